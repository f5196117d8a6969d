"""One process of a role, as seen from inside: it builds the role's state and runs functions on it.

This module loads neither torch nor ray, since the number of CPU threads must be set before torch is loaded.
"""

from __future__ import annotations

import faulthandler
import importlib.metadata
import os
import pickle
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from sfumato.errors import CheckpointError, ConfigError
from sfumato.runtime.cluster.packing import Packed, pack, size_of, unpack


@dataclass(frozen=True)
class Identity:
    """Who and where a process is."""

    pid: int
    born: int
    """Clock ticks from the machine's start to the process's, which tells it from a later one of the same id."""
    host: str
    address: str
    node_id: str
    stderr: str
    """File that takes the process's standard error."""
    versions: dict[str, str]
    folder: tuple[str, str] | None = None
    """What it answered to the token in the run folder, if there was one."""


@dataclass
class Reply:
    """What comes back from a call besides what it made."""

    start: float
    """Wall-clock seconds, like ``end``."""
    end: float
    version: int | None
    """``state.version`` after the call, of states that have one."""
    stop_requested: bool
    lines: list[str]
    timings: dict[str, float]
    """Seconds by name, as the function timed them with its ``run``."""
    sizes: list[float] = field(default_factory=list)
    """Bytes of each kept value; floats, whose pickles are all equally long."""
    error: Packed | None = None
    """The exception, with its traceback as text."""
    memory: dict[str, float] = field(default_factory=dict)
    """Memory of the process and its GPU, now and at their peaks; see ``memory_in_use``."""
    peak_flops: float | None = None
    """Peak operations a second of the device that the state computes on, if that is known."""


