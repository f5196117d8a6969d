"""The parts that the roles of an RL run of a language model are built from, and how a role draws texts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import nn

from sfumato.config.text_rl import SUM_OF_LENGTHS, TextRLConfig
from sfumato.data.prompt_loader import check_prompts
from sfumato.data.text.answer_end import facts_of, tokens_without_text
from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.packing import make_batch, placeholder_tokens
from sfumato.data.text.prompt_template import PromptTemplate, build_prompt_template
from sfumato.data.text.prompts import TextPrompt, describe_shared_prompts, load_text_prompts
from sfumato.data.text.token_ids import padding_token, token_decoder
from sfumato.errors import ConfigError, NonFiniteError, RoleLostError
from sfumato.models.estimate.flops import FlopCount
from sfumato.models.language.hf_config import check_length
from sfumato.models.language.load import build_language_model, build_reader, read_model_config
from sfumato.models.language.model import LanguageModel
from sfumato.models.language.parts import refuse_other_tokens
from sfumato.models.language.probe import probe
from sfumato.models.language.rounding import rounding_noise
from sfumato.models.language.shared_prompts import can_share_prompts
from sfumato.models.language.tolerance import coarsest_dtype
from sfumato.models.policies import Policies
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh
from sfumato.rewards.base import Sample
from sfumato.rollout.batch import EvalStats, SampleRequest
from sfumato.rollout.engines.base import Engine, EngineError, GenerationRequest, Sampling
from sfumato.rollout.engines.embedded.complete import complete_requests
from sfumato.rollout.engines.embedded.policy_engine import PolicyEngine
from sfumato.rollout.engines.settings import Embedded
from sfumato.rollout.kinds.base import DrawnText, LengthLimits, SampleKeys
from sfumato.rollout.text.tokens import TextRollout, TokenSequence
from sfumato.tracking.folder import run_date

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from transformers import PreTrainedTokenizerBase

    from sfumato.data.media.vision import MediaProcessor
    from sfumato.models.language.critic import Critic
    from sfumato.rollout.debug.replay import DumpedRollouts
    from sfumato.rollout.oversampling.partial import OverSampling
    from sfumato.rollout.oversampling.unfinished import UnfinishedGroups, UnfinishedRollouts

    class _EngineWithWeights(Engine, Protocol):
        """An engine that weights are sent to (``runtime/weight_sync``), one of this library or of a user."""

        weights: Any

        def restart(self) -> None: ...

    class _DrawsEvaluations(Protocol):
        """The part that an actor and a sampler (``runtime/states.py``, on a floor above this one) have in common."""

        eval_prompts: Sequence[TextPrompt]
        engine: TextGenerator
        updates: int

        def evaluated(self) -> AbstractContextManager[object]: ...


Result = TypeVar("Result")


def build_text_policy(config: TextRLConfig) -> tuple[LanguageModel, FlopCount]:
    """Loads the model that is trained, and counts its operations.

    Raises:
        ConfigError: when it is missing, has dropout, or has fewer positions than a sample may have tokens.
    """
    model = build_language_model(config.model, config.train, data_type=config.data.data_type)
    check_length(model.plain.config.get_text_config(), config.max_seq_len, SUM_OF_LENGTHS)
    _refuse_dropout(model)
    return model, FlopCount(model.module, model.vision)


def _refuse_dropout(model: LanguageModel) -> None:
    """Raises ConfigError for a policy that drops elements when it is trained, as published GPT-2 does."""
    parts = [name for name, part in model.module.named_modules() if isinstance(part, nn.Dropout) and part.p > 0]
    if not parts:
        return
    fields = model.plain.config.get_text_config().to_dict()
    settings = [name for name, value in fields.items() if "drop" in name and isinstance(value, float) and value > 0]
    raise ConfigError(
        f"{type(model.plain).__name__} has dropout ({parts[0]}), with which replay and rollout would be different "
        f"policies: set {', '.join(settings) or 'it'} to 0 in its config.json"
    )


def probe_policies(config: TextRLConfig, policies: Policies[LanguageModel], say: Callable[..., None]) -> None:
    """Finds out in which layout the policy and its teacher take packed rows, and whether samples can share prompts.

    A frozen copy of the policy takes rows as the policy does.

    Raises:
        ConfigError: as ``probe``.
    """
    model = policies.model
    teacher = policies.other_model
    models = [model] if teacher is None else [model, teacher]
    for probed in models:
        probe(probed, config.model, config.train, config.max_seq_len, say, trains=probed is model)
    shares = config.train.share_prompts and config.rollout.n > 1
    shares &= not config.algorithm.token_advantage.needs_values  # a critic gets the policy's rows
    shares = shares and all(can_share_prompts(probed, config.max_seq_len) for probed in models)
    if policies.frozen_copy is not None:
        policies.frozen_copy.set_row_layout(model.attention, model.row_layout)
        models.append(policies.frozen_copy)
    for probed in models:
        probed.shares_prompts = shares


LOGGER = logging.getLogger(__name__)

NUM_BEGINNINGS, BEGINNING_TOKENS, DRAWN_TOKENS = 4, 96, 48
"""Texts by which an engine with weights of its own is compared with the policy, most tokens of a prompt in each, and
fewest that are drawn. Their logits are all in memory at a time."""

EVALUATION = "evaluation"
"""The purpose of samples that are not learned from; others are drawn for ``rollout``."""


class TextGenerator:
    """Draws texts in a role: with the policy of this process, or with an engine that has weights of its own."""

    def __init__(
        self,
        config: TextRLConfig,
        mesh: Mesh,
        model: LanguageModel | None = None,
        flops: FlopCount | None = None,
        served: bool = False,
    ) -> None:
        """Starts an engine that has weights of its own; one that uses the policy's is built when it is first needed.

        Args:
            config: of the task.
            mesh: of the role's ranks.
            model: the policy, on the mesh; None for an engine with weights of its own.
            flops: of the policy that is trained.
            served: start the engine that ``rollout.engine`` names, which has weights of its own.

        Raises:
            ConfigError: when the engine does not fit its configuration.
            RoleLostError: when it does not start.
        """
        if model is None:
            tokenizer, reader = build_reader(config.model, config.train, config.data.data_type)
        else:
            tokenizer = model.tokenizer
            reader = None if model.vision is None else model.vision.reader
        facts_of(tokenizer).date = run_date(config.train)  # templates that show the date show that of the run's start
        self.config = config
        self.template = build_text_template(config, tokenizer, reader)
        self.flops = flops
        adopt_template(self.template)  # the actor's export has this tokenizer
        self.mesh = mesh
        self.served = build_served(config) if served else None
        if self.served is not None:
            from sfumato.rollout.engines.served.engine import ServedEngine

            if isinstance(self.served, ServedEngine):  # not one of the user's own
                self.served.on_loss = self._restart
        self._restarts = 0
        self.receiver = None if self.served is None else self.served.weights
        """Receives the weights of new versions; None where the policy's model does."""
        self._policy = None if model is None else PolicyEngine(model, self._build_embedded)
        self._is_resting = False
        self.unfinished: UnfinishedRollouts | None = None
        """The groups that finished iterations have left to the next, in the actor, whose checkpoints hold them."""
        self._over_sampling: OverSampling | None = None
        if config.rollout.leaves_unfinished:
            from sfumato.rollout.oversampling.unfinished import UnfinishedRollouts

            self.unfinished = UnfinishedRollouts()
        self._dumped: DumpedRollouts | None = None
        if config.rollout.load_dump is not None:
            from sfumato.rollout.debug.replay import DumpedRollouts

            self._dumped = DumpedRollouts(config.rollout.load_dump, self.template, config.rollout.temperature)

    def _build_embedded(self, module: nn.Module) -> Engine:
        """Builds the embedded engine for a module with the policy's weights."""
        assert self._policy is not None
        settings = self.config.rollout.engine
        embedded = settings if isinstance(settings, Embedded) else Embedded()
        return embedded.build_for_module(module, self._policy.model, self.config.max_seq_len)

    def offload(self) -> None:
        """Frees the device for another role."""
        if self.served is not None and not self._is_resting:
            self.served.release()
        self._is_resting = True

    def onload(self) -> None:
        """Takes the device back."""
        if self.served is not None and self._is_resting:
            self.served.restore()
        self._is_resting = False

    def rescore(self, model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probs of fixed tokens ``[N, T]`` by a policy: float32 ``[N, T - 1]`` on the CPU."""
        documents = [Document(row, np.arange(len(row)) > 0) for row in tokens.numpy().astype(np.int32)]
        samples = [TextSample((document,)) for document in documents]
        count = len(documents)
        batch = make_batch(samples, list(range(count)), [0] * count, True, 0, placeholder_tokens(model.mesh))
        log_probs = model.token_log_probs([batch])[0].cpu()
        return log_probs[batch.labels != IGNORED].view(count, -1)

    def rescore_rounded(self, model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
        """As ``rescore``, with what rounding to the coarser precision of engine and policy does to the model."""
        engine_dtype: torch.dtype = getattr(torch, getattr(self.config.rollout.engine, "dtype", "bfloat16"))
        dtypes = (engine_dtype, model.plain.dtype, model.autocast_dtype or torch.float32)
        with model.whole_output(), rounding_noise(model.module, coarsest_dtype(dtypes)):  # logits are rounded, too
            return self.rescore(model, tokens)

    def draw_tokens(self, beginnings: Sequence[Sequence[int]]) -> torch.Tensor:
        """Texts of equal lengths that go on from these tokens, int64 ``[N, T]``, drawn by the engine with weights of
        its own."""
        assert self.served is not None
        length = min(max(map(len, beginnings)) + DRAWN_TOKENS, self.config.max_seq_len - 1)
        shortened = [beginning[: length - 1] for beginning in beginnings]
        requests = [
            GenerationRequest(beginning, seed, length - len(beginning)) for seed, beginning in enumerate(shortened)
        ]
        served = self.served
        completions = self._with_restarts(lambda: complete_requests(served, requests, Sampling()))
        tokens = torch.tensor(
            [[*beginning, *drawn.token_ids] for beginning, drawn in zip(shortened, completions, strict=True)]
        )
        # a token that stands for an image cannot be scored without one
        media = torch.tensor(sorted(self.template.media_tokens), dtype=torch.int64)
        return tokens.masked_fill(torch.isin(tokens, media), padding_token(self.template.tokenizer))

    def draw(
        self,
        weights: tuple[str, int],
        version: int,
        prompts: Sequence[TextPrompt],
        groups: Sequence[int],
        keys: Sequence[SampleKeys],
    ) -> tuple[list[list[TokenSequence]], list[Sample]]:
        """Draws one sample for each of B prompts, all at the same time.

        Args:
            weights: the samples' purpose and a number, which together name the policy's weights of now: an engine takes
                them anew where they are not those of the last call; see ``PolicyEngine.ready``.
            version: of the policy.
            prompts: B prompts, equal ones for the samples of a group.
            groups: B group ids.
            keys: of the noise of each sample.

        Returns:
            B lists of token sequences, and the B samples as rewards see them.

        Raises:
            RoleLostError: when an engine with weights of its own is lost and cannot be restarted.
        """
        rollout = self.config.rollout
        engine, sampling, limits = self._prepare_engine(weights, version)

        async def draw_all() -> list[DrawnText]:
            draws = [
                rollout.kind.draw(engine, prompt, key, sampling, self.template, limits)
                for prompt, key in zip(prompts, keys, strict=True)
            ]
            return await asyncio.gather(*draws)

        texts = self._with_restarts(lambda: asyncio.run(draw_all()))
        texts = [text.mark_unknown_tokens(self.template.without_text) for text in texts]
        samples = [text.sample(prompt, group) for text, prompt, group in zip(texts, prompts, groups, strict=True)]
        return [text.sequences for text in texts], samples

    def _with_restarts(self, draw: Callable[[], Result]) -> Result:
        """What ``draw`` returns, which is called again when the engine was lost and has been restarted."""
        while True:
            try:
                return draw()
            except EngineError as error:
                self._restart(error)

    def _restart(self, error: EngineError) -> None:
        """Restarts an engine that was lost, with the weights that it had; the caller then draws all samples again.

        Raises:
            EngineError: the given one, for the embedded engine, in whose process there is nothing to restart.
            NonFiniteError: when the embedded engine drew with logits that are not finite.
            RoleLostError: when it does not start, or was restarted ``runtime.max_restarts`` times before.
        """
        if self.served is None:
            raise error.__cause__ if isinstance(error.__cause__, NonFiniteError) else error
        limit = self.config.runtime.max_restarts
        if self._restarts >= limit:
            reason = f"{error}\nits engine was started anew {self._restarts} times already (runtime.max_restarts)"
            raise RoleLostError("engine", (), reason) from error
        self._restarts += 1
        LOGGER.warning("%s\nit is started anew, %d of %d times (runtime.max_restarts)", error, self._restarts, limit)
        try:
            self.served.restart()
        except (ConfigError, EngineError) as problem:
            raise RoleLostError("engine", (), f"{error}\n{problem}") from problem

    def draw_requests(
        self,
        requests: Sequence[SampleRequest],
        prompts: Sequence[TextPrompt],
        iteration: int,
        version: int,
        unfinished: UnfinishedGroups | None = None,
    ) -> tuple[TextRollout, list[Sample], *tuple[UnfinishedGroups | None, ...]]:
        """Draws the requested samples of an iteration, or with ``rollout.load_dump`` reads them.

        Args:
            requests: of this rank.
            prompts: those of training.
            iteration: whose samples are drawn.
            version: of the policy.
            unfinished: with oversampling, the groups that the iteration before has left. More groups are then drawn
                than are requested, and those that end first take the places of the requested ones.

        Returns:
            The rollout, and its samples as rewards see them. With ``unfinished`` also the groups that are left to the
            next iteration: on Ray from the first rank only, since all ranks have the same, and None from the others.

        Raises:
            RoleLostError: when drawing fails and the engine cannot be restarted.
        """
        if self._dumped is not None:
            return self._dumped.draw(requests, iteration)
        version = 0 if self.config.rollout.rollout_only else version  # nothing is trained: the weights stay the same
        weights = ("rollout", version)
        if unfinished is not None:
            expected = unfinished.iteration
            assert expected == iteration, f"iteration {iteration} cannot go on from what {expected} does"
            return self._draw_from(unfinished, requests, prompts, weights, version)
        keys = [SampleKeys(self.config.train.seed, iteration, request.sample_id) for request in requests]
        requested_prompts = [prompts[request.prompt_id] for request in requests]
        groups = [request.group_id for request in requests]
        sequences, samples = self.draw(weights, version, requested_prompts, groups, keys)
        return TextRollout(requests=list(requests), versions=[version] * len(requests), sequences=sequences), samples

    def _draw_from(
        self,
        unfinished: UnfinishedGroups,
        requests: Sequence[SampleRequest],
        prompts: Sequence[TextPrompt],
        weights: tuple[str, int],
        version: int,
    ) -> tuple[TextRollout, list[Sample], UnfinishedGroups | None]:
        """``draw_requests`` with oversampling."""
        from sfumato.rollout.oversampling.first_finished import OtherRankError
        from sfumato.rollout.oversampling.partial import OverSampling

        if self._over_sampling is None:
            self._over_sampling = OverSampling(self.config, prompts, self.mesh)
        places = list(dict.fromkeys(request.group_id for request in requests))
        while True:
            engine, sampling, limits = self._prepare_engine(weights, version)
            try:
                rollout, samples, after = self._over_sampling.draw(
                    engine, sampling, limits, self.template, version, unfinished, places
                )
                break
            except EngineError as error:
                if self.served is None:
                    raise RoleLostError("engine", (), str(error)) from error
                if not isinstance(error, OtherRankError):  # then this rank's engine runs, and all ranks draw again
                    self._restart(error)
        returns_unfinished = self.config.runtime.backend != "ray" or self.mesh.data_rank == 0
        return rollout, samples, after if returns_unfinished else None

    def _prepare_engine(self, weights: tuple[str, int], version: int) -> tuple[Engine, Sampling, LengthLimits]:
        """The engine for these weights, how it draws, and the limits of answers; arguments as of ``draw``."""
        engine = cast(Engine, self.served if self._policy is None else self._policy.ready(weights, version))
        rollout = self.config.rollout
        evaluation = self.config.eval
        stop = {"stop_token_ids": stop_tokens(self.template), "stop": self.template.stop}
        longest = rollout.max_new_tokens
        if weights[0] == EVALUATION:
            longest = evaluation.max_new_tokens or longest
            sampling = Sampling(evaluation.temperature, **stop)
        else:
            sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k, **stop)
        return engine, sampling, LengthLimits(longest, self.config.max_seq_len)

    def store_unfinished(self, unfinished: UnfinishedGroups | None) -> dict[str, float]:
        """Keeps the groups that an iteration has left to the next, once the actor has learned from the iteration.

        Returns:
            Metrics of the iteration that do not follow from its samples: of oversampling, or of dumps that were read.
        """
        if self.unfinished is not None:
            assert unfinished is not None
            self.unfinished.groups = unfinished
            return unfinished.metrics
        return {} if self._dumped is None else self._dumped.metrics

    def describe_saved(self, fields: dict[str, object]) -> dict[str, object]:
        """The fields of a saved sample with the texts of its tokens, which pages show one by one."""
        token_ids = fields.get("token_ids")
        if not isinstance(token_ids, list):
            return fields
        return {**fields, "tokens": [self._text_of_token(token) for token in token_ids]}

    @cached_property
    def _text_of_token(self) -> Callable[[int], str]:
        return token_decoder(self.template.tokenizer)

    def close(self) -> None:
        """Ends the engine, where there is one."""
        engine = self._policy or self.served
        if engine is not None:
            engine.close()


def answer_held_out(state: _DrawsEvaluations, rows: list[int], config: TextRLConfig) -> tuple[list[Sample], EvalStats]:
    """An answer to each held-out prompt of ``rows``, and the lengths of the answers.

    An actor draws with its averaged weights, a sampler with the weights that it was sent.
    """
    prompts = [state.eval_prompts[row] for row in rows]
    step = state.updates
    keys = [SampleKeys(config.eval.seed, 0, row, EVALUATION) for row in rows]
    with state.evaluated():
        _, samples = state.engine.draw((EVALUATION, step), step, prompts, rows, keys)
    return samples, EvalStats({"eval/tokens": [float(sample.num_tokens) for sample in samples]})


def build_teacher(config: TextRLConfig, policy: LanguageModel) -> LanguageModel | None:
    """The model that takes the place of the reference, where ``algorithm.teacher`` names one.

    Raises:
        ConfigError: when it is missing, or its tokenizer has other tokens than the policy's.
    """
    if config.algorithm.teacher is None:
        return None
    teacher_fields = {
        "model_path": config.algorithm.teacher,
        "config_path": None,
        "tokenizer_path": None,
        "lora": None,
    }
    section = config.model.model_copy(update=teacher_fields)
    data_type = config.data.data_type
    teacher = build_language_model(section, config.train, frozen=True, data_type=data_type)
    check_length(teacher.plain.config.get_text_config(), config.max_seq_len, SUM_OF_LENGTHS)
    refuse_other_tokens(f"algorithm.teacher {config.algorithm.teacher}", teacher.tokenizer, policy.tokenizer)
    return teacher


def build_critic(config: TextRLConfig, mesh: Mesh, say: Callable[..., None]) -> Critic | None:
    """The critic, where the advantages need one; raises as ``Critic``."""
    if not config.algorithm.token_advantage.needs_values:
        return None
    from sfumato.models.language.critic import Critic

    return Critic(config.critic, config.model, config.train, mesh, config.num_updates, config.max_seq_len, say)


def open_prompts(
    config: TextRLConfig, say: Callable[..., None]
) -> tuple[PromptTemplate, list[TextPrompt], list[TextPrompt]]:
    """The template that renders prompts, and the prompts of training and of evaluation.

    Raises:
        ConfigError: when tokenizer, chat template and kind of rollout do not go together.
        DataError: as ``load_text_prompts``, and when a row lacks what a reward needs.
    """
    tokenizer, reader = build_reader(config.model, config.train, config.data.data_type)
    facts_of(tokenizer).date = run_date(config.train)
    template = build_text_template(config, tokenizer, reader)
    for line in template.answer_end.describe():
        say(line)
    config.rollout.kind.prepare(template)
    settings = {"seed": config.train.seed, "tools": config.rollout.kind.tools(), "log": say}
    train = load_text_prompts(config.data, template, "train", **settings)
    held_out = load_text_prompts(config.data, template, "eval", limit=config.eval.num_prompts, **settings)
    for line in describe_shared_prompts(train, held_out):
        say(line)
    check_prompts(train + held_out, [reward.check_row for reward in config.reward.rewards])
    return template, train, held_out


def build_served(config: TextRLConfig) -> _EngineWithWeights:
    """The engine with weights of its own that ``rollout.engine`` names, started or connected to.

    Raises:
        ConfigError: when it cannot run the model, or takes shorter sequences than the run has.
        RoleLostError: when it does not start.
    """
    # a model without memory: the engine takes from it which weights will be sent, with their names and shapes
    on_meta = config.train.model_copy(update={"init_device": "meta"})
    meta_model = build_language_model(config.model, on_meta, data_type=config.data.data_type)
    if not meta_model.can_be_served:
        raise ConfigError(
            f"rollout.engine {config.rollout.engine.type}: {meta_model.name} is drawn with in the run's own processes "
            "alone: take embedded"
        )
    media = {"reader": meta_model.vision.reader} if meta_model.vision is not None else {}
    try:
        served = config.rollout.engine.build(
            str(config.model.model_path), meta_model.module, Path(config.train.output_dir), **media
        )
    except EngineError as error:
        raise RoleLostError("engine", (), str(error)) from error
    length = getattr(served, "max_length", None)  # an engine of the user's own need not say it
    if length is not None and length < config.max_seq_len:
        served.close()
        raise ConfigError(
            f"rollout.engine: the engine takes {length} tokens, and the longest prompt with its answer may have "
            f"{config.max_seq_len} (data.max_prompt_tokens with rollout.max_new_tokens or eval.max_new_tokens): lower "
            "these, or raise max_model_len, of a server at url the one that it was started with"
        )
    return served


def beginnings_of(prompts: Sequence[TextPrompt], template: PromptTemplate) -> list[list[int]]:
    """Beginnings of the shortest prompts, which an engine with weights of its own goes on from, and by which it is then
    compared with the policy."""
    without_media = ([token for token in prompt.token_ids if token not in template.media_tokens] for prompt in prompts)
    shortest = sorted(without_media, key=len)[:NUM_BEGINNINGS]
    return [tokens[:BEGINNING_TOKENS] for tokens in shortest]


def stop_tokens(template: PromptTemplate) -> tuple[int, ...]:
    """Tokens at which drawing stops.

    They are those that end an answer, and those after which it cannot go on: tokens that stand for media, of which an
    answer has none, and ids without text.
    """
    return tuple(sorted({*template.answer_end.stop_token_ids} | template.media_tokens | template.without_text))


def build_text_template(
    config: TextRLConfig, tokenizer: PreTrainedTokenizerBase, reader: MediaProcessor | None
) -> PromptTemplate:
    """The template of a run, with the texts and ids that end answers; raises as ``build_prompt_template``."""
    without_text: frozenset[int] = frozenset()
    if config.modality == "text":
        model_config = read_model_config(config.model, config.data.data_type.has_images)
        size = getattr(model_config.get_text_config(), "vocab_size", None) or len(tokenizer)
        without_text = tokens_without_text(tokenizer, size)
    template = build_prompt_template(config.data, tokenizer, reader)
    return replace(template, stop=tuple(config.rollout.stop), without_text=without_text)


def adopt_template(template: PromptTemplate) -> None:
    """Makes the chat template and the end of answers the tokenizer's own, so that exports have them."""
    if template.chat is not None:
        template.chat.adopt()
    facts_of(template.tokenizer).answer_end = template.answer_end


def sum_over_ranks(mesh: Mesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that sums a small tensor over data-parallel ranks, in the order of ranks."""

    def reduce(values: torch.Tensor) -> torch.Tensor:
        parts = mesh.gather(values)
        # No all-reduce, which adds in an order of its own: its sums would have other bits on other networks.
        return torch.stack(parts).sum(dim=0)

    return reduce
