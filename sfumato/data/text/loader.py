"""Micro-batches of text for each step of a run, the same samples on any number of processes; and the validation set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from sfumato.config.text_data import TextDataConfig, TextEvalConfig, TextTaskConfig, TextTrainConfig
from sfumato.data.background import STEPS_AHEAD, Calls, in_background
from sfumato.data.epoch_order import refuse_repetition
from sfumato.data.files.bad_rows import BadRows, bad_row_limit
from sfumato.data.files.mixing import Order
from sfumato.data.files.row_blocks import RowFile
from sfumato.data.files.sources import Sources, open_sources_once, open_validation
from sfumato.data.files.stored import digest_of
from sfumato.data.media.document_media import MediaRefs
from sfumato.data.media.threads import open_ahead
from sfumato.data.text.answer_end import AnswerEnd, answer_end_of, facts_of
from sfumato.data.text.chat import ChatTemplate
from sfumato.data.text.document import TextSample
from sfumato.data.text.document_cost import MediaCost, default_cost
from sfumato.data.text.format import TextTransform, build_transform, has_media
from sfumato.data.text.identity import identify_text
from sfumato.data.text.notes import describe_text_data
from sfumato.data.text.packing import make_batch, placeholder_tokens
from sfumato.data.text.row_samples import SharedWork, samples_of
from sfumato.data.text.token_batch import TokenBatch
from sfumato.data.text.token_source import RunLength, State, Step, StepRule, StoreSteps, StreamSteps, TextStream
from sfumato.data.text.token_store import Watch, build_token_store
from sfumato.errors import ConfigError, DataError
from sfumato.parallel.bin_packing import Bins, micro_batch_rule, pack
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.folder import run_date
from sfumato.tracking.identity import Identity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sfumato.data.media.cache import MediaCache
    from sfumato.data.media.vision import Vision


class TextLoader:
    """This rank's micro-batches, step by step, from any step on.

    A step takes consecutive samples in the order of the data, from where the step before it ended. Ranks and
    micro-batches only divide them.
    """

    def __init__(
        self,
        steps: StoreSteps | StreamSteps,
        source_names: list[str],
        data: TextDataConfig,
        train: TextTrainConfig,
        pad_token_id: int,
        mesh: Mesh,
        cost: Callable[[int], float],
        sight: MediaCost | None = None,
        media: MediaCache | None = None,
        calls: Calls | None = None,
    ) -> None:
        """Use ``build_text_loader``."""
        self._calls = calls
        self._sight = sight
        self._media = media
        self.source_names = source_names
        """Names of the sources, which ``TokenBatch.source_ids`` numbers."""
        self.epoch_ended = False
        """Whether an epoch ended within the latest step that was yielded."""
        self._steps = steps
        self._data = data
        self._train = train
        self._pad = pad_token_id
        self._mesh = mesh
        self._cost = cache(cost)
        self.fingerprint = steps.fingerprint
        """Identifies the samples and their order, for ``restore``."""
        self.num_samples = steps.num_samples
        """Samples of the data; None for streams."""
        self.tokens_per_epoch = steps.tokens_per_epoch
        """Tokens of the first epoch; None for streams."""
        self._state = steps.begin()
        self._total_steps: int | None = None

    @property
    def total_steps(self) -> int:
        """Steps of the whole run: those before the restored state, and those that are left from there."""
        if self._total_steps is None:
            self._total_steps = self._state["step"] + self._steps.num_steps(self._state)
        return cast(int, self._total_steps)

    def state(self) -> State:
        """The position in the data after the latest step that was yielded, as values that JSON can hold.

        It does not depend on ranks and batch sizes. ``samples`` is the position: how many samples have been used.
        ``step`` and ``tokens`` are counted along. A stream adds its place in the rows of each source.
        """
        return {"fingerprint": self.fingerprint, **self._state}

    def restore(self, state: State) -> None:
        """Continues from a state. To be called before ``steps``; ``total_steps`` then counts what is left from there.

        Raises:
            DataError: when it is the state of other data, or of another order.
        """
        if "rows" in state:
            raise DataError(
                "the checkpoint counts the rows of data.datasets_type iterable, as versions did that read all files "
                "before the first step: where it is in the files cannot be told. Go on with that version, or start a "
                "new run from the exported weights (model.model_path)"
            )
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"the data is not what the checkpoint was trained on: position {state['samples']} would mean other "
                "samples, so that some would be lost or seen twice. Restore data.train_path, data.max_seq_len, the "
                "tokenizer, train.seed and the like; or start a new run from the exported weights (model.model_path)"
            )
        self._state = {name: value for name, value in state.items() if name != "fingerprint"}
        self._total_steps = None

    def steps(self, from_step: int = 0) -> Iterator[tuple[int, list[TokenBatch]]]:
        """Yields the number of each step, from 0 on, and this rank's micro-batches.

        All ranks have equally many, of which some may be placeholders.

        Args:
            from_step: the step of the restored state; 0 without one.

        Raises:
            ValueError: when the data is at another step.
        """
        if from_step != self._state["step"]:
            raise ValueError(f"the data is at step {self._state['step']}, not {from_step}: restore the loader's state")
        prepared = ((step, self._micro_batches(step)) for step in self._steps.steps(self._state))
        for number, (step, batches) in enumerate(in_background(prepared, STEPS_AHEAD, self._calls), start=from_step):
            # Set only now: the thread is steps ahead, and a checkpoint must hold the position of the steps taken.
            self._state = step.after
            self.epoch_ended = step.epoch_ended
            yield number, batches

    def is_epoch_due(self, every: int) -> bool:
        """Whether the latest step ended an epoch and ``every`` divides the number of complete epochs; False for 0."""
        return bool(every) and self.epoch_ended and self._steps.epochs(self._state) % every == 0

    def _micro_batches(self, step: Step) -> list[TokenBatch]:
        """This data-parallel rank's micro-batches of a step."""
        train = self._train
        documents_per_sample = step.document_lengths.shape[1]
        lengths = step.document_lengths.sum(axis=1).tolist() if train.dyn_bsz else [1] * len(step.sources)
        capacity = train.micro_batch_size * (self._data.max_seq_len * documents_per_sample if train.dyn_bsz else 1)
        # Costs balance the ranks; lengths, or with ``dyn_bsz`` off the number of samples, limit a micro-batch.
        costs = [sum(map(self._cost, document_lengths)) for document_lengths in step.document_lengths.tolist()]
        if self._sight is not None:
            costs = [
                cost + sum(map(self._sight.of_images, step.image_shapes(position)))
                for position, cost in enumerate(costs)
            ]
        by_rank = pack(lengths, costs, capacity, self._mesh.data_size, *micro_batch_rule(train))
        first_id = step.after["samples"] - len(step.sources)
        rank_bins = by_rank[self._mesh.data_rank]
        settings = (step.sources, train.rmpad_with_pos_ids, self._pad, self._mesh)
        if self._sight is None:
            return _make_batches(rank_bins, step.read, first_id, *settings, None)
        # Threads open the media of all of the rank's samples at the same time.
        places = [position for positions in rank_bins for position in positions]
        tensors = (self._media or self._sight.vision.reader).tensors
        samples = dict(zip(places, open_ahead([step.read(position) for position in places], tensors), strict=True))
        return _make_batches(rank_bins, samples.__getitem__, first_id, *settings, self._sight.vision)


