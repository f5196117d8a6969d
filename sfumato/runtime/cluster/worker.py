"""The code inside a role's process: it builds the role's state and runs functions on it.

This module imports neither torch nor ray, since the number of CPU threads must be set before torch is imported.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
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
from typing import TYPE_CHECKING, Any, NamedTuple

from sfumato.errors import CheckpointError, ConfigError
from sfumato.runtime.cluster.packing import Packed, pack, size_of, unpack
from sfumato.tracking.lock import process_birth
from sfumato.tracking.source_code import package_versions

if TYPE_CHECKING:
    from types import FrameType

    from torch._C._distributed_c10d import TCPStore

    from sfumato.config.sections import TrainConfig
    from sfumato.parallel.mesh import Mesh
    from sfumato.runtime.roles import Build


@dataclass(frozen=True)
class Identity:
    """Which process this is, and where it runs."""

    pid: int
    born: str
    """When it was started, which tells it from a later process with the same id: see ``process_birth``."""
    host: str
    address: str
    node_id: str
    stderr: str
    """File that the process's standard error is written to."""
    versions: dict[str, str]
    folder: tuple[str, str] | None = None
    """Its answer to the token in the run folder (``tracking.shared_folder``), if there was a token."""


class Said(NamedTuple):
    """Lines for the user. Replies and heartbeats repeat them until the driver says that it has heard them: an answer
    to a heartbeat may come after the reply to the call that said a line, or never be read."""

    first: int
    """Number of the first line, counted from the start of the process."""
    lines: list[str]


@dataclass
class Reply:
    """What a call returns besides its value."""

    start: float
    """Wall-clock seconds, like ``end``."""
    end: float
    version: int | None
    """``state.version`` after the call, of states that have one."""
    stop_requested: bool
    """Whether the process was asked to stop by a signal."""
    said: Said
    """Lines for the user that the driver had not heard of when it made the call."""
    timings: dict[str, float]
    """Seconds by name, as the function timed them with its ``run``."""
    sizes: list[float] = field(default_factory=list)
    """Bytes of each kept value; as floats, whose pickles are all equally long."""
    error: Packed | None = None
    """The exception, with its traceback as text."""
    memory: dict[str, float] = field(default_factory=dict)
    """Memory of the process and its GPU, current and peak; see ``memory_in_use``."""
    peak_flops: float | None = None
    """Peak FLOP/s of the state's device, if known."""


