"""Roles of an RL run: what lives where, and how work reaches it.

A role is a state in one or more processes, and runs the functions that it is given on it. What a call returns is a
future; what is large stays where it was made, and a handle of it is given to whoever needs it. The roles of this file
are in this process (under torchrun, of this rank); those on Ray offer the same verbs (``sfumato/runtime/cluster``).
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
from typing import Any, Protocol

from sfumato.errors import PreemptedError, RewardError, RoleLostError, WeightSyncError
from sfumato.tracking.timeline import Event

ACTOR, SAMPLER, SCORER = "actor", "sampler", "scorer"

OTHER = "other"
"""Kind of work in the timeline (``sfumato.tracking.timeline.KINDS``) of calls that name none."""

TURN_S = 1.0
"""Longest wait in one go, so that a signal is heard."""


class Future(Protocol):
    """What a call will return."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def result(self) -> Any:
        """What it returned, waiting for it; what it raised is raised."""
        ...


class Handle(Protocol):
    """A value that stays where it was made. Functions that are given one see the value."""

    seconds: float
    """Time that the call took, once done."""
    nbytes: int
    """Memory that is kept until the handle is dropped, once done; 0 where nothing is copied."""

    def done(self) -> bool:
        """Whether the value is there, or will never be."""
        ...

    def check(self) -> None:
        """Waits for the value, without fetching it; what the call raised is raised."""
        ...

    def fetch(self) -> Any:
        """The value, brought to this process: for small ones."""
        ...


class Role(Protocol):
    """A state, and the processes that have it. ``kind`` of a call is the kind of its work in the timeline."""

    name: str
    num_data_ranks: int
    """Data-parallel ranks of the role: each has samples of its own."""
    data_ranks: range
    """Those that are given work by this process: in process its own rank, on Ray all."""

    def call(self, function: Callable[..., Any], *args: Any, kind: str = OTHER) -> Future:
        """``function(state, *args)`` in every process; the value of the first."""
        ...

    def call_concurrently(self, function: Callable[..., Any], *args: Any, kind: str = OTHER) -> Future:
        """The same, beside the calls that are under way or queued."""
        ...

    def map(self, function: Callable[..., Any], parts: Sequence[Any], *args: Any, kind: str = OTHER) -> Future:
        """``function(state, part, *args)``, a part for each of ``data_ranks``; the value of the first process."""
        ...

    def map_remote(
        self, function: Callable[..., Any], parts: Sequence[Any], *args: Any, num_values: int = 1, kind: str = OTHER
    ) -> list[tuple[Handle, ...]]:
        """Like ``map``, but values stay where they are made.

        Args:
            function: returns a tuple of ``num_values``, or for 1 the value.
            parts: one for each of ``data_ranks``; None gives that rank nothing to do, and no handles.
            args: the same for all.
            num_values: handles for each of them.
        """
        ...

    def bring(self, parts: Sequence[Sequence[Handle]]) -> Future:
        """Brings values to where each of ``data_ranks`` is, without giving them to a function.

        The future raises ValuesLostError when some are gone with the machine that they lay on.
        """
        ...

    def submit(self, function: Callable[..., Any], *args: Any, kind: str = OTHER) -> Future:
        """``function(state, *args)`` in one of the processes, whichever is free: of roles that share nothing."""
        ...

    def close(self) -> None:
        """Ends what the role started."""
        ...


@dataclass
class LocalHandle:
    """A value in this process."""

    value: Any
    seconds: float = 0.0
    nbytes: int = 0

    def done(self) -> bool:
        """It is there."""
        return True

    def check(self) -> None:
        """What goes wrong rises where it happens."""

    def fetch(self) -> Any:
        """It is here."""
        return self.value


@dataclass(frozen=True)
class Label:
    """What calls are for."""

    step: int = 0
    """Step of the run, as metrics.jsonl counts."""
    version: int | None = None
    """Version of the policy that they use."""


class Record:
    """What roles did, for the timeline."""

    def __init__(self) -> None:
        self.label = Label()
        """What the calls are for that are made now."""
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def add(self, event: Event) -> None:
        """Notes what one of them did."""
        with self._lock:
            self._events.append(event)

    def take(self) -> list[Event]:
        """What was noted since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events


class LocalRole:
    """A role in this very thread: a call has finished when it returns, and errors rise where they happen."""

    def __init__(
        self, state: Any, name: str = ACTOR, data_rank: int = 0, num_data_ranks: int = 1, record: Record | None = None
    ) -> None:
        self.state, self.name = state, name
        self.data_ranks, self.num_data_ranks = range(data_rank, data_rank + 1), num_data_ranks
        self._record = record or Record()
        self._local: Any = SimpleNamespace(rank=data_rank)

    def call(self, function: Callable[..., Any], *args: Any, kind: str = OTHER) -> Future:
        """Runs the function now."""
        return _done(self._run(function, args, self._record.label, kind))

    call_concurrently = submit = call

    def _run(self, function: Callable[..., Any], args: Sequence[Any], label: Label, kind: str) -> Any:
        """Runs a call, with the values of handles, and notes it."""
        started = time.time()
        try:
            return function(self.state, *values_of(args))
        finally:
            ended = max(started, time.time())  # a wall clock may be set back
            self._record.add(Event(self.name, self._local.rank, kind, started, ended, label.step, label.version))

    def map(self, function: Callable[..., Any], parts: Sequence[Any], *args: Any, kind: str = OTHER) -> Future:
        """Runs the function on this process's part now."""
        return self.call(function, parts[0], *args, kind=kind)

    def map_remote(
        self, function: Callable[..., Any], parts: Sequence[Any], *args: Any, num_values: int = 1, kind: str = OTHER
    ) -> list[tuple[Handle, ...]]:
        """Runs the function on this process's part now."""
        if parts[0] is None:
            return [()]
        started = time.perf_counter()
        result = self.call(function, parts[0], *args, kind=kind).result()
        seconds = time.perf_counter() - started
        return [tuple(LocalHandle(value, seconds) for value in (result if num_values > 1 else [result]))]

    def bring(self, parts: Sequence[Sequence[Handle]]) -> Future:
        """They are here."""
        del parts
        return _done(None)

    def close(self) -> None:
        """Ends the engine that the state draws with, where it has one, and what that has started."""
        engine = getattr(self.state, "engine", None)
        if engine is not None:
            engine.close()


