"""Owner of a server that a run started: ends it, with its children, when the run ends in whatever way.

It runs as a program, with the server's command as its arguments. Its standard input is a pipe from the run, which is
closed when the run dies; the run writes a byte first when it ends the server itself. On the pipe whose number is its
first argument it says its process id, that of the server and, at the end, the server's exit code. Should it be killed
itself, the run ends the server, which leads a group of processes of its own.

It is no child of the run: Ray kills the children of a process that it ends, before they could end anything. It imports
nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

GRACE_S = 10.0
"""Seconds that a server has to end by itself after SIGTERM."""

PR_SET_PDEATHSIG = 1
"""Of Linux' prctl: the signal that a process gets when its parent has ended."""


def keep(command: list[str], on_start: Callable[[int], None]) -> tuple[int, bool]:
    """Runs a command until it ends, or until standard input says so.

    Args:
        command: program and arguments.
        on_start: called with the process id.

    Returns:
        Its exit code, and whether the run is there no more.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: None
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM),  # should this process be killed
    )
    on_start(process.pid)
    waiting = selectors.DefaultSelector()
    waiting.register(sys.stdin.fileno(), selectors.EVENT_READ)
    is_lost = False
    while process.poll() is None:
        if waiting.select(timeout=0.2):
            is_lost = not os.read(sys.stdin.fileno(), 1)
            send(process.pid, signal.SIGTERM)
            send(process.pid, signal.SIGCONT)  # a stopped process would not see it
            deadline = time.monotonic() + GRACE_S
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            break
    send(process.pid, signal.SIGKILL)  # to the group: children may have outlived the server
    return process.wait(), is_lost


def send(group: int, number: int) -> None:
    """Sends a signal to a group of processes, if any of it is left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def main(pipe: int, leftovers: list[str], command: list[str]) -> None:
    """Runs the command in a process that nobody waits for.

    Args:
        pipe: that the run reads.
        leftovers: folders that are removed when the run died, and so cannot do it.
        command: of the server.
    """
    if os.fork():
        os._exit(0)  # the run, which waits for this process, is then not the owner's parent
    for ignored_signal in (signal.SIGINT, signal.SIGTERM):
        # The run gets these signals too, and decides when the server ends. SIG_IGN would be inherited by the server.
        signal.signal(ignored_signal, lambda *_: None)
    with os.fdopen(pipe, "w") as told:
        print(os.getpid(), file=told, flush=True)
        code, is_lost = keep(command, lambda pid: print(pid, file=told, flush=True))
        for folder in leftovers if is_lost else ():
            shutil.rmtree(folder, ignore_errors=True)
        try:
            print(code if code >= 0 else 128 - code, file=told, flush=True)
        except BrokenPipeError:  # nobody reads it
            os._exit(0)


if __name__ == "__main__":
    separator = sys.argv.index("--")
    main(int(sys.argv[1]), sys.argv[2:separator], sys.argv[separator + 1 :])
