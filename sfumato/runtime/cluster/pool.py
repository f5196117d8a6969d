"""A role whose processes are on their own: each call of ``submit`` goes to one of them, and a dead one is replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sfumato.errors import RoleLostError
from sfumato.runtime.cluster.futures import Part, RayFuture
from sfumato.runtime.cluster.loop import DriverLoop
from sfumato.runtime.cluster.process import ConcurrencyGroup, RoleProcess
from sfumato.runtime.cluster.role import RayRole, RolePlan
from sfumato.runtime.roles import OTHER


class RayPool(RayRole):
    """N independent processes, each a data-parallel rank. Calls may overtake one that waits for its arguments.

    A process that dies or hangs is replaced, at most ``runtime.max_restarts`` times in all; its state is built anew
    and its unfinished calls are made again.
    """

    works_together = False

    def __init__(self, plan: RolePlan, loop: DriverLoop) -> None:
        """Starts the processes, without waiting."""
        ranks = range(plan.pool.processes)
        super().__init__(plan, loop, ranks, [range(rank, rank + 1) for rank in ranks])

    def submit(self, function: Callable[..., Any], *args: Any, kind: str = OTHER) -> RayFuture:
        """``function(state, *args)`` in the process with the fewest unfinished calls; its value."""
        return self._issue(function, {0: args}, moves=True, kind=kind)

    def on_lost(
        self, processes: list[RoleProcess], unfinished: list[tuple[RayFuture, Part]], error: RoleLostError
    ) -> None:
        """Replaces the processes and sends their calls again."""
        most = self.loop.config.max_restarts
        if self.num_restarts + len(processes) > most:
            reason = f"{error.reason}\nand {self.num_restarts} processes were replaced already (runtime.max_restarts)"
            self.fail(RoleLostError(self.name, error.ranks, reason))
            return
        again = [(future, part) for future, part in unfinished if not (future.is_start or future.settled)]
        self.num_restarts += len(processes)
        self.loop.run.say(
            f"{error}\nit is replaced ({self.num_restarts} of {most} times); unfinished calls that are made again: "
            f"{len(again)}"
        )
        for process in processes:
            self._start(range(process.rank, process.rank + 1))
        for future, part in again:
            part.process = self.processes[part.process.rank]
            self._send_part(future, part)
        for future, _ in unfinished:
            if future.is_start:
                future.settle(error)

    def _blocks(self, future: RayFuture) -> set[ConcurrencyGroup]:
        del future
        return set()

    def _send_part(self, future: RayFuture, part: Part) -> None:
        if future.moves:
            part.process = min(self.processes, key=lambda each: len(each.unanswered))
        super()._send_part(future, part)