def build_text_loader(
    data: TextDataConfig,
    train: TextTrainConfig,
    tokenizer_pad_id: int,
    transform: TextTransform,
    sources: Sources,
    mesh: Mesh,
    say: Callable[[str], None],
    watch: Watch | None = None,
    cost: Callable[[int], float] = default_cost,
    sight: MediaCost | None = None,
) -> TextLoader:
    """Builds the loader that a configuration asks for. Every rank must call it.

    With ``data.datasets_type: mapping`` rank 0 tokenises all data here, unless that was done before. With ``iterable``
    rows are read while steps are taken; each rank tokenises its share of them, and the ranks exchange what they made.
    Rows with images or sound, whose samples hold open files, every rank prepares for itself.

    Args:
        data, train: the task's sections.
        tokenizer_pad_id: token that fills rows up.
        transform: makes samples of rows.
        sources: the rows.
        mesh: the ranks.
        say, watch: for messages and a progress bar, see ``build_token_store``.
        cost: work of a document of so many tokens, by which ranks are balanced.
        sight: the same of media, for a model with images or sound.

    Raises:
        ConfigError: when the number of steps cannot be known.
        DataError: when too many rows cannot be used, or a step would take each sample too often.
    """
    global_batch = train.global_batch_size or train.micro_batch_size * mesh.data_size
    num_tokens = data.max_seq_len * transform.documents_per_sample
    rule = StepRule(global_batch * (num_tokens if train.dyn_bsz else 1), by_tokens=train.dyn_bsz)
    length = RunLength(train.max_steps, data.train_size, train.num_train_epochs)
    media: MediaCache | None = None
    calls: Calls | None = None
    order_key = [train.seed if data.shuffle else None, sources.mixing]  # what the order depends on besides the samples
    if data.datasets_type == "mapping":
        folder = Path(data.cache_dir or Path(train.output_dir) / "tokens")
        with mesh.first_rank_first():  # rank 0 makes the store, which the others then only open
            limit = bad_row_limit(data.max_bad_rows, sum(map(len, sources.rows)))
            store = build_token_store(sources, transform, folder, data.num_workers, limit, say, watch)
            if data.cache_media:
                assert has_media(transform)  # the configuration refuses other formats
                from sfumato.data.media.cache import build_media_cache

                media = build_media_cache(store, sources.rows, transform, folder, data.num_workers, say, watch)
        # With ``dyn_bsz`` the samples of a step are estimated by their mean length.
        step_samples = rule.limit * len(store) // int(store.lengths.sum()) if rule.by_tokens else rule.limit
        refuse_repetition("train.global_batch_size", step_samples, len(store))
        mixing = (sources.weights, sources.level, sources.stopping)
        order = Order(store.lengths, store.source_of, store.names, *mixing, train.seed, data.shuffle)
        steps: StoreSteps | StreamSteps = StoreSteps(
            store, order, digest_of([store.fingerprint, *order_key]), rule, length
        )
    else:
        if train.max_steps is None and not train.dyn_bsz:
            raise ConfigError(
                "data.train_size counts tokens, but how many the samples of data.datasets_type iterable have is not "
                "known before: set train.max_steps, or train.dyn_bsz true"
            )
        assert isinstance(data.max_bad_rows, int)  # a share is refused by the configuration
        bad_rows = BadRows(data.max_bad_rows, say)
        shared = None
        if mesh.distributed and mesh.size > 1 and not has_media(transform):
            calls = Calls()
            shared = SharedWork(mesh.rank, mesh.size, calls, partial(mesh.gather, over="world"))
        stream = TextStream(sources, transform, train.seed, data.shuffle, data.shuffle_buffer, bad_rows, shared)
        # A stream is not read before the run: sizes of files stand for their content.
        sizes = [
            [item.path.stat().st_size if isinstance(item, RowFile) else len(item) for item in tables]
            for tables in sources.tables
        ]
        content = [transform.fingerprint, sources.names, sizes]
        order_key = [data.shuffle_buffer if data.shuffle else None, *order_key]
        steps = StreamSteps(stream, digest_of(["stream", content, order_key]), rule, length)
    return TextLoader(steps, list(sources.names), data, train, tokenizer_pad_id, mesh, cost, sight, media, calls)


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt from a validation sample, and the answer that is expected."""

    input_ids: list[int]
    """Tokens of the prompt."""
    answer: list[int]
    """Tokens of the expected answer."""
    images: MediaRefs | None = None
    """The media of the prompt."""


@dataclass(frozen=True)
class Validation:
    """The validation set of a task that trains on text."""

    batches: list[TokenBatch]
    """This rank's micro-batches, as many as on every other rank."""
    prompts: list[AnsweredPrompt]
    """Prompts to generate answers to, the same on every rank."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer."""


