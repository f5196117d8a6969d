"""Roles of an RL run: states in processes, and the calls by which work reaches them.

A role is a state in one or more processes, and runs functions on it that it is given. A call returns a future. Large
values stay where they were made, and calls that need them are given their handles. The roles of this file live in this
process (under torchrun, of this rank); those on Ray have the same methods (``sfumato/runtime/cluster``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol, cast

from sfumato.errors import PreemptedError, RewardError, RoleLostError, WeightSyncError
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.timeline import Event

ACTOR, SAMPLER, SCORER = "actor", "sampler", "scorer"

Build = Callable[[Any, Mesh, Any], object]
"""Builds a role's state from ``(config, mesh, run)``, in one of the role's processes. The mesh is the role's; the run
has ``say``, ``timed`` and ``stop_requested``."""

OTHER = "other"
"""Kind of work in the timeline (``sfumato.tracking.timeline.KINDS``) of calls that name none."""

TURN_S = 1.0
"""Longest uninterrupted wait in seconds, so that signals are handled."""


class Future(Protocol):
    """The result of a call that may still run."""

    def done(self) -> bool:
        """Whether the call has ended."""
        ...

    def result(self) -> Any:
        """Waits for the call and returns its value, or raises its error."""
        ...


class Handle(Protocol):
    """A value that stays where it was made. A function that is called with a handle is given the value."""

    seconds: float
    """Duration of the call, once done."""
    nbytes: int
    """Memory that the value occupies until the handle is dropped, once done; 0 where nothing is copied."""

    def done(self) -> bool:
        """Whether the call has ended, with the value or an error."""
        ...

    def check(self) -> None:
        """Waits for the value without fetching it; raises the call's error."""
        ...

    def fetch(self) -> Any:
        """The value, copied to this process: for small ones."""
        ...


class Role(Protocol):
    """A state, and the processes that hold it. The ``kind`` of a call is the kind of its work in the timeline."""

    name: str
    num_data_ranks: int
    """Number of data-parallel ranks of the role, each of which has samples of its own."""
    data_ranks: range
    """The data-parallel ranks that this process drives: its own one for roles in this process, all of them on Ray."""

    def call(self, function: Callable[..., object], *args: object, kind: str = OTHER) -> Future:
        """Runs ``function(state, *args)`` in every process. The result is that of the first."""
        ...

    def call_concurrently(self, function: Callable[..., object], *args: object, kind: str = OTHER) -> Future:
        """As ``call``, but beside the calls that are running or queued."""
        ...

    def map(self, function: Callable[..., object], parts: Sequence[object], *args: object, kind: str = OTHER) -> Future:
        """Runs ``function(state, part, *args)`` with a part for each of ``data_ranks``. The result is that of the first
        process."""
        ...

    def map_remote(
        self,
        function: Callable[..., object],
        parts: Sequence[object],
        *args: object,
        num_values: int = 1,
        kind: str = OTHER,
    ) -> list[tuple[Handle, ...]]:
        """As ``map``, but values stay where they are made.

        Args:
            function: returns a tuple of ``num_values`` values, or if that is 1 the value itself.
            parts: one for each of ``data_ranks``; None gives that rank nothing to do.
            args: the same for all ranks.
            num_values: number of values of each rank.
            kind: of the work, for the timeline.

        Returns:
            For each of ``data_ranks`` the handles of its values; empty where the part was None.
        """
        ...

    def prefetch(self, parts: Sequence[Sequence[Handle]]) -> Future:
        """Copies values to the machines of each of ``data_ranks``, so that later calls find them there.

        The future raises ValuesLostError when some are lost with the machine that they were on.
        """
        ...

    def submit(self, function: Callable[..., object], *args: object, kind: str = OTHER) -> Future:
        """Runs ``function(state, *args)`` in whichever process is free: for roles with independent processes."""
        ...

    def close(self) -> None:
        """Ends the role's processes or threads."""
        ...


@dataclass
class LocalHandle:
    """The handle of a value in this process."""

    value: Any
    seconds: float = 0.0
    nbytes: int = 0

    def done(self) -> bool:
        """Always true."""
        return True

    def check(self) -> None:
        """Does nothing: the call has raised its errors already."""

    def fetch(self) -> Any:
        """The value."""
        return self.value


