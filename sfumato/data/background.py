"""Data that a thread prepares while steps are taken."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
Read = TypeVar("Read")

STEPS_AHEAD = 2
"""Steps that a thread prepares before they are asked for."""


def read_ahead(
    read: Callable[[Item], Read], steps: Iterator[tuple[int, list[Item]]]
) -> Iterator[tuple[int, list[Read]]]:
    """Steps with what was read of their micro-batches, in a thread, while the steps before are taken.

    Args:
        read: called in the thread; what it raises is raised at its step.
        steps: number and micro-batches of each step.
    """
    return in_background(((step, list(map(read, batches))) for step, batches in steps), STEPS_AHEAD)


def in_background(items: Iterator[Item], ahead: int) -> Iterator[Item]:
    """The items of an iterator that runs in a thread, at most ``ahead`` of them before they are asked for.

    What it raises is raised here. The thread ends when the items do, or when the iterator is closed.
    """
    ready: queue.Queue[tuple[str, Item | BaseException | None]] = queue.Queue(ahead)
    closed = threading.Event()

    def hand_over(kind: str, item: Item | BaseException | None = None) -> None:
        while not closed.is_set():
            try:
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
                raise item
            if kind == "end":
                return
            yield item
    finally:
        closed.set()
        thread.join()