class TextData(NamedTuple):
    """The data of a task that trains on text."""

    loader: TextLoader
    """This rank's micro-batches, step by step."""
    validation: Validation | None
    """The validation set; None where there is none."""
    identity: Identity
    """Digests of what the data holds, for checkpoints."""


def open_text_data(
    config: TextTaskConfig,
    tokenizer: PreTrainedTokenizerBase,
    mesh: Mesh,
    say: Callable[[str], None],
    watch: Watch | None = None,
    cost: Callable[[int], float] = default_cost,
    sight: MediaCost | None = None,
) -> TextData:
    """Opens the training and validation data of a task. Every rank must call it.

    Args:
        config: the task's configuration, with the sections data, train and eval.
        tokenizer: a fast tokenizer with a padding token.
        mesh, say, watch, cost, sight: see ``build_text_loader``.

    Raises:
        UserError: as ``build_transform``, ``open_sources``, ``build_text_loader`` and ``build_validation`` do.
    """
    data = config.data
    train = config.train
    pad_token_id = cast(int, tokenizer.pad_token_id)
    facts_of(tokenizer).date = run_date(train)
    transform = build_transform(data, tokenizer, None if sight is None else sight.vision.reader)
    end = adopt_answer_end(transform, tokenizer)
    for line in end.describe() if facts_of(tokenizer).appends_end else end.notes:  # a reward model generates no answers
        say(line)
    sources = open_sources_once(data, mesh)
    held_out = open_validation(data)
    if mesh.is_first:  # it alone writes the log, and all rows may be read for these lines
        for line in describe_text_data(data, sources, held_out, transform, config.eval.num_rows):
            say(line)
    identity = identify_text(config, sources, held_out, transform, mesh)
    loader = build_text_loader(data, train, pad_token_id, transform, sources, mesh, say, watch, cost, sight)
    vision = None if sight is None else sight.vision
    validation = build_validation(held_out, data, train, config.eval, transform, pad_token_id, mesh, say, vision)
    return TextData(loader, _add_stops(validation, data, transform, tokenizer), identity)


