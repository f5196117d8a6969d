"""The probe before the first step: does this model, on this mesh, with this kernel and these rows, compute what
transformers computes? The check works on outputs alone and knows no architectures.

A few short documents go through the model as the run will send them, and one by one through transformers' own module
with the same weights. Log-probabilities, loss and gradient norm must agree up to the rounding of the dtype; a second
pass must give the same as the first; the output for a token must not change when other documents of its row or later
tokens of its document do.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from sfumato.config.text import LanguageModelConfig
from sfumato.config.text_data import TextTrainConfig
from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.packing import make_batch, placeholder_tokens
from sfumato.data.text.token_batch import TokenBatch
from sfumato.errors import ConfigError
from sfumato.models.language.document_rows import forget_lengths
from sfumato.models.language.generator_states import generator_states, generators_restored, is_same_state
from sfumato.models.language.hf_config import can_set_attention, changing_positions, set_attention
from sfumato.models.language.packed_attention import ATTENTION
from sfumato.models.language.packed_model import PackedModel, RowLayout
from sfumato.models.language.probe_documents import make_documents, other_than
from sfumato.models.language.tolerance import DRAWS, Noise, dtype_of, tolerance_of
from sfumato.parallel.bin_packing import micro_batch_rule
from sfumato.parallel.expert_modules import has_experts
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.packed_rows import SIZES
from sfumato.parallel.parallelize import forget_pass
from sfumato.parallel.shards import trainable_parameters
from sfumato.parallel.weights import whole_weights

if TYPE_CHECKING:
    from sfumato.config.omni import OmniModelConfig
    from sfumato.config.text_rl import TextRLTrainConfig

LARGEST_COPY = 4 * 2**30
"""Bytes of weights up to which transformers' own module is built beside the run's, as the reference."""

OTHER_COUNT = (
    ". The processor puts another number of tokens into a text than the model makes of a picture or sound: bring "
    "processor_config.json (patch_size, num_additional_image_tokens, vision_feature_select_strategy, "
    "image_seq_length, vision_aspect_ratio) into line with config.json"
)
"""What to change where transformers finds fewer or more tokens of media in a text than features."""


@dataclass(frozen=True)
class Way:
    """How documents go through a model: a layout of rows, and an attention."""

    attention: str
    """transformers' name of the attention."""
    layout: RowLayout

    def __str__(self) -> str:
        attention = "packed" if self.attention == ATTENTION else self.attention
        suffix = ", each length by itself" if self.layout.same_length else ""
        return f"model.attention {attention} with model.rows {self.layout.rows}{suffix}"


@dataclass(frozen=True)
class Measured:
    """Results of a model for the documents of the probe."""

    log_probs: Tensor
    """float32, log-probabilities of the labels of all documents, one document after the other, without dropout. Of a
    model with another head, the numbers that ``PackedModel.probe_values`` makes."""
    loss: float
    """The negative mean over the labels of the short documents, from a training pass."""
    grad_norm: float
    """Of that loss."""
    random: tuple[str, ...] = ()
    """The generators of random numbers from which the training pass has drawn."""


SAME_SHAPES = 2e-6
"""The most in nats by which a log-probability may move when other tokens of rows of the same shape change, in a model
without experts."""


