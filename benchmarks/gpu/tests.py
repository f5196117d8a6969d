"""Tests of the repository with ``SFUMATO_TEST_DEVICE``: whole runs, resuming, kernels; a process for each file."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import Any

from benchmarks.gpu.cells import Bound, Cell, NotHereError, Setting
from benchmarks.gpu.results import ROOT

ON_DEVICE = (
    "tests/unit/test_save_async.py",
    "tests/unit/test_muon.py",
    "tests/unit/test_memory.py",
    "tests/unit/test_compiled_families.py",
    "tests/unit/test_adamw8bit.py",
    "tests/e2e/test_train_dit.py",
    "tests/e2e/test_train_text.py",
    "tests/e2e/test_train_dit_dpo.py",
    "tests/e2e/test_separate_roles.py",
    "tests/faults/test_resume.py",
)
"""Cheapest first."""
TINY = {"tests/unit/test_save_async.py": "-k=test_a_save_that_is_asked_for"}
"""What --tiny runs: whether the stage works; the tests themselves have their own run."""

BOUNDS = (Bound("passed", 1, "no test of this file ran: log.txt says why", least=True),)
"""A test that fails fails its cell."""


def cells(setting: Setting) -> dict[str, Cell]:
    chosen = TINY if setting.tiny else ON_DEVICE
    return {path: lambda cell_setting, path=path: run_tests(cell_setting, path) for path in chosen}


def run_tests(setting: Setting, path: str) -> dict[str, Any]:
    """How many pass; raises with the names of those that fail."""
    try:
        import pytest  # noqa: F401
    except ImportError as error:
        raise NotHereError("pytest is not installed") from error
    limit = setting.left_s - 5
    marks = "not slow" if setting.tiny else "slow or not slow"
    options = ["-p", "no:cacheprovider", "-m", marks, "-rf", "--tb=short", "--maxfail=3"]
    if setting.tiny:
        options.append(TINY[path])
    command = [sys.executable, "-m", "pytest", path, *options, f"--basetemp={setting.scratch / 'pytest'}"]
    environment = {**os.environ, "SFUMATO_TEST_DEVICE": setting.device, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=max(limit, 5))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        print(output, flush=True)
        raise TimeoutError(f"not done in {limit:.0f} s: {output[-300:]}") from None
    print(output, flush=True)
    counts = {
        name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|error|skipped)", output.splitlines()[-1])
    }
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    assert process.returncode == 0, f"{counts}: {', '.join(failed)}"
    return counts
