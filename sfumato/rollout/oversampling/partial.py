"""Oversampling with abort, and partial rollouts: answers that go on after an update, under the new weights.

M groups are under way (``rollout.over_sampling_batch_size``), of which an iteration learns from P
(``rollout.num_prompts``). It ends with the P-th group that has ended, as ``race.py`` counts; the others are thrown
away, or with ``rollout.partial_rollout`` kept, with the log-probability and the version of each token, and go on in the
next iteration, beside as many new groups as are missing.

What is under way is a value: an iteration is drawn from the unfinished groups that the one before has left, and leaves
others. All ranks that draw have all of them and share them anew in each iteration, so that neither a restart nor
another number of ranks changes what is drawn.

Group number p of a run is of the prompt that a run without this draws as group p mod P of iteration p div P, and has
its noise.
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
from sfumato.rollout.agents.turns import LengthLimits, SampleKeys
from sfumato.rollout.batch import SampleRequest
from sfumato.rollout.engines.base import Engine, Sampling
from sfumato.rollout.kinds.single_turn import answered
from sfumato.rollout.oversampling.first_finished import SERVED_TURN_S, AnswerKey, FirstFinished
from sfumato.rollout.oversampling.unfinished import Group, UnfinishedGroups
from sfumato.rollout.text.growing_sequence import GrowingSequence
from sfumato.rollout.text.tokens import TextRollout


class OverSampling:
    """Draws iterations of which more groups are under way than are learned from."""

    def __init__(self, config: TextRLConfig, prompts: Sequence[TextPrompt], mesh: Mesh) -> None:
        """
        Args:
            config: of the task.
            prompts: those of training.
            mesh: of the ranks that draw, all of which make the same calls.

        Raises:
            DataError: as ``TextPromptLoader``.
        """
        self.config, self.prompts, self.mesh = config, prompts, mesh
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
        """Draws the iteration that goes on from unfinished groups, which are left as they are.

        Args:
            engine: of this rank, by the weights of now.
            sampling: how tokens are drawn.
            limits: of an answer's length.
            template: has the tokenizer.
            version: of the weights.
            unfinished: what the iteration before has left, on every rank.
            places: of the P groups of the iteration, those that this rank is to return.

        Returns:
            Of the P groups that ended first, oldest first, those in these places, numbered as the samples of any
            iteration; what rewards see of them; and what is left to the next iteration.

        Raises:
            ConfigError, EngineError: as ``FirstFinished.run``.
        """
        rollout, mesh = self.config.rollout, self.mesh
        learned_at = version if rollout.rollout_only else unfinished.iteration  # the policy's version then
        oldest = learned_at - rollout.max_age
        kept = [group for group in unfinished.groups if min(group.versions, default=version) >= oldest]
        new = range(unfinished.begun, unfinished.begun + rollout.over_sampling_batch_size - len(kept))
        groups = copy.deepcopy(kept) + [self._new_group(number) for number in new]
        own = groups[mesh.data_rank :: mesh.data_size]
        turn_s = SERVED_TURN_S if rollout.engine.is_server else 0.0
        race = FirstFinished(engine, sampling, rollout.num_prompts, own, mesh, turn_s)
        asyncio.run(race.run([self._answer_keys(group, limits) for group in own]))
        place_of = {number: place for place, number in enumerate(race.chosen())}
        taken = self._exchanged([each for each in own if each.number in place_of], place_of, places)
        left = [each for some in mesh.gather([one for one in own if one.number not in place_of]) for each in some]
        left.sort(key=lambda group: group.number)
        metrics = self._left_metrics(left, len(unfinished.groups) - len(kept)) | self._ages(taken, learned_at)
        after = UnfinishedGroups(unfinished.iteration + 1, new.stop, left if rollout.partial_rollout else [], metrics)
        return *self._rollout_of({place_of[group.number]: group for group in taken}, version, template), after

    def _new_group(self, number: int) -> Group:
        num_prompts = self.config.rollout.num_prompts
        prompt_id = self._loader.groups(number // num_prompts)[number % num_prompts]
        return Group(number, prompt_id, [GrowingSequence() for _ in range(self.config.rollout.n)])

    def _answer_keys(self, group: Group, limits: LengthLimits) -> list[AnswerKey]:
        """What the answers of a group go on from."""
        seed, rollout = self.config.train.seed, self.config.rollout
        iteration, place = divmod(group.number, rollout.num_prompts)
        prompt = self.prompts[group.prompt_id]
        room = limits.room(len(prompt.token_ids), len(prompt.token_ids))
        keys = [SampleKeys(seed, iteration, place * rollout.n + member) for member in range(rollout.n)]
        return [AnswerKey(prompt, key.request_seed(), room) for key in keys]

    def _exchanged(self, ended: Sequence[Group], place_of: dict[int, int], places: Sequence[int]) -> list[Group]:
        """The groups in this rank's places, of those that all ranks have drawn, in the order of places."""
        wanted = [set(each) for each in self.mesh.gather(list(places))]
        sent = [[group for group in ended if place_of[group.number] in each] for each in wanted]
        received = [group for some in self.mesh.exchange(sent) for group in some]
        return sorted(received, key=lambda group: place_of[group.number])

    def _left_metrics(self, left: Sequence[Group], too_old: int) -> dict[str, float]:
        is_kept = self.config.rollout.partial_rollout
        what, tokens = "kept" if is_kept else "aborted", sum(len(group.versions) for group in left)
        found = {f"rollout/{what}_groups": float(len(left)), f"rollout/{what}_tokens": float(tokens)}
        return found | ({"rollout/too_old_groups": float(too_old)} if is_kept else {})

    def _ages(self, taken: Sequence[Group], learned_at: int) -> dict[str, float]:
        """How far the policy will be ahead of the tokens of all ranks when it learns from them."""
        ages = [learned_at - version for group in taken for version in group.versions]
        everyone = self.mesh.gather((sum(ages), len(ages), max(ages, default=0)))
        total, count, oldest = zip(*everyone, strict=True)
        return {"staleness/mean": sum(total) / max(sum(count), 1), "staleness/max": float(max(oldest))}

    def _rollout_of(
        self, by_place: dict[int, Group], version: int, template: PromptTemplate
    ) -> tuple[TextRollout, list[Sample]]:
        requests, versions, sequences, samples = [], [], [], []
        for place, group in by_place.items():
            prompt = self.prompts[group.prompt_id]
            for member, answer in enumerate(group.answers):
                sequence = GrowingSequence.after_prompt(prompt.token_ids, prompt.images)
                sequence.append_drawn(answer)
                sequence.finish_reason = answer.finish_reason
                drawn = answered(sequence, prompt, template, is_truncated=answer.finish_reason == "length")
                sample_id = place * len(group.answers) + member
                requests.append(SampleRequest(sample_id, place, group.prompt_id, is_first=member == 0))
                versions.append(min(answer.versions, default=version))
                sequences.append(drawn.sequences)
                samples.append(drawn.checked(template.without_text).sample(prompt, place))
        return TextRollout(requests=requests, versions=versions, sequences=sequences), samples