class RoleRun:
    """The run as a role's functions see it in a process of their own: what they say and time goes to the driver's."""

    def __init__(self, output_dir: Path, speaks: bool) -> None:
        self.output_dir = output_dir
        self.mesh: Any = None
        self.stop_requested = False
        """Whether the run was asked to stop: the driver or a process of any role got SIGTERM."""
        self._speaks = speaks
        self._lines: list[str] = []
        self._timings: dict[str, float] = {}
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        """A line for the person who watches; only the first process of a group is heard."""
        if self._speaks:
            with self._lock:
                self._lines.append(text)

    def sync(self) -> str:
        """Nothing: the driver has made sure that its metrics are on disk before it asks for a save."""
        return ""

    def owe(self, error: CheckpointError) -> None:
        """The last checkpoint could not be written; the driver, where it comes to, goes no further."""
        raise error

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to those of that name."""
        started = time.perf_counter()
        yield
        self.add_time(name, time.perf_counter() - started)

    def add_time(self, name: str, seconds: float) -> None:
        """Adds seconds to those of that name."""
        with self._lock:
            self._timings[name] = self._timings.get(name, 0.0) + seconds

    def take_said(self) -> list[str]:
        """What was said since the last time."""
        with self._lock:
            lines, self._lines = self._lines, []
        return lines

    def take_timings(self) -> dict[str, float]:
        """What was timed since the last time."""
        with self._lock:
            timings, self._timings = self._timings, {}
        return timings


class RoleWorker:
    """The actor of one process. Ray runs ``run`` in threads of three groups: calls, concurrent calls, health."""

    def __init__(self, role: str, rank: int, num_threads: int, output_dir: str, speaks: bool, paths: list[str]) -> None:
        """Runs in the main thread, the only one that may install signal handlers."""
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        sys.path += [path for path in paths if path not in sys.path]
        faulthandler.enable(file=2)
        self.role, self.rank = role, rank
        self.run_of_role = RoleRun(Path(output_dir), speaks)
        self.state: Any = None
        self.peak_flops: float | None = None
        self.store: Any = None
        self._functions: dict[str, Callable[..., Any]] = {}
        self._has_functions = threading.Condition()
        self.is_built = threading.Event()
        """Whether the state is there, or could not be made."""
        self._running: dict[int, float] = {}
        signal.signal(signal.SIGTERM, self._ask_to_stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the driver, which decides

    def __repr__(self) -> str:
        return f"{self.role} rank {self.rank}"  # what Ray writes in front of each line that the process prints

    def _ask_to_stop(self, _number: int, _frame: Any) -> None:
        self.run_of_role.stop_requested = True

    def run(
        self,
        call: int,
        digest: str,
        function: bytes | None,
        args: Packed,
        num_values: int,
        ships: bool,
        stop: bool,
        *values: Any,
    ) -> Any:
        """Runs a function on the state.

        Args:
            call: number of the call.
            digest: which function.
            function: its pickle, the first time.
            args: its packed arguments; ``values`` stand where they refer to handles.
            num_values: how many values it returns that are kept, as separate return values of this call; 0: none.
            ships: whether to return the result with the reply.
            stop: whether the run was asked to stop, wherever that was.
            values: the packed values of the handles among the arguments.

        Returns:
            The packed pair of reply and result, or a tuple of it and the kept values, each packed.
        """
        start, kept_values, result = time.time(), [], None
        reply = Reply(start, start, None, False, [], {})
        self._running[call] = time.monotonic()
        self.run_of_role.stop_requested |= stop
        try:
            run_function = self._function(digest, function)
            returned = run_function(self, *unpack(args, values))
            if num_values:
                returned_values = (returned,) if num_values == 1 else tuple(returned)
                if len(returned_values) != num_values:
                    raise ValueError(f"returned {len(returned_values)} values, {num_values} were to be kept")
                kept_values = [pack(value) for value in returned_values]
                reply.sizes = [float(size_of(packed_value)) for packed_value in kept_values]
            packed = pack(returned if ships else None)
        except BaseException as error:  # also SystemExit: what a function raises must not end the process
            reply.error = _describe(error)
            kept_values, packed = [None] * num_values, pack(None)
        finally:
            del self._running[call]
        reply.end, reply.version = max(start, time.time()), getattr(self.state, "version", None)
        reply.stop_requested = self.run_of_role.stop_requested
        if self.state is not None:
            from sfumato.tracking.meters import memory_in_use

            reply.memory, reply.peak_flops = memory_in_use(), self.peak_flops
        reply.lines, reply.timings = self.run_of_role.take_said(), self.run_of_role.take_timings()
        result = (pack(reply), packed)
        return (result, *kept_values) if num_values else result

    def _function(self, digest: str, pickled: bytes | None) -> Callable[..., Any]:
        """The function of that digest. Of calls at the same time the one that brings it may come after another."""
        with self._has_functions:
            if pickled is not None:
                self._functions[digest] = pickle.loads(pickled)
                self._has_functions.notify_all()
            self._has_functions.wait_for(lambda: digest in self._functions)
            function = self._functions[digest]
        if isinstance(function, OnState):
            self.is_built.wait()
        return function

    def ping(self) -> tuple[bool, list[str], dict[int, float]]:
        """Whether the process was asked to stop, what it said, and how many seconds it has been running each call."""
        now = time.monotonic()
        running = {call: now - since for call, since in list(self._running.items())}
        return self.run_of_role.stop_requested, self.run_of_role.take_said(), running

    def stacks(self) -> str:
        """The stacks of all Python threads but this one, as text."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        parts = []
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                parts.append(f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)))
        return "\n".join(parts)


@dataclass(frozen=True)
class OnState:
    """A function of the state, as one of the worker."""

    function: Callable[..., Any]

    def __call__(self, worker: RoleWorker, *args: Any) -> Any:
        return self.function(worker.state, *args)


def identify(worker: RoleWorker, token: str | None) -> Identity:
    """Who and where the process is; with a token, whether it sees it in the run folder."""
    import ray

    born = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    address, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
    stderr, folder = os.readlink("/proc/self/fd/2"), None
    if token is not None:
        from sfumato.tracking.shared_folder import answer

        folder = answer(worker.run_of_role.output_dir, token, f"{worker.role} rank {worker.rank}")
    return Identity(os.getpid(), born, socket.gethostname(), address, node_id, stderr, versions(), folder)