class RoleRun:
    """The run as functions of a role see it: what they say and time is sent to the driver with the next reply."""

    def __init__(self, output_dir: Path, speaks: bool) -> None:
        self.output_dir = output_dir
        self.mesh: Mesh | None = None
        self.stop_requested = False
        """Whether the run was asked to stop: SIGTERM to the driver or to a process of any role."""
        self.speaks = speaks
        self._unheard = Said(0, [])
        self._timings: dict[str, float] = {}
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        """Shows a line to the user; only the first process of a group is heard."""
        if self.speaks:
            with self._lock:
                self._unheard.lines.append(text)

    def sync(self) -> str:
        """Does nothing: the driver has written its metrics to disk before it asks for a checkpoint."""
        return ""

    def store_error(self, error: CheckpointError) -> None:
        """Raises the error of the last checkpoint at once; it reaches the driver, which stops."""
        raise error

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside the block to those of that name."""
        started = time.perf_counter()
        yield
        self.add_time(name, time.perf_counter() - started)

    def add_time(self, name: str, seconds: float) -> None:
        """Adds seconds to those of that name."""
        with self._lock:
            self._timings[name] = self._timings.get(name, 0.0) + seconds

    def said(self) -> Said:
        """The lines that the driver may not have heard."""
        with self._lock:
            return Said(self._unheard.first, list(self._unheard.lines))

    def forget_said(self, num_heard: int) -> None:
        """Forgets lines that the driver has heard: the first ``num_heard`` since the start of the process."""
        with self._lock:
            first, lines = self._unheard
            if num_heard > first:  # calls are sent in order, but those of other threads may begin earlier
                self._unheard = Said(num_heard, lines[num_heard - first :])

    def take_timings(self) -> dict[str, float]:
        """The timings since the last call."""
        with self._lock:
            timings = self._timings
            self._timings = {}
        return timings


class RoleWorker:
    """The Ray actor of one process. Ray runs its methods in threads of three groups: calls, concurrent, health."""

    def __init__(self, role: str, rank: int, num_threads: int, output_dir: str, speaks: bool, paths: list[str]) -> None:
        """Must run in the main thread, the only one that may install signal handlers.

        Args:
            role: name of the role.
            rank: within the role.
            num_threads: for OMP_NUM_THREADS.
            output_dir: the run folder.
            speaks: whether lines that functions say are sent to the driver.
            paths: entries of the driver's ``sys.path``, made absolute.
        """
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        sys.path += [path for path in paths if path not in sys.path]
        faulthandler.enable(file=2)
        self.role = role
        self.rank = rank
        self.run_of_role = RoleRun(Path(output_dir), speaks)
        self.state: Any = None
        self.peak_flops: float | None = None
        self.store: TCPStore | None = None
        self._functions: dict[str, Callable[..., Any]] = {}
        self._has_functions = threading.Condition()
        self.is_built = threading.Event()
        """Set when the state is built, or could not be built."""
        self._running: dict[int, float] = {}  # when each running call has begun, by number
        signal.signal(signal.SIGTERM, self._ask_to_stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the driver, which decides

    def __repr__(self) -> str:
        return f"{self.role} rank {self.rank}"  # what Ray writes in front of each line that the process prints

    def _ask_to_stop(self, _number: int, _frame: FrameType | None) -> None:
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
        num_heard: int,
        *values: Packed,
    ) -> object:
        """Runs a function on the state.

        Args:
            call: number of the call.
            digest: identifies the function.
            function: its pickle, when it is sent for the first time.
            args: its packed arguments, with references to ``values`` in place of handles.
            num_values: number of values that it returns and that stay in this machine's object store, as separate
                return values of this call; 0: none.
            ships: whether the result is returned with the reply.
            stop: whether the run was asked to stop, wherever the signal came.
            num_heard: number of lines that the driver has heard of this process.
            values: the packed values of the handles among the arguments.

        Returns:
            The packed reply and the packed result; with ``num_values`` a tuple of that pair and each packed value.
        """
        start = time.time()
        kept_values: Sequence[Packed | None] = []
        result = None
        self.run_of_role.forget_said(num_heard)
        reply = Reply(start, start, None, False, Said(num_heard, []), {})
        self._running[call] = time.monotonic()
        self.run_of_role.stop_requested |= stop
        try:
            run_function = self._load_function(digest, function)
            returned = run_function(self, *unpack(args, values))
            if num_values:
                returned_values = (returned,) if num_values == 1 else tuple(returned)
                if len(returned_values) != num_values:
                    raise ValueError(f"returned {len(returned_values)} values, {num_values} were to be kept")
                kept_values = [pack(value) for value in returned_values]
                reply.sizes = [float(size_of(packed_value)) for packed_value in kept_values]
            # Inside of ``try``: a value that cannot be pickled is an error of the function, too.
            packed = pack(returned if ships else None)
        except BaseException as error:  # also SystemExit: what a function raises must not end the process
            reply.error = _describe(error)
            kept_values = [None] * num_values
            packed = pack(None)
        finally:
            del self._running[call]
        reply.end = max(start, time.time())  # the wall clock may be set back
        reply.version = getattr(self.state, "version", None)
        reply.stop_requested = self.run_of_role.stop_requested
        if self.state is not None:
            from sfumato.tracking.meters import memory_in_use

            reply.memory = memory_in_use()
            reply.peak_flops = self.peak_flops
        reply.said = self.run_of_role.said()
        reply.timings = self.run_of_role.take_timings()
        result = (pack(reply), packed)
        return (result, *kept_values) if num_values else result

    def _load_function(self, digest: str, pickled: bytes | None) -> Callable[..., Any]:
        """The function of a digest; functions of the state wait until that is built.

        Of two calls at the same time the one that brings the pickle may come after the other, which then waits for it.
        """
        with self._has_functions:
            if pickled is not None:
                self._functions[digest] = pickle.loads(pickled)
                self._has_functions.notify_all()
            self._has_functions.wait_for(lambda: digest in self._functions)
            function = self._functions[digest]
        if isinstance(function, OnState):
            self.is_built.wait()
        return function

    def ping(self, num_heard: int) -> tuple[bool, Said, dict[int, float]]:
        """Answers a heartbeat of a driver that has heard ``num_heard`` lines: whether the process was asked to stop,
        the lines that it said since, and for each running call since how many seconds it runs."""
        self.run_of_role.forget_said(num_heard)
        now = time.monotonic()
        running = {call: now - since for call, since in list(self._running.items())}
        return self.run_of_role.stop_requested, self.run_of_role.said(), running

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
    """Makes a function of the state a function of the worker."""

    function: Callable[..., object]

    def __call__(self, worker: RoleWorker, *args: object) -> object:
        return self.function(worker.state, *args)


def identify(worker: RoleWorker, token: str | None) -> Identity:
    """Tells which process this is and where; with a token, also whether it sees that in the run folder."""
    import ray

    address = ray.util.get_node_ip_address()
    node_id = ray.get_runtime_context().get_node_id()
    stderr = os.readlink("/proc/self/fd/2")
    folder = None
    if token is not None:
        from sfumato.tracking.shared_folder import answer_token

        folder = answer_token(worker.run_of_role.output_dir, token, f"{worker.role} rank {worker.rank}")
    born = process_birth(os.getpid())
    return Identity(os.getpid(), born, socket.gethostname(), address, node_id, stderr, package_versions("ray"), folder)


def confirm_arrival(worker: RoleWorker) -> None:
    """Does nothing: when it is called, Ray has brought the values of its arguments to this machine."""


STORE_S = 300.0
"""Seconds that processes of a group wait at their store."""


def open_store(worker: RoleWorker, members: Sequence[Identity]) -> int:
    """Opens the store where the processes of a group find each other. Returns its port."""
    from sfumato.parallel.rendezvous import LOOPBACK, serve_store

    # A server that listens already, on a port chosen by the system, cannot lose its port to another program, as a port
    # that is only chosen now and used later could.
    is_alone = len({member.node_id for member in members}) == 1
    address = LOOPBACK if is_alone else members[worker.rank].address
    worker.store = serve_store(address, 0, timedelta(seconds=STORE_S))
    return int(worker.store.port)


def build_state(
    worker: RoleWorker,
    build: Build,
    config: object,
    train: TrainConfig,
    members: Sequence[Identity],
    port: int | None,
) -> None:
    """Builds mesh and state, in the thread that will run the calls: torch's settings of threads are per thread.

    Args:
        worker: this process.
        build: ``(config, mesh, run)`` to the state.
        config: given to ``build``.
        train: the ``TrainConfig`` that says how the group shares the work.
        members: of the group, by rank; empty for a process without a group.
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
        # As under torchrun, whose agent opens the store: here ``open_store`` has, so that rank 0 does not.
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    from sfumato.parallel.mesh import build_mesh
    from sfumato.runtime.weight_sync.places import ADDRESS_VARIABLE
    from sfumato.tracking.meters import peak_flops
    from sfumato.tracking.progress import say_messages
    from sfumato.tracking.run import quiet_libraries, seed_generators

    variables[ADDRESS_VARIABLE] = ray.util.get_node_ip_address()
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        quiet_libraries()
        if worker.run_of_role.speaks:
            say_messages(worker.run_of_role.say)
        seed_generators(train.seed)
        mesh = build_mesh(train, replays=True)
        worker.run_of_role.mesh = mesh
        worker.peak_flops = peak_flops(mesh.device, train.mixed_precision, train.peak_tflops)
        worker.state = build(config, mesh, worker.run_of_role)
    finally:
        worker.is_built.set()  # also after an error, so that waiting calls end


def place_of_gpu(gpu: str, visible: str | None) -> int:
    """The number that torch uses for a GPU in this process.

    Ray hides the GPUs of other processes, unless it is told not to (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES): then
    the process sees all GPUs that were visible where Ray was started.

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
    """Packs an exception together with its traceback as text."""
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, Exception):
        error = RuntimeError(f"the function raised {type(error).__name__}({error})")
    # Frames cannot be pickled; their text goes along.
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        packed = pack((error, text))
        unpack(packed)
        return packed
    except Exception:  # some exceptions cannot be pickled or unpickled
        return pack((RuntimeError(f"{type(error).__name__}: {error}"), text))
