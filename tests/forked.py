"""Python processes that begin with torch, transformers, diffusers and the tasks imported, which takes a new one some
four seconds of a core: copies of one process that has imported them (``tests/preloaded.py``) and computed nothing.

Python's own fork server makes the copies. What a process is started with, its environment among it, is its own; what
libraries read of the environment while they are imported is that of the first start.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
import traceback
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

import torch.multiprocessing

ROOT = Path(__file__).resolve().parent.parent


def fork_server() -> ForkServerContext:
    """The context whose processes are such copies. Its server runs with one thread, as torchrun's ranks do."""
    context: Any = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=paths):
        forkserver.ensure_running()
    return context


class ForkedScript:
    """``python SCRIPT ARGUMENTS``, with the methods of ``subprocess.Popen`` that wait for it and send it signals."""

    def __init__(self, arguments: list[str], cwd: Path, env: dict[str, str], log: Path) -> None:
        """Starts it in a session of its own.

        Args:
            arguments: the script, absolute or below ``cwd``, and what it is given.
            cwd: the working directory.
            env: its whole environment.
            log: the file for stdout and stderr.
        """
        self._process = fork_server().Process(target=_run_script, args=(arguments, str(cwd), env, str(log)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it has ended and returns ``poll()``; raises TimeoutError after so many seconds."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise TimeoutError(f"process {self.pid} has not ended in {timeout} s")
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to a process that still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _run_script(arguments: list[str], cwd: str, env: dict[str, str], log: str) -> None:
    """Does what a new python does with a script, and ends the process as python does."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    script = os.path.abspath(arguments[0])
    sys.argv = [*arguments]
    sys.path[:] = [os.path.dirname(script), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