def versions() -> dict[str, str]:
    """Of what must be the same on all machines."""
    import sfumato

    package_versions = {name: importlib.metadata.version(name) for name in ("ray", "torch")}
    return {"python": platform.python_version(), "sfumato": sfumato.__version__, **package_versions}


def arrive(worker: RoleWorker) -> None:
    """Nothing: the values among its arguments have come to this machine when it is called."""


STORE_S = 300.0
"""Seconds that processes of a group wait at their store."""


def open_store(worker: RoleWorker, members: Sequence[Identity]) -> int:
    """Opens the place where the processes of a group find each other. Returns its port."""
    from sfumato.parallel.rendezvous import LOOPBACK, serve_store

    # A server that is there already, on a port that the system chose, cannot lose its port to somebody else.
    is_alone = len({member.node_id for member in members}) == 1
    address = LOOPBACK if is_alone else members[worker.rank].address
    worker.store = serve_store(address, 0, timedelta(seconds=STORE_S))
    return int(worker.store.port)


def build_state(
    worker: RoleWorker,
    build: Callable[..., Any],
    config: Any,
    train: Any,
    members: Sequence[Identity],
    port: int | None,
) -> None:
    """Makes the mesh and the state, in the thread that will run the calls: torch counts threads per thread.

    Args:
        worker: this process.
        build: ``(config, mesh, run)`` to the state.
        config: what ``build`` gets.
        train: the ``TrainConfig`` that tells how the group shares the work.
        members: of the group, by rank; none for a process that stands alone.
        port: of the first member's store.
    """
    rank = worker.rank if members else 0
    on_node = [member for member in range(len(members)) if members[member].node_id == members[rank].node_id] or [0]
    import ray

    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("HIP_VISIBLE_DEVICES")
    variables = {
        "RANK": rank,
        "WORLD_SIZE": len(members) or 1,
        "LOCAL_RANK": on_node.index(rank) if not gpus else place_of_gpu(gpus[0], visible),
        "LOCAL_WORLD_SIZE": len(on_node),
        "SFUMATO_STORE": "",
    }
    if members:
        address = "127.0.0.1" if len(on_node) == len(members) else members[0].address
        variables |= {"MASTER_ADDR": address, "MASTER_PORT": port}
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}  # open_store opened it
    from sfumato.parallel.mesh import build_mesh
    from sfumato.runtime.weight_sync.places import ADDRESS_VARIABLE
    from sfumato.tracking.meters import peak_flops
    from sfumato.tracking.run import quiet_libraries, seed_generators

    variables[ADDRESS_VARIABLE] = ray.util.get_node_ip_address()
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        quiet_libraries()
        seed_generators(train.seed)
        mesh = build_mesh(train)
        worker.run_of_role.mesh = mesh
        worker.peak_flops = peak_flops(mesh.device, train.mixed_precision, train.peak_tflops)
        worker.state = build(config, mesh, worker.run_of_role)
    finally:
        worker.is_built.set()


def place_of_gpu(gpu: str, visible: str | None) -> int:
    """The number that torch has for a GPU in this process.

    Ray hides the GPUs of others, unless it is told not to (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES): then the
    process sees all that the machine, or who started Ray, lets it see.

    Args:
        gpu: Ray's name of it: a number, or a UUID.
        visible: CUDA_VISIBLE_DEVICES of this process, if it is set.

    Raises:
        ConfigError: when the process cannot see it.
    """
    if not visible:
        return int(gpu)
    visible_gpus = [name.strip() for name in visible.split(",")]
    if gpu not in visible_gpus:
        raise ConfigError(
            f"Ray gave this process GPU {gpu}, but CUDA_VISIBLE_DEVICES is {visible}: unset it where Ray is started"
        )
    return visible_gpus.index(gpu)


def _describe(error: BaseException) -> Packed:
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, Exception):
        error = RuntimeError(f"the function raised {type(error).__name__}({error})")
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        packed = pack((error, text))
        unpack(packed)
        return packed
    except Exception:  # an exception of a kind that cannot be pickled, or not be made again
        return pack((RuntimeError(f"{type(error).__name__}: {error}"), text))
