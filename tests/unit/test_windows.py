"""Windows are functions of (seed, iteration), stay in their range, and never hold the last step or no step."""

from __future__ import annotations

import pytest

from sfumato.algorithms.windows import AllSteps, RandomSubset, RandomWindow, SlidingWindow

ALL = [
    AllSteps(),
    RandomWindow(3, (0, 5)),
    SlidingWindow(iters_per_group=2),
    SlidingWindow(iters_per_group=2, roll_back=False, range=(1, 8)),
    SlidingWindow(strategy="random"),
    SlidingWindow(strategy="decay", iters_per_group=4, stride=3),
    SlidingWindow(strategy="exp_decay", iters_per_group=5, decay_after=2, decay_rate=0.3, stride=None),
    RandomSubset(size=3),
    RandomSubset(size=2, among=(1, 4, 6)),
]


@pytest.mark.parametrize("window", ALL, ids=repr)
def test_every_window_is_sorted_not_empty_and_before_the_last_step(window: object) -> None:
    for iteration in range(200):
        steps = window.steps(10, 7, iteration)
        assert steps and steps == sorted(set(steps)) and steps[0] >= 0 and steps[-1] <= 8


@pytest.mark.parametrize("window", ALL, ids=repr)
def test_a_resumed_run_sees_the_windows_that_follow(window: object) -> None:
    straight = [window.steps(10, 3, iteration) for iteration in range(60)]
    assert [type(window)(**vars(window)).steps(10, 3, iteration) for iteration in reversed(range(60))] == straight[::-1]


@pytest.mark.parametrize("window", [ALL[1], ALL[4], ALL[7]], ids=repr)
def test_random_windows_reach_every_place_and_depend_on_the_seed(window: object) -> None:
    drawn = [tuple(window.steps(8, 0, iteration)) for iteration in range(400)]
    assert {step for steps in drawn for step in steps} == set(range(5 if isinstance(window, RandomWindow) else 7))
    assert drawn != [tuple(window.steps(8, 1, iteration)) for iteration in range(400)]


def test_the_sliding_window_moves_shrinks_and_starts_again() -> None:
    window = SlidingWindow(size=3, iters_per_group=1, stride=2)
    seen = [window.steps(7, 0, iteration) for iteration in range(4)]
    assert seen == [[0, 1, 2], [2, 3, 4], [4, 5], [0, 1, 2]]
    stays = SlidingWindow(size=3, iters_per_group=1, stride=2, roll_back=False)
    assert stays.steps(7, 0, 99) == [4, 5]


def test_the_decaying_window_stays_shorter_towards_the_image() -> None:
    window = SlidingWindow(strategy="decay", iters_per_group=8, range=(0, 4))
    assert window.places(5) == [(0, 8), (1, 6), (2, 5), (3, 3)]  # int(8 (1 - p) + 2 p)
    floor = SlidingWindow(strategy="decay", iters_per_group=8, range=(0, 4), min_iters=7)
    assert [stay for _, stay in floor.places(5)] == [8, 7, 7, 7]
    lengths = [len(window.steps(5, 0, iteration)) for iteration in range(22)]
    assert lengths == [4] * 8 + [3] * 6 + [2] * 5 + [1] * 3


def test_windows_refuse_to_reach_the_last_step() -> None:
    RandomWindow(3, (0, 5)).check(6)
    with pytest.raises(ValueError, match="at most 4"):
        RandomWindow(3, (0, 5)).check(5)
    with pytest.raises(ValueError, match="does not fit"):
        RandomWindow(4, (1, 4))
    with pytest.raises(ValueError, match="at least 2"):
        AllSteps().check(1)
    SlidingWindow(range=(0, 9)).check(10)
    with pytest.raises(ValueError, match="at most 8"):
        SlidingWindow(range=(0, 9)).check(9)
    with pytest.raises(ValueError, match="no step is left"):
        SlidingWindow().check(1)
    with pytest.raises(ValueError, match="holds no step"):
        SlidingWindow(range=(4, 4))
    with pytest.raises(ValueError, match="at least 1"):
        SlidingWindow(stride=0)
    with pytest.raises(ValueError, match="at most 5"):
        RandomSubset(size=1, among=(1, 6)).check(6)
    with pytest.raises(ValueError, match="cannot draw 9 of 9 steps"):
        RandomSubset(size=9).check(9)
    with pytest.raises(ValueError, match="cannot draw 3"):
        RandomSubset(size=3, among=(1, 2))
    with pytest.raises(ValueError, match="different steps"):
        RandomSubset(size=1, among=(1, 1))


def test_a_subset_may_be_all_that_it_is_drawn_from() -> None:
    assert RandomSubset(size=2, among=(0, 2)).steps(4, seed=0, iteration=0) == [0, 2]
    with pytest.raises(ValueError, match="cannot draw 3"):
        RandomSubset(size=3, among=(0, 2))
