"""One process of a role as the driver sees it, and the calls to it: futures of their results, and handles of values
that stay where they were made."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from sfumato.config.runtime import PoolConfig
from sfumato.runtime.cluster.packing import Packed, unpack
from sfumato.runtime.cluster.placement import Places
from sfumato.runtime.cluster.worker import Identity, OnState, RoleWorker, Said
from sfumato.runtime.roles import OTHER, Build
from sfumato.tracking.lock import process_birth

if TYPE_CHECKING:
    from ray import ObjectRef

    from sfumato.config.sections import TrainConfig
    from sfumato.runtime.cluster.loop import DriverLoop

ConcurrencyGroup = Literal["calls", "concurrent", "health"]
"""Groups of threads of a process. Each begins its calls in order; ``calls`` may have several threads."""

TAIL_LINES = 50
"""Last lines of a dead process's standard error that are shown."""
REMOTE_S = 10.0
"""Longest wait in seconds for a small function on another machine."""

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Shipped:
    """A pickled function; each process is sent the pickle once, and then only its digest."""

    name: str
    digest: str
    pickled: bytes


class Functions(weakref.WeakKeyDictionary[Callable[..., object], Shipped]):
    """Pickles of functions, each made once."""

    def ship(self, function: Callable[..., object], *, of_worker: bool = False) -> Shipped:
        """The pickle of a function of the role's state or, with ``of_worker``, of the worker itself."""
        if function not in self:
            from ray import cloudpickle

            pickled = cloudpickle.dumps(  # pyright: ignore[reportPrivateImportUsage]
                function if of_worker else OnState(function)
            )
            # A ``partial`` has no name of its own, but ``func``.
            name = getattr(function, "__name__", None) or getattr(getattr(function, "func", None), "__name__", "call")
            self[function] = Shipped(name, hashlib.sha256(pickled).hexdigest(), pickled)
        return self[function]


@dataclass(frozen=True)
class RolePlan:
    """Everything that a role's processes are started from."""

    name: str
    build: Build
    """Builds the state from ``(config, mesh, run)``, in each process."""
    config: object
    """The configuration that ``build`` gets."""
    train: TrainConfig
    """The ``TrainConfig`` that says how the processes share the work, and on which device."""
    pool: PoolConfig
    places: Places
    """The places reserved for its processes."""
    threads: int = 1
    """Number of calls that a process runs at a time."""
    sees_folder: bool = False
    """Whether the processes must see the run folder."""


