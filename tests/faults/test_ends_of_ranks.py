"""How runs of two ranks end, started as a user does: exit code, what is said, what is saved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sfumato.tracking.atomic_folders import list_checkpoints
from sfumato.tracking.json_lines import read_jsonl
from tests.tiny import ROOT, tiny_dit_config, write_config

RESUME = "to go on, add --train.load_checkpoint_path auto"
NEXT_STEPS = ("to go on: ", "to go on from what was saved last: ", "to start it again: ")


class TwoRanks:
    """A run of ``faulty_rank_task.py``."""

    def __init__(self, folder: Path, faults: list[list[Any]], **train: Any) -> None:
        self.folder = folder
        config = tiny_dit_config(folder, train={"max_steps": 4, "micro_batch_size": 1, "save_steps": 1, **train})
        path = write_config(config, folder / "run.yaml")
        self.in_step = folder / "in_step"
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHON": sys.executable,
            "NPROC_PER_NODE": "2",
            "OMP_NUM_THREADS": "1",
            "FAULTS": json.dumps(faults),
            "IN_STEP": str(self.in_step),
        }
        self.command = ["bash", "train.sh", "tests/faults/faulty_rank_task.py", str(path)]
        self.log = (folder / "output").open("w+")
        self.next_steps: list[str] = []
        self.process = subprocess.Popen(
            self.command, cwd=ROOT, env=self.environment, stdout=self.log, stderr=subprocess.STDOUT
        )

    def wait_for_the_step(self) -> None:
        """Until a rank is in the step that takes long."""
        deadline = time.monotonic() + 120
        while not self.in_step.exists():
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

    def end(self) -> tuple[int, list[str]]:
        """Exit code, and what was said of the end: neither progress nor what libraries say when they are loaded."""
        code = self.process.wait(timeout=150)
        self.log.seek(0)
        lines = [line for line in self.log.read().splitlines() if not line.startswith("train_dit  ")]
        begins = [index for index, line in enumerate(lines) if line.startswith(("error:", "stopped", "rank ", "Trace"))]
        assert begins, lines
        self.next_steps = [line for line in lines if line.startswith(NEXT_STEPS)]
        return code, [line for line in lines[begins[0] :] if line not in self.next_steps]

    @property
    def saved(self) -> list[int]:
        """Steps of the checkpoints."""
        return list(list_checkpoints(self.folder / "run" / "checkpoints"))


@pytest.mark.slow
def test_an_error_on_one_rank_is_one_line_and_its_code(tmp_path):
    run = TwoRanks(tmp_path, [[1, 3, 4]])
    assert run.end() == (4, ["rank 1: stopped: a loss is not finite"])
    assert run.saved == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[0], [0, 1]])
@pytest.mark.parametrize(
    ("code", "text"),
    [
        (2, "error: the data is wrong"),
        (5, "stopped: rewards fail"),
        (6, "stopped: replay and rollout disagree"),
        (7, "stopped: weights were not sent"),
        (130, "stopped at once"),
    ],
)
def test_every_code_comes_through(tmp_path, code, text, ranks):
    assert TwoRanks(tmp_path, [[rank, 1, code] for rank in ranks]).end() == (code, [text])


@pytest.mark.slow
def test_a_step_that_takes_long_is_finished_and_saved(tmp_path):
    run = TwoRanks(tmp_path, [[0, 3, "long"]], save_steps=0)
    run.wait_for_the_step()
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == (143, ["stopped by signal after step 3; the state is saved"])
    assert run.next_steps == [f"to go on: {' '.join(run.command)} --train.load_checkpoint_path auto"]
    assert run.saved == [3]


@pytest.mark.slow
def test_a_second_interrupt_stops_at_once(tmp_path):
    run = TwoRanks(tmp_path, [[0, 3, "long"]], save_steps=0)
    run.wait_for_the_step()
    for _ in range(2):
        run.process.send_signal(signal.SIGINT)
        time.sleep(1)
    assert run.end() == (130, ["stopped at once"])
    assert run.saved == []


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(tmp_path):
    code, said = TwoRanks(tmp_path, [[1, 3, "killed"]]).end()
    assert code == 8 and len(said) == 1
    assert said[0].startswith("stopped: rank 1 was ended by SIGKILL") and said[0].endswith(RESUME)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_with_the_stacks_of_all(tmp_path):
    run = TwoRanks(tmp_path, [[1, 3, "hang"]], timeout_s=15)
    started = time.monotonic()
    code, said = run.end()
    assert code == 8 and time.monotonic() - started < 100
    assert said[0].startswith("stopped: rank 0 has waited for another rank for longer than train.timeout_s allows")
    assert said[0].endswith("; rank 1 did not answer")
    text = "\n".join(said)
    waiting, hanging = text.split("stacks of rank 1:")
    assert "stacks of rank 0:" in waiting and "in main" in waiting
    assert "in deadlock" in hanging
    assert text in (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert run.saved == [1, 2] and read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 2
