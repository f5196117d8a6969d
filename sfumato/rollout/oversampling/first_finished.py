"""Finds which of the groups that are drawn at the same time end first, on one rank or several, counted in tokens.

Time is counted in ticks: at each tick of an iteration every answer has one token more, whenever the engine really draws
it. An answer that had to wait for a row catches up, and one that has run ahead is cut back. Ranks tell each other at
which ticks their groups have ended. What they have heard so far only limits how far everybody draws; the choice is made
when all have drawn up to that limit. So which groups end first follows from weights and noise alone: not from batch
sizes, memory, ranks or clocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from sfumato.data.text.prompts import TextPrompt
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.engines.base import Engine, EngineError, GenerationRequest, Sampling
from sfumato.rollout.oversampling.unfinished import Group
from sfumato.rollout.text.tokens import GrowingSequence

TURNS = 16
"""Turns of the event loop between two exchanges among ranks. The embedded engine draws a token for each of its rows in
a turn, so the ranks exchange after the same tokens each time, and a run can be repeated to the bit."""

SERVED_TURN_S = 0.02
"""Seconds of such a turn where an engine draws in other processes."""


class OtherRankError(EngineError):
    """Drawing failed on another rank, which says why."""


@dataclass(frozen=True)
class AnswerKey:
    """What an answer is drawn from."""

    prompt: TextPrompt
    seed: int
    room: int
    """Most tokens that the answer may have."""


class FirstFinished:
    """Draws this rank's groups until enough groups of all ranks have ended."""

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
            wanted: how many groups of all ranks are to end.
            groups: this rank's.
            mesh: its data-parallel ranks take part, each with groups of its own.
            turn_s: ``SERVED_TURN_S``, or 0 for an engine that draws in this thread.
        """
        self.engine = engine
        self.sampling = sampling
        self.wanted = wanted
        self.groups = groups
        self.mesh = mesh
        self.turn_s = turn_s
        # tokens that answers bring from earlier iterations; by identity, since two answers may be equal
        self._first_tokens = {id(answer): len(answer.token_ids) for group in groups for answer in group.answers}
        self._end_ticks: dict[int, int] = {}  # the tick at which a group of any rank has ended, by its number
        self._last_tick = 1 << 62  # at which enough groups have ended, by what was heard so far: it only goes down

    async def run(self, keys: Sequence[Sequence[AnswerKey]]) -> None:
        """Draws the answers of all groups at the same time.

        Args:
            keys: one for each answer of each group.

        Raises:
            ConfigError, EngineError: as ``Engine.generate``.
            OtherRankError: when another rank has raised one of these.
        """
        for group in self.groups:
            self._mark_if_finished(group)
        draws = [
            self._draw(answer, group, key)
            for group, group_keys in zip(self.groups, keys, strict=True)
            for answer, key in zip(group.answers, group_keys, strict=True)
        ]
        drawing = asyncio.gather(*draws)
        if self.mesh.data_size == 1:
            await drawing
        else:
            await self._with_others(drawing)

    async def _with_others(self, drawing: asyncio.Future[list[None]]) -> None:
        """Waits until all ranks have drawn enough, and exchanges with them which groups have ended.

        Every rank makes the same number of collective calls: one whose own answers are drawn, or have failed, takes
        part until all ranks have heard of it.
        """
        is_over = False
        while not is_over:
            for _ in range(TURNS):
                if drawing.done():
                    break
                await asyncio.sleep(self.turn_s)
            failure = drawing.exception() if drawing.done() else None
            problem = None if failure is None else f"rank {self.mesh.rank}: {failure}"
            # Before this rank raises: the others wait for its word.
            everyone = self.mesh.gather((self._end_ticks, drawing.done(), problem))
            if failure is not None:
                raise failure
            problems = [text for _, _, text in everyone if text is not None]
            if problems:
                drawing.cancel()
                # Until its requests have left the engine, which draws again.
                await asyncio.wait([drawing])
                raise OtherRankError(problems[0])
            for end_ticks, _, _ in everyone:
                self._end_ticks |= end_ticks
            self._lower_token_limit()
            is_over = all(is_through for _, is_through, _ in everyone)

    async def _draw(self, answer: GrowingSequence, group: Group, key: AnswerKey) -> None:
        """Draws an answer until it ends or has as many tokens as the last tick allows.

        ``pause("abort")`` of ``_lower_token_limit`` ends a request of the engine early; the loop then asks for what is
        still missing up to the new limit.
        """
        while answer.finish_reason is None:
            so_far = len(answer.token_ids)
            until_last = self._first_tokens[id(answer)] + self._last_tick - so_far
            if until_last <= 0:
                return
            tokens = [*key.prompt.token_ids, *answer.token_ids]
            longest = min(key.room - so_far, until_last)
            request = GenerationRequest(tokens, key.seed, longest, so_far, key.prompt.images)
            completion = await self.engine.generate(request, self.sampling)
            answer.append_drawn(completion)
            if completion.finish_reason == "stop":
                answer.finish_reason = "stop"
            elif len(answer.token_ids) == key.room:  # "length" of the engine may also mean the last tick
                answer.finish_reason = "length"
        self._mark_if_finished(group)

    def _mark_if_finished(self, group: Group) -> None:
        """Records the tick at which a group has ended, that of its longest answer, once all its answers have."""
        if group.has_ended:
            self._end_ticks[group.number] = max(
                len(answer.token_ids) - self._first_tokens[id(answer)] for answer in group.answers
            )
            self._lower_token_limit()

    def _lower_token_limit(self) -> None:
        """Has no answer drawn beyond the tick at which enough groups have ended, as far as this rank has heard."""
        if len(self._end_ticks) < self.wanted:
            return
        last_tick = sorted(self._end_ticks.values())[self.wanted - 1]
        if last_tick < self._last_tick:
            self._last_tick = last_tick
            self.engine.pause("abort")  # requests that may go beyond it end; answers that are behind it ask again
            self.engine.resume()

    def chosen(self) -> list[int]:
        """The numbers of the groups of all ranks that ended first, oldest first, once ``run`` is over.

        Of groups that ended at the same tick the older ones are chosen. The answers of this rank's other groups are cut
        to what they were at the last tick, so that they do not depend on how far this rank happened to draw.
        """
        order = sorted(self._end_ticks, key=lambda number: (self._end_ticks[number], number))
        chosen = sorted(order[: self.wanted])
        for group in self.groups:
            for answer in group.answers if group.number not in chosen else ():
                answer.truncate(self._first_tokens[id(answer)] + self._last_tick)
        return chosen
