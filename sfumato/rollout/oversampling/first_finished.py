"""Which of the groups that are drawn at a time end first, on one rank or several, counted in tokens.

Each answer draws one token at each tick of an iteration, whatever the engine has room for: an answer that had to wait
for a row catches up, and one that has run ahead is cut back. Ranks tell each other which of their groups have ended;
what they know meanwhile only says beyond which tick nobody need draw, and the choice is made when all are through. So
what ends first follows from weights and noise alone: not from batch sizes, memory, ranks or clocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from sfumato.data.text.prompts import TextPrompt
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.engines.base import Engine, EngineError, GenerationRequest, Sampling
from sfumato.rollout.oversampling.unfinished import Group
from sfumato.rollout.text.growing_sequence import GrowingSequence

TURNS = 16
"""Turns of the event loop between two talks among ranks. The embedded engine draws a token for each of its rows in a
turn, so that ranks hear of each other at the same tokens each time, and a run can be repeated to the bit."""

SERVED_TURN_S = 0.02
"""Seconds of such a turn where an engine draws elsewhere."""


class OtherRankError(EngineError):
    """Drawing failed on another rank, which says why."""


@dataclass(frozen=True)
class AnswerKey:
    """What an answer is drawn from."""

    prompt: TextPrompt
    seed: int
    room: int
    """Tokens that it may have."""


class FirstFinished:
    """Draws this rank's groups until enough of all ranks' have ended."""

    def __init__(
        self,
        engine: Engine,
        sampling: Sampling,
        wanted: int,
        groups: Sequence[Group],
        mesh: Mesh,
        turn_s: float = 0.0,
    ) -> None:
        """
        Args:
            engine: of this rank.
            sampling: how tokens are drawn.
            wanted: groups of all ranks that are to end.
            groups: this rank's.
            mesh: its data-parallel ranks take part, each with groups of its own.
            turn_s: ``SERVED_TURN_S``, or 0 for an engine that draws in this thread.
        """
        self.engine, self.sampling, self.wanted, self.groups = engine, sampling, wanted, groups
        self.mesh, self.turn_s = mesh, turn_s
        self._before = {id(answer): len(answer.token_ids) for group in groups for answer in group.answers}
        self._ends: dict[int, int] = {}  # the tick at which a group of any rank has ended, by its number
        self._last = 1 << 62  # the tick at which enough groups have ended, as far as is known

    async def run(self, keys: Sequence[Sequence[AnswerKey]]) -> None:
        """Draws.

        Args:
            keys: of each answer of each group.

        Raises:
            ConfigError, EngineError: as ``Engine.generate``.
            OtherRankError: when that happened on another rank.
        """
        for group in self.groups:
            self._mark_if_finished(group)
        draws = [
            self._draw(answer, group, key)
            for group, own in zip(self.groups, keys, strict=True)
            for answer, key in zip(group.answers, own, strict=True)
        ]
        drawing = asyncio.gather(*draws)
        if self.mesh.data_size == 1:
            await drawing
        else:
            await self._with_others(drawing)

    async def _with_others(self, drawing: asyncio.Future[list[None]]) -> None:
        """Waits until all ranks have drawn enough, and hears of their groups meanwhile."""
        is_over = False
        while not is_over:
            for _ in range(TURNS):
                if drawing.done():
                    break
                await asyncio.sleep(self.turn_s)
            failure = drawing.exception() if drawing.done() else None
            problem = None if failure is None else f"rank {self.mesh.rank}: {failure}"
            everyone = self.mesh.gather((self._ends, drawing.done(), problem))
            if failure is not None:
                raise failure
            problems = [each for _, _, each in everyone if each is not None]
            if problems:
                drawing.cancel()
                await asyncio.wait([drawing])
                raise OtherRankError(problems[0])
            for ends, _, _ in everyone:
                self._ends |= ends
            self._lower_token_limit()
            is_over = all(is_through for _, is_through, _ in everyone)

    async def _draw(self, answer: GrowingSequence, group: Group, key: AnswerKey) -> None:
        while answer.finish_reason is None:
            so_far = len(answer.token_ids)
            until_last = self._before[id(answer)] + self._last - so_far
            if until_last <= 0:
                return
            tokens, longest = [*key.prompt.token_ids, *answer.token_ids], min(key.room - so_far, until_last)
            request = GenerationRequest(tokens, key.seed, longest, so_far, key.prompt.images)
            completion = await self.engine.generate(request, self.sampling)
            answer.append_drawn(completion)
            if completion.finish_reason == "stop":
                answer.finish_reason = "stop"
            elif len(answer.token_ids) == key.room:
                answer.finish_reason = "length"
        self._mark_if_finished(group)

    def _mark_if_finished(self, group: Group) -> None:
        """Notes when a group has ended."""
        if group.has_ended:
            self._ends[group.number] = max(len(one.token_ids) - self._before[id(one)] for one in group.answers)
            self._lower_token_limit()

    def _lower_token_limit(self) -> None:
        """Nobody need draw beyond the tick at which enough groups have ended."""
        if len(self._ends) < self.wanted:
            return
        last = sorted(self._ends.values())[self.wanted - 1]
        if last < self._last:
            self._last = last
            self.engine.pause("abort")  # who is behind this tick asks again
            self.engine.resume()

    def chosen(self) -> list[int]:
        """The numbers of the groups of all ranks that ended first, oldest first. Of those that ended at the same tick
        the older go first. This rank's others are left as they were at the last tick."""
        order = sorted(self._ends, key=lambda number: (self._ends[number], number))
        chosen = sorted(order[: self.wanted])
        for group in self.groups:
            for answer in group.answers if group.number not in chosen else ():
                answer.truncate(self._before[id(answer)] + self._last)
        return chosen