@dataclass(frozen=True)
class Label:
    """What calls are made for, as the timeline shows it."""

    step: int = 0
    """Step of the run, counted as in metrics.jsonl."""
    version: int | None = None
    """Version of the policy that the calls use."""


class Record:
    """Collects what roles did, for the timeline."""

    def __init__(self) -> None:
        self.label = Label()
        """The label of calls that are made now."""
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def add(self, event: Event) -> None:
        """Adds an event; may be called from any thread."""
        with self._lock:
            self._events.append(event)

    def pop_events(self) -> list[Event]:
        """The events since the last call."""
        with self._lock:
            events = self._events
            self._events = []
        return events


class LocalRole:
    """A role in the calling thread: a call runs at once, and its errors are raised where it is made."""

    def __init__(
        self,
        state: object,
        name: str = ACTOR,
        data_rank: int = 0,
        num_data_ranks: int = 1,
        record: Record | None = None,
    ) -> None:
        self.state = state
        self.name = name
        self.data_ranks = range(data_rank, data_rank + 1)
        self.num_data_ranks = num_data_ranks
        self._record = record or Record()
        self._local: SimpleNamespace | threading.local = SimpleNamespace(
            rank=data_rank
        )  # its ``rank`` is the row of the timeline

    def call(self, function: Callable[..., object], *args: object, kind: str = OTHER) -> Future:
        """Runs the function now."""
        return _finished_future(self._run(function, args, self._record.label, kind))

    call_concurrently = submit = call

    def _run(self, function: Callable[..., object], args: Sequence[object], label: Label, kind: str) -> object:
        """Runs a call, with handles replaced by their values, and records it."""
        started = time.time()
        try:
            return function(self.state, *values_of(args))
        finally:
            ended = max(started, time.time())  # the wall clock may be set back
            self._record.add(Event(self.name, self._local.rank, kind, started, ended, label.step, label.version))

    def map(self, function: Callable[..., object], parts: Sequence[object], *args: object, kind: str = OTHER) -> Future:
        """Runs the function on this process's part now."""
        return self.call(function, parts[0], *args, kind=kind)

    def map_remote(
        self,
        function: Callable[..., object],
        parts: Sequence[object],
        *args: object,
        num_values: int = 1,
        kind: str = OTHER,
    ) -> list[tuple[Handle, ...]]:
        """Runs the function on this process's part now."""
        if parts[0] is None:
            return [()]
        started = time.perf_counter()
        result = self.call(function, parts[0], *args, kind=kind).result()
        seconds = time.perf_counter() - started
        return [tuple(LocalHandle(value, seconds) for value in (result if num_values > 1 else [result]))]

    def prefetch(self, parts: Sequence[Sequence[Handle]]) -> Future:
        """Does nothing: the values are in this process."""
        del parts
        return _finished_future(None)

    def close(self) -> None:
        """Closes the state's engine, if it has one."""
        close_engine(self.state)


def close_engine(state: object) -> None:
    """Closes the engine of a role's state, if it has one."""
    close = getattr(getattr(state, "engine", None), "close", None)
    if close is not None:
        close()


def _finished_future(value: object) -> Future:
    """A future that has ended with a value."""
    future: ThreadFuture[object] = ThreadFuture()
    future.set_result(value)
    return future


