"""Roles on Ray: the processes of a role and its methods. In a group they work together, in a pool independently."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from sfumato.errors import ConfigError, RoleLostError
from sfumato.parallel.layout import Layout
from sfumato.runtime.cluster.loop import DriverLoop
from sfumato.runtime.cluster.packing import pack, size_of
from sfumato.runtime.cluster.process import (
    Arguments,
    CallPart,
    ConcurrencyGroup,
    Functions,
    RayFuture,
    RayHandle,
    RolePlan,
    RoleProcess,
)
from sfumato.runtime.cluster.worker import build_state, confirm_arrival, identify, open_store
from sfumato.runtime.roles import OTHER, close_engine
from sfumato.tracking.shared_folder import Token
from sfumato.tracking.source_code import CODE, describe_difference, package_versions

if TYPE_CHECKING:
    from sfumato.runtime.cluster.process import Shipped

SHARED_BYTES = 64 * 1024
"""Larger arguments of several processes are put into shared memory once, instead of into the call to each process."""

END_S = 2.0
"""Seconds that Ray may take to end a process before it is killed."""


CLOSE_S = 20.0
"""Seconds that engines may take to end before their processes are killed; their servers have half of it."""


class RayRole:
    """A role on Ray. A call is sent when the values of all handles among its arguments are there."""

    works_together = True
    """Whether processes wait for each other, so that the loss of one is the loss of all."""

    def __init__(self, plan: RolePlan, loop: DriverLoop, data_rank_of: Sequence[int], teams: Sequence[range]) -> None:
        """Starts the processes and the building of their states, without waiting.

        Args:
            plan: what the role is made of.
            loop: the driver's.
            data_rank_of: the data-parallel rank of each process.
            teams: the ranks of each process group.
        """
        self.plan = plan
        self.loop = loop
        self.name = plan.name
        self.num_data_ranks = max(data_rank_of) + 1
        """Number of data-parallel ranks."""
        self.data_ranks = range(self.num_data_ranks)
        self.processes: list[RoleProcess] = []
        self.num_restarts = 0
        self._data_rank_of = list(data_rank_of)
        self._functions = Functions()
        self._waiting: list[RayFuture] = []  # calls that are not sent yet
        self._open: set[RayFuture] = set()  # calls that have not ended
        self._starts: dict[int, list[RayFuture]] = {}  # the calls that start each team, by its first rank
        self._failure: BaseException | None = None
        """The error that ended the role, until it is restarted."""
        self._start_lines: set[str] | None = set()  # lines that were shown while it starts; None afterwards
        loop.roles.append(self)
        for ranks in teams:
            self._start(ranks)

    def call(self, function: Callable[..., object], *args: object, kind: str = OTHER) -> RayFuture:
        """Runs ``function(state, *args)`` in every process. The result is that of the first."""
        return self._make_call(function, dict.fromkeys(range(len(self.processes)), args), kind=kind)

    def call_concurrently(self, function: Callable[..., object], *args: object, kind: str = OTHER) -> RayFuture:
        """As ``call``, in a second thread of each process, beside other calls."""
        return self._make_call(function, dict.fromkeys(range(len(self.processes)), args), group="concurrent", kind=kind)

    def map(
        self, function: Callable[..., object], parts: Sequence[object], *args: object, kind: str = OTHER
    ) -> RayFuture:
        """Runs ``function(state, parts[i], *args)`` in all processes of data-parallel rank i. The result is that of the
        role's first process."""
        return self._make_call(function, self._shared(parts, args), kind=kind)

    def map_remote(
        self,
        function: Callable[..., object],
        parts: Sequence[object],
        *args: object,
        num_values: int = 1,
        kind: str = OTHER,
    ) -> list[tuple[RayHandle, ...]]:
        """As ``map``, but results stay with the first process of each data-parallel rank. See ``Role.map_remote``."""
        by_rank = self._shared(parts, args)
        firsts = [self._data_rank_of.index(data_rank) for data_rank in self.data_ranks]
        kept_handles = {rank: [RayHandle() for _ in range(num_values)] for rank in firsts if rank in by_rank}
        self._make_call(function, by_rank, kept_handles=kept_handles, shippers=(), kind=kind)
        return [tuple(kept_handles.get(rank, ())) for rank in firsts]

    def prefetch(self, parts: Sequence[Sequence[RayHandle]]) -> RayFuture:
        """Copies values to the machines of each data-parallel rank's processes; they stay there while the handles live.

        The future raises ValuesLostError, which names the role that made them, when some are lost.
        """
        return self._make_call(
            confirm_arrival,
            self._shared([tuple(handles) for handles in parts], ()),
            shippers=(),
            prefetches=True,
            kind="load",
        )

    def wait_ready(self) -> None:
        """Waits until every process has built its state.

        Raises:
            ConfigError: a machine of the cluster has other versions than the driver's.
            RoleLostError: a process died, or was not built within ``runtime.call_timeout_s``.
            PreemptedError: the run was asked to stop meanwhile.
            Exception: the error of ``build``.
        """
        while waiting := [start for starts in self._starts.values() for start in starts if not start.settled]:
            self.loop.wait(waiting[0])
        if self._failure is not None:
            raise self._failure
        self._start_lines = None

    def close(self) -> None:
        """Ends the processes and frees their places; unfinished and later calls raise RoleLostError."""
        if self not in self.loop.roles or self.loop.is_broken:
            return
        self._close_engines()
        self.fail(RoleLostError(self.name, range(len(self.processes)), "closed"))
        self.loop.roles.remove(self)
        self.plan.places.free()

    def _close_engines(self) -> None:
        """Has states end their engines, whose processes and files outlive a process that Ray kills; not for long."""
        starts = [start for starts in self._starts.values() for start in starts]
        if self._failure is not None or any(not start.settled or start.error is not None for start in starts):
            return
        closing = self.call_concurrently(close_engine)
        deadline = time.monotonic() + CLOSE_S
        while not closing.done() and time.monotonic() < deadline:
            time.sleep(0.01)

    def flush(self) -> None:
        """Sends, in order, the calls whose arguments are there or have failed.

        In a group a call that waits for arguments holds up later calls of the same threads, since all ranks must run
        calls in the same order.
        """
        blocked: set[ConcurrencyGroup] = set()
        for future in list(self._waiting):
            if future.group not in blocked and all(handle.future.settled for handle in future.handles):
                self._waiting.remove(future)
                self._send(future)
            elif self.works_together:
                blocked.add(future.group)

    def new_lines(self, lines: list[str]) -> list[str]:
        """The lines of a process that are to be shown: while the role starts, each line once for all processes."""
        if self._start_lines is None:
            return lines
        new = [line for line in lines if line not in self._start_lines]
        self._start_lines.update(new)
        return new

    def on_lost(
        self, processes: list[RoleProcess], unfinished: list[tuple[RayFuture, CallPart]], error: RoleLostError
    ) -> None:
        """Called by the loop when processes are lost. A role fails as a whole; a pool replaces them.

        Args:
            processes: that are lost, and were killed.
            unfinished: their open calls.
            error: the reason.
        """
        del processes, unfinished
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends all processes, and all open and later calls with the error, until the role is restarted."""
        self._failure = self._failure or error
        alive = [process for process in self.processes if not process.is_lost]
        # All are asked to end before any is waited for.
        for process in alive:
            process.end()
        for process in alive:
            process.kill(END_S)
        for process in self.processes:
            self.loop.forget(process)
        self._waiting.clear()
        for future in list(self._open):
            future.settle(self._failure)

    def _start(self, ranks: range) -> None:
        """Starts the processes of a team, and issues the calls that build their states.

        Each process identifies itself. In a group the first one opens a store, whose port all need to find each other.
        Identities and port go from process to process as handles.
        """
        plan = self.plan
        plan.places.renew(plan.name, ranks)
        for rank in ranks:
            process = RoleProcess(plan, rank, self.loop.run.output_dir, speaks=rank == ranks[0])
            self.processes[rank : rank + 1] = [process]
        members = {rank: [RayHandle()] for rank in ranks}
        port = RayHandle()
        token = Token(self.loop.run.output_dir) if plan.sees_folder else None
        identify_args = (None if token is None else token.name,)
        identifying = self._make_call(
            identify,
            dict.fromkeys(ranks, identify_args),
            kept_handles=members,
            shippers=ranks,
            is_start=True,
            kind="load",
        )
        is_group = len(ranks) > 1
        identities = [member for (member,) in members.values()]
        if is_group:
            first = {ranks[0]: (identities,)}
            self._make_call(open_store, first, kept_handles={ranks[0]: [port]}, shippers=(), is_start=True, kind="load")
        group_args = (identities, port) if is_group else ([], None)
        args = (plan.build, plan.config, plan.train, *group_args)
        built = self._make_call(build_state, dict.fromkeys(ranks, args), shippers=(), is_start=True, kind="load")
        self._starts[ranks[0]] = [identifying, built]
        identifying.on_settled(lambda: self._on_identified(ranks[0], identifying, token))
        built.on_settled(lambda: self._has_started(ranks[0], built))

    def _on_identified(self, first: int, identifying: RayFuture, token: Token | None) -> None:
        """Checks, when the processes of a team have identified themselves, that they see the run folder and have the
        driver's versions; otherwise the role fails."""
        self._has_started(first, identifying)
        if identifying.error is not None:
            if token is not None:
                token.close()
            return
        if token is not None:
            answers = {f"{self.name} rank {part.process.rank}": part.value.folder for part in identifying.parts}
            problem = token.refusal(answers)
            token.close()
            if problem:
                self.fail(ConfigError(problem))
        driver_versions = package_versions("ray")
        for part in identifying.parts:
            part.process.identity = part.value
            where = f"{part.value.host}, where rank {part.process.rank} of role {self.name} runs, has"
            process_versions = dict(part.value.versions)
            is_replaced = self.num_restarts > 0 or self.loop.run.is_started_again
            if is_replaced and process_versions.get(CODE) != driver_versions[CODE]:
                # Files may have been edited since the run began, which is no reason to lose it.
                process_versions[CODE] = driver_versions[CODE]
                self.loop.run.say(f"{where} other source code of sfumato now than the run was begun with")
            if different := describe_difference(process_versions, driver_versions):
                self.fail(
                    ConfigError(
                        f"{where} {different}: install the same versions on all machines of the cluster, or let them "
                        "see one checkout"
                    )
                )
        self.loop.write_processes()

    def _has_started(self, first: int, future: RayFuture) -> None:
        """Fails the role when a call that starts it has failed, unless the team was started again meanwhile."""
        if future.error is not None and future in self._starts.get(first, ()):
            self.fail(future.error)

    def _shared(self, parts: Sequence[object], args: tuple[object, ...]) -> dict[int, tuple[object, ...]]:
        """Arguments by rank: each process gets the part of its data-parallel rank; none where that is None."""
        if len(parts) != self.num_data_ranks:
            raise ValueError(
                f"role {self.name} has {self.num_data_ranks} data-parallel ranks, but there are {len(parts)} parts"
            )
        by_data_rank = [None if part is None else (part, *args) for part in parts]
        return {
            rank: rank_args
            for rank, data_rank in enumerate(self._data_rank_of)
            if (rank_args := by_data_rank[data_rank]) is not None
        }

    def _make_call(
        self,
        function: Callable[..., object],
        args: Mapping[int, tuple[object, ...]],
        *,
        kept_handles: Mapping[int, list[RayHandle]] = MappingProxyType({}),
        shippers: Collection[int] = (0,),
        **manner: Any,
    ) -> RayFuture:
        """Makes a call, which is sent when its arguments are there.

        Args:
            function: of the state, or of the worker if it starts the role or brings values.
            args: by rank; one object for several ranks is pickled once.
            kept_handles: by rank the handles of values that stay there.
            shippers: ranks whose result is returned to the driver.
            manner: further fields of ``RayFuture``.
        """
        future = RayFuture(self.loop, self.name, cast("Shipped", None), [], **manner)
        future.function = self._functions.ship(function, of_worker=future.is_start or future.prefetches)
        packed: dict[int, Arguments] = {}
        for rank, rank_args in args.items():
            if id(rank_args) not in packed:
                arguments = _pack_arguments(rank_args)
                # ``arrive`` needs the values on its machine, not as arguments.
                packed[id(rank_args)] = Arguments(pack(()), arguments.handles) if future.prefetches else arguments
            arguments = packed[id(rank_args)]
            arguments.num_users += 1
            part = CallPart(self.processes[rank], arguments, rank in shippers, list(kept_handles.get(rank, ())))
            for handle in part.keeps:
                handle.future = future
            future.parts.append(part)
        if self._failure is not None:
            future.settle(self._failure)
            return future
        self._open.add(future)
        future.on_settled(lambda: self._open.discard(future))
        self._waiting.append(future)
        self.flush()
        return future

    def _send(self, future: RayFuture) -> None:
        """Sends a call, or ends it with the error of a call whose value it needs."""
        if future.settled:
            return
        errors = (handle.future.error for handle in future.handles)
        failed = next((error for error in errors if error is not None), None)
        if failed is not None:
            future.settle(failed)
            return
        for part in future.parts:
            self._send_part(future, part)

    def _send_part(self, future: RayFuture, part: CallPart) -> None:
        import ray

        arguments = part.arguments
        args = arguments.packed
        if arguments.num_users > 1 and size_of(args) > SHARED_BYTES:
            if arguments.reference is None:
                arguments.reference = ray.put(args)
                self.loop.count_bytes(self.name, args)
            args = arguments.reference
        else:
            self.loop.count_bytes(self.name, args)
        references, function_bytes = part.process.send(future, part, args, self.loop.run.stop_requested)
        self.loop.count_bytes(self.name, function_bytes)
        for handle, reference in zip(part.keeps, references[1:], strict=True):
            handle.reference = reference
        self.loop.register_sent(future, part, references[0])