def open_validation_prompts(
    config: TextTaskConfig,
    tokenizer: PreTrainedTokenizerBase,
    vision: Vision | None,
    say: Callable[[str], None],
) -> list[AnsweredPrompt]:
    """The prompts that a run answers in its evaluation; none without a validation set. No training data is opened.

    Args:
        config: the task's configuration, with the sections data, train and eval.
        tokenizer: a fast tokenizer with a padding token.
        vision: of a model that sees.
        say: takes lines about rows that are left out.

    Raises:
        UserError: as ``build_transform``, ``open_validation`` and ``build_validation`` do.
    """
    data = config.data
    transform = build_transform(data, tokenizer, None if vision is None else vision.reader)
    adopt_answer_end(transform, tokenizer)
    pad_token_id = cast(int, tokenizer.pad_token_id)
    alone = Mesh(Layout(), torch.device("cpu"))
    held_out = open_validation(data)
    validation = build_validation(
        held_out, data, config.train, config.eval, transform, pad_token_id, alone, say, vision
    )
    validation = _add_stops(validation, data, transform, tokenizer)
    return [] if validation is None else validation.prompts


def adopt_answer_end(transform: TextTransform, tokenizer: PreTrainedTokenizerBase) -> AnswerEnd:
    """Makes a format's chat template the tokenizer's own, as exports carry it. Returns how answers end."""
    template = getattr(transform, "template", None)
    if isinstance(template, ChatTemplate):
        template.adopt()
    return answer_end_of(tokenizer)


