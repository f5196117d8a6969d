"""One process of a role, as the driver sees it, and the calls on their way to it: futures of their results, and handles
of values that stay where they were made."""

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
from typing import Any, Literal

from sfumato.config.runtime import PoolConfig
from sfumato.runtime.cluster.packing import Packed, unpack
from sfumato.runtime.cluster.placement import Places
from sfumato.runtime.cluster.worker import Identity, OnState, RoleWorker
from sfumato.runtime.roles import OTHER

ConcurrencyGroup = Literal["calls", "concurrent", "health"]
"""Threads of a process; each runs its calls in order, those of ``calls`` several at a time where there are several."""

TAIL_LINES = 50
"""Lines of a dead process's standard error that are shown."""
REMOTE_S = 10.0
"""Seconds for a look at another machine."""

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Shipped:
    """A function on its way to processes, which get its pickle once."""

    name: str
    digest: str
    pickled: bytes


class Functions(weakref.WeakKeyDictionary[Any, Shipped]):
    """Pickles of functions, each made once."""

    def ship(self, function: Callable[..., Any], *, of_worker: bool = False) -> Shipped:
        """The function as it is sent: of the role's state, or of the worker itself."""
        if function not in self:
            from ray import cloudpickle

            pickled = cloudpickle.dumps(function if of_worker else OnState(function))
            name = getattr(function, "__name__", None) or getattr(getattr(function, "func", None), "__name__", "call")
            self[function] = Shipped(name, hashlib.sha256(pickled).hexdigest(), pickled)
        return self[function]


@dataclass(frozen=True)
class RolePlan:
    """What a role is made of."""

    name: str
    build: Callable[..., Any]
    """``(config, mesh, run)`` to the state, in each process."""
    config: Any
    """What ``build`` gets."""
    train: Any
    """The ``TrainConfig`` that tells how the processes share the work, and on which device."""
    pool: PoolConfig
    places: Places
    """The places of its processes."""
    threads: int = 1
    """Calls that a process works on at a time."""
    sees_folder: bool = False
    """Whether the processes must see the run folder."""


class RoleProcess:
    """A process in its place."""

    def __init__(self, plan: RolePlan, rank: int, output_dir: Path, speaks: bool) -> None:
        """Starts it, without waiting.

        Args:
            plan: of its role.
            rank: within the role.
            output_dir: the run folder.
            speaks: whether what its functions say is heard.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        role, pool, slot = plan.name, plan.pool, plan.places.slots[rank]
        self.role, self.rank, self.slot = role, rank, slot
        self.identity: Identity | None = None
        self.is_lost = False
        self.unanswered: dict[Any, tuple[RayFuture, CallPart]] = {}
        """Futures and parts of calls by the reference to their reply; the driver's loop keeps them."""
        self._sent: set[tuple[ConcurrencyGroup, str]] = set()
        worker = ray.remote(concurrency_groups={"calls": plan.threads, "concurrent": 1, "health": 1})(RoleWorker)
        actor = worker.options(
            num_cpus=pool.cpus,
            num_gpus=pool.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(slot.group, slot.index),
            max_restarts=0,
            max_task_retries=0,
            **({} if pool.gpus else {"runtime_env": _without_gpus()}),
        )
        paths = [os.path.abspath(path) for path in sys.path]
        self._actor = actor.remote(role, rank, max(int(pool.cpus), 1), str(output_dir), speaks, paths)

    def send(self, future: RayFuture, part: CallPart, args: Any, stop: bool) -> tuple[list[Any], int]:
        """Sends what it is to do of a call. Returns the references to its reply and kept values, and the bytes of the
        function.

        Args:
            future: of the call.
            part: what this process does of it.
            args: its packed arguments, or a reference to them.
            stop: whether the run was asked to stop.
        """
        function, group, num_values = future.function, future.group, len(part.keeps)
        is_new = (group, function.digest) not in self._sent
        self._sent.add((group, function.digest))
        pickled = function.pickled if is_new else None
        values = [handle.reference for handle in part.arguments.handles]
        references = self._actor.run.options(concurrency_group=group, num_returns=1 + num_values).remote(
            part.call, function.digest, pickled, args, num_values, part.ships, stop, *values
        )
        return references if num_values else [references], len(function.pickled) if is_new else 0

    def ask(self, method: Literal["ping", "stacks"]) -> Any:
        """The reference to an answer of the health thread."""
        return getattr(self._actor, method).options(concurrency_group="health").remote()

    def end(self) -> None:
        """Has Ray end the process, which works whatever the process does, unless it is stopped."""
        import ray

        self.is_lost = True
        ray.kill(self._actor)

    def kill(self, grace_s: float = 0.0) -> None:
        """Ends the process, a stopped one too. With a grace Ray may do it, which then is not surprised by its death."""
        self.end()
        if self.identity is not None:
            on_node(self.identity.node_id, _kill, self.identity.pid, self.identity.born, grace_s, wait=False)

    def where(self) -> str:
        """Process id and host."""
        return "its process" if self.identity is None else f"process {self.identity.pid} on {self.identity.host}"

    def stderr_tail(self) -> str:
        """The end of its standard error; empty when there is none or it cannot be read."""
        if self.identity is None:
            return ""
        return on_node(self.identity.node_id, _tail, self.identity.stderr) or ""


