"""Functions that misbehave: each costs its own sample, is named and counted, and is gone afterwards."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sfumato.errors import ConfigError
from sfumato.rewards.base import Sample
from sfumato.rewards.function import FunctionReward
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.rewards.scoring.scores import Scores
from sfumato.rewards.scoring.workers import close_workers
from tests.tiny import ROOT

FILE = Path(__file__).parent / "faulty_functions.py"
PROMPTS = ("good", "bad", "good", "good")


@pytest.fixture(autouse=True)
def _no_worker_is_left():
    yield
    close_workers()


def function(name: str, **fields) -> FunctionReward:
    return FunctionReward(path=f"{FILE}:{name}", **fields)


def samples(prompts=PROMPTS, **metadata) -> list[Sample]:
    image = np.zeros((4, 4, 3), np.uint8)
    return [Sample(image=image, prompt=prompt, metadata=metadata, group_id=0) for prompt in prompts]


def score(name: str, prompts=PROMPTS, **fields) -> Scores:
    scores = Scorer([function(name, **fields)]).score(samples(prompts))
    assert scores.metrics("")["reward/failed"] == np.isnan(scores.total).mean()
    return scores


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"processes {running} survive"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("sleep_on", {"timeout_s": 1.5}, "timed out after 1.5 s"),
        ("compute_on", {"timeout_s": 1.5}, "timed out after 1.5 s"),
        ("ignore_signals", {"timeout_s": 1.5}, "timed out after 1.5 s"),
        ("crash", {}, "its process was ended by SIGSEGV"),
        ("leave", {}, "its process ended itself with exit code 3"),
        ("leave_politely", {}, f"SystemExit: enough (at {FILE}:"),
        ("leak", {"memory_mib": 1024}, "MemoryError"),
        ("return_garbage", {}, "returned a dict, not a number"),
        ("return_nan", {}, "returned NaN"),
        ("return_nothing", {}, "returned a NoneType, not a number"),
        ("raise_wordlessly", {}, f"WordlessError (at {FILE}:"),
        ("sleep_asynchronously", {"timeout_s": 1.5, "concurrency": 4}, "timed out after 1.5 s"),
        ("sleep_asynchronously", {"timeout_s": 1.5}, "timed out after 1.5 s"),
        ("raise_asynchronously", {"concurrency": 2}, f"ConnectionError: no judge there (at {FILE}:"),
    ],
)  # fmt: skip
def test_a_failure_costs_one_sample_and_is_named(name: str, fields: dict, reason: str) -> None:
    scores = score(name, **fields)
    np.testing.assert_array_equal(scores.total, [1, math.nan, 1, 1])
    (message,) = scores.failures
    assert message.startswith(f"{name}: {reason}") and message.endswith("(1 of 4 samples)")


def test_what_is_written_into_the_pipes_is_no_value() -> None:
    scores = score("write_into_its_pipes")
    assert scores.total[0] == 1 and scores.total[2:].tolist() == [1, 1]
    assert math.isnan(scores.total[1]), "99 stood in the pipe"
    assert "answered with something that is no list of values" in scores.failures[0]


def test_a_coroutine_that_blocks_is_ended_with_those_that_run_beside_it() -> None:
    scores = score("block_the_loop", timeout_s=1.0, concurrency=4)
    assert np.isnan(scores.total).all()
    assert scores.failures == ["block_the_loop: timed out after 2 s (4 of 4 samples)"]
    assert score("block_the_loop", ("good", "good"), timeout_s=1.0, concurrency=4).total.tolist() == [1, 1]


def test_a_group_of_which_the_number_of_values_is_wrong_is_lost_alone() -> None:
    scorer = Scorer([function("wrong_number", groupwise=True)])
    image = np.zeros((4, 4, 3), np.uint8)
    mixed = [Sample(image=image, prompt=p, group_id=g) for p, g in (("good", 0), ("bad", 1), ("good", 0), ("good", 1))]
    scores = scorer.score(mixed)
    np.testing.assert_array_equal(scores.total, [1, math.nan, 1, math.nan])
    assert scores.failures == ["wrong_number: returned 3 values for 2 samples (2 of 4 samples)"]


def test_after_two_lost_processes_in_a_row_the_rest_is_not_tried() -> None:
    scores = score("always_crash", [f"prompt {number}" for number in range(50)])
    assert np.isnan(scores.total).all()
    assert scores.failures == ["always_crash: its process was ended by SIGKILL (50 of 50 samples)"]


def test_what_a_function_prints_leaves_stdout_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert score("talk").total.tolist() == [1, 1, 1, 1]
    close_workers()
    captured = capfd.readouterr()
    assert captured.out == "" and "a lot of words" in captured.err


def test_a_timeout_ends_what_the_function_started(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    scores = Scorer([function("start_children", timeout_s=1.5)]).score(samples(file=str(file)))
    np.testing.assert_array_equal(scores.total, [1, math.nan, 1, 1])
    pids = [int(pid) for pid in file.read_text().split()]
    assert len(pids) == 3
    wait_until_gone(pids)


def test_a_package_that_is_missing_in_the_function_is_a_failure_and_in_the_module_a_mistake(tmp_path: Path) -> None:
    assert "No module named 'a_package_that_nobody_has'" in score("needs_a_package").failures[0]
    (tmp_path / "own.py").write_text("import a_package_that_nobody_has\ndef score(sample): return 1.0\n")
    reward = FunctionReward(path=f"{tmp_path}/own.py:score")
    with pytest.raises(ConfigError, match=r"reward 'score': cannot import .*own.py:score.*a_package_that_nobody_has"):
        Scorer([reward]).prepare()


PARENT = """
import sys, threading, time
import numpy as np
from sfumato.rewards.base import Sample
from sfumato.rewards.function import FunctionReward
from sfumato.rewards.scoring.scorer import Scorer

scorer = Scorer([FunctionReward(path=f"{sys.argv[1]}:start_children")])
bad = Sample(image=np.zeros((4, 4, 3), np.uint8), prompt="bad", metadata={"file": sys.argv[2]}, group_id=0)
threading.Thread(target=scorer.score, args=([bad],), daemon=True).start()
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_the_process_that_started_it(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "pids"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(FILE), str(file)], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        deadline = time.monotonic() + 60
        while not (file.exists() and len(file.read_text().split()) == 3):
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.02)
        pids = [int(pid) for pid in file.read_text().split()]
        assert all(map(is_running, pids))
        parent.send_signal(number)
        assert parent.wait(30) == -number
        wait_until_gone(pids)
    finally:
        parent.kill()
