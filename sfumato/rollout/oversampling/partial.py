"""Oversampling with abort, and partial rollouts: answers that go on after an update, under the new weights.

M groups are drawn at the same time (``rollout.over_sampling_batch_size``), of which an iteration learns from P
(``rollout.num_prompts``). It ends when the P-th group ends, counted as in ``first_finished.py``. The other groups are
thrown away, or with ``rollout.partial_rollout`` kept, with the log-probability and the version of each token: they go
on in the next iteration, beside new groups that make up M again.

The unfinished groups are passed on as a value: an iteration takes those that the one before has returned, and returns
others. Every rank that draws has all of them, and they are dealt anew to the ranks in each iteration, so neither a
restart nor another number of ranks changes what is drawn.

Group number p of a run has the prompt and the noise of group p mod P in iteration p div P of a run without
oversampling.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence

from sfumato.config.text_rl import TextRLConfig
from sfumato.data.text.prompt_template import PromptTemplate
from sfumato.data.text.prompts import TextPrompt, TextPromptLoader
from sfumato.parallel.mesh import Mesh
from sfumato.rewards.base import Sample
from sfumato.rollout.batch import SampleRequest
from sfumato.rollout.engines.base import Engine, Sampling
from sfumato.rollout.kinds.base import LengthLimits, SampleKeys
from sfumato.rollout.kinds.single_turn import make_answer
from sfumato.rollout.oversampling.first_finished import SERVED_TURN_S, AnswerKey, FirstFinished
from sfumato.rollout.oversampling.unfinished import Group, UnfinishedGroups
from sfumato.rollout.text.tokens import GrowingSequence, TextRollout


class OverSampling:
    """Draws iterations in which more groups are drawn than are learned from."""

    def __init__(self, config: TextRLConfig, prompts: Sequence[TextPrompt], mesh: Mesh) -> None:
        """
        Args:
            config: of the task.
            prompts: those of training.
            mesh: of the ranks that draw; all of them must make the same calls.

        Raises:
            DataError: as ``TextPromptLoader``.
        """
        self.config = config
        self.prompts = prompts
        self.mesh = mesh
        self._loader = TextPromptLoader.from_config(prompts, config)

    def draw(
        self,
        engine: Engine,
        sampling: Sampling,
        limits: LengthLimits,
        template: PromptTemplate,
        version: int,
        unfinished: UnfinishedGroups,
        places: Sequence[int],
    ) -> tuple[TextRollout, list[Sample], UnfinishedGroups]:
        """Draws the iteration that goes on from unfinished groups, which are not changed, since it may be drawn again.

        Args:
            engine: of this rank, by the weights of now.
            sampling: how tokens are drawn.
            limits: of an answer's length.
            template: has the tokenizer.
            version: of the weights.
            unfinished: all groups that the iteration before has left, the same on every rank.
            places: positions among the P groups of the iteration, from the oldest, that this rank is to return.

        Returns:
            The groups at these places of the P that ended first, with sample ids as in any iteration; their samples as
            rewards see them; and the unfinished groups for the next iteration.

        Raises:
            ConfigError, EngineError: as ``FirstFinished.run``.
        """
        rollout = self.config.rollout
        mesh = self.mesh
        learned_at = version if rollout.rollout_only else unfinished.iteration  # the policy's version then
        oldest = learned_at - rollout.max_age
        young = [group for group in unfinished.groups if min(group.versions, default=version) >= oldest]
        assert rollout.over_sampling_batch_size is not None
        new_numbers = range(unfinished.begun, unfinished.begun + rollout.over_sampling_batch_size - len(young))
        # copies, since drawing appends to the answers, and a call that fails is made again with the same groups
        groups = copy.deepcopy(young) + [self._begin_group(number) for number in new_numbers]
        rank_groups = groups[mesh.data_rank :: mesh.data_size]
        turn_s = SERVED_TURN_S if rollout.engine.is_server else 0.0
        first_finished = FirstFinished(engine, sampling, rollout.num_prompts, rank_groups, mesh, turn_s)
        asyncio.run(first_finished.run([self._answer_keys(group, limits) for group in rank_groups]))
        place_of = {number: place for place, number in enumerate(first_finished.chosen())}
        ended = [group for group in rank_groups if group.number in place_of]
        placed = self._exchange_groups(ended, place_of, places)
        unended = [group for group in rank_groups if group.number not in place_of]
        remaining = [group for of_rank in mesh.gather(unended) for group in of_rank]
        # An order that does not depend on how many ranks drew them.
        remaining.sort(key=lambda group: group.number)
        too_old = len(unfinished.groups) - len(young)
        metrics = self._remaining_metrics(remaining, too_old) | self._measure_ages(placed, learned_at)
        next_groups = remaining if rollout.partial_rollout else []
        after = UnfinishedGroups(unfinished.iteration + 1, new_numbers.stop, next_groups, metrics)
        return *self._build_rollout({place_of[group.number]: group for group in placed}, version, template), after

    def _begin_group(self, number: int) -> Group:
        """The group of the run with this number, without any tokens yet."""
        num_prompts = self.config.rollout.num_prompts
        prompt_id = self._loader.groups(number // num_prompts)[number % num_prompts]
        return Group(number, prompt_id, [GrowingSequence() for _ in range(self.config.rollout.n)])

    def _answer_keys(self, group: Group, limits: LengthLimits) -> list[AnswerKey]:
        """Prompt, noise and room of each answer of a group; they are the same in whichever iteration it is drawn."""
        seed = self.config.train.seed
        rollout = self.config.rollout
        iteration, place = divmod(group.number, rollout.num_prompts)
        prompt = self.prompts[group.prompt_id]
        room = limits.room(len(prompt.token_ids), len(prompt.token_ids))
        keys = [SampleKeys(seed, iteration, place * rollout.n + member) for member in range(rollout.n)]
        return [AnswerKey(prompt, key.request_seed(), room) for key in keys]

    def _exchange_groups(self, ended: Sequence[Group], place_of: dict[int, int], places: Sequence[int]) -> list[Group]:
        """The groups at this rank's places, whichever rank has drawn them, in the order of places.

        Args:
            ended: groups that this rank has drawn, which it sends to the ranks of their places.
            place_of: the place of each chosen group by its number.
            places: that this rank is to have.
        """
        places_of_ranks = [set(rank_places) for rank_places in self.mesh.gather(list(places))]
        sent = [[group for group in ended if place_of[group.number] in rank_places] for rank_places in places_of_ranks]
        received = [group for of_rank in self.mesh.exchange(sent) for group in of_rank]
        return sorted(received, key=lambda group: place_of[group.number])

    def _remaining_metrics(self, remaining: Sequence[Group], too_old: int) -> dict[str, float]:
        """How much was drawn of the groups that did not end, and how many groups were thrown away for their age."""
        is_kept = self.config.rollout.partial_rollout
        fate = "kept" if is_kept else "aborted"
        tokens = sum(len(group.versions) for group in remaining)
        metrics = {f"rollout/{fate}_groups": float(len(remaining)), f"rollout/{fate}_tokens": float(tokens)}
        return metrics | ({"rollout/too_old_groups": float(too_old)} if is_kept else {})

    def _measure_ages(self, groups: Sequence[Group], learned_at: int) -> dict[str, float]:
        """Mean and maximum, over the tokens of all ranks, of the policy's version when it learns less the token's."""
        ages = [learned_at - version for group in groups for version in group.versions]
        everyone = self.mesh.gather((sum(ages), len(ages), max(ages, default=0)))
        total, count, oldest = zip(*everyone, strict=True)
        return {"staleness/mean": sum(total) / max(sum(count), 1), "staleness/max": float(max(oldest))}

    def _build_rollout(
        self, by_place: dict[int, Group], version: int, template: PromptTemplate
    ) -> tuple[TextRollout, list[Sample]]:
        """The groups by their places as a rollout, and as rewards see them. A sample has its oldest token's version."""
        requests = []
        versions = []
        sequences = []
        samples = []
        for place, group in by_place.items():
            prompt = self.prompts[group.prompt_id]
            for member, answer in enumerate(group.answers):
                sequence = GrowingSequence.after_prompt(prompt.token_ids, prompt.images)
                sequence.append_drawn(answer)
                sequence.finish_reason = answer.finish_reason
                text = make_answer(sequence, prompt, template, is_truncated=answer.finish_reason == "length")
                sample_id = place * len(group.answers) + member
                requests.append(SampleRequest(sample_id, place, group.prompt_id, is_first=member == 0))
                versions.append(min(answer.versions, default=version))
                sequences.append(text.sequences)
                samples.append(text.mark_unknown_tokens(template.without_text).sample(prompt, place))
        return TextRollout(requests=requests, versions=versions, sequences=sequences), samples
