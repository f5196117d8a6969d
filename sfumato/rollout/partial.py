"""Oversampling with abort, and partial rollouts: answers that go on after an update, under the new weights.

M groups are under way (``rollout.over_sampling_batch_size``), of which an iteration learns from P
(``rollout.num_prompts``). It ends with the P-th group that has ended; the others are thrown away, or with
``rollout.partial_rollout`` kept, with the log-probability and the version of each token, and go on in the next
iteration, beside as many new groups as are missing.

**Time is counted in tokens.** Each answer draws one token at each tick of an iteration, whatever the engine has room
for: an answer that had to wait for a row catches up, and one that has run ahead is cut back. So what ends first follows
from weights and noise alone: not from batch sizes, memory or clocks, and not from a restart. Of groups that end at the
same tick the older go first.

Group number p of a run is of the prompt that a run without this draws as group p mod P of iteration p div P, and has
its noise.
"""

from __future__ import annotations

import asyncio
import base64
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sfumato.config.text_rl import TextRLConfig
from sfumato.data.prompt_template import PromptTemplate
from sfumato.data.text_prompts import TextPrompt, TextPromptLoader
from sfumato.errors import DataError
from sfumato.rewards.base import Sample
from sfumato.rollout.batch import SampleRequest
from sfumato.rollout.engines.base import Completion, Engine, GenerationRequest, Sampling
from sfumato.rollout.kinds.single_turn import answered
from sfumato.rollout.tokens import FinishReason, TextRollout
from sfumato.rollout.turns import LengthLimits, SampleKeys, SequenceInMaking

_ARRAYS = {"token_ids": np.int32, "log_probs": np.float32, "versions": np.int32}


