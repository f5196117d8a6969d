"""News of runs for pages: one stream for each tab, which says that there is something new, and one look a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from starlette.concurrency import run_in_threadpool

from sfumato.serving.requests import RefusedRequestError
from sfumato.studio.runs import RunsFolder

LOOK_EVERY_S = 1.0
BEAT_EVERY_S = 15.0
"""Seconds after which a comment is sent where there is nothing new, so that both ends know of each other."""
MOST_STREAMS = 128
"""Streams at once; hidden tabs close theirs."""
MOST_STREAM_S = 3600.0
"""How long a stream lives. A browser connects again by itself and says where it was."""


@dataclass
class _Look:
    """The newest cursor of a run, and when it was looked for."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    cursor: str = ""
    looked_at: float = -LOOK_EVERY_S


class Live:
    """Streams of server-sent events. However many tabs look at a run, it is looked at once a second."""

    def __init__(self, runs: RunsFolder) -> None:
        self._runs = runs
        self._looks: dict[str, _Look] = {}
        self.num_streams = 0

    async def cursor(self, run: str) -> str:
        """What there is to see of a run now; of no run, of the list of runs."""
        look = self._looks.setdefault(run, _Look())
        async with look.lock:
            if time.monotonic() - look.looked_at >= LOOK_EVERY_S:
                look.cursor = await run_in_threadpool(self._look_at, run)
                look.looked_at = time.monotonic()
        return look.cursor

    def _look_at(self, run: str) -> str:
        if not run:
            return self._runs.stamp()
        reader = self._runs.reader(run)
        return "gone" if reader is None else str(reader.cursor())

    async def events(self, run: str, cursor: str) -> AsyncIterator[str]:
        """The events of a stream: ``change`` with the new cursor, whenever there is one.

        Args:
            run: name of a run; empty watches the list of runs.
            cursor: what the page has seen; empty for a page that has seen nothing.

        Raises:
            RefusedRequestError: 429 where there are too many streams.
        """
        if self.num_streams >= MOST_STREAMS:
            raise RefusedRequestError(429, f"{MOST_STREAMS} pages are watching already: close some of them")
        self.num_streams += 1
        return self._stream_events(run, cursor)

    async def _stream_events(self, run: str, cursor: str) -> AsyncIterator[str]:
        try:
            began = sent = time.monotonic()
            yield "retry: 2000\n\n"
            while time.monotonic() - began < MOST_STREAM_S:
                new = await self.cursor(run)
                if new != cursor:
                    cursor = new
                    sent = time.monotonic()
                    yield f"id: {new}\nevent: change\ndata: {new}\n\n"
                elif time.monotonic() - sent > BEAT_EVERY_S:
                    sent = time.monotonic()
                    yield ": nothing new\n\n"
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self.num_streams -= 1
            if self.num_streams == 0:
                self._looks.clear()
