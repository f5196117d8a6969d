"""What the roles of an RL run of a language model hold, and how they draw texts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sfumato.algorithms.noise import keyed_generator
from sfumato.config.text_rl import SUM_OF_LENGTHS, TextRLConfig
from sfumato.data.media.vision import ImageReader
from sfumato.data.text.answer_end import facts_of, tokens_without_text
from sfumato.data.text.format import Document, TextSample
from sfumato.data.text.packing import make_batch, placeholder_tokens
from sfumato.data.text.prompt_template import PromptTemplate, build_prompt_template
from sfumato.data.text.prompts import TextPrompt, check_text_prompts, describe_shared_prompts, load_text_prompts
from sfumato.errors import ConfigError, RoleLostError
from sfumato.models.estimate.flops import FlopCount
from sfumato.models.language.critic import Critic
from sfumato.models.language.hf_config import check_length
from sfumato.models.language.load import build_language_model, build_reader, read_model_config
from sfumato.models.language.model import LanguageModel
from sfumato.models.language.probe import probe
from sfumato.models.language.shared_prompts import can_share_prompts
from sfumato.models.policies import Policies
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh
from sfumato.rewards.base import Sample
from sfumato.rollout.agents.turns import DrawnText, LengthLimits, SampleKeys
from sfumato.rollout.batch import Drawn, SampleRequest
from sfumato.rollout.debug.replay import DumpedRollouts
from sfumato.rollout.engines.base import Engine, EngineError, Sampling
from sfumato.rollout.engines.embedded.of_policy import PolicyEngine
from sfumato.rollout.engines.settings import Embedded
from sfumato.rollout.oversampling.first_finished import OtherRankError
from sfumato.rollout.oversampling.partial import OverSampling
from sfumato.rollout.oversampling.unfinished import UnfinishedGroups, UnfinishedRollouts
from sfumato.rollout.text.tokens import TextRollout, TokenSequence
from sfumato.tracking.folder import run_date


def build_text_policy(config: TextRLConfig) -> tuple[LanguageModel, FlopCount]:
    """Loads the model that is trained, and counts its operations.

    Raises:
        ConfigError: when it is missing, or knows fewer positions than a sample may have tokens.
    """
    model = build_language_model(config.model, config.train, data_type=config.data.data_type)
    check_length(model.module.config.get_text_config(), config.max_seq_len, SUM_OF_LENGTHS)
    return model, FlopCount(model.module, model.vision)


def probe_policies(config: TextRLConfig, policies: Policies[LanguageModel], say: Callable[..., None]) -> None:
    """Finds how packed rows have to reach the policy, a frozen copy of it or a teacher, and whether samples can share
    prompts.

    Raises:
        ConfigError: as ``probe``.
    """
    model, teacher = policies.model, policies.other_model
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

EVALUATION = "evaluation"
"""What samples are for that are not learned from."""


class TextEngine:
    """Draws texts in a role, by weights of the policy in this process or by an engine with its own."""

    def __init__(
        self,
        config: TextRLConfig,
        mesh: Mesh,
        model: LanguageModel | None = None,
        flops: FlopCount | None = None,
        served: bool = False,
    ) -> None:
        """Starts an engine that has weights of its own; makes the embedded one when it is first needed.

        Args:
            config: of the task.
            mesh: of the role's ranks.
            model: the policy, on the mesh; None for an engine with weights of its own.
            flops: of the policy that is trained.
            served: use the engine that ``rollout.engine`` names, which has weights of its own.

        Raises:
            ConfigError: when that engine cannot be what the configuration says.
            RoleLostError: when it does not start.
        """
        if model is None:
            tokenizer, reader = build_reader(config.model, config.train, config.data.data_type)
        else:
            tokenizer, reader = model.tokenizer, None if model.vision is None else model.vision.reader
        facts_of(tokenizer).date = run_date(config.train)
        self.config, self.template, self.flops = config, build_text_template(config, tokenizer, reader), flops
        adopt_template(self.template)  # which the actor's export carries
        self.mesh = mesh
        self.served = build_served(config) if served else None
        self._restarts = 0
        self.receiver = None if self.served is None else self.served.weights
        """What takes weights; None where the policy's model does."""
        self._policy = None if model is None else PolicyEngine(model, self._embedded)
        self._is_resting = False
        self.unfinished = UnfinishedRollouts() if config.rollout.leaves_unfinished else None
        """What finished iterations have left to the next, in the actor, which keeps it with its checkpoints."""
        self._over_sampling: OverSampling | None = None
        self._dumped = None
        if config.rollout.load_dump is not None:
            self._dumped = DumpedRollouts(config.rollout.load_dump, self.template, config.rollout.temperature)

    def _embedded(self, module: nn.Module) -> Engine:
        assert self._policy is not None
        settings = self.config.rollout.engine
        embedded = settings if isinstance(settings, Embedded) else Embedded()
        return embedded.of_module(module, self._policy.model, self.config.max_seq_len)

    def rest(self) -> None:
        """Leaves the device to another role."""
        if self.served is not None and not self._is_resting:
            self.served.release()
        self._is_resting = True

    def wake(self) -> None:
        """Takes the device back."""
        if self.served is not None and self._is_resting:
            self.served.restore()
        self._is_resting = False

    def rescore(self, model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probs of fixed tokens ``[N, T]`` by a policy: float32 ``[N, T - 1]`` on the CPU."""
        documents = [Document(row, np.arange(len(row)) > 0) for row in tokens.numpy().astype(np.int32)]
        samples, number = [TextSample((each,)) for each in documents], len(documents)
        batch = make_batch(samples, list(range(number)), [0] * number, True, 0, placeholder_tokens(model.mesh))
        found = model.token_log_probs([batch])[0].cpu()
        return found[batch.tensors["labels"] != IGNORED].view(number, -1)

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
            weights: names what the samples are for and the policy's weights of now; see ``PolicyEngine.ready``.
            version: of the policy.
            prompts: B prompts, equal ones for a group.
            groups: B numbers.
            keys: of the noise of each.

        Returns:
            B lists of token sequences, and the B samples as rewards see them.

        Raises:
            RoleLostError: when an engine with weights of its own is lost, and nothing brings it back.
        """
        rollout = self.config.rollout
        engine, sampling, limits = self._ready(weights, version)

        async def draw_all() -> list[DrawnText]:
            draws = [
                rollout.kind.draw(engine, prompt, key, sampling, self.template, limits)
                for prompt, key in zip(prompts, keys, strict=True)
            ]
            return await asyncio.gather(*draws)

        while True:
            try:
                drawn = asyncio.run(draw_all())
                break
            except EngineError as error:
                self._restart(error)
        drawn = [each.checked(self.template.without_text) for each in drawn]
        samples = [each.sample(prompt, group) for each, prompt, group in zip(drawn, prompts, groups, strict=True)]
        return [each.sequences for each in drawn], samples

    def _restart(self, error: EngineError) -> None:
        """Starts an engine that was lost anew, with the weights that it had: what was asked for is drawn again."""
        if self.served is None:
            raise error
        most = self.config.runtime.max_restarts
        if self._restarts >= most:
            reason = f"{error}\nits engine was started anew {self._restarts} times already (runtime.max_restarts)"
            raise RoleLostError("engine", (), reason) from error
        self._restarts += 1
        LOGGER.warning("%s\nit is started anew, %d of %d times (runtime.max_restarts)", error, self._restarts, most)
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
    ) -> tuple[Any, ...]:
        """Draws the samples of an iteration that are asked for, or with ``rollout.load_dump`` reads them.

        Args:
            requests: of this rank.
            prompts: those of training.
            iteration: that is drawn.
            version: of the policy.
            unfinished: what the iteration before left, where more groups are under way than are asked for: those that
                end first then take the places of these.

        Returns:
            The rollout, and what rewards see of it; with unfinished groups also those of the next iteration, on Ray of
            the first rank alone, which speaks for all.

        Raises:
            RoleLostError: when drawing fails, and nothing brings the engine back.
        """
        if self._dumped is not None:
            return self._dumped.draw(requests, iteration)
        version = 0 if self.config.rollout.rollout_only else version
        weights = ("rollout", version)
        if unfinished is not None:
            before = unfinished.iteration
            assert before == iteration, f"iteration {iteration} cannot go on from what {before} does"
            return self._draw_from(unfinished, requests, prompts, weights, version)
        keys = [SampleKeys(self.config.train.seed, iteration, request.sample_id) for request in requests]
        wanted, groups = [prompts[each.prompt_id] for each in requests], [each.group_id for each in requests]
        sequences, samples = self.draw(weights, version, wanted, groups, keys)
        return TextRollout(requests=list(requests), versions=[version] * len(requests), sequences=sequences), samples

    def _draw_from(
        self,
        unfinished: UnfinishedGroups,
        requests: Sequence[SampleRequest],
        prompts: Sequence[TextPrompt],
        weights: tuple[str, int],
        version: int,
    ) -> tuple[TextRollout, list[Sample], UnfinishedGroups | None]:
        if self._over_sampling is None:
            self._over_sampling = OverSampling(self.config, prompts, self.mesh)
        places = list(dict.fromkeys(request.group_id for request in requests))
        while True:
            drawing = (*self._ready(weights, version), self.template, version, unfinished, places)
            try:
                rollout, samples, after = self._over_sampling.draw(*drawing)
                break
            except EngineError as error:
                if self.served is None:
                    raise RoleLostError("engine", (), str(error)) from error
                if not isinstance(error, OtherRankError):
                    self._restart(error)
        is_given_on = self.config.runtime.backend != "ray" or self.mesh.data_rank == 0
        return rollout, samples, after if is_given_on else None

    def _ready(self, weights: tuple[str, int], version: int) -> tuple[Engine, Sampling, LengthLimits]:
        """What draws by these weights, and how; arguments as of ``draw``."""
        engine: Engine = self.served if self._policy is None else self._policy.ready(weights, version)
        rollout, evaluation = self.config.rollout, self.config.eval
        stop = {"stop_token_ids": stop_tokens(self.template), "stop": self.template.stop}
        longest = rollout.max_new_tokens
        if weights[0] == EVALUATION:
            longest = evaluation.max_new_tokens or longest
            sampling = Sampling(evaluation.temperature, **stop)
        else:
            sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k, **stop)
        return engine, sampling, LengthLimits(longest, self.config.max_seq_len)

    def store_unfinished(self, unfinished: UnfinishedGroups | None) -> dict[str, float]:
        """Keeps what an iteration that was learned from has left to the next. In the actor.

        Returns:
            Metrics of the iteration, where there is more to say than its samples do.
        """
        if self.unfinished is not None:
            self.unfinished.groups = unfinished
            return unfinished.metrics
        return {} if self._dumped is None else self._dumped.metrics

    def close(self) -> None:
        """Ends the engine, where there is one."""
        engine = self._policy or self.served
        if engine is not None:
            engine.close()