def probe(
    model: PackedModel,
    config: LanguageModelConfig | OmniModelConfig,
    train: TextTrainConfig | TextRLTrainConfig,
    max_seq_len: int,
    say: Callable[..., None],
    trains: bool = True,
) -> None:
    """Compares a model with transformers' own module, and finds how packed rows have to reach it.

    Call it after ``model.parallelize``, before anything is trained. It leaves weights, random generators and gradients
    as they were. The model's row layout, and where ``model.rows`` is auto its attention, are afterwards the first way
    that has been found right.

    Args:
        model: on its mesh.
        config: the model section, with ``model.attention`` and ``model.rows``.
        train: the train section: precision, packing, ``train.probe``.
        max_seq_len: tokens of the longest document of the run.
        say: logs a line.
        trains: whether the model is trained; of a frozen one only log-probabilities are compared.

    Raises:
        ConfigError: when no way that the configuration allows gives what transformers gives; the message says what
            differs and which setting is right. With ``train.probe: warn`` that is logged instead.
    """
    lines = [*model.notes]
    if trains and isinstance(config, LanguageModelConfig) and config.lora is not None and model.source is not None:
        from sfumato.models.language.untrained_tokens import describe_untrained_tokens

        lines += describe_untrained_tokens(model.source, model.tokenizer)
    for line in lines:
        say(line)
    documents = make_documents(model, train, max_seq_len)
    checks = Checks(model, documents, train, _num_copies(train), trains)
    with generators_restored(), model.probed():
        expected = checks.reference()
        problems: dict[Way, str] = {}
        # the first way that is right is taken: ways are ordered by cost
        for way in _list_ways(model, config, max_seq_len):
            problem = checks.problem(way, expected)
            if problem is None:
                break
            problems[way] = problem
        else:
            _report_problems(problems, checks, expected, config, max_seq_len, say)
            return
    if problems:
        first = next(iter(problems.values()))
        say(f"{model.name}: {first}. Taken instead, since it is right: {way}")


