"""Runs tests against a broken copy of the project, in forks of a process that has imported what takes long."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

MARK = "SFUMATO_MUTATION"
"""Environment variable of all processes of a trial."""
PRELOADED = (
    "pytest",
    "numpy",
    "torch",
    "torch.distributed.checkpoint",
    "transformers",
    "diffusers",
    "peft",
    "pydantic",
)


def copy_project(root: Path, folder: Path) -> Path:
    """A copy of what git knows, and of new files that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=root, capture_output=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.decode().split("\0"):
        if name and (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)
    return folder


def preload() -> None:
    """Imports what every trial needs, so that forks have it. Nothing of the project itself."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    sys.dont_write_bytecode = True
    for name in PRELOADED:
        __import__(name)
    import torch

    torch.set_num_threads(1)


def run_tests(project: Path, tests: list[str], timeout_s: float, log: Path) -> str:
    """``passed``, ``failed`` or ``hangs``: the tests of a copy of the project, up to the first that fails.

    Raises:
        RuntimeError: when pytest could not run them, or one of them is not there.
    """
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    selection = log.with_suffix(".tests")
    selection.write_text("\n".join(tests), encoding="utf-8")
    child = os.fork()
    if child == 0:
        _child(project, selection, log, mark)
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                if code == 4 and "ERROR collecting" in log.read_text(errors="replace"):
                    return "failed"  # a module that cannot be imported any more
                if code in (3, 4, 5, 70):
                    raise RuntimeError(f"pytest ended with {code}: {log.read_text(errors='replace')[-2000:]}")
                return "passed" if code == 0 else "failed"
            time.sleep(0.05)
        return "hangs"
    finally:
        _end(mark, child)


def _child(project: Path, selection: Path, log: Path, mark: str) -> None:
    code = 70
    try:
        os.setsid()
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(project)
        os.environ |= {"PYTHONPATH": str(project), MARK: mark}
        sys.path[:] = [str(project), *(path for path in sys.path if path not in ("", os.getcwd()))]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "sfumato", "tasks")]:
            del sys.modules[name]
        import pytest

        quiet = ["-x", "-q", "-m", "", "-p", "no:cacheprovider", "--tb=line", "--rootdir", str(project)]
        code = int(pytest.main([*quiet, f"@{selection}"]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _end(mark: str, session: int) -> None:
    """Kills every process of a trial that is left: those of its session, and those with its mark."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session or process.environ().get(MARK) == mark:
                process.kill()
        except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            continue
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return