class RoleProcess:
    """A process of a role in its reserved place."""

    def __init__(self, plan: RolePlan, rank: int, output_dir: Path, speaks: bool) -> None:
        """Starts the process, without waiting for it.

        Args:
            plan: of its role.
            rank: within the role.
            output_dir: the run folder.
            speaks: whether lines that its functions say are shown.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        pool = plan.pool
        slot = plan.places.slots[rank]
        self.role = plan.name
        self.rank = rank
        self.slot = slot
        self.identity: Identity | None = None
        self.is_lost = False
        self._num_heard = 0  # lines for the user, of those that it has said since its start
        self.unanswered: dict[ObjectRef, tuple[RayFuture, CallPart]] = {}
        """Futures and parts of calls by Ray's reference to their reply; maintained by the driver's loop."""
        # Functions that each group of threads was sent: groups run independently, so each must get the pickle.
        self._sent: set[tuple[ConcurrencyGroup, str]] = set()
        remote = cast("Any", ray.remote)  # Ray's stubs do not know concurrency_groups
        worker = remote(concurrency_groups={"calls": plan.threads, "concurrent": 1, "health": 1})(RoleWorker)
        actor = worker.options(
            num_cpus=pool.cpus,
            num_gpus=pool.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(slot.group, slot.index),
            # The driver replaces processes and repeats calls itself: it knows which of them may run twice.
            max_restarts=0,
            max_task_retries=0,
            **({} if pool.gpus else {"runtime_env": _without_gpus()}),
        )
        paths = [os.path.abspath(path) for path in sys.path]
        self._actor = actor.remote(plan.name, rank, max(int(pool.cpus), 1), str(output_dir), speaks, paths)

    def send(
        self, future: RayFuture, part: CallPart, args: Packed | ObjectRef, stop: bool
    ) -> tuple[list[ObjectRef], int]:
        """Sends this process's part of a call.

        Args:
            future: of the call.
            part: the part of this process.
            args: its packed arguments, or Ray's reference to them.
            stop: whether the run was asked to stop.

        Returns:
            Ray's references to the reply and to each kept value, and the bytes of the function that were sent.
        """
        function = future.function
        group = future.group
        num_values = len(part.keeps)
        is_new = (group, function.digest) not in self._sent
        self._sent.add((group, function.digest))
        pickled = function.pickled if is_new else None
        values = [handle.reference for handle in part.arguments.handles]
        references = self._actor.run.options(concurrency_group=group, num_returns=1 + num_values).remote(
            part.call, function.digest, pickled, args, num_values, part.ships, stop, self._num_heard, *values
        )
        return references if num_values else [references], len(function.pickled) if is_new else 0

    def ask_for_heartbeat(self) -> ObjectRef:
        """Ray's reference to the answer of ``RoleWorker.ping``, which the health thread gives."""
        return self._actor.ping.options(concurrency_group="health").remote(self._num_heard)

    def ask_for_stacks(self) -> ObjectRef:
        """Ray's reference to the answer of ``RoleWorker.stacks``, which the health thread gives."""
        return self._actor.stacks.options(concurrency_group="health").remote()

    def take_new_lines(self, said: Said) -> list[str]:
        """The lines of an answer that are new; the same line may come with several answers."""
        new = said.lines[max(self._num_heard - said.first, 0) :]
        self._num_heard += len(new)
        return new

    def end(self) -> None:
        """Has Ray end the process. That works whatever it does, unless it is stopped (SIGSTOP)."""
        import ray

        self.is_lost = True
        ray.kill(self._actor)

    def kill(self, grace_s: float = 0.0) -> None:
        """Ends the process, also a stopped one, by SIGKILL on its machine. Ray has ``grace_s`` seconds to do it first,
        so that it does not report an unexpected death."""
        self.end()
        if self.identity is not None:
            on_node(self.identity.node_id, _kill_after, self.identity.pid, self.identity.born, grace_s, wait=False)

    def where(self) -> str:
        """Process id and host, for messages."""
        return "its process" if self.identity is None else f"process {self.identity.pid} on {self.identity.host}"

    def stderr_tail(self) -> str:
        """The end of its standard error; empty if there is none, or its machine does not answer."""
        if self.identity is None:
            return ""
        return on_node(self.identity.node_id, _read_last_lines, self.identity.stderr) or ""


def on_node(node_id: str, function: Callable[..., object], *args: object, wait: bool = True) -> Any:
    """Runs a small function on a machine of the cluster; None when that machine does not answer."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if node_id == ray.get_runtime_context().get_node_id():
        return function(*args)
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    answer = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(*args)
    if not wait:
        return None
    try:
        return ray.get(answer, timeout=REMOTE_S)
    except ray.exceptions.RayError:  # pyright: ignore[reportAttributeAccessIssue]
        # The machine is lost, which the caller is about to report
        return None


def _without_gpus() -> dict[str, object]:
    """Ray's options that hide the cluster's GPUs from a process without GPUs: Ray itself will stop doing that."""
    import ray

    return {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}} if ray.cluster_resources().get("GPU") else {}


def _kill_after(pid: int, born: str, grace_s: float) -> None:
    """Kills a process of this machine if it has not ended in time; ``born`` as of ``Identity``."""
    deadline = time.monotonic() + grace_s
    # Its start is compared, since a later process may have got the same id.
    while born and process_birth(pid) == born:
        if time.monotonic() >= deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.02)


def _read_last_lines(path: str) -> str:
    """The last lines of a file that a process has written to, without Ray's own."""
    try:
        with open(path, "rb") as file:
            file.seek(max(os.path.getsize(path) - 16384, 0))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        return f"(its log cannot be read: {error})"
    # Marks by which Ray assigns lines to processes, and the very long last line of faulthandler.
    marks = (":job_id:", ":actor_name:", ":task_name:", "Extension modules:")
    lines = [line for line in text.splitlines() if not (line.startswith(marks) or "] logging.cc:" in line)]
    return "\n".join(lines[-TAIL_LINES:])


@dataclass(eq=False)
class Arguments:
    """Packed arguments of a call."""

    packed: Packed
    handles: list[RayHandle]
    """Handles that the packed arguments refer to."""
    num_users: int = 0
    """Number of processes that get these arguments."""
    reference: ObjectRef | None = None
    """Ray's reference to them, if they were put into shared memory."""


_NOTHING = Arguments((b"", []), [])