def _add_stops(
    validation: Validation | None, data: TextDataConfig, transform: TextTransform, tokenizer: PreTrainedTokenizerBase
) -> Validation | None:
    """Adds the tokens that end an answer to a validation set, and cuts the expected answers after the first of them.

    A user's format without a chat template may end answers with any token: the last token of each answer counts, too.
    """
    if validation is None:
        return None
    stops = {*answer_end_of(tokenizer).stop_token_ids}
    if data.data_type.has_answers and not isinstance(getattr(transform, "template", None), ChatTemplate):
        stops |= {prompt.answer[-1] for prompt in validation.prompts}
    prompts = [replace(prompt, answer=_cut_after_stop(prompt.answer, stops)) for prompt in validation.prompts]
    return replace(validation, prompts=prompts, stop_token_ids=tuple(sorted(stops)))


def _cut_after_stop(tokens: list[int], stops: set[int]) -> list[int]:
    """Tokens up to and with the first one that is in ``stops``; all of them where none is."""
    ends = [position for position, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens


def build_validation(
    sources: Sources | None,
    data: TextDataConfig,
    train: TextTrainConfig,
    evaluation: TextEvalConfig,
    transform: TextTransform,
    pad_token_id: int,
    mesh: Mesh,
    say: Callable[[str], None],
    vision: Vision | None = None,
) -> Validation | None:
    """Reads the first rows of each validation source. Broken rows are left out with a message and stop no run.

    Returns:
        None when there is no validation set.

    Raises:
        DataError: when no row of it can be used.
    """
    if sources is None:
        return None
    samples: list[TextSample] = []
    origins: list[int] = []
    for number, rows in enumerate(sources.rows):
        indices = range(min(len(rows), -(-evaluation.num_rows // len(sources.rows))))
        for _, result in samples_of(transform, rows, indices):
            if isinstance(result, DataError):
                say(f"validation row left out: {result}")
                continue
            samples += result
            origins += [number] * len(result)
    if not samples:
        raise DataError("data.eval_path: no row of the validation set can be used")
    lengths = [sample.num_tokens for sample in samples]
    capacity = train.micro_batch_size * data.max_seq_len * transform.documents_per_sample
    if not train.rmpad_with_pos_ids:  # padded rows cost their number times the longest
        lengths = [1] * len(samples)
        capacity = train.micro_batch_size
    by_rank = pack(lengths, [float(length) for length in lengths], capacity, mesh.data_size)
    bins = by_rank[mesh.data_rank]
    batches = _make_batches(bins, samples.__getitem__, 0, origins, train.rmpad_with_pos_ids, pad_token_id, mesh, vision)
    return Validation(batches, [_split_prompt(sample) for sample in samples[: evaluation.num_samples]])


def _make_batches(
    bins: Bins,
    read: Callable[[int], TextSample],
    first_id: int,
    sources: Sequence[int],
    packed: bool,
    pad_token_id: int,
    mesh: Mesh,
    vision: Vision | None,
) -> list[TokenBatch]:
    """Makes a micro-batch of each bin of positions of samples.

    Args:
        bins: positions of the samples of each micro-batch.
        read: returns the sample at a position.
        first_id: sample id of position 0.
        sources: number of the source of the sample at each position.
        packed, pad_token_id, vision: see ``make_batch``.
        mesh: the ranks.
    """
    return [
        make_batch(
            [read(position) for position in positions],
            [first_id + position for position in positions],
            [sources[position] for position in positions],
            packed,
            pad_token_id,
            placeholder_tokens(mesh),
            vision,
        )
        for positions in bins
    ]


def _split_prompt(sample: TextSample) -> AnsweredPrompt:
    """Splits the first document of a sample into prompt and answer.

    The answer is the last run of tokens in the loss mask. Plain text, which is in the loss throughout, is split in its
    middle.
    """
    document = sample.documents[0]
    token_ids = document.input_ids.tolist()
    loss_mask = document.loss_mask.tolist()
    start = len(token_ids) // 2
    stop = len(token_ids)
    if not all(loss_mask[1:]):
        start = stop = max(index for index, is_in_loss in enumerate(loss_mask, start=1) if is_in_loss)
        while loss_mask[start - 1]:
            start -= 1
    return AnsweredPrompt(token_ids[:start], token_ids[start:stop], document.images)
