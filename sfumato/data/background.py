"""Data that a thread prepares while the run takes its steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar, cast

Item = TypeVar("Item")
Read = TypeVar("Read")

STEPS_AHEAD = 2
"""Most steps that a thread prepares before they are asked for."""


def read_ahead(
    read: Callable[[Item], Read], steps: Iterator[tuple[int, list[Item]]]
) -> Iterator[tuple[int, list[Read]]]:
    """Reads the micro-batches of the coming steps in a thread, while earlier steps are taken.

    Args:
        read: reads one micro-batch, in the thread; what it raises is raised here, at the step of that micro-batch.
        steps: number and micro-batches of each step.

    Yields:
        The number of each step, and what ``read`` returned for its micro-batches.
    """
    return in_background(((step, list(map(read, batches))) for step, batches in steps), STEPS_AHEAD)


class Calls:
    """What the thread of ``in_background`` has the thread that takes its items do, such as exchanges between ranks.

    A call is done while an item is waited for, in the order of calls and items. So ranks that take equal items make
    equal calls at the same points of a run, and none is under way when a run ends.
    """

    def __init__(self) -> None:
        self._hand_over: Callable[[Future[Any], Callable[[], object]], None] | None = None
        self._closed = threading.Event()

    def submit(self, function: Callable[..., Read], *args: object) -> Future[Read]:
        """Has a function called. Where no thread runs, it is called here and now."""
        future: Future[Read] = Future()
        if self._hand_over is None:
            _call_into(future, partial(function, *args))
        else:
            self._hand_over(future, partial(function, *args))
        return future

    def wait(self, future: Future[Read]) -> Read:
        """The result of a call, or what it raised.

        Raises:
            _Closed: when nobody takes items any more; the thread ends.
        """
        while not self._closed.is_set():
            if wait([future], timeout=0.1).done:
                return future.result()
        raise _Closed

    def attach(
        self, hand_over: Callable[[Future[Any], Callable[[], object]], None] | None, closed: threading.Event
    ) -> None:
        """Sets how calls reach the other thread."""
        self._hand_over = hand_over
        self._closed = closed


class _Closed(BaseException):
    """Ends the thread of ``in_background`` where it waits for a call that nobody will make."""


def _call_into(future: Future[Any], call: Callable[[], object]) -> None:
    """Calls a function and gives the future its result, or what it raises."""
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def in_background(items: Iterator[Item], ahead: int, calls: Calls | None = None) -> Iterator[Item]:
    """Yields the items of an iterator that a thread advances, at most ``ahead`` items before they are asked for.

    What the iterator raises is raised here. The thread ends with the items, or when the returned generator is closed.

    Args:
        items: the iterator.
        ahead: most items that wait.
        calls: what the iterator has this thread do for it.
    """
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(ahead)
    closed = threading.Event()

    def hand_over(kind: str, item: object = None) -> None:
        while not closed.is_set():
            try:
                # A timeout, since a consumer that has gone away would leave the thread waiting at a full queue.
                return ready.put((kind, item), timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                hand_over("item", item)
                if closed.is_set():
                    return
            hand_over("end")
        except _Closed:
            return
        except BaseException as error:  # raised again where the items are consumed
            hand_over("error", error)

    if calls is not None:
        calls.attach(lambda future, call: hand_over("call", (future, call)), closed)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            kind, item = ready.get()
            if kind == "error":
                raise cast(BaseException, item)
            if kind == "end":
                return
            if kind == "call":
                _call_into(*item)
                continue
            yield cast(Item, item)
    finally:
        closed.set()
        thread.join()
        if calls is not None:
            calls.attach(None, threading.Event())
