"""Runs a task with hostile overrides up to its first step, in a process forked from this one."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from sfumato.config.base import Section
from sfumato.tracking.task import run_task

LIMIT_CPU_S = 10.0
"""Processor time after which a process that has neither ended nor begun to work hangs."""

WORK_CPU_S = 60.0
"""The same for one that has evaluated, but not made a step: rewards may take long."""

LIMIT_WALL_S = 120.0
"""The same in time that passes, for one that waits."""

LIMIT_BYTES = 2 * 2**30
"""Memory that a process may take on top of what it was forked with."""


@dataclass
class Ending:
    """How a run ended."""

    code: int | None
    """Exit code; None when it was ended after its first step, or at work that shows how long it will take."""
    log: str
    cpu_s: float
    grown_bytes: int

    @property
    def problem(self) -> str | None:
        """What is wrong with it, if anything."""
        if "Traceback" in self.log:
            return "a traceback"
        if self.code is not None and self.code < 0:
            return f"ended by signal {-self.code}"
        if self.code not in (None, 0, 2, 3, 4, 5, 6):
            return f"exit code {self.code}"
        if self.grown_bytes > LIMIT_BYTES:
            return f"{self.grown_bytes / 2**30:.1f} GiB more memory"
        if self.code == 2 and not [line for line in self.log.splitlines() if line.startswith("error: ")]:
            return "no message"
        return None


def run_hostile(task: ModuleType, schema: type[Section], arguments: list[str], folder: Path) -> Ending:
    """Runs a task in a fork.

    Args:
        task: the module.
        schema: of its configuration.
        arguments: the YAML file and overrides.
        folder: an empty folder, where the run starts and, without an override, writes to ``run``.
    """
    log, metrics = folder / "log", folder / "run" / "metrics.jsonl"
    sys.stdout.flush()
    before = _resident(os.getpid())
    if (child := os.fork()) == 0:
        try:
            _become(folder, log)
            sys.argv = ["task.py", *arguments]
            run_task(task.main, schema)
            os._exit(0)
        finally:
            os._exit(1)
    deadline, made_step, most = time.monotonic() + LIMIT_WALL_S, False, 0
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            break
        written = metrics.read_bytes() if metrics.is_file() else b""
        made_step, limit_cpu_s = (
            re.search(rb'"step": 1[,}]', written) is not None,
            WORK_CPU_S if written else LIMIT_CPU_S,
        )
        most = max(most, _resident(child))
        if made_step or most - before > LIMIT_BYTES or _cpu_s(child) > limit_cpu_s or time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            _, status, usage = os.wait4(child, 0)
            break
        time.sleep(0.02)
    text = log.read_text(errors="replace")
    is_at_work = bool(done == 0 and most - before <= LIMIT_BYTES and re.search(r"step \d+/\d+ .*eta", text))
    code = None if made_step or is_at_work else os.waitstatus_to_exitcode(status)
    ending = Ending(code, text, usage.ru_utime + usage.ru_stime, most - before)
    shutil.rmtree(folder, ignore_errors=True)
    return ending


def _become(folder: Path, log: Path) -> None:
    """Makes this process one that writes to a log and cannot fill the machine."""
    os.chdir(folder)
    os.environ["HOME"] = str(folder / "home")
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)  # not those of pytest
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, 2**30))


def _resident(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # it has just ended
        return 0


def _cpu_s(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
