"""The driver's loop: during every wait it handles replies of all roles' calls, heartbeats, and lost processes."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from sfumato.config.runtime import RuntimeConfig
from sfumato.config.writing import write_atomically
from sfumato.errors import PreemptedError, RoleLostError, ValuesLostError
from sfumato.parallel.peers import is_lost_connection
from sfumato.runtime.cluster.packing import Packed, size_of, unpack
from sfumato.runtime.cluster.placement import list_machines
from sfumato.runtime.cluster.process import CallPart, RayFuture, RoleProcess
from sfumato.runtime.cluster.worker import Reply, Said
from sfumato.runtime.roles import Record
from sfumato.tracking.timeline import Event

if TYPE_CHECKING:
    from ray import ObjectRef

    from sfumato.runtime.cluster.role import RayRole
    from sfumato.tracking.run import Run

TURN_S = 0.2
"""Longest wait in seconds within Ray, so that signals are handled."""
SAY_S = 60.0
"""Seconds between two lines about what the driver waits for."""
GRACE_S = 10.0
"""Seconds in which the other processes of a group must end a call after one has raised an error."""
LOOK_S = 1.0
"""Seconds between two checks of Ray itself."""
SILENT_S = 10.0
"""Seconds without an answer of a process after which the user is told."""
STACKS_S = 5.0
"""Longest wait in seconds for the stacks of processes."""

CRASH = "Fatal Python error:"
"""Beginning of the line that faulthandler writes when a process crashes."""


class RemoteError(Exception):
    """Holds, as the cause of an exception, its traceback in the process where it was raised."""


@dataclass
class Heartbeat:
    """Tracks whether a process answers."""

    asked: float = 0.0
    """When it was last asked."""
    reference: ObjectRef | None = None
    """Ray's reference to its answer; None while it is not asked."""
    silent_s: float = 0.0
    """Seconds without an answer, counted only while the driver was listening."""
    is_said: bool = False
    """Whether the user was told that it is silent."""


