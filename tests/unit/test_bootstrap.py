"""Paired bootstrap intervals: against scipy's, their coverage, prompts as clusters, and what is refused."""

import math

import numpy as np
import pytest
from scipy import stats

from sfumato.tracking.bootstrap import paired_bootstrap


def test_agrees_with_scipy():
    differences = np.random.default_rng(1).normal(0.3, 1.0, 60)
    interval = paired_bootstrap(differences.tolist(), seed=3, num_resamples=20_000)
    expected = stats.bootstrap(
        (differences,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(5)
    ).confidence_interval
    assert interval.mean == pytest.approx(differences.mean(), abs=1e-12)
    assert interval.low == pytest.approx(expected.low, abs=0.01)
    assert interval.high == pytest.approx(expected.high, abs=0.01)


def test_equal_values_give_exactly_zero():
    assert paired_bootstrap([0.0] * 7) == (0.0, 0.0, 0.0)


def test_is_a_function_of_its_arguments():
    values = np.random.default_rng(2).normal(size=30).tolist()
    assert paired_bootstrap(values, seed=1) == paired_bootstrap(values, seed=1)
    assert paired_bootstrap(values, seed=1) != paired_bootstrap(values, seed=2)


def test_samples_of_a_prompt_are_drawn_together():
    generator = np.random.default_rng(0)
    prompts = np.repeat(np.arange(20), 8)
    of_prompt = generator.normal(0, 1, 20)
    differences = of_prompt[prompts] + generator.normal(0, 0.01, 160)
    alone = paired_bootstrap(differences.tolist())
    together = paired_bootstrap(differences.tolist(), clusters=prompts.tolist())
    of_means = paired_bootstrap([differences[prompts == prompt].mean() for prompt in range(20)])
    assert together.high - together.low > 2 * (alone.high - alone.low)
    assert together == pytest.approx(of_means, abs=1e-9)


def test_covers_the_true_mean():
    generator = np.random.default_rng(4)
    hits = 0
    for trial in range(300):
        interval = paired_bootstrap(generator.normal(1.0, 2.0, 40).tolist(), seed=trial, num_resamples=400)
        hits += interval.low <= 1.0 <= interval.high
    assert 0.90 <= hits / 300 <= 0.98


def test_one_prompt_has_no_interval():
    interval = paired_bootstrap([0.5, 0.7], clusters=["a cat", "a cat"])
    assert interval.mean == pytest.approx(0.6)
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)


@pytest.mark.parametrize(
    ("differences", "clusters", "message"),
    [([], None, "at least one"), ([1.0, math.nan], None, "not finite"), ([1.0, 2.0], ["a"], "1 clusters")],
)
def test_refuses(differences, clusters, message):
    with pytest.raises(ValueError, match=message):
        paired_bootstrap(differences, clusters=clusters)