class Checks:
    """The documents of a probe, and the checks of a model's results for them."""

    def __init__(
        self,
        model: PackedModel,
        documents: list[list[TextSample]],
        train: TextTrainConfig | TextRLTrainConfig,
        copies: int,
        trains: bool = True,
    ) -> None:
        """
        Args:
            model: on its mesh.
            documents: of each micro-batch, the short ones first.
            train: the train section.
            copies: how often each micro-batch is computed at a time, since a pipeline needs several.
            trains: whether the model is trained.
        """
        self.model = model
        self.documents = documents
        self.train = train
        self.copies = copies
        self.trains = trains
        self.tolerance = tolerance_of(model)
        self.batches = [self._make_batch(batch_documents) for batch_documents in documents]

    def _make_batch(self, documents: list[TextSample]) -> TokenBatch:
        """The documents as a micro-batch in host memory."""
        count = len(documents)
        packed = self.train.rmpad_with_pos_ids
        min_tokens = placeholder_tokens(self.model.mesh)
        return make_batch(documents, list(range(count)), [0] * count, packed, 0, min_tokens, self.model.vision)

    def reference(self) -> Measured | None:
        """The expected results, on every rank.

        They come from transformers' own module, one document after the other. Where a copy of the weights is too large,
        they come from this model with transformers' attention, and under sequence or pipeline parallelism, where that
        cannot be, there are none (None). Attention is eager for short documents and sdpa for long ones, whose score
        matrices are large.

        Raises:
            ConfigError: when transformers' module fails.
        """
        model = self.model
        mesh = model.mesh
        if model.whole_bytes() <= LARGEST_COPY:
            weights = whole_weights(model.trained, mesh, share=True)
            # rank 0 alone computes the reference, and sends its results, or its error, to the others
            measured = _or_error(lambda: one_by_one(model, weights, self.documents)) if mesh.is_first else None
            measured = mesh.first(measured, among="world")
            problem = measured if isinstance(measured, str) else None
        elif mesh.layout.cp > 1 or mesh.layout.pp > 1:
            return None
        else:
            measured = _or_error(self._measure_one_by_one)
            problem = self._agree_on(measured if isinstance(measured, str) else None)
        if problem is not None:
            remedy = OTHER_COUNT if "tokens do not match" in problem else ""
            raise ConfigError(f"{model.name} of transformers computes no document alone: {problem}{remedy}")
        assert isinstance(measured, Measured)
        return measured

    def _measure_one_by_one(self) -> Measured:
        """Results of this model for one document after the other, with transformers' attention."""
        model = self.model
        short, *long = self.batches
        # not compiled: each length would make graphs of its own, which the run never needs
        with self._one_by_one("eager"), torch.compiler.set_stance("force_eager"):
            with model.whole_output():  # of long documents the logits may be too large
                log_probs = [self._log_probs(short)]
                loss, grad_norm = self._train()
            with suppress(ConfigError, ValueError, ImportError):
                model.set_row_layout("sdpa", model.row_layout)
            log_probs += [self._log_probs(batch) for batch in long]
        return Measured(torch.cat(log_probs), loss, grad_norm)

    def problem(self, way: Way, expected: Measured | None) -> str | None:
        """Computes the documents in a way, and compares. The model keeps that way afterwards.

        Returns:
            What is wrong, in words, the same on every rank; None when nothing is.
        """

        def measure() -> Measured:
            self.model.set_row_layout(way.attention, way.layout)
            return self.measure()

        measured = _or_error(measure)
        problem = self._agree_on(measured if isinstance(measured, str) else None)
        if problem is not None:
            # fsdp2 would take the next pass for a part of the one that broke off
            try:
                forget_pass(self.model.trained)
            except ConfigError as error:
                raise ConfigError(f"{problem}; {error}") from error
            return problem
        assert isinstance(measured, Measured)
        for check in (self._find_difference, self._find_change, self._find_training_difference, self._find_leak):
            problem = self._agree_on(_or_error(lambda check=check: check(measured, expected)))
            if problem is not None:
                return problem
        return None

    def _agree_on(self, problem: str | None) -> str | None:
        """The problem of the first rank that has one: all ranks must go on alike, since checks are collective."""
        try:
            return self.model.mesh.first_problem(problem)
        except ConfigError as error:
            if self.model.mesh.layout.pp == 1:
                raise
            # the stages behind one that fails wait for what it does not send
            raise ConfigError(
                f"{self.model.name} fails in a stage of the pipeline: {error}; set train.pipeline_parallel_size to 1"
            ) from error

    def measure(self) -> Measured:
        """The model's results for the documents, with its current row layout and attention."""
        if self.train.compiles(self.model.mesh.device.type):
            # The graph of the first length gives way to one of any length when a second one comes. A pass before makes
            # both, so that passes that are compared are of one graph.
            for batch in self.batches:
                self._log_probs(batch)
        log_probs = torch.cat([self._log_probs(batch) for batch in self.batches])
        states = generator_states()
        loss, grad_norm = self._train()
        random = tuple(name for name, state in generator_states().items() if not is_same_state(state, states[name]))
        return Measured(log_probs, loss, grad_norm, random)

    def _train(self) -> tuple[float, float]:
        """Loss and gradient norm of a training pass of the short documents; 0 and 0 of a frozen model.

        All data-parallel ranks compute the same documents, and the loss is the mean over all. No gradient stays.
        """
        if not self.trains:
            return 0.0, 0.0
        model = self.model
        mesh = model.mesh
        num_labels = self.batches[0].num_labels * self.copies * mesh.data_size

        def loss_fn(output: object, batch: TokenBatch) -> Tensor:
            return -model.probe_values(output, batch).sum() / num_labels

        try:
            loss = sum(model.forward_backward([self.batches[0]] * self.copies, loss_fn))
            grad_norm = reduce_and_clip(model.trained, float("inf"), mesh, "the probe before the first step")
        finally:
            for parameter in trainable_parameters(model.trained).values():
                parameter.grad = None
            # the probe's tokens must not move the routing biases
            if model.balancer is not None:
                model.balancer.forget()
        return mesh.sum(loss, over="loss"), grad_norm

    def _log_probs(self, batch: TokenBatch) -> Tensor:
        """Log-probabilities of the labels of a micro-batch, ``[N]`` on the CPU, without dropout."""
        values = self.model.compute_probe_values([batch] * self.copies)[0]
        return values[batch.loss_mask.to(values.device)].cpu()

    def _find_difference(self, measured: Measured, expected: Measured | None) -> str | None:
        """The problem when log-probabilities, computed without dropout, differ from the expected ones."""
        if expected is None:
            return None
        difference = float((measured.log_probs - expected.log_probs).abs().max())
        allowed = self.tolerance.log_prob_tolerance(expected.log_probs)
        if self.model.mesh.any(not difference <= allowed):
            allowed = self.tolerance.log_prob_tolerance(expected.log_probs, self._find_noise(measured).log_probs)
        if difference <= allowed:
            return None
        return (
            f"documents together give other {self.model.output_name[1]} than transformers gives for each alone (one "
            f"differs by {difference:.2g}; rounding explains {allowed:.1g})"
        )

    def _find_change(self, measured: Measured, _expected: Measured | None) -> str | None:
        """The problem when a second training pass gives another loss or gradient norm than the first."""
        loss, grad_norm = self._train()
        if measured.random and loss != measured.loss:
            where = "config.json of model.model_path" if self.model.source else "model.config_path"
            return (
                f"training draws random numbers from the generator of {' and '.join(measured.random)} (dropout of "
                "attention, jitter of a router, or the like), which depend on how documents are packed and shared: "
                f"set it to 0 in {where}"
            )
        allowed = 0.1 * self.tolerance.training_tolerance()
        if _exceeds_tolerance(loss, measured.loss, allowed) or _exceeds_tolerance(
            grad_norm, measured.grad_norm, allowed
        ):
            return (
                f"a second pass of the same documents gives loss {loss:.7g} and gradient norm {grad_norm:.7g} after "
                f"{measured.loss:.7g} and {measured.grad_norm:.7g}: the model keeps something from one pass to the next"
            )
        return None

    def _find_training_difference(self, measured: Measured, expected: Measured | None) -> str | None:
        """The problem when loss or gradient norm of the training pass differ from the expected ones."""
        # the reference drops nothing out: with dropout the two cannot be compared
        if expected is None or self.model.drops_out or not self.trains:
            return None
        pairs = {"loss": (measured.loss, expected.loss), "gradient norm": (measured.grad_norm, expected.grad_norm)}
        allowed = self.tolerance.training_tolerance()
        if self.model.mesh.any(any(_exceeds_tolerance(*pair, allowed) for pair in pairs.values())):
            allowed = self.tolerance.training_tolerance(self._find_noise(measured).relative)
        for name, (value, expected_value) in pairs.items():
            if _exceeds_tolerance(value, expected_value, allowed):
                return (
                    f"the {name} of documents together is {value:.6g}, in transformers one by one {expected_value:.6g} "
                    f"(rounding explains {100 * allowed:.1g} %)"
                )
        return None

    def _find_noise(self, measured: Measured) -> Noise:
        """What rounding changes in the results of the way that is being checked."""
        from sfumato.models.language.rounding import rounding_noise

        log_probs = []
        relative = []
        short = measured.log_probs[: self.batches[0].num_labels]
        for seed in range(DRAWS):
            with rounding_noise(self.model.module, dtype_of(self.model), seed):
                log_probs.append(float((self._log_probs(self.batches[0]) - short).abs().max()))
                loss, grad_norm = self._train()
            pairs = ((loss, measured.loss), (grad_norm, measured.grad_norm)) if self.trains else ()
            relative.append(max((abs(value / before - 1) for value, before in pairs if before), default=0.0))
        return Noise(max(log_probs), statistics.fmean(change**2 for change in relative) ** 0.5)

    def _find_leak(self, measured: Measured, _expected: Measured | None) -> str | None:
        """The problem when the output for a token depends on later tokens, or on other documents of its row.

        Every second document is replaced, and of each document between only the last token. The outputs for the tokens
        before that must not change.
        """
        changed = [
            other_than(document.documents[0], 0 if index % 2 else -1, self.model)
            for index, document in enumerate(self.documents[0])
        ]
        # labels stay, since the log-probabilities of the same labels are compared
        other_batch = replace(self._make_batch(changed), labels=self.batches[0].labels)
        log_probs = self._log_probs(other_batch)
        differences = (log_probs - measured.log_probs[: len(log_probs)]).abs()
        by_document = differences.split([document.num_tokens - 1 for document in changed])
        largest = float(torch.cat(by_document[::2]).max())
        # rows of one shape are rounded alike, unless other documents change how many tokens an expert gets
        allowed = self.tolerance.log_probs[1] if has_experts(self.model.module) else SAME_SHAPES
        if self.model.mesh.any(not largest <= allowed):
            allowed = max(allowed, self._find_scatter(measured))
        if not largest <= allowed:
            return (
                f"a token notices what comes after it, or what stands beside its document ({self.model.output_name[0]} "
                f"moves by {largest:.2g}): this is no causal model of separate documents"
            )
        return None

    def _find_scatter(self, measured: Measured) -> float:
        """Nats by which kernels that add in any order may move a log-probability, in the dtype of this model: four
        times what the same documents move by when they are computed again, and no more than rounding explains."""
        again = self._log_probs(self.batches[0])
        scatter = float((again - measured.log_probs[: len(again)]).abs().max())
        return min(4 * scatter, self.tolerance.log_probs[0])

    @contextmanager
    def _one_by_one(self, attention: str) -> Iterator[None]:
        """Inside, documents go through the model as if each were alone, with one of transformers' attentions."""
        way_before = Way(self.model.attention, self.model.row_layout)
        self.model.set_row_layout(attention, RowLayout("documents", same_length=True))
        try:
            yield
        finally:
            self.model.set_row_layout(way_before.attention, way_before.layout)