class RayGroup(RayRole):
    """N processes with a torch.distributed group of their own (a single process has none). Calls run in order.

    When a process dies or hangs, all are ended, and all open and later calls raise RoleLostError until ``restart``.
    """

    def __init__(self, plan: RolePlan, loop: DriverLoop) -> None:
        """Starts the processes, without waiting. Raises ConfigError when their number does not fit the layout."""
        size = plan.pool.processes
        layout = Layout.resolve(plan.train, size)
        super().__init__(plan, loop, [layout.rank_in("data", rank) for rank in range(size)], [range(size)])

    def wait_ready(self) -> None:
        """As ``RayRole.wait_ready``; processes that are lost while their state is being built are replaced."""
        if not self._is_ready():
            self.restart()

    def restart(self) -> None:
        """Replaces all processes and waits until they have built their states; again if the new ones are lost, too.

        Raises:
            RoleLostError: ``runtime.max_restarts`` is used up.
        """
        most = self.loop.config.max_restarts
        ranks = range(len(self.processes))
        is_ready = False
        while not is_ready:
            if self.num_restarts >= most:
                before = f"; it was: {self._failure}" if self._failure is not None else ""
                raise RoleLostError(self.name, ranks, f"replaced {most} times already (runtime.max_restarts){before}")
            self.num_restarts += 1
            self.loop.run.say(f"role {self.name}: its processes are replaced ({self.num_restarts} of {most})")
            self.fail(RoleLostError(self.name, ranks, "being replaced"))
            self._failure = None
            self._start(ranks)
            is_ready = self._is_ready()

    def _is_ready(self) -> bool:
        """Waits until the role is built. Returns False, and tells the user, when processes were lost meanwhile."""
        try:
            super().wait_ready()
        except RoleLostError as lost:
            if lost.role != self.name:
                raise
            self.loop.run.say(str(lost))
            return False
        return True