class ThreadRole(LocalRole):
    """A role in threads of this process, which share its state and begin its calls in order."""

    def __init__(self, state: object, name: str, num_threads: int = 1, record: Record | None = None) -> None:
        super().__init__(state, name, record=record)
        self._ranks = iter(range(num_threads))
        self._local = threading.local()
        self._executor = ThreadPoolExecutor(num_threads, name, initializer=self._assign_rank)

    def _assign_rank(self) -> None:
        """Runs once in each thread, whose number is its rank in the timeline."""
        self._local.rank = next(self._ranks)

    def submit(self, function: Callable[..., object], *args: object, kind: str = OTHER) -> Future:
        """Queues the function; its error is raised by the future's ``result``."""
        return ThreadCall(self._executor.submit(self._run, function, args, self._record.label, kind))

    call = call_concurrently = submit

    def close(self) -> None:
        """Drops calls that have not begun and ends the threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class ThreadCall:
    """The future of a call in another thread. Waits are short and repeated, so that signals are handled."""

    def __init__(self, future: ThreadFuture[object]) -> None:
        self.future = future

    def done(self) -> bool:
        """Whether the call has ended."""
        return self.future.done()

    def result(self) -> Any:
        """Waits for the call and returns its value, or raises its error."""
        while not self.future.done():
            wait_for([self.future], timeout=TURN_S)
        return self.future.result()


class Driver:
    """Waits for the calls of all roles: here for roles in threads of this process, since others run at once."""

    store_bytes: int | None = None
    """Size of the memory for values between processes; None where nothing is copied."""

    def __init__(self, record: Record | None = None) -> None:
        self.record = record or Record()
        """Collects what the roles did."""

    def wait(self, pending: Iterable[Future | Handle]) -> None:
        """Waits until one of these is done, but not longer than a short while."""
        calls = [call.future for call in pending if isinstance(call, ThreadCall)]
        if calls:
            wait_for(calls, timeout=TURN_S, return_when=FIRST_COMPLETED)

    def on_progress(self, callback: Callable[[], None] | None) -> None:
        """Sets the function that is called whenever some call has ended during a wait. Here it is never called."""

    def take_timings(self) -> dict[str, float]:
        """Further measurements since the last call, for ``timings.jsonl``."""
        return {}

    def close(self) -> None:
        """Ends what is shared by all roles."""


@dataclass(frozen=True)
class Roles:
    """The roles of a run; a context manager that closes them."""

    actor: Role
    """Trains the policy."""
    sampler: Role
    """Draws samples from the policy; the actor itself when they share weights."""
    scorer: Role
    """Scores samples."""
    weights: Any = None
    """The ``WeightSync`` from the actor to a sampler of its own; None where the actor samples."""
    driver: Driver = field(default_factory=Driver)
    """Waits for the roles' calls."""
    together: Callable[[Any], list[Any]] = lambda mine: [mine]
    """Gathers a value from each process that drives data-parallel ranks of the roles: under torchrun from all ranks."""

    def __enter__(self) -> Roles:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def rescuing(self, save: Callable[[Any], object]) -> Iterator[None]:
        """Inside the block, when rewards, scorers or samplers fail for good, or the run is stopped while one of them is
        replaced, ``save`` is called on the actor before the error is raised, so that its finished work is not lost."""
        try:
            yield
        except (RewardError, WeightSyncError, RoleLostError, PreemptedError) as error:
            # What a lost actor had not saved has gone with it.
            is_lost = getattr(error, "role", None) in (self.actor.name, "ray")
            if not is_lost and not getattr(error, "is_saved", False):
                try:
                    self.actor.call(save, kind="save").result()
                except Exception as save_error:  # the error that stopped the run matters more
                    error.add_note(f"and its finished work could not be saved: {save_error}")
            raise

    def close(self) -> None:
        """Ends all roles."""
        # Each once: the sampler may be the actor.
        for role in {id(role): role for role in (self.actor, self.sampler, self.scorer)}.values():
            role.close()
        self.driver.close()


def values_of(args: Any) -> Any:
    """Replaces local handles by their values, also inside lists and tuples."""
    if isinstance(args, LocalHandle):
        return args.value
    # Not their subclasses, which may be made from other arguments.
    if type(args) in (list, tuple):
        return type(args)(values_of(value) for value in args)
    if isinstance(args, tuple) and hasattr(args, "_make"):  # a NamedTuple
        return cast("Any", args)._make(values_of(value) for value in args)
    return args


@contextmanager
def label_calls(record: Record, step: int, version: int | None = None) -> Iterator[None]:
    """Calls that are made inside the block are labelled with that step and version of the policy."""
    before = record.label
    record.label = Label(step, version)
    try:
        yield
    finally:
        record.label = before
