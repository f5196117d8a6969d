"""The real task with rewards in processes: the same results, what it measures, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from sfumato.rewards.scoring.workers import close_workers
from sfumato.tracking.json_lines import read_jsonl
from tests.tiny import run_task_here, run_task_process, tiny_rl_config, weights_in, write_config

FUNCTION = """
def shade(sample):
    return float(sample.image.mean()) / 255
def combine(values, metadata):
    assert all(len(row["target"]) == 2 for row in metadata)
    return 2 * values["shade"] + values["sharpness"]
"""


def config(tmp_path: Path, process: bool, **reward) -> dict:
    (tmp_path / "own.py").write_text(FUNCTION)
    rewards = [
        {"type": "function", "path": f"{tmp_path}/own.py:shade", "process": process, "normalise": "group"},
        {"type": "sharpness", "process": process, "normalise": [0.0, 0.5]},
        {"type": "jpeg_compressibility", "evaluation_only": True},
    ]
    train = {"output_dir": str(tmp_path / f"run_{process}"), "max_steps": 2}
    reward = {"rewards": rewards, **reward}
    return tiny_rl_config(
        tmp_path, reward=reward, train=train, rollout={"micro_batch_size": 4}, eval={"every_steps": 2}
    )


def children() -> set[str]:
    """Processes below this one."""
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


@pytest.mark.slow
def test_processes_change_no_bit_and_what_scoring_took_is_measured(tmp_path: Path) -> None:
    close_workers()
    before = children()
    combination = {"type": "function", "path": f"{tmp_path}/own.py:combine"}
    threads = run_task_here("rl_diffusion", config(tmp_path, False, combination=combination))
    processes = run_task_here(
        "rl_diffusion", config(tmp_path, True, combination=combination, num_workers=2, max_pending=1, cache_size=0)
    )
    assert (threads / "metrics.jsonl").read_bytes() == (processes / "metrics.jsonl").read_bytes()
    assert weights_in(threads / "hf_ckpt") == weights_in(processes / "hf_ckpt")
    assert children() <= before, "the workers end with the run"
    lines = read_jsonl(threads / "metrics.jsonl")
    assert lines[1]["reward/total"] == pytest.approx(2 * lines[1]["reward/shade"] + 2 * lines[1]["reward/sharpness"])
    assert lines[1]["reward_failed/shade"] == 0 and lines[1]["reward_std/shade"] > 0
    assert "reward/jpeg_compressibility" not in lines[1] and "eval/reward_std/jpeg_compressibility" in lines[2]
    timings = read_jsonl(threads / "timings.jsonl")[1]
    scoring_s = timings["time/reward_shade_s"] + timings["time/reward_sharpness_s"]
    assert timings["time/scoring_s"] == pytest.approx(scoring_s) and scoring_s > 0
    assert timings["scoring/hidden_share"] <= 1 and timings["scoring/remembered_share_shade"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_worker(tmp_path: Path, number: signal.Signals) -> None:
    settings = config(tmp_path, True)
    settings["train"]["max_steps"] = 500
    path = write_config(settings, tmp_path / "run.yaml")
    result = run_task_process("rl_diffusion", path, kill_after=2, kill_signal=number, env={"RUN": str(tmp_path)})
    assert result.returncode == (143 if number == signal.SIGTERM else -9)
    deadline = time.monotonic() + 20
    while workers := [path for path in Path("/proc").glob("[0-9]*/cmdline") if _is_worker(path, tmp_path)]:
        assert time.monotonic() < deadline, workers
        time.sleep(0.05)


def _is_worker(command: Path, folder: Path) -> bool:
    """Whether that process is a worker of that folder's run, or the guard of one."""
    try:
        return "worker_process" in command.read_text() and str(folder) in command.with_name("environ").read_text()
    except (OSError, UnicodeDecodeError):
        return False