def _done(value: Any) -> Future:
    future: ThreadFuture[Any] = ThreadFuture()
    future.set_result(value)
    return future


class ThreadRole(LocalRole):
    """A role in other threads of this process, which begin its calls in order and share its state."""

    def __init__(self, state: Any, name: str, num_threads: int = 1, record: Record | None = None) -> None:
        super().__init__(state, name, record=record)
        self._ranks = iter(range(num_threads))
        self._local = threading.local()
        self._executor = ThreadPoolExecutor(num_threads, name, initializer=self._assign_rank)

    def _assign_rank(self) -> None:
        self._local.rank = next(self._ranks)

    def submit(self, function: Callable[..., Any], *args: Any, kind: str = OTHER) -> Future:
        """Queues the function; an error rises in the future's ``result``."""
        return ThreadCall(self._executor.submit(self._run, function, args, self._record.label, kind))

    call = call_concurrently = submit

    def close(self) -> None:
        """Drops calls that have not begun and ends the threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class ThreadCall:
    """A call in another thread, which is waited for in short turns so that a signal is heard."""

    def __init__(self, future: ThreadFuture[Any]) -> None:
        self.future = future

    def done(self) -> bool:
        """Whether it has ended."""
        return self.future.done()

    def result(self) -> Any:
        """What it returned; what it raised is raised."""
        while not self.future.done():
            wait_for([self.future], timeout=TURN_S)
        return self.future.result()


class Driver:
    """What waits for all roles of a run: here, for those in this process. Those in this thread are never waited for."""

    store_bytes: int | None = None
    """Bytes of samples that may be on their way between processes; None where nothing is copied."""

    def __init__(self, record: Record | None = None) -> None:
        self.record = record or Record()
        """What the roles did."""

    def wait(self, pending: Iterable[Future | Handle]) -> None:
        """Until one of them is done, or for a short while."""
        calls = [call.future for call in pending if isinstance(call, ThreadCall)]
        if calls:
            wait_for(calls, timeout=TURN_S, return_when=FIRST_COMPLETED)

    def on_progress(self, callback: Callable[[], None] | None) -> None:
        """Calls this whenever something is done while somebody waits; nothing goes on in this thread meanwhile."""

    def take_timings(self) -> dict[str, float]:
        """What else was measured since the last call, for ``timings.jsonl``."""
        return {}

    def close(self) -> None:
        """Ends what was started for all roles."""


@dataclass(frozen=True)
class Roles:
    """The roles of a run. Closes them at the end of a ``with``."""

    actor: Role
    """Trains the policy."""
    sampler: Role
    """Draws samples from it; the actor itself when they share weights."""
    scorer: Role
    """Scores samples."""
    weights: Any = None
    """Brings the actor's weights to a sampler that is not the actor: a ``WeightSync``; None where it is."""
    driver: Driver = field(default_factory=Driver)
    """Waits for them."""
    together: Callable[[Any], list[Any]] = lambda mine: [mine]
    """Gathers a value of each process that drives data-parallel ranks of the roles: under torchrun, of all ranks."""

    def __enter__(self) -> Roles:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def rescuing(self, save: Callable[[Any], Any]) -> Iterator[None]:
        """Inside, when rewards, scorers or samplers fail for good, or the run is stopped while one of them is replaced,
        the actor's finished work is saved first."""
        try:
            yield
        except (RewardError, WeightSyncError, RoleLostError, PreemptedError) as error:
            is_lost = getattr(error, "role", None) in (self.actor.name, "ray")
            if not is_lost and not getattr(error, "is_saved", False):
                try:
                    self.actor.call(save, kind="save").result()
                except Exception as save_error:  # what stopped the run matters more
                    error.add_note(f"and its finished work could not be saved: {save_error}")
            raise

    def close(self) -> None:
        """Ends all roles."""
        for role in {id(role): role for role in (self.actor, self.sampler, self.scorer)}.values():
            role.close()
        self.driver.close()


def values_of(args: Any) -> Any:
    """Arguments with the values of local handles in place of these, also inside lists and tuples."""
    if isinstance(args, LocalHandle):
        return args.value
    if type(args) in (list, tuple):
        return type(args)(values_of(value) for value in args)
    if isinstance(args, tuple) and hasattr(args, "_make"):  # a NamedTuple
        return args._make(values_of(value) for value in args)
    return args


@contextmanager
def labelled(record: Record, step: int, version: int | None = None) -> Iterator[None]:
    """Calls that are made inside are for that step, with that version of the policy."""
    before, record.label = record.label, Label(step, version)
    try:
        yield
    finally:
        record.label = before