@dataclass
class Answer:
    """What has been drawn of an answer."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """None while it is under way."""

    def take(self, completion: Completion) -> None:
        """Appends what was drawn."""
        self.token_ids += completion.token_ids
        self.log_probs += completion.log_probs
        self.versions += completion.versions

    def cut(self, length: int) -> None:
        """Forgets what was drawn beyond so many tokens, and that it ended there."""
        if len(self.token_ids) > length:
            del self.token_ids[length:], self.log_probs[length:], self.versions[length:]
            self.finish_reason = None


@dataclass
class Group:
    """The answers to a prompt, some of which may have ended."""

    number: int
    """Groups that were begun before it in the run."""
    prompt_id: int
    answers: list[Answer]

    @property
    def has_ended(self) -> bool:
        """Whether all answers have."""
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def versions(self) -> list[int]:
        """Of all tokens."""
        return [version for answer in self.answers for version in answer.versions]


@dataclass
class Pool:
    """The groups that are under way between two iterations."""

    begun: int = 0
    """Groups that the run has begun."""
    groups: list[Group] = field(default_factory=list)
    """Those that go on, oldest first."""


class OverSampling:
    """The groups that are under way in a run of one process. A checkpoint keeps them.

    It has them before and after the iteration that was drawn last, which a run that fails before it has learned from
    that iteration draws again when it goes on.
    """

    def __init__(self, config: TextRLConfig, prompts: Sequence[TextPrompt]) -> None:
        """Args: the task's configuration, and the prompts of training. Raises as ``TextPromptLoader``."""
        self.config, self._prompts = config, prompts
        self._loader = TextPromptLoader.from_config(prompts, config)
        self._drawn: int | None = None  # the iteration that was drawn last
        self._before = self._after = Pool()
        self.metrics: dict[str, float] = {}
        """Of the iteration that was drawn last."""

    @property
    def groups(self) -> list[Group]:
        """What goes on in the next iteration, oldest first."""
        return self._after.groups

    def draw(
        self,
        engine: Engine,
        sampling: Sampling,
        limits: LengthLimits,
        template: PromptTemplate,
        version: int,
        iteration: int,
    ) -> tuple[TextRollout, list[Sample]]:
        """Draws an iteration: the one after that which was drawn last, or that one again.

        Args:
            engine: by the weights of now.
            sampling: how tokens are drawn.
            limits: of an answer's length.
            template: has the tokenizer.
            version: of the weights.
            iteration: that is drawn.

        Returns:
            P groups, oldest first, numbered as the samples of any iteration; and what rewards see of them.

        Raises:
            ConfigError, EngineError: as ``Engine.generate``.
        """
        rollout = self.config.rollout
        if iteration != self._drawn:
            self._before, self._drawn = self._after, iteration
        pool = copy.deepcopy(self._before)
        kept = [group for group in pool.groups if version - min(group.versions, default=version) <= rollout.max_age]
        too_old = len(pool.groups) - len(kept)
        new = range(pool.begun, pool.begun + rollout.over_sampling_batch_size - len(kept))
        groups = kept + [self._new_group(number) for number in new]
        race = _Race(engine, sampling, rollout.num_prompts, groups)
        asyncio.run(race.run([self._answer_keys(group, limits) for group in groups]))
        chosen = race.chosen()
        left = [group for group in groups if group not in chosen]
        self._after = Pool(new.stop, left if rollout.partial_rollout else [])
        tokens = float(sum(len(group.versions) for group in left))
        ages = version - np.array([each for group in chosen for each in group.versions] or [version])
        what = "kept" if rollout.partial_rollout else "aborted"
        self.metrics = {f"rollout/{what}_groups": float(len(left)), f"rollout/{what}_tokens": tokens}
        self.metrics |= {"rollout/too_old_groups": float(too_old)} if rollout.partial_rollout else {}
        self.metrics |= {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}
        return self._rollout_of(chosen, version, template)

    def _new_group(self, number: int) -> Group:
        num_prompts = self.config.rollout.num_prompts
        prompt_id = self._loader.groups(number // num_prompts)[number % num_prompts]
        return Group(number, prompt_id, [Answer() for _ in range(self.config.rollout.n)])

    def _answer_keys(self, group: Group, limits: LengthLimits) -> list[_AnswerKey]:
        """What the answers of a group go on from."""
        seed, rollout = self.config.train.seed, self.config.rollout
        iteration, place = divmod(group.number, rollout.num_prompts)
        prompt = self._prompts[group.prompt_id]
        room = limits.room(len(prompt.token_ids), len(prompt.token_ids))
        keys = [SampleKeys(seed, iteration, place * rollout.n + member) for member in range(rollout.n)]
        return [_AnswerKey(prompt, key.request_seed(), room) for key in keys]

    def _rollout_of(
        self, groups: Sequence[Group], version: int, template: PromptTemplate
    ) -> tuple[TextRollout, list[Sample]]:
        requests, versions, sequences, samples = [], [], [], []
        for place, group in enumerate(groups):
            prompt = self._prompts[group.prompt_id]
            for member, answer in enumerate(group.answers):
                sequence = SequenceInMaking(prompt.token_ids, prompt.images)
                reason = answer.finish_reason
                assert reason is not None
                sequence.take(Completion(answer.token_ids, answer.log_probs, answer.versions, reason))
                drawn = answered(sequence, prompt, template, is_truncated=reason == "length")
                sample_id = place * len(group.answers) + member
                requests.append(SampleRequest(sample_id, place, group.prompt_id, is_first=member == 0))
                versions.append(min(answer.versions, default=version))
                sequences.append(drawn.sequences)
                samples.append(drawn.sample(prompt, place))
        return TextRollout(requests=requests, versions=versions, sequences=sequences), samples

    # of a checkpoint

    def state(self) -> dict[str, Any]:
        """See ``Resumable``: 16 letters a token that goes on, twice."""
        return {"drawn": self._drawn, "before": _packed_pool(self._before), "after": _packed_pool(self._after)}

    def restore(self, state: dict[str, Any]) -> None:
        """See ``Resumable``."""
        if "drawn" not in state:
            raise DataError(
                "the checkpoint is of a run without rollout.over_sampling_batch_size, and does not say which groups "
                "were under way: leave it out, or start a new run from the exported weights (model.model_path)"
            )
        try:
            self._before, self._after = _unpacked_pool(state["before"]), _unpacked_pool(state["after"])
            self._drawn = None if state["drawn"] is None else int(state["drawn"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the partial rollouts of the checkpoint do not hold together: {error}") from error


@dataclass(frozen=True)
class _AnswerKey:
    """What an answer is drawn from."""

    prompt: TextPrompt
    seed: int
    room: int
    """Tokens that it may have."""


class _Race:
    """Draws groups until enough of them have ended."""

    def __init__(self, engine: Engine, sampling: Sampling, wanted: int, groups: Sequence[Group]) -> None:
        self.engine, self.sampling, self.wanted, self.groups = engine, sampling, wanted, groups
        self._before = {id(answer): len(answer.token_ids) for group in groups for answer in group.answers}
        self._ends: dict[int, int] = {}  # the tick at which a group has ended, by its number
        self._last = 1 << 62  # the tick at which enough groups have ended, as far as is known

    async def run(self, keys: Sequence[Sequence[_AnswerKey]]) -> None:
        """Draws; ``keys`` of each answer of each group."""
        for group in self.groups:
            self._look(group)
        draws = [
            self._draw(answer, group, key)
            for group, own in zip(self.groups, keys, strict=True)
            for answer, key in zip(group.answers, own, strict=True)
        ]
        await asyncio.gather(*draws)

    async def _draw(self, answer: Answer, group: Group, key: _AnswerKey) -> None:
        while answer.finish_reason is None:
            so_far = len(answer.token_ids)
            until_last = self._before[id(answer)] + self._last - so_far
            if until_last <= 0:
                return
            tokens, longest = [*key.prompt.token_ids, *answer.token_ids], min(key.room - so_far, until_last)
            request = GenerationRequest(tokens, key.seed, longest, so_far, key.prompt.images)
            completion = await self.engine.generate(request, self.sampling)
            answer.take(completion)
            if completion.finish_reason == "stop":
                answer.finish_reason = "stop"
            elif len(answer.token_ids) == key.room:
                answer.finish_reason = "length"
        self._look(group)

    def _look(self, group: Group) -> None:
        """Notes when a group has ended; nobody need draw beyond the tick at which enough have."""
        if not group.has_ended:
            return
        self._ends[group.number] = max(len(one.token_ids) - self._before[id(one)] for one in group.answers)
        if len(self._ends) < self.wanted:
            return
        last = sorted(self._ends.values())[self.wanted - 1]
        if last < self._last:
            self._last = last
            self.engine.pause("abort")  # who is behind this tick asks again
            self.engine.resume()

    def chosen(self) -> list[Group]:
        """The groups that ended first, oldest first; the others are left as they were at the last tick."""
        order = sorted(
            (group for group in self.groups if group.number in self._ends),
            key=lambda group: (self._ends[group.number], group.number),
        )
        chosen = {group.number for group in order[: self.wanted]}
        for group in self.groups:
            for answer in group.answers if group.number not in chosen else ():
                answer.cut(self._before[id(answer)] + self._last)
        return [group for group in self.groups if group.number in chosen]


def _packed_pool(pool: Pool) -> dict[str, Any]:
    groups = [
        {"number": group.number, "prompt_id": group.prompt_id, "answers": [_packed(one) for one in group.answers]}
        for group in pool.groups
    ]
    return {"begun": pool.begun, "groups": groups}


def _unpacked_pool(state: dict[str, Any]) -> Pool:
    groups = [
        Group(each["number"], each["prompt_id"], [_unpacked(one) for one in each["answers"]])
        for each in state["groups"]
    ]
    return Pool(int(state["begun"]), groups)


def _packed(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = {"finish_reason": answer.finish_reason}
    for name, dtype in _ARRAYS.items():
        found[name] = base64.b64encode(np.array(getattr(answer, name), dtype).tobytes()).decode("ascii")
    return found


def _unpacked(state: dict[str, Any]) -> Answer:
    values = {name: np.frombuffer(base64.b64decode(state[name]), dtype).tolist() for name, dtype in _ARRAYS.items()}
    return Answer(**values, finish_reason=state["finish_reason"])