Result = TypeVar("Result")


def _exceeds_tolerance(value: float, expected_value: float, allowed: float) -> bool:
    """Whether a loss or gradient norm is further from the expected one than this fraction of it."""
    # "not <=" rather than ">": NaN counts as different
    return not abs(value - expected_value) <= allowed * max(abs(expected_value), 1e-6)


def _or_error(compute: Callable[[], Result]) -> Result | str:
    """A result, or one line about the error that a module raised, whatever its class: modules that do not support
    packed rows raise errors of many kinds. Running out of memory is no such error."""
    try:
        return compute()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return _first_line(error)


def _first_line(error: Exception) -> str:
    """The first line of an error's message, with its class where that is not this library's."""
    line = str(error).strip().partition("\n")[0]
    return line if isinstance(error, ConfigError) else f"{type(error).__name__}: {line}"


def one_by_one(model: PackedModel, weights: dict[str, Tensor], documents: list[list[TextSample]]) -> Measured:
    """Results of transformers' own module, one document after the other.

    Attention is eager for short documents and sdpa for long ones, whose score matrices are large.

    Args:
        model: on its mesh.
        weights: its whole weights by the names of the module.
        documents: of each micro-batch, the short ones first; these alone give loss and gradient norm.
    """
    # transformers wraps the method, of which its annotations lose the instance
    plain = model.plain_with(weights).to(model.mesh.device)  # pyright: ignore[reportArgumentType]
    if can_set_attention(plain):
        set_attention(plain, "eager")

    def compute_values(document: Document) -> Tensor:
        """Values of all tokens but the last."""
        forget_lengths(plain)
        inputs = model.single_document_inputs(document.input_ids, document.images)
        tokens = torch.from_numpy(document.input_ids.astype(np.int64)).to(model.mesh.device)
        return model.reference_probe_values(plain, tokens, inputs)

    short, *long = [[sample.documents[0] for sample in samples] for samples in documents]
    plain.train()
    num_labels = sum(len(document.input_ids) - 1 for document in short)
    loss = 0.0
    for document in short:
        loss_part = -compute_values(document).sum() / num_labels
        # where only the encoder or the projector is trained, a document without images has no gradient
        if loss_part.requires_grad:
            loss_part.backward()
        loss += float(loss_part.detach())
    gradients = [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
    # torch's own clipping of gradients calls the same function
    foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
    norms = foreach_norm(gradients) if gradients else [torch.zeros(())]
    grad_norm = float(torch.linalg.vector_norm(torch.stack(norms).double()))
    with torch.no_grad():
        plain.eval()
        log_probs = [compute_values(document) for document in short]
        with suppress(ConfigError, ValueError, ImportError):  # the score matrices of long ones are large
            set_attention(plain, "sdpa")
        log_probs += [compute_values(document) for batch_documents in long for document in batch_documents]
    return Measured(torch.cat(log_probs).cpu(), loss, grad_norm)


def _list_ways(
    model: PackedModel, config: LanguageModelConfig | OmniModelConfig, max_seq_len: int, every: bool = False
) -> list[Way]:
    """Lists the ways that the configuration allows, the cheapest first; with ``every`` all that there are.

    Raises:
        ConfigError: when the configuration or the mesh needs documents to share rows, but the model's rotary positions
            depend on the longest row.
    """
    packed = RowLayout("packed")
    documents = RowLayout("documents")
    equal_documents = RowLayout("documents", same_length=True)
    current_attention = model.attention
    rows = "auto" if every else config.rows
    obstacle = _find_obstacle(model)
    if rows == "documents" and obstacle is not None:
        raise ConfigError(f"model.rows documents is not possible on this mesh: set {obstacle}, or model.rows auto")
    attentions = [ATTENTION, "sdpa", "eager"] if every or config.attention == "packed" else [current_attention]
    if not can_set_attention(model.plain):
        attentions = [current_attention]
    # in rows beyond the limit rotary positions depend on the row's length, which padding would change
    limit = changing_positions(model.plain.config)
    if limit is not None and max_seq_len > limit:
        if obstacle is not None or rows == "packed":
            raise ConfigError(
                f"rotary positions of {model.name} depend on the longest row beyond {limit} tokens: set "
                f"{'model.rows to documents' if obstacle is None else obstacle}, or data.max_seq_len to at most {limit}"
            )
        return [Way(attention, equal_documents) for attention in attentions]
    if obstacle is not None:
        return [Way(current_attention, packed)]
    # packed rows with sdpa or eager in the place of the packed attention are tried for the report alone
    ways = [Way(attention, packed) for attention in (attentions if every else attentions[:1])]
    ways = [] if rows == "documents" else ways
    if rows in ("auto", "documents"):
        ways += [Way(attention, layout) for layout in (documents, equal_documents) for attention in attentions]
    return ways


def _find_obstacle(model: PackedModel) -> str | None:
    """The setting, with its remedy, that keeps documents from having rows of their own; None where none does."""
    if model.mesh.layout.pp > 1:
        return "train.pipeline_parallel_size to 1"
    if model.mesh.layout.cp > 1:
        return f"{SIZES} to 1"
    return "dropout (model.lora.dropout, or that of the model) to 0" if model.drops_out else None


def _report_problems(
    problems: dict[Way, str],
    checks: Checks,
    expected: Measured | None,
    config: LanguageModelConfig | OmniModelConfig,
    max_seq_len: int,
    say: Callable[..., None],
) -> None:
    """Reports that no configured way is right, and which other way would be.

    With ``train.probe: warn`` the model keeps the first configured way.

    Raises:
        ConfigError: with ``train.probe: stop``.
    """
    model = checks.model
    other_ways = [way for way in _list_ways(model, config, max_seq_len, every=True) if way not in problems]
    right_way = next((way for way in other_ways if checks.problem(way, expected) is None), None)
    # trying other ways has changed the model: the first configured one is set again
    first = next(iter(problems))
    model.set_row_layout(first.attention, first.layout)
    distinct_problems = dict.fromkeys(problems.values())
    text = f"{model.name} is not trained as transformers would: " + "; or, ".join(distinct_problems)
    if right_way is not None:
        text += f". Right is {right_way}"
    elif _find_obstacle(model) is not None:
        text += f". A row for each document may be right, for which set {_find_obstacle(model)}"
    elif not checks.train.rmpad_with_pos_ids and "for each alone" in text:
        text += ". train.rmpad_with_pos_ids true, which sends documents without padding, may be right"
    elif model.mesh.layout.tp > 1:
        setting = "sequence_parallel to false" if checks.train.sequence_parallel else "tensor_parallel_size to 1"
        text += f". Layers that ranks do not share so may be right, for which set train.{setting}"
    if checks.train.probe == "stop":
        raise ConfigError(f"{text}. (train.probe warn goes on all the same)")
    say(f"WARNING: {text}")


def _num_copies(train: TextTrainConfig | TextRLTrainConfig) -> int:
    """The smallest number of micro-batches that the pipeline's schedule takes."""
    multiple, minimum = micro_batch_rule(train)
    return -(-max(minimum, 1) // multiple) * multiple