class DriverLoop:
    """The open calls of all roles. It is used by the driver's thread alone."""

    def __init__(self, run: Run, config: RuntimeConfig) -> None:
        """Starts empty.

        Args:
            run: the driver's run: ``say``, ``add_time``, ``output_dir``, ``stop_requested``.
            config: says after how long a process or a call is given up.
        """
        self.run = run
        self.config = config
        self.roles: list[RayRole] = []
        """Each role adds itself."""
        self.record = Record()
        """Collects what the processes did, from their replies."""
        self.driver_bytes: dict[str, int] = {}
        """Bytes that the driver pickled into calls and unpickled from results, by role."""
        self.memory: dict[str, dict[str, float]] = {}
        """By role and metric the memory of the process that uses most, in MiB, since it was last reported."""
        self.peak_flops: dict[str, float] = {}
        """By role the peak FLOP/s of a device, where known."""
        self._sent: dict[ObjectRef, tuple[RayFuture, CallPart]] = {}
        self._heartbeats: dict[RoleProcess, Heartbeat] = {}
        self._listener: Callable[[], None] | None = None
        self._last_turn = time.monotonic()
        self._has_progressed = self._is_telling = False
        self.problem: Callable[[], str] = lambda: ""
        """Returns what is wrong with Ray itself; empty if nothing is."""
        self.is_broken = False
        """Whether there was such a problem, after which no role can be reached."""
        self._last_look = 0.0

    def on_progress(self, listener: Callable[[], None] | None) -> None:
        """Sets the function that is called, and may issue calls, whenever some have ended."""
        self._listener = listener

    def count_bytes(self, role: str, packed: Packed | int) -> None:
        """Counts bytes that pass through the driver."""
        size = packed if isinstance(packed, int) else size_of(packed)
        self.driver_bytes[role] = self.driver_bytes.get(role, 0) + size

    def wait(self, future: RayFuture) -> None:
        """Runs the loop until a call has ended, and tells the user once a minute what it waits for.

        Raises:
            PreemptedError: the run was asked to stop while this call starts a role.
        """
        started = time.monotonic()
        say_at = started + SAY_S
        while not future.settled:
            self.turn(TURN_S)
            if future.is_start and self.run.stop_requested and not future.settled:
                raise PreemptedError(f"stopped by signal while role {future.role} was being built", is_saved=False)
            if (now := time.monotonic()) >= say_at and not future.settled:
                say_at = now + SAY_S
                self.run.say(
                    f"waiting for {future.role} {future.function.name} since {now - started:.0f} s: {future.state()}"
                )

    def turn(self, timeout_s: float) -> None:
        """One turn of the loop: sends calls that are ready, handles replies and heartbeats, gives up what hangs.

        Args:
            timeout_s: longest wait for a reply.
        """
        self._flush()
        if time.monotonic() - self._last_look > LOOK_S:
            self._look_at_ray()
            self._look_at_starts()
        for future, part in self._receive_replies(timeout_s):
            self._take_reply(future, part)
        self._ask_for_heartbeats()
        self._give_up()
        self._flush()
        # The listener may wait for calls itself, and so come here again: it is not called within itself.
        while self._has_progressed and not self._is_telling:
            self._has_progressed = False
            self._is_telling = True
            try:
                if self._listener is not None:
                    self._listener()
            finally:
                self._is_telling = False
            self._flush()

    def register_sent(self, future: RayFuture, part: CallPart, reference: ObjectRef) -> None:
        """Registers a part of a call that a role has sent."""
        part.reference = reference
        part.running_s = None
        self._sent[reference] = part.process.unanswered[reference] = future, part

    def write_processes(self) -> None:
        """Writes the list of living processes to ``processes.json`` in the run folder."""
        entries = [
            {
                "role": process.role,
                "rank": process.rank,
                "pid": identity.pid,
                "host": identity.host,
                "stderr": identity.stderr,
            }
            for role in self.roles
            for process in role.processes
            if (identity := process.identity) is not None and not process.is_lost
        ]
        path = self.run.output_dir / "processes.json"
        write_atomically(path, json.dumps(entries, indent=1).encode())

    def forget(self, process: RoleProcess) -> None:
        """Drops all calls and heartbeats that a process has not answered."""
        self._heartbeats.pop(process, None)
        for reference, (_, part) in process.unanswered.items():
            del self._sent[reference]
            part.reference = part.running_s = None
        process.unanswered.clear()

    def lose(self, role: RayRole, processes: list[RoleProcess], reason: str) -> None:
        """Kills processes that are lost or hang, and tells their role, which fails or replaces them.

        Args:
            role: of the processes.
            processes: all of that role.
            reason: why, for messages.

        Raises:
            RoleLostError: when Ray itself does not work.
        """
        self._look_at_ray()  # if Ray has died, all processes are lost for that reason
        for process in processes:
            process.kill()
        tails = [(process.rank, text) for process in processes if (text := process.stderr_tail())]
        if crash := next((line for _, text in tails for line in text.splitlines() if line.startswith(CRASH)), None):
            reason = f"{reason} ({crash})"
        last = "".join(f"\nlast lines of the standard error of rank {rank}:\n{text}" for rank, text in tails)
        unfinished = [pair for process in processes for pair in process.unanswered.values()]
        reason = f"{reason}; {_describe_calls(unfinished)}"
        for process in processes:
            self.forget(process)
        error = RoleLostError(role.name, [process.rank for process in processes], reason + last)
        self._has_progressed = True
        role.on_lost(processes, unfinished, error)

    def _look_at_ray(self) -> None:
        """Raises RoleLostError when Ray itself does not work."""
        self._last_look = time.monotonic()
        if text := self.problem():
            self.is_broken = True
            raise RoleLostError("ray", (), text)

    def _look_at_starts(self) -> None:
        """Gives up processes that were starting on a machine which is lost: Ray would wait for that machine."""
        processes = [process for role in self.roles for process in role.processes]
        if all(process.identity is not None or process.is_lost for process in processes):
            return
        alive = {machine.node_id for machine in list_machines()}
        for process in processes:
            if process.identity is None and not process.is_lost and process.slot.node_id not in alive:
                self.lose(self._role_of(process), [process], "its machine was lost while it started")

    def _flush(self) -> None:
        """Sends the calls whose arguments are there."""
        for role in self.roles:
            role.flush()

    def _receive_replies(self, timeout_s: float) -> list[tuple[RayFuture, CallPart]]:
        """Waits for replies, and handles heartbeats.

        Returns:
            Parts of calls that were answered, in the order in which they were made.
        """
        import ray

        references = [
            *self._sent,
            *(heartbeat.reference for heartbeat in self._heartbeats.values() if heartbeat.reference is not None),
        ]
        if not references:
            time.sleep(timeout_s)
            return []
        ready, _ = ray.wait(references, num_returns=1, timeout=timeout_s, fetch_local=False)
        if ready:
            # The first wait returns with a single reply; this one takes all that are there.
            ready, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        now = time.monotonic()
        came = set(ready)
        # At most a second counts: while the driver did other work, processes may have answered without being heard.
        passed = min(now - self._last_turn, 1.0)
        self._last_turn = now
        for process, heartbeat in list(self._heartbeats.items()):
            if heartbeat.reference in came:
                self._take_heartbeat(process, heartbeat)
            elif heartbeat.reference is not None:
                heartbeat.silent_s += passed
        calls = [self._sent[reference] for reference in ready if reference in self._sent]
        return sorted(calls, key=lambda pair: pair[1].call)

    def _take_heartbeat(self, process: RoleProcess, heartbeat: Heartbeat) -> None:
        import ray

        reference = heartbeat.reference
        heartbeat.reference = None
        try:
            stop, said, running = ray.get(cast("ObjectRef", reference))
        except ray.exceptions.RayActorError as error:  # pyright: ignore[reportAttributeAccessIssue]
            if not process.unanswered:  # else the replies of its calls report the death
                self.lose(self._role_of(process), [process], f"{process.where()} {_how_it_died(error)}")
            return
        if heartbeat.is_said:
            self.run.say(f"role {process.role}, rank {process.rank} answers again, after {heartbeat.silent_s:.0f} s")
        heartbeat.silent_s = 0.0
        heartbeat.is_said = False
        self._notice(process, stop, said)
        for _, part in process.unanswered.values():
            part.running_s = running.get(part.call)

    def _notice(self, process: RoleProcess, stop: bool, said: Said) -> None:
        """Handles what every answer contains: whether the process was asked to stop, and lines for the user."""
        if stop:
            self.run.stop_requested = True
        for line in self._role_of(process).new_lines(process.take_new_lines(said)):
            self.run.say(line)

    def _role_of(self, process: RoleProcess) -> RayRole:
        return next(role for role in self.roles if role.name == process.role)

    def _take_reply(self, future: RayFuture, part: CallPart) -> None:
        """Handles the reply to a part of a call, or its loss."""
        import ray

        if part.reference not in self._sent:  # its process was lost earlier in the same turn
            return
        assert part.reference is not None
        process = part.process
        try:
            packed_reply, packed_value = ray.get(part.reference)
        except ray.exceptions.RayActorError as error:  # pyright: ignore[reportAttributeAccessIssue]
            self.lose(self._role_of(process), [process], f"{process.where()} {_how_it_died(error)}")
            return
        except ray.exceptions.ObjectLostError as error:  # pyright: ignore[reportAttributeAccessIssue]
            self._take_loss(future, part, error)
            return
        except ray.exceptions.RayError as error:  # pyright: ignore[reportAttributeAccessIssue]
            # Ray could not bring arguments or results, as when the store is full
            self._mark_answered(part)
            self._part_ended(future, part, RuntimeError(f"{future.function.name} of role {future.role}: {error}"))
            return
        self._mark_answered(part)
        self.count_bytes(future.role, packed_reply)
        reply: Reply = unpack(packed_reply)
        label = future.label
        version = reply.version if label.version is None else label.version
        self.record.add(Event(process.role, process.rank, future.kind, reply.start, reply.end, label.step, version))
        self._notice(process, reply.stop_requested, reply.said)
        if process.rank == 0:
            for name, seconds in reply.timings.items():
                self.run.add_time(name, seconds)
        self._remember(future.role, reply)
        # A call that has failed returns no sizes.
        for handle, size in zip(part.keeps, reply.sizes, strict=False):
            handle.nbytes = int(size)
            handle.seconds = reply.end - reply.start
        error = None if reply.error is None else _unpack_exception(reply.error, process, future.function.name)
        if error is None and part.ships:
            self.count_bytes(future.role, packed_value)
            part.value = unpack(packed_value)
        self._part_ended(future, part, error)

    def _remember(self, role: str, reply: Reply) -> None:
        """Stores the memory of a process, if it is the largest of its role, and its device's peak FLOP/s."""
        largest = self.memory.setdefault(role, {})
        for name, mib in reply.memory.items():
            largest[name] = max(largest.get(name, 0.0), mib)
        if reply.peak_flops is not None:
            self.peak_flops[role] = reply.peak_flops

    def _take_loss(self, future: RayFuture, part: CallPart, error: Any) -> None:
        """Handles that the result of a call, or a value among its arguments, is lost with the machine that it was on.

        ``error`` is Ray's ObjectLostError, perhaps as the cause of another.
        """
        process = part.process
        role = self._role_of(process)
        handles = part.arguments.handles
        lost = getattr(error, "cause", error).object_ref_hex
        assert part.reference is not None
        if lost == part.reference.hex() or not handles:
            self.lose(role, [process], f"the result of {process.where()} is lost with its machine")
            return
        made_by = next(
            (handle for handle in handles if cast("ObjectRef", handle.reference).hex() == lost), handles[0]
        ).future.role
        reason = f"values that role {made_by} had made are lost with the machine they lay on"
        # other ranks may run their parts already, and wait for this one
        if role.works_together and not future.prefetches:
            self.lose(role, role.processes, reason)
            return
        self._mark_answered(part)
        self._part_ended(future, part, ValuesLostError(made_by, (), reason))

    def _mark_answered(self, part: CallPart) -> None:
        assert part.reference is not None
        del self._sent[part.reference], part.process.unanswered[part.reference]
        part.reference = None

    def _part_ended(self, future: RayFuture, part: CallPart, error: BaseException | None) -> None:
        """Ends one process's part of a call, and the call when it was the last part."""
        part.is_done = True
        if error is not None and future.failed_at is None:
            future.failed_at = time.monotonic()
            future.error = error
        if all(part.is_done for part in future.parts):
            self._end_failed(future)

    def _ask_for_heartbeats(self) -> None:
        """Asks processes with open calls for a heartbeat, and gives up those that have been silent too long."""
        now = time.monotonic()
        interval = min(max(self.config.heartbeat_s / 4, 0.05), 5.0)
        working: dict[RoleProcess, list[tuple[RayFuture, CallPart]]] = {}
        for future, part in self._sent.values():
            working.setdefault(part.process, []).append((future, part))
        # In a group also processes that have done their part are asked: the others may need them.
        for role in self.roles:
            if role.works_together and any(process in working for process in role.processes):
                working |= {process: working.get(process, []) for process in role.processes}
        for process, calls in working.items():
            if process.is_lost:
                continue
            heartbeat = self._heartbeats.setdefault(process, Heartbeat())
            if heartbeat.reference is None and now - heartbeat.asked >= interval:
                heartbeat.asked = now
                heartbeat.reference = process.ask_for_heartbeat()
            # A process that starts may be silent: importing and loading can block all of its threads.
            starts = any(future.is_start for future, _ in calls)
            if heartbeat.silent_s >= SILENT_S and not heartbeat.is_said and not starts:
                heartbeat.is_said = True
                self.run.say(
                    f"role {process.role}, rank {process.rank}: {process.where()} is silent "
                    f"since {heartbeat.silent_s:.0f} s; it is given up after {self.config.heartbeat_s:g} s "
                    "(runtime.heartbeat_s)"
                )
            if heartbeat.silent_s >= self.config.heartbeat_s and not starts:
                reason = f"{process.where()} does not answer since {heartbeat.silent_s:.0f} s (runtime.heartbeat_s)"
                self.lose(self._role_of(process), [process], reason)
        for process in [process for process in self._heartbeats if process not in working]:
            del self._heartbeats[process]

    def _give_up(self) -> None:
        """Ends calls that hang, and calls that failed in one process while the others wait for it."""
        now = time.monotonic()
        limit = self.config.call_timeout_s
        for future in {id(future): future for future, _ in self._sent.values()}.values():
            open_parts = [part for part in future.parts if part.reference is not None]
            taken = [part.running_s or 0.0 for part in open_parts]
            if future.is_start:
                taken = [now - future.issued for _ in open_parts]
            late = [part for part, seconds in zip(open_parts, taken, strict=True) if seconds > limit]
            if late and not future.settled:
                self._end_hang(future, late, max(taken))
            elif future.failed_at is not None and now - future.failed_at > GRACE_S and not future.settled:
                processes = [part.process for part in open_parts]
                self._end_failed(future)
                reason = f"it still ran {future.function.name} {GRACE_S:.0f} s after another rank had raised an error"
                if (role := self._role_of(processes[0])).works_together and not processes[0].is_lost:
                    self.lose(role, processes, reason)

    def _end_failed(self, future: RayFuture) -> None:
        """Ends a call with its error, if it has one. An error of ranks that lost their connection loses the role."""
        error = future.error
        role = self._role_of(future.parts[0].process)
        self._has_progressed = True
        if error is not None and role.works_together and is_lost_connection(error) and not future.settled:
            self.lose(role, role.processes, f"its ranks have lost each other: {str(error).splitlines()[0]}")
        # Does nothing where the role was lost just now and has ended its calls with that.
        future.settle(error)

    def _end_hang(self, future: RayFuture, parts: list[CallPart], seconds: float) -> None:
        """Loses the processes whose parts of a call run too long, after writing the stacks of the role."""
        role = self._role_of(parts[0].process)
        stacks = self.stacks(role)
        path = self.run.output_dir / f"stacks_{role.name}.txt"
        write_atomically(path, stacks.encode(errors="replace"))
        problem = f"{future.function.name} has not ended after {seconds:.0f} s (runtime.call_timeout_s)"
        self.run.say(f"role {role.name}: {problem}; the stacks of its processes, also in {path}:\n{stacks}")
        self.lose(role, [part.process for part in parts], f"{problem}; the stacks are in {path}")

    def stacks(self, role: RayRole) -> str:
        """The Python stacks of all processes of a role, as text."""
        import ray

        asked = [(process, process.ask_for_stacks()) for process in role.processes if not process.is_lost]
        ready, _ = ray.wait([reference for _, reference in asked], num_returns=len(asked), timeout=STACKS_S)
        parts = []
        for process, reference in asked:
            text = "does not answer\n"
            if reference in ready:
                with contextlib.suppress(ray.exceptions.RayActorError):  # pyright: ignore[reportAttributeAccessIssue]
                    text = ray.get(reference)
            parts.append(f"--- {role.name} rank {process.rank}, {process.where()}\n{text}")
        return "\n".join(parts)


def _describe_calls(calls: list[tuple[RayFuture, CallPart]]) -> str:
    """Which functions a process was given, for messages."""
    if not calls:
        return "it was idle"
    return "it had been given " + ", ".join(dict.fromkeys(future.function.name for future, _ in calls))


def _unpack_exception(packed: Packed, process: RoleProcess, function: str) -> BaseException:
    """Unpacks the exception of a function, and adds where it was raised."""
    error, text = unpack(packed)
    where = f"in role {process.role}, rank {process.rank} ({process.where()}), {function}"
    error.__cause__ = RemoteError(f"\n{where}:\n{text}")
    error.add_note(where)
    return error


def _how_it_died(error: Exception) -> str:
    """The part of Ray's report that says how a process died."""
    text = str(error)
    if "low on memory" in text or "OOM" in type(error).__name__:
        return "was ended by Ray because its machine ran out of memory"
    if "node" in text and "died" in text and "Worker exit type" not in text:
        return f"has ended with its machine: {text.splitlines()[0]}"
    _, separator, detail = text.partition("Worker exit detail: ")
    if separator and "unexpectedly exits with a connection error" not in detail:
        return f"has ended: {detail.splitlines()[0]}"
    return "has died: it was killed, ended itself or crashed"