def on_node(node_id: str, function: Callable[..., Any], *args: Any, wait: bool = True) -> Any:
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
    except ray.exceptions.RayError:  # the machine is gone, which the caller is about to say
        return None


def _without_gpus() -> dict[str, Any]:
    """The environment of a process without GPUs, where the cluster has some: Ray will stop hiding them."""
    import ray

    return {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}} if ray.cluster_resources().get("GPU") else {}


def _kill(pid: int, born: int, grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) == born:
            if time.monotonic() >= deadline:
                os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.02)


def _tail(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(os.path.getsize(path) - 16384, 0))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        return f"(its log cannot be read: {error})"
    marks = (":job_id:", ":actor_name:", ":task_name:", "Extension modules:")  # by which Ray tells lines apart; long
    lines = [line for line in text.splitlines() if not (line.startswith(marks) or "] logging.cc:" in line)]
    return "\n".join(lines[-TAIL_LINES:])


@dataclass(eq=False)
class Arguments:
    """Packed arguments of a call."""

    packed: Packed
    handles: list[RayHandle]
    """What they refer to."""
    num_users: int = 0
    """Processes that get them."""
    reference: Any = None
    """Where they lie in shared memory, if they do."""


_NOTHING = Arguments((b"", []), [])


@dataclass(eq=False)
class CallPart:
    """What one process does of a call."""

    process: RoleProcess
    arguments: Arguments
    ships: bool
    """Whether its result comes with the reply."""
    keeps: list[RayHandle] = field(default_factory=list)
    """Handles of the values that it keeps."""
    call: int = field(default_factory=lambda: next(_numbers))
    reference: Any = None
    """Ray's reference to the reply; None while it is not sent or after it came."""
    running_s: float | None = None
    """Seconds for which the process had been running it when it last said so."""
    is_done: bool = False
    value: Any = None


@dataclass(eq=False)
class RayFuture:
    """A call, and the value of its first process that ships one. Use the verbs of a role."""

    loop: Any
    """The driver's, which hears of replies."""
    role: str
    function: Shipped
    parts: list[CallPart]
    group: ConcurrencyGroup = "calls"
    """Whose threads run it in each process."""
    kind: str = OTHER
    """Kind of its work, for the timeline."""
    is_start: bool = False
    """Whether the call, of the worker, starts the role: it may take ``call_timeout_s`` in all, and be silent."""
    moves: bool = False
    """Whether any process of the role may run it."""
    brings: bool = False
    """Whether it does nothing but bring values to where its processes are: the function, of the worker, is not given
    the handles among the arguments."""
    error: BaseException | None = None
    failed_at: float | None = None

    def __post_init__(self) -> None:
        self.issued, self.label = time.monotonic(), self.loop.record.label
        self.settled = False
        """As ``done``, without looking for news."""
        self._listeners: list[Callable[[], None]] = []

    @property
    def handles(self) -> list[RayHandle]:
        """All handles among the arguments."""
        return [handle for part in self.parts for handle in part.arguments.handles]

    def done(self) -> bool:
        """Whether the result is there, or the error."""
        if not self.settled:
            self.loop.turn(0.0)
        return self.settled

    def result(self) -> Any:
        """Waits for all processes.

        Raises:
            Exception: what the function raised in the process that failed first.
            RoleLostError: a process died or hangs.
        """
        self.loop.wait(self)
        if self.error is not None:
            raise self.error
        return next((part.value for part in self.parts if part.ships), None)

    def settle(self, error: BaseException | None = None) -> None:
        """Ends the call; later news of it are ignored."""
        if not self.settled:
            self.settled, self.error = True, error
            for part in self.parts:
                # values that nobody else refers to are freed now, not when Python looks for cycles of references
                part.arguments, part.keeps = _NOTHING, []
            listeners, self._listeners = self._listeners, []
            for listener in listeners:
                listener()

    def on_settled(self, listener: Callable[[], None]) -> None:
        """Runs the listener when the call ends."""
        self._listeners.append(listener)

    def state(self) -> str:
        """What its processes do, for a person who waits."""
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
    """A value that stayed in the memory of the machine where it was made. Use ``map_remote`` of a role."""

    future: RayFuture = None  # type: ignore[assignment]  # the call that gets it sets it
    reference: Any = None
    seconds: float = 0.0
    """Seconds that the call took, once done."""
    nbytes: int = 0
    """Bytes, once done."""

    def done(self) -> bool:
        """Whether the value is there, or its call has failed."""
        return self.future.done()

    def check(self) -> None:
        """Waits for the value, without fetching it. Raises what the call that makes it raises."""
        self.future.result()

    def fetch(self) -> Any:
        """Brings the value here; its bytes count as the driver's. Raises what the call that makes it raises."""
        import ray

        self.future.result()
        packed = ray.get(self.reference)
        self.future.loop.count_bytes(self.future.role, packed)
        return unpack(packed)


def ranks_of(parts: list[CallPart]) -> str:
    """The ranks, as text."""
    return ", ".join(str(part.process.rank) for part in parts)
