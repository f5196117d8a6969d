"""Calls on their way: futures of their results, and handles of values that stay where they were made."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from sfumato.runtime.cluster.packing import Packed, unpack
from sfumato.runtime.cluster.process import ConcurrencyGroup, RoleProcess, Shipped
from sfumato.runtime.roles import OTHER, Record

_numbers = itertools.count(1)


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
class Part:
    """What one process does of a call."""

    process: RoleProcess
    arguments: Arguments
    ships: bool
    """Whether its result comes with the reply."""
    keeps: list[RayHandle] = field(default_factory=list)
    """Handles of the values that it keeps."""
    call: int = field(default_factory=lambda: next(_numbers))
    reference: Any = None
    """Of the reply; None while it is not sent or after it came."""
    running_s: float | None = None
    """How long the process had been running it when it last said so."""
    is_done: bool = False
    value: Any = None


class CallLoop(Protocol):
    """What hears of replies, as a future needs it."""

    record: Record

    def turn(self, timeout_s: float) -> None: ...
    def wait(self, future: RayFuture) -> None: ...
    def count_bytes(self, role: str, packed: Packed | int) -> None: ...


class RayFuture:
    """Of a call: the value of its first process that ships one."""

    def __init__(
        self,
        loop: CallLoop,
        role: str,
        function: Shipped,
        group: ConcurrencyGroup,
        parts: list[Part],
        *,
        is_start: bool = False,
        moves: bool = False,
        brings: bool = False,
        kind: str = OTHER,
    ) -> None:
        """Use the verbs of a role."""
        self.loop, self.role, self.function, self.group, self.parts = loop, role, function, group, parts
        self.issued, self.label, self.kind = time.monotonic(), loop.record.label, kind
        self.is_start = is_start
        """A call that starts the role: it may take ``call_timeout_s`` in all, and be silent meanwhile."""
        self.moves = moves
        """Whether any process of the role may run it."""
        self.brings = brings
        """A call that does nothing but bring values to where its processes are."""
        self.error: BaseException | None = None
        self.failed_at: float | None = None
        self._settled = False
        self._listeners: list[Callable[[], None]] = []

    @property
    def handles(self) -> list[RayHandle]:
        """All handles among the arguments."""
        return [each for part in self.parts for each in part.arguments.handles]

    @property
    def has_arguments(self) -> bool:
        """Whether every value among the arguments is there, or will never be."""
        return all(each.future.settled for each in self.handles)

    def done(self) -> bool:
        """Whether the result is there, or the error."""
        if not self._settled:
            self.loop.turn(0.0)
        return self._settled

    def result(self) -> Any:
        """Waits for all processes.

        Raises:
            Exception: what the function raised in the process that failed first.
            RoleLostError: a process died or hangs.
        """
        self.loop.wait(self)
        if self.error is not None:
            raise self.error
        return next((each.value for each in self.parts if each.ships), None)

    @property
    def settled(self) -> bool:
        """As ``done``, without looking for news."""
        return self._settled

    def settle(self, error: BaseException | None = None) -> None:
        """Ends the call; later news of it are ignored."""
        if not self._settled:
            self._settled, self.error = True, error
            for each in self.parts:
                # values that nobody else refers to are freed now, not when Python looks for cycles of references
                each.arguments, each.keeps = _NOTHING, []
            listeners, self._listeners = self._listeners, []
            for listener in listeners:
                listener()

    def on_settled(self, listener: Callable[[], None]) -> None:
        """Runs the listener when the call ends."""
        self._listeners.append(listener)

    def state(self) -> str:
        """What its processes do, for a person who waits."""
        running = [each for each in self.parts if each.reference is not None and each.running_s is not None]
        queued = [each for each in self.parts if each.reference is not None and each.running_s is None]
        texts = []
        if not queued and not running and not self._settled:
            texts.append("it waits for its arguments")
        if running:
            longest = max(each.running_s or 0.0 for each in running)
            texts.append(f"ranks {ranks_of(running)} have run it for {longest:.0f} s")
        if queued:
            texts.append(f"ranks {ranks_of(queued)} have not begun or not said so")
        return "; ".join(texts)


class RayHandle:
    """A value that stayed in the memory of the machine where it was made."""

    def __init__(self) -> None:
        """Use ``map_remote`` of a role."""
        self.future: RayFuture = None  # type: ignore[assignment]  # the call that gets it sets it
        self.reference: Any = None
        self.seconds = 0.0
        """That the call took, once done."""
        self.nbytes = 0
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


def ranks_of(parts: list[Part]) -> str:
    """The ranks, as text."""
    return ", ".join(str(each.process.rank) for each in parts)
