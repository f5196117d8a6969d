"""When a completion is given up: its time counts from when the engine can have begun to draw it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CompletionDeadlines:
    """Deadlines of the completions of an engine that works on as many at a time as its memory holds.

    A completion that waits in the engine begins when another ends and leaves its memory. So none is late before
    ``timeout_s`` after the newest end: however many wait, an engine that goes on drawing is in time, and one that hangs
    ends nothing, so that all are late together.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._newest_end = -float("inf")

    @contextmanager
    def begin(self) -> Iterator[Callable[[], float]]:
        """A completion, inside the block. Yields a function of its deadline as of now, by ``time.monotonic()``."""
        begun = time.monotonic()
        yield lambda: max(begun, self._newest_end) + self.timeout_s
        self._newest_end = time.monotonic()  # not after an error: what failed shows no progress