def answer_held_out(state: Any, rows: list[int], config: TextRLConfig) -> tuple[list[Sample], Drawn]:
    """An answer to each of some held-out prompts, from the averaged weights of an actor, or from those that a sampler
    has; how long they are."""
    prompts, step = [state.eval_prompts[row] for row in rows], state.updates
    keys = [SampleKeys(config.eval.seed, 0, row, EVALUATION) for row in rows]
    with state.evaluated():
        _, samples = state.engine.draw((EVALUATION, step), step, prompts, rows, keys)
    return samples, Drawn({"eval/tokens": [float(sample.num_tokens) for sample in samples]})


def build_teacher(config: TextRLConfig, policy: LanguageModel) -> LanguageModel | None:
    """The model that stands in the place of the reference, where ``algorithm.teacher`` names one.

    Raises:
        ConfigError: when it is missing, or its tokens are others than the policy's.
    """
    if config.algorithm.teacher is None:
        return None
    own = {"model_path": config.algorithm.teacher, "config_path": None, "tokenizer_path": None, "lora": None}
    section, data_type = config.model.model_copy(update=own), config.data.data_type
    teacher = build_language_model(section, config.train, frozen=True, data_type=data_type)
    check_length(teacher.module.config.get_text_config(), config.max_seq_len, SUM_OF_LENGTHS)
    if teacher.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ConfigError(
            f"algorithm.teacher {config.algorithm.teacher}: its tokenizer has other tokens than the policy's, so what "
            "it says of them means nothing: take a teacher of the same tokenizer"
        )
    return teacher


