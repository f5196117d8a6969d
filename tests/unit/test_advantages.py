"""Advantages with gaps, against their formulas: what is missing counts nowhere, what cannot teach is marked."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sfumato.algorithms.advantages import GDPO, Advantages, Best, BestWorst, GroupAdvantage, LeaveOneOut, RawReward

NAN = float("nan")
ALL = [GroupAdvantage(), LeaveOneOut(), GDPO(), BestWorst(), BestWorst(values="group"), Best(), RawReward()]


def of(advantage: object, rewards: list[float], groups: list[int]) -> Advantages:
    values = torch.tensor(rewards, dtype=torch.float64)
    return advantage.compute(values, torch.tensor(groups), {"only": values}, {"only": 1.0})


def compute(rewards: list[float], groups: list[int], **settings: object):
    advantage = GroupAdvantage(**settings)
    return advantage.compute(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))


def test_advantages_are_standardised_within_groups() -> None:
    result = compute([1, 2, 3, 10, 30], [7, 7, 7, 2, 2], clip=100)
    expected = [(value - 2) / (np.std([1, 2, 3]) + 1e-4) for value in (1, 2, 3)]
    expected += [(value - 20) / (10 + 1e-4) for value in (10, 30)]
    assert result.values.tolist() == pytest.approx(expected, rel=1e-6)
    assert not result.no_spread.any() and not result.failed.any()


def test_a_missing_reward_leaves_its_group_and_teaches_nothing() -> None:
    gap = compute([1, NAN, 3, 5, 6], [0, 0, 0, 1, 1])
    without = compute([1, 3, 5, 6], [0, 0, 1, 1])
    assert gap.failed.tolist() == [False, True, False, False, False]
    assert gap.values[1] == 0
    assert torch.equal(gap.values[[0, 2, 3, 4]], without.values)
    assert gap.useful(keep_no_spread=True).tolist() == [True, False, True, True, True]


def test_groups_without_spread_are_marked() -> None:
    result = compute([0.3, 0.3, 0.1 + 0.2, 1, 2, 5, NAN, NAN, NAN], [0, 0, 0, 1, 1, 2, 2, 3, 3])
    assert result.no_spread.tolist() == [True] * 3 + [False] * 2 + [True] * 4
    assert result.values[result.no_spread].tolist() == [0] * 7
    assert result.useful(keep_no_spread=False).tolist() == [False] * 3 + [True] * 2 + [False] * 4
    assert result.metrics["advantage/groups_without_spread"] == 0.75
    assert compute([0.1 + 0.2 - 0.3, 0], [0, 0]).no_spread.all(), "a total of rewards that cancel out"


def test_std_none_global_and_clip() -> None:
    assert compute([1, 3, 5, 9], [0, 0, 1, 1], std="none").values.tolist() == [-1, 1, -2, 2]
    overall = np.std([1, 3, 5, 9]) + 1e-4
    values = compute([1, 3, 5, 9], [0, 0, 1, 1], std="global").values.tolist()
    assert values == pytest.approx([value / overall for value in (-1, 1, -2, 2)])
    assert compute([0] * 99 + [1], [0] * 100, clip=5.0).values.max() == 5.0


def test_rows_follow_an_index_and_shapes_are_checked() -> None:
    result = compute([1, 3, 5, 9], [0, 0, 1, 1], std="none").rows([3, 0])
    assert result.values.tolist() == [2, -1]
    with pytest.raises(ValueError, match=r"\[N\]"):
        GroupAdvantage().compute(torch.zeros(3), torch.zeros(4, dtype=torch.long))


def test_group_ids_are_exact_integers() -> None:
    ids = [2**53, 2**53 + 1]  # equal as float64
    result = compute([0, 1, 5, 9], [ids[0], ids[0], ids[1], ids[1]], std="none")
    assert result.values.tolist() == [-0.5, 0.5, -2, 2]


@pytest.mark.parametrize("advantage", ALL, ids=lambda advantage: f"{advantage.type}-{getattr(advantage, 'values', '')}")
def test_a_gap_changes_nothing_for_the_others(advantage: object) -> None:
    rewards, groups = [1.0, 2, 5, 3, 3, 7, 4, 9], [0, 0, 0, 1, 1, 2, 2, 2]
    with_gaps, without = of(advantage, [*rewards, NAN, math.inf], [*groups, 0, 1]), of(advantage, rewards, groups)
    assert torch.equal(with_gaps.values[:8], without.values)
    assert with_gaps.values[8:].tolist() == [0, 0]
    assert with_gaps.failed.tolist() == [False] * 8 + [True] * 2
    assert not with_gaps.useful(keep_no_spread=True)[8:].any()
    assert with_gaps.no_spread[:8].tolist() == without.no_spread.tolist() == [False] * 3 + [True] * 2 + [False] * 3
    assert with_gaps.metrics["advantage/groups_without_spread"] == pytest.approx(1 / 3)
    assert without.metrics["advantage/group_std"] == pytest.approx(
        (np.std([1, 2, 5]) + np.std([7, 4, 9])) / 3, rel=1e-9
    )


@pytest.mark.parametrize("advantage", ALL, ids=lambda advantage: f"{advantage.type}-{getattr(advantage, 'values', '')}")
def test_nothing_scored_and_nothing_at_all(advantage: object) -> None:
    nothing = of(advantage, [NAN, NAN], [0, 1])
    assert nothing.values.tolist() == [0, 0] and nothing.no_spread.all() and nothing.failed.all()
    assert of(advantage, [], []).values.tolist() == []


@pytest.mark.parametrize("advantage", ALL, ids=lambda advantage: f"{advantage.type}-{getattr(advantage, 'values', '')}")
def test_the_order_of_samples_does_not_matter(advantage: object) -> None:
    rewards, groups = [1.0, 2, 5, 3, 7, 4, 9, NAN], [5, 1, 5, 1, 5, 1, 1, 5]
    order = [3, 7, 0, 6, 2, 5, 1, 4]
    straight = of(advantage, rewards, groups)
    shuffled = of(advantage, [rewards[place] for place in order], [groups[place] for place in order])
    torch.testing.assert_close(shuffled.values, straight.rows(order).values)
    assert shuffled.left_out.tolist() == straight.rows(order).left_out.tolist()


def test_ddof_and_eps() -> None:
    result = of(GroupAdvantage(ddof=1, eps=0.5), [1, 2, 6], [0, 0, 0])
    assert result.values.tolist() == pytest.approx(
        [(value - 3) / (np.std([1, 2, 6], ddof=1) + 0.5) for value in (1, 2, 6)]
    )
    overall = np.std([1, 3, 5, 9], ddof=1) + 1e-4
    result = of(GroupAdvantage(std="global", ddof=1), [1, 3, 5, 9], [0, 0, 1, 1])
    assert result.values.tolist() == pytest.approx([value / overall for value in (-1, 1, -2, 2)])


def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others() -> None:
    result = of(LeaveOneOut(), [1, 2, 6, NAN, 4, 4], [0, 0, 0, 0, 1, 1])
    assert result.values.tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5, 0, 0, 0])
    assert of(LeaveOneOut(clip=2), [0, 9], [0, 0]).values.tolist() == [-2, 2]


def test_gdpo_lets_no_reward_drown_the_others() -> None:
    groups = torch.tensor([0, 0, 1, 1])
    small = torch.tensor([0.0, 1e-3, 0.0, 1e-3], dtype=torch.float64)
    large = torch.tensor([0.0, 1e6, 1e6, 0.0], dtype=torch.float64)
    result = GDPO().compute(small + large, groups, {"s": small, "l": large, "x": large * NAN}, {"s": 2.0, "l": 1.0})
    expected = np.array([-3, 3, -1, 1]) / np.std([-3, 3, -1, 1])
    assert result.values.tolist() == pytest.approx(expected.tolist())
    assert not result.failed.any(), "a reward without weight may fail"
    with pytest.raises(ValueError, match="missing: all"):
        GDPO().compute(small, groups)
    with pytest.raises(ValueError, match="missing: l"):
        GDPO().compute(small, groups, {"s": small}, {"s": 1.0, "l": 1.0})


def test_gdpo_leaves_out_a_sample_with_a_gap_in_any_weighted_reward() -> None:
    groups = torch.tensor([0, 0, 0])
    first = torch.tensor([0.0, 1, 2], dtype=torch.float64)
    second = torch.tensor([1.0, 3, NAN], dtype=torch.float64)
    result = GDPO().compute(first, groups, {"a": first, "b": second}, {"a": 1.0, "b": 1.0})
    assert result.failed.tolist() == [False, False, True]
    assert result.values.tolist() == pytest.approx([-1, 1, 0])


def test_best_and_worst() -> None:
    rewards, groups = [0.4, 0.9, 0.1, 0.9, 0.1, 7, 7], [0, 0, 0, 0, 0, 1, 1]
    result = of(BestWorst(), rewards, groups)
    assert result.values.tolist() == [0, 1, -1, 0, 0, 0, 0], "of equals the first counts"
    assert result.useful(keep_no_spread=False).tolist() == [False, True, True, False, False, False, False]
    result = of(BestWorst(top=2, bottom=1, values="group"), rewards, groups)
    whole = of(GroupAdvantage(), rewards, groups).values
    assert result.values.tolist() == [0, *whole[1:4].tolist(), 0, 0, 0]
    assert of(BestWorst(top=4, bottom=4), [1, 2, 3], [0, 0, 0]).values.tolist() == [-1, 0, 1], "both ends shrink"
    tied = of(BestWorst(top=2, bottom=1), [1, 1, 1, 2], [0, 0, 0, 0])
    assert tied.values.tolist() == [-1, 1, 0, 1], "no sample is at both ends"
    with pytest.raises(ValueError, match="top and bottom must be at least 1"):
        BestWorst(bottom=0)


def test_best_and_raw_rewards() -> None:
    rewards, groups = [0.4, 0.9, 0.9, 0.2, 0.2], [0, 0, 0, 1, 1]
    best = of(Best(), rewards, groups)
    assert best.values.tolist() == [0, 1, 1, 1, 1]
    assert best.useful(keep_no_spread=True).tolist() == [False, True, True, True, True]
    assert of(Best(leave_out=False), rewards, groups).useful(keep_no_spread=True).all()
    raw = of(RawReward(), rewards, groups)
    assert raw.values.tolist() == pytest.approx(rewards)
    assert raw.no_spread.tolist() == [False, False, False, True, True] and not raw.left_out.any()