class RayPool(RayRole):
    """N independent processes, each a data-parallel rank. Calls may overtake one that waits for its arguments.

    A process that dies or hangs is replaced, at most ``runtime.max_restarts`` times in all; its state is built again
    and its open calls are sent again.
    """

    works_together = False

    def __init__(self, plan: RolePlan, loop: DriverLoop) -> None:
        """Starts the processes, without waiting."""
        ranks = range(plan.pool.processes)
        super().__init__(plan, loop, ranks, [range(rank, rank + 1) for rank in ranks])

    def submit(self, function: Callable[..., object], *args: object, kind: str = OTHER) -> RayFuture:
        """Runs ``function(state, *args)`` in the process with the fewest open calls."""
        return self._make_call(function, {0: args}, moves=True, kind=kind)

    def on_lost(
        self, processes: list[RoleProcess], unfinished: list[tuple[RayFuture, CallPart]], error: RoleLostError
    ) -> None:
        """Replaces the processes and sends their calls again; fails if there were too many replacements."""
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
        # After ``_start``: a call of the process before must not end the role (``_has_started``).
        for future, _ in unfinished:
            if future.is_start:
                future.settle(error)

    def _send_part(self, future: RayFuture, part: CallPart) -> None:
        if future.moves:
            part.process = min(self.processes, key=lambda process: len(process.unanswered))
        super()._send_part(future, part)


def _pack_arguments(args: tuple[object, ...]) -> Arguments:
    """Packs arguments, with numbers in place of the handles among them."""
    handles: list[RayHandle] = []

    def number(item: object) -> int | None:
        if not isinstance(item, RayHandle):
            return None
        handles.append(item)
        return len(handles) - 1

    return Arguments(pack(args, number), handles)
