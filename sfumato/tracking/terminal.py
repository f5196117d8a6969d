"""Processes whose terminal goes away: their standard streams, and the signal that it sends."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from typing import TextIO

STANDARD = 2
"""The highest descriptor of a standard stream."""


class BestEffortStream:
    """A stream whose reader may go away: what can no longer be written is dropped, and the process goes on.

    Writing fails when a terminal was closed, a pipe has lost its reader (``| tee`` that was killed), or the disk of a
    redirected log is full. ``log.txt`` of a run has its messages all the same. Letters that a terminal of another
    encoding than UTF-8 does not have, as in names of folders and in answers, are written by their numbers.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # it is flushed first
                stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        """Writes text, if somebody takes it. Returns its length."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, if somebody takes it."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def outlive_readers() -> None:
    """Makes standard output and error such streams, and opens those of standard streams that were closed."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        # A file that is opened later must not become a standard stream, into which libraries write.
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STANDARD:
            os.set_inheritable(descriptor, True)
        os.close(descriptor)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, BestEffortStream):
            opened = open(os.devnull, "w") if stream is None else stream  # noqa: SIM115  (open until the process ends)
            setattr(sys, name, BestEffortStream(opened))


def hangup_signals() -> list[signal.Signals]:
    """SIGHUP, which a lost terminal sends; none where nohup has this process ignore it."""
    return [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
