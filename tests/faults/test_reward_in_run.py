"""What a failing reward does to a run of the real task."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from sfumato.errors import RewardError
from sfumato.tracking.atomic_folders import list_checkpoints
from sfumato.tracking.json_lines import read_jsonl
from tests.tiny import run_task_here, tiny_rl_config

REWARD = """
import math, time
from dataclasses import dataclass
from typing import ClassVar
from sfumato.rewards.base import Reward

CALLS = []

@dataclass(frozen=True, kw_only=True)
class Flaky(Reward):
    type: ClassVar[str] = "flaky"
    fail_from_call: int = 0
    how: str = "nan"

    def score(self, samples):
        CALLS.append(len(samples))
        values = [float(sample.image.mean()) for sample in samples]
        if len(CALLS) <= self.fail_from_call:
            return values
        if self.how == "raise":
            raise ConnectionError("the reward server is down")
        if self.how == "hang":
            time.sleep(60)
        return [math.nan if index % 4 == 1 else value for index, value in enumerate(values)]
"""


@pytest.fixture
def flaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A reward of one's own, named by import path."""
    name = f"flaky_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(REWARD))
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda **fields: {"type": f"{name}:Flaky", **fields}


def test_samples_without_a_reward_are_left_out_and_counted(tmp_path: Path, flaky) -> None:
    config = tiny_rl_config(tmp_path, reward={"rewards": [flaky(how="nan")]}, train={"max_steps": 2})
    folder = run_task_here("rl_diffusion", config)
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if "reward/failed" in line]
    assert [line["reward/failed"] for line in lines] == [0.25, 0.25]
    assert all(line["rows"] == 12 * 2 for line in lines), "12 of 16 samples x 2 trained steps"
    assert "flaky: returned NaN" in (folder / "log.txt").read_text()


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_an_outage_stops_the_run_after_saving_what_is_finished(tmp_path: Path, flaky, how: str) -> None:
    # the evaluation before training is one call, an iteration two: iterations 1 and 2 succeed
    reward = flaky(how=how, fail_from_call=5, timeout_s=0.5)
    config = tiny_rl_config(tmp_path, reward={"rewards": [reward]}, eval={"every_steps": 100})
    reason = "the reward server is down" if how == "raise" else r"timed out after 0\.5 s"
    with pytest.raises(RewardError, match=f"16 of 16 samples.*{reason}"):
        run_task_here("rl_diffusion", config)
    assert list(list_checkpoints(tmp_path / "run" / "checkpoints")) == [2]
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 2


def test_a_watched_reward_that_fails_stops_nothing(tmp_path: Path, flaky) -> None:
    rewards = [{"type": "brightness"}, flaky(how="raise", evaluation_only=True)]
    config = tiny_rl_config(tmp_path, reward={"rewards": rewards}, train={"max_steps": 2}, eval={"every_steps": 2})
    folder = run_task_here("rl_diffusion", config)
    lines = read_jsonl(folder / "metrics.jsonl")
    assert lines[-1]["step"] == 2
    assert lines[-1]["eval/reward/flaky"] is None, "NaN, not 0"
    assert lines[-1]["eval/reward/brightness"] > 0
    assert "reward/flaky" not in lines[-1], "it is not scored in training"
    said = [line for line in (folder / "log.txt").read_text().splitlines() if "reward server is down" in line]
    for step, line in zip((0, 2), said, strict=True):
        assert line.startswith(f"evaluation at step {step}: reward failed: flaky (evaluation only): Connection")
