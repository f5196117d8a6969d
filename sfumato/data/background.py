"""Data that a thread prepares while the run takes its steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

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


def in_background(items: Iterator[Item], ahead: int) -> Iterator[Item]:
    """Yields the items of an iterator that a thread advances, at most ``ahead`` items before they are asked for.

    What the iterator raises is raised here. The thread ends with the items, or when the returned generator is closed.
    """
    ready: queue.Queue[tuple[str, Item | BaseException | None]] = queue.Queue(ahead)
    closed = threading.Event()

    def hand_over(kind: str, item: Item | BaseException | None = None) -> None:
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
        except BaseException as error:  # raised again where the items are consumed
            hand_over("error", error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            kind, item = ready.get()
            if kind == "error":
                raise cast(BaseException, item)
            if kind == "end":
                return
            yield cast(Item, item)
    finally:
        closed.set()
        thread.join()
