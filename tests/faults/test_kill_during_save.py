"""SIGKILL while checkpoints are written and pruned: what is there verifies, and at most one save is lost."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sfumato.tracking.atomic_folders import list_checkpoints, newest_intact, prune_checkpoints, verify_checkpoint
from tests.tiny import ROOT

TRIALS = 30

WRITER = """
import os, sys
from pathlib import Path
from sfumato.tracking.atomic_folders import begin_checkpoint, finish_checkpoint, list_files, prune_checkpoints

root, log, step = Path(sys.argv[1]), os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT), int(sys.argv[3])

while True:
    step += 1
    os.write(log, b"begin %d\\n" % step)
    building = begin_checkpoint(root, step)
    for name in ("model", "optimizer", "ema"):
        (building / name).write_bytes(step.to_bytes(4, "big") * (1 << 18))
    finish_checkpoint(building, list_files(building, building.iterdir()))
    os.write(log, b"written %d\\n" % step)
    prune_checkpoints(root, 2, step)
"""


def test_a_checkpoint_survives_sigkill_at_any_time(tmp_path):
    root, log, rng = tmp_path / "checkpoints", tmp_path / "log", random.Random(0)
    last, leftovers, kills_during_save = 0, 0, 0
    for _ in range(TRIALS):
        log.write_bytes(b"")
        writer = start(root, log, last)
        wait_for_line(log, writer)
        time.sleep(rng.uniform(0, 0.15))
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL

        events = [line.split() for line in log.read_text(encoding="utf-8").splitlines()]
        begun = max((int(step) for what, step in events if what == "begin"), default=last)
        written = max((int(step) for what, step in events if what == "written"), default=last)
        assert begun - written in (0, 1)
        result = newest_intact(list_checkpoints(root), pytest.fail)  # no finished checkpoint is ever damaged
        for folder in list_checkpoints(root).values():
            verify_checkpoint(folder)
        if result is None:
            assert written == 0
            continue
        last = result[0]
        assert written <= last <= begun
        assert (result[1] / "ema").read_bytes() == last.to_bytes(4, "big") * (1 << 18)
        leftovers += any(path.suffix == ".tmp" for path in root.iterdir())
        kills_during_save += begun > written
    assert last > TRIALS // 5, "the writer came to nothing"
    assert kills_during_save >= 3, "the kills missed the saves, so this test shows nothing"
    assert leftovers >= 3

    prune_checkpoints(root, 1, last)
    assert [path.name for path in root.iterdir()] == [f"global_step_{last}"]


def start(root: Path, log: Path, step: int) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-S", "-c", WRITER, str(root), str(log), str(step)]  # -S: a quick start
    return subprocess.Popen(command, env=environment)


def wait_for_line(log: Path, writer: subprocess.Popen) -> None:
    deadline = time.monotonic() + 30
    while not log.stat().st_size:
        assert writer.poll() is None and time.monotonic() < deadline, "the writer did not start"
        time.sleep(0.002)
