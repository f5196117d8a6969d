"""A role whose processes work together: they share a process group, and are lost together."""

from __future__ import annotations

from sfumato.errors import RoleLostError
from sfumato.parallel.layout import Layout
from sfumato.runtime.cluster.loop import DriverLoop
from sfumato.runtime.cluster.role import RayRole, RolePlan


class RayGroup(RayRole):
    """N processes with a torch.distributed group of their own (one process has none). Calls run in the order of issue.

    When a process dies or hangs, all are ended, and every unfinished and later call raises RoleLostError until
    ``restart``.
    """

    def __init__(self, plan: RolePlan, loop: DriverLoop) -> None:
        """Starts the processes, without waiting. Raises ConfigError when their number does not fit the layout."""
        size = plan.pool.processes
        layout = Layout.of(plan.train, size)
        super().__init__(plan, loop, [layout.rank_in("data", rank) for rank in range(size)], [range(size)])

    def wait_ready(self) -> None:
        """As ``RayRole.wait_ready``; processes that are lost while their state is being built are replaced."""
        try:
            super().wait_ready()
        except RoleLostError as lost:
            if lost.role != self.name:
                raise
            self.loop.run.say(str(lost))
            self.restart()

    def restart(self) -> None:
        """Replaces all processes and waits until they have built their state anew; again if these are lost, too.

        Raises:
            RoleLostError: ``runtime.max_restarts`` is used up.
        """
        while not self._is_replaced():
            pass

    def _is_replaced(self) -> bool:
        most, ranks = self.loop.config.max_restarts, range(len(self.processes))
        if self.num_restarts >= most:
            before = f"; it was: {self._failure}" if self._failure is not None else ""
            raise RoleLostError(self.name, ranks, f"replaced {most} times already (runtime.max_restarts){before}")
        self.num_restarts += 1
        self.loop.run.say(f"role {self.name}: its processes are replaced ({self.num_restarts} of {most})")
        self.fail(RoleLostError(self.name, ranks, "being replaced"))
        self._failure = None
        self._start(ranks)
        try:
            super().wait_ready()
        except RoleLostError as lost:
            if lost.role != self.name:
                raise
            self.loop.run.say(str(lost))
            return False
        return True
