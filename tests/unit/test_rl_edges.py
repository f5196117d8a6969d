"""Rewards beyond what statistics can be made of, and iterations of RL that learn nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from sfumato.algorithms.advantages import GDPO, BestWorst, GroupAdvantage, LeaveOneOut
from sfumato.errors import ConfigError, RewardError
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.scoring.calls import LARGEST, check_values
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.tracking.idle import REMEDIES, IdleIterations, idle_summary, why_idle
from sfumato.tracking.json_lines import read_jsonl, series_of
from tests.tiny import run_task_here, tiny_rl_config, tiny_text_rl_config


@dataclass(frozen=True, kw_only=True)
class Fixed(Reward):
    """The same value, or the values of a list in turn."""

    type: ClassVar[str] = "fixed"

    values: Any = 1.0

    def score(self, samples: list[Sample]) -> list[float]:
        values = self.values if isinstance(self.values, list) else [self.values]
        return [values[index % len(values)] for index in range(len(samples))]


def samples(count: int) -> list[Sample]:
    return [Sample(prompt="p", text=f"{number}", group_id=number // 4) for number in range(count)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1e200, f"returned 1e+200, more than the {LARGEST:g}"),
        (-1e308, "returned -1e+308, more than"),
        (1.1 * LARGEST, "more than"),
        (math.inf, "returned an infinite value"),
        (-math.inf, "returned an infinite value"),
        (math.nan, "returned NaN"),
        (10**400, "returned an infinite value"),
        (10**40, "more than"),
        (np.float32(3e38), "more than"),
        (torch.tensor(1e35), "more than"),
        ("0.5", "returned a str, not a number"),
        (Decimal("0.5"), "returned a Decimal, not a number"),
        (1j, "returned a complex, not a number"),
        (None, "returned a NoneType, not a number"),
    ],
)
def test_values_without_a_scale_are_failures_with_their_reason(value: Any, expected: str) -> None:
    ((number, reason),) = check_values([value], 1)
    assert math.isnan(number) and expected in reason


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (np.bool_(False), 0.0),
        (np.int64(3), 3.0),
        (np.float16(0.5), 0.5),
        (Fraction(1, 2), 0.5),
        (torch.tensor(2), 2.0),
        (5e-324, 5e-324),
        (-0.0, 0.0),
        (LARGEST, LARGEST),
        (-LARGEST, -LARGEST),
        (2**62, 2.0**62),
    ],
)
def test_values_that_are_numbers_are_taken(value: Any, expected: float) -> None:
    assert check_values([value], 1) == [(expected, "")]


def test_a_huge_reward_stops_the_run_with_its_name_and_not_with_advantages_of_zero() -> None:
    scorer = Scorer(
        [Fixed(name="broken", values=1e200), Fixed(name="sound", values=[0.0, 1.0])], max_failed_fraction=0.5
    )
    scores = scorer.score(samples(8))
    assert np.isnan(scores.total).all()
    with pytest.raises(RewardError, match=r"8 of 8 samples have no reward.*broken: returned 1e\+200"):
        scorer.check_budget(scores)
    mixed = Scorer([Fixed(name="mixed", values=[1e200, 0.0, 1.0, 0.5])]).score(samples(8))
    values = GroupAdvantage().compute(torch.tensor(mixed.total), torch.tensor([0] * 4 + [1] * 4))
    assert values.failed.tolist() == [True, False, False, False] * 2
    assert values.values[1] < values.values[3] < values.values[2], "the others of the group are compared"
    weighted = Scorer([Fixed(name="heavy", values=1e29, weight=1e6)]).score(samples(4))
    assert "combination: weighted_sum returned more than 1e+30 (4 of 4 samples)" in weighted.failures


@pytest.mark.parametrize("advantage", [GroupAdvantage(), GroupAdvantage(std="global"), LeaveOneOut(), BestWorst()])
def test_advantages_of_large_and_tiny_rewards_are_those_of_their_ranks(advantage: Any) -> None:
    group = torch.zeros(4, dtype=torch.long)
    large = torch.tensor([-LARGEST, 0.0, 1.0, LARGEST], dtype=torch.float64)
    result = advantage.compute(large, group)
    assert torch.isfinite(result.values).all()
    assert result.values[0] < 0 < result.values[3] and not result.no_spread.any()
    tiny = advantage.compute(torch.tensor([0.0, 0.0, 0.0, 5e-324], dtype=torch.float64), group)
    assert torch.isfinite(tiny.values).all()
    with pytest.raises(ValueError, match=r"a reward is 1e\+200 in magnitude"):
        advantage.compute(torch.tensor([1e200, 0.0, 1.0, 2.0], dtype=torch.float64), group)


def test_gdpo_refuses_a_huge_reward_too() -> None:
    rewards, group = torch.tensor([1e200, 0.0], dtype=torch.float64), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="in magnitude"):
        GDPO().compute(rewards, group, {"a": rewards}, {"a": 1.0})


def test_a_reward_below_zero_is_no_weight_of_an_error(tmp_path: Path) -> None:
    reward = {"rewards": [{"type": "tests.unit.test_rl_edges:Fixed", "values": [0.5, -0.25, 1.0, 2.0]}]}
    config = tiny_rl_config(tmp_path, train={"max_steps": 1}, reward=reward)
    with pytest.raises(ConfigError, match=r"rwr .* one is -0\.25: set algorithm\.objective\.temperature"):
        run_task_here("rl_diffusion_forward", {**config, "algorithm": {"recipe": "rwr"}})


ACTIVE = {"updates": 2.0, "grad_norm": 0.1, "lr": 1e-4, "advantage/groups_without_spread": 0.5}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"updates": 0.0, "grad_norm": 0.0, "advantage/groups_without_spread": 1.0}, "no group has samples"),
        ({"updates": 0.0, "grad_norm": 0.0}, "no sample could be learned from"),
        ({"grad_norm": 0.0}, "the gradient is zero"),
        ({"lr": 0.0}, "the learning rate is zero"),
    ],
)
def test_why_an_iteration_learned_nothing(changes: dict[str, float], why: str) -> None:
    result = why_idle({**ACTIVE, **changes})
    assert result.startswith(why) and bool(result) == bool(why)
    assert not result or result in REMEDIES


def test_iterations_in_a_row_are_said_at_each_doubling() -> None:
    idle, nothing = IdleIterations(), {**ACTIVE, "updates": 0.0}
    said = [idle.note(step, nothing) for step in range(1, 9)]
    assert [bool(text) for text in said] == [True, True, False, True, False, False, False, True]
    assert said[0].startswith("step 1: nothing was learned: no sample") and "the last 8 of them" in said[7]
    assert idle.note(9, ACTIVE) == "" and idle.note(10, nothing)
    assert idle.note(11, {"loss": 1.0}) == "", "other tasks have no such iterations"


def test_the_end_says_it_of_half_of_the_iterations_or_more() -> None:
    def summary(num_idle: int) -> str:
        lines = [{"step": step + 1, **ACTIVE, "updates": float(step >= num_idle)} for step in range(4)]
        return idle_summary(series_of(lines))

    assert summary(0) == summary(1) == idle_summary({}) == ""
    assert summary(2).startswith("2 of 4 iterations learned nothing")
    assert summary(4).startswith("none of the 4 iterations learned anything, so the weights are those that the run")


@pytest.mark.parametrize("task", ["rl_diffusion", "rl_diffusion_forward", "rl_text"])
def test_a_run_that_learned_nothing_does_not_end_as_if_it_had(task: str, tmp_path: Path) -> None:
    reward = {"rewards": [{"type": "tests.unit.test_rl_edges:Fixed"}]}
    if task == "rl_text":
        config = tiny_text_rl_config(tmp_path, train={"max_steps": 2})
    else:
        config = tiny_rl_config(tmp_path, train={"max_steps": 2}, rollout={"num_prompts": 2})
    if task == "rl_diffusion_forward":
        config["algorithm"] = {"recipe": "diffusion_nft"}
    run = run_task_here(task, {**config, "reward": reward}, with_report=True)
    assert [line["updates"] for line in read_jsonl(run / "metrics.jsonl") if line["step"]] == [0.0, 0.0]
    log, report = (run / "log.txt").read_text(), (run / "report.html").read_text()
    assert "step 1: nothing was learned: no group has samples of different rewards" in log
    assert "none of the 2 iterations learned anything" in log.splitlines()[-1]
    assert "Nothing learned" in report and "none of the 2 iterations" in report