def build_critic(config: TextRLConfig, mesh: Mesh, say: Callable[..., None]) -> Critic | None:
    """The critic, where the advantages need one; raises as ``Critic``."""
    if not config.algorithm.token_advantage.needs_values:
        return None
    return Critic(config.critic, config.model, config.train, mesh, config.num_updates, config.max_seq_len, say)


def open_prompts(
    config: TextRLConfig, say: Callable[..., None]
) -> tuple[PromptTemplate, list[TextPrompt], list[TextPrompt]]:
    """How prompts are rendered, and the prompts of training and evaluation.

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
    check_text_prompts(train + held_out, [reward.check_row for reward in config.reward.rewards])
    return template, train, held_out


def build_served(config: TextRLConfig) -> Any:
    """The engine that has weights of its own, started or found."""
    on_meta, data_type = config.train.model_copy(update={"init_device": "meta"}), config.data.data_type
    described = build_language_model(config.model, on_meta, data_type=data_type)
    if not described.can_be_served:
        raise ConfigError(
            f"rollout.engine {config.rollout.engine.type}: {described.name} is drawn with in the run's own processes "
            "alone: take embedded"
        )
    seen = {"reader": described.vision.reader} if described.vision is not None else {}
    try:
        return config.rollout.engine.build(
            str(config.model.model_path), described.module, Path(config.train.output_dir), **seen
        )
    except EngineError as error:
        raise RoleLostError("engine", (), str(error)) from error


def fixed_tokens(config: TextRLConfig, template: PromptTemplate) -> torch.Tensor:
    """Tokens by whose log-probs the weights of an engine of its own are verified: int64 ``[4, 16]``."""
    generator = keyed_generator(config.train.seed, "rescoring")
    tokens = torch.randint(len(template.tokenizer), (4, 16), generator=generator)
    media = torch.tensor(sorted(template.media_tokens), dtype=torch.int64)
    return tokens.masked_fill(torch.isin(tokens, media), template.tokenizer.pad_token_id)


def stop_tokens(template: PromptTemplate) -> tuple[int, ...]:
    """Tokens at which drawing stops: those that end an answer, and those after which nothing can be said, since they
    stand for an image that is not there or for no text at all."""
    return tuple(sorted({*template.answer_end.stop_token_ids} | template.media_tokens | template.without_text))


def build_text_template(config: TextRLConfig, tokenizer: Any, reader: ImageReader | None) -> PromptTemplate:
    """The template of a run, with what ends the answers that it draws; raises as ``build_prompt_template``."""
    without: frozenset[int] = frozenset()
    if config.modality == "text":
        described = read_model_config(config.model, config.data.data_type.has_images)
        size = getattr(described.get_text_config(), "vocab_size", None) or len(tokenizer)
        without = tokens_without_text(tokenizer, size)
    template = build_prompt_template(config.data, tokenizer, reader)
    return replace(template, stop=tuple(config.rollout.stop), without_text=without)


def adopt_template(template: PromptTemplate) -> None:
    """Makes the chat template the tokenizer's own, which exports carry."""
    if template.chat is not None:
        template.chat.adopt()
    facts_of(template.tokenizer).answer_end = template.answer_end


def summed(mesh: Mesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that sums a small tensor over data-parallel ranks."""

    def reduce(values: torch.Tensor) -> torch.Tensor:
        parts = mesh.gather(values)
        return torch.stack(parts).sum(dim=0)

    return reduce