@dataclass(eq=False)
class CallPart:
    """The part of a call that one process runs."""

    process: RoleProcess
    arguments: Arguments
    ships: bool
    """Whether its result is returned with the reply."""
    keeps: list[RayHandle] = field(default_factory=list)
    """Handles of the values that stay with it."""
    call: int = field(default_factory=lambda: next(_numbers))
    reference: ObjectRef | None = None
    """Ray's reference to the reply; None before it is sent and after the reply came."""
    running_s: float | None = None
    """Seconds that it had been running at the process's last heartbeat; None if it was not running."""
    is_done: bool = False
    value: Any = None


@dataclass(eq=False)
class RayFuture:
    """A call of a role; its result is the value of the first process that ships one. Made by the methods of a role."""

    loop: DriverLoop
    """The driver's loop, which receives replies."""
    role: str
    function: Shipped
    parts: list[CallPart]
    group: ConcurrencyGroup = "calls"
    """The threads that run it in each process."""
    kind: str = OTHER
    """Kind of its work, for the timeline."""
    is_start: bool = False
    """Whether it starts the role. Its function is one of the worker; it may take ``call_timeout_s`` in all, and the
    process may be silent meanwhile."""
    moves: bool = False
    """Whether any process of the role may run it."""
    prefetches: bool = False
    """Whether it only brings values to the machines of its processes. Its function is one of the worker, and is not
    given the handles among the arguments."""
    error: BaseException | None = None
    """What it ended with."""
    failed_at: float | None = None
    """When the first of its parts failed."""

    def __post_init__(self) -> None:
        self.issued = time.monotonic()
        self.label = self.loop.record.label
        self.settled = False
        """As ``done``, but without receiving replies."""
        self._listeners: list[Callable[[], None]] = []

    @property
    def handles(self) -> list[RayHandle]:
        """All handles among the arguments."""
        return [handle for part in self.parts for handle in part.arguments.handles]

    def done(self) -> bool:
        """Whether the call has ended, with a result or an error."""
        if not self.settled:
            self.loop.turn(0.0)
        return self.settled

    def result(self) -> Any:
        """Waits for all processes and returns the result.

        Raises:
            Exception: the error of the function in the process that failed first.
            RoleLostError: a process died or hangs.
        """
        self.loop.wait(self)
        if self.error is not None:
            raise self.error
        return next((part.value for part in self.parts if part.ships), None)

    def settle(self, error: BaseException | None = None) -> None:
        """Ends the call; replies that come later are ignored."""
        if not self.settled:
            self.settled = True
            self.error = error
            for part in self.parts:
                # Future, parts and handles refer to each other: without this, values would be freed only when Python
                # looks for cycles of references.
                part.arguments = _NOTHING
                part.keeps = []
            listeners = self._listeners
            self._listeners = []
            for listener in listeners:
                listener()

    def on_settled(self, listener: Callable[[], None]) -> None:
        """Runs the listener when the call ends."""
        self._listeners.append(listener)

    def state(self) -> str:
        """What its processes are doing, for a user who waits."""
        running = [part for part in self.parts if part.reference is not None and part.running_s is not None]
        queued = [part for part in self.parts if part.reference is not None and part.running_s is None]
        texts = []
        if not queued and not running and not self.settled:
            texts.append("it waits for its arguments")
        if running:
            longest = max(part.running_s or 0.0 for part in running)
            texts.append(f"ranks {ranks_of(running)} have run it for {longest:.0f} s")
        if queued:
            texts.append(f"ranks {ranks_of(queued)} have not begun or not said so")
        return "; ".join(texts)


@dataclass(eq=False)
class RayHandle:
    """A value that stays in the memory of the machine where it was made. Made by ``map_remote`` of a role."""

    future: RayFuture = None  # type: ignore[assignment]  # set by ``RayRole._make_call``
    reference: ObjectRef | None = None
    """Ray's reference to the packed value."""
    seconds: float = 0.0
    """Duration of the call in seconds, once done."""
    nbytes: int = 0
    """Bytes of the packed value, once done."""

    def done(self) -> bool:
        """Whether the call has ended, with the value or an error."""
        return self.future.done()

    def check(self) -> None:
        """Waits for the value without fetching it; raises the error of its call."""
        self.future.result()

    def fetch(self) -> Any:
        """Copies the value to this process, which counts its bytes as the driver's; raises the error of its call."""
        import ray

        self.future.result()
        packed = cast("Packed", ray.get(cast("ObjectRef", self.reference)))
        self.future.loop.count_bytes(self.future.role, packed)
        return unpack(packed)


def ranks_of(parts: list[CallPart]) -> str:
    """The ranks of parts, for messages."""
    return ", ".join(str(part.process.rank) for part in parts)
