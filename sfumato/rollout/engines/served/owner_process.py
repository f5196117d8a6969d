"""Parent process of a server that a run started: ends it, with its children, when the run ends in whatever way.

It runs as a program, with the server's command as its arguments. Its standard input is a pipe from the run, which is
closed when the run closes it or dies. It imports nothing but the standard library.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time

GRACE_S = 10.0
"""Seconds that a server has to end by itself after SIGTERM."""


def keep(command: list[str]) -> int:
    """Runs a command until it ends, or until standard input is closed. Returns its exit code."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    waiting = selectors.DefaultSelector()
    waiting.register(sys.stdin.fileno(), selectors.EVENT_READ)
    while process.poll() is None:
        if waiting.select(timeout=0.2) and not os.read(sys.stdin.fileno(), 1):
            send(process.pid, signal.SIGTERM)
            send(process.pid, signal.SIGCONT)  # a stopped process would not see it
            deadline = time.monotonic() + GRACE_S
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            break
    send(process.pid, signal.SIGKILL)  # to the group: children may have outlived the server
    return process.wait()


def send(group: int, number: int) -> None:
    """Sends a signal to a group of processes, if any of it is left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    for ignored_signal in (signal.SIGINT, signal.SIGTERM):
        # The run gets these signals too, and decides when the server ends.
        signal.signal(ignored_signal, signal.SIG_IGN)
    code = keep(sys.argv[1:])
    sys.exit(code if code >= 0 else 128 - code)
