"""Totals of several rewards: normalised, combined, finished over all samples of an iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from sfumato.algorithms.advantages import GDPO, GroupAdvantage
from sfumato.config.diffusion_rl import TrajectoryRLConfig
from sfumato.config.load import load_config
from sfumato.config.yaml_text import config_text
from sfumato.errors import ConfigError, RewardError
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.scoring.combinations import FunctionCombination, Minimum, WeightedSum, normalise_values
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.rewards.scoring.scores import Scores
from sfumato.tracking.samples import read_samples, save_samples
from tests.tiny import ROOT

NAN = math.nan
GROUPS = [0, 0, 0, 1, 1, 1]
FIRST = [1.0, 2.0, 3.0, 5.0, 5.0, 5.0]
SECOND = [0.0, 10.0, NAN, 30.0, 20.0, 10.0]


@dataclass(frozen=True, kw_only=True)
class FromRow(Reward):
    """What stands in the row."""

    def score(self, samples):
        return [sample.metadata[self.label] for sample in samples]


def samples(groups=GROUPS, **columns):
    image = np.zeros((2, 2, 3), np.uint8)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [Sample(image=image, prompt="", metadata=m, group_id=g) for m, g in zip(rows, groups, strict=True)]


def finished(scorer: Scorer, parts: int = 1) -> Scores:
    """As the task does: micro-batches are scored by themselves, all of them are finished together."""
    all_samples = samples(a=FIRST, b=SECOND)
    size = len(all_samples) // parts
    scores = Scores.cat([scorer.score(all_samples[at : at + size]) for at in range(0, len(all_samples), size)])
    return scorer.finish(scores, [sample.group_id for sample in all_samples])


def a(**fields):
    return FromRow(name="a", **fields)


def b(**fields):
    return FromRow(name="b", **fields)


def test_group_normalisation_is_a_z_score_among_what_was_scored():
    spread = math.sqrt(2 / 3)
    got = normalise_values(np.array(FIRST), "group", np.array(GROUPS))
    np.testing.assert_allclose(got, [-1 / spread, 0, 1 / spread, 0, 0, 0])
    got = normalise_values(np.array(SECOND), "group", np.array(GROUPS))
    np.testing.assert_allclose(got, [-1, 1, NAN, 1 / spread, 0, -1 / spread])


def test_batch_normalisation_is_over_all_and_a_range_becomes_0_to_1():
    scored = np.array([0.0, 10, 30, 20, 10])
    expected = (np.array(SECOND) - scored.mean()) / scored.std()
    np.testing.assert_allclose(normalise_values(np.array(SECOND), "batch", np.array(GROUPS)), expected)
    np.testing.assert_allclose(normalise_values(np.array(SECOND), (10.0, 30.0), None), [-0.5, 0, NAN, 1, 0.5, 0])


@pytest.mark.parametrize("how", ["group", "batch"])
def test_values_without_spread_become_0_and_tiny_spread_is_not_blown_up(how):
    groups = np.zeros(3, int)
    for rounded in (0.1 + 0.2, 0.3):
        assert normalise_values(np.array([0.3, rounded, 0.3]), how, groups).tolist() == [0, 0, 0]
    assert normalise_values(np.array([NAN, 7.0, NAN]), how, groups)[1] == 0
    assert np.isnan(normalise_values(np.full(3, NAN), how, groups)).all()
    assert np.abs(normalise_values(np.array([0.0, 1e-9, -1e-9]), how, groups)).max() < 2e-3


def test_samples_of_no_iteration_are_not_standardised():
    assert normalise_values(np.array(FIRST), "group", None).tolist() == FIRST
    scores = Scorer([a(normalise="batch"), b(normalise=(0.0, 10.0))]).score(samples(a=FIRST, b=SECOND))
    np.testing.assert_allclose(scores.total, np.array(FIRST) + np.array(SECOND) / 10)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_sum_of_group_scores_is_the_same_however_the_iteration_is_cut(parts):
    scorer = Scorer([a(weight=2.0, normalise="group"), b(weight=-1.0, normalise="group")])
    scores = finished(scorer, parts)
    spread = math.sqrt(2 / 3)
    np.testing.assert_allclose(scores.total, [-2 / spread + 1, -1, NAN, -1 / spread, 0, 1 / spread])
    np.testing.assert_array_equal(scores.level, 2 * np.array(FIRST) - np.array(SECOND))
    np.testing.assert_array_equal(scores.components["b"], SECOND, "components stay as they were given")


def test_metrics_show_the_level_since_standardised_totals_have_no_mean():
    metrics = finished(Scorer([a(normalise="group"), b(normalise="group")])).metrics("")
    level = np.array([1.0, 12, 35, 25, 15])
    assert metrics["reward/total"] == pytest.approx(level.mean())
    assert metrics["reward/std"] == pytest.approx(level.std())
    assert metrics["reward/b"] == 14 and metrics["reward_std/b"] == pytest.approx(math.sqrt(104))
    assert metrics["reward/failed"] == metrics["reward_failed/b"] == 1 / 6 and metrics["reward_failed/a"] == 0


def test_the_minimum_takes_the_worst_weighted_value_and_keeps_failures():
    scores = finished(Scorer([a(), b(weight=0.2, normalise="none")], combination=Minimum()))
    np.testing.assert_array_equal(scores.total, [0, 2, NAN, 5, 4, 2])


def test_the_weighted_sum_is_what_it_was():
    scores = finished(Scorer([a(weight=0.3), b(weight=-0.1)], combination=WeightedSum()))
    expected = np.zeros(6)
    for weight, values in ((0.3, FIRST), (-0.1, SECOND)):
        expected += weight * np.array(values)
    assert scores.total.tobytes() == expected.tobytes() == scores.level.tobytes()


def write_function(folder: Path, body: str) -> FunctionCombination:
    (folder / "own.py").write_text(f"import numpy as np\ndef combine(values, metadata):\n    {body}\n")
    return FunctionCombination(path=f"{folder}/own.py:combine")


@pytest.mark.parametrize("parts", [1, 3])
def test_a_function_gets_values_and_rows(tmp_path, parts):
    body = "return values['a'] * values['b'] + [row['a'] for row in metadata]"
    scorer = Scorer([a(), b()], combination=write_function(tmp_path, body))
    scorer.prepare()
    np.testing.assert_array_equal(finished(scorer, parts).total, [1, 22, NAN, 155, 105, 55])


def test_a_function_cannot_give_a_total_to_what_failed_and_what_it_leaves_out_is_named(tmp_path):
    scorer = Scorer([a(), b()], combination=write_function(tmp_path, "return np.where(values['a'] == 1, np.inf, 7)"))
    scores = finished(scorer)
    np.testing.assert_array_equal(scores.total, [NAN, 7, NAN, 7, 7, 7])
    assert "combination: function returned no finite number (1 of 6 samples)" in scores.failures
    scorer.max_failed_fraction = 0.0
    with pytest.raises(RewardError, match=r"2 of 6 samples.*no finite number"):
        scorer.check_budget(finished(scorer))


def test_a_total_that_only_standard_scores_lack_is_named(tmp_path):
    body = "return np.where(values['a'] < 0, np.nan, values['a'])"
    scorer = Scorer([a(normalise="group")], combination=write_function(tmp_path, body))
    scores = finished(scorer, parts=2)
    assert np.isnan(scores.total).tolist() == [True, False, False, False, False, False]
    assert np.isfinite(scores.level).all()
    assert scores.failures == ["combination: function returned no finite number (1 of 6 samples)"]


@pytest.mark.parametrize(
    ("body", "message"),
    [("return values['c']", r"KeyError: 'c' \(at .*own.py:3\)"), ("return [1.0]", r"shape \[1\] for 6 samples")],
)
def test_a_function_that_is_wrong_stops_the_run(tmp_path, body, message):
    with pytest.raises(ConfigError, match=rf"reward.combination .*own.py:combine.*{message}"):
        finished(Scorer([a()], combination=write_function(tmp_path, body)))


def test_a_function_that_is_not_there_is_named_before_the_run(tmp_path):
    for path, message in (
        ("nowhere", "is no function"),
        (f"{tmp_path}/no.py:f", "there is no file"),
        ("os:nil", "nil"),
    ):
        with pytest.raises(ConfigError, match=message):
            Scorer([a()], combination=FunctionCombination(path=path)).prepare()


def test_group_normalisation_and_gdpo_agree_before_the_batch_norm():
    rewards = {"a": np.array(FIRST), "b": np.array([0.0, 10, 3, 30, 20, 10])}
    total = sum(normalise_values(reward, "group", np.array(GROUPS)) for reward in rewards.values())
    tensors = {name: torch.from_numpy(reward) for name, reward in rewards.items()}
    gdpo = GDPO().compute(torch.from_numpy(total), torch.tensor(GROUPS), tensors, {"a": 1.0, "b": 1.0})
    np.testing.assert_allclose(gdpo.values, (total - total.mean()) / total.std(), rtol=1e-6, atol=1e-7)
    assert GroupAdvantage().compute(torch.from_numpy(total), torch.tensor(GROUPS)).values.abs().max() > 0.5


def test_rows_are_picked_with_their_totals():
    scores = finished(Scorer([a(normalise="group")]))
    picked = scores.rows([4, 0])
    assert picked.total.tolist() == [scores.total[4], scores.total[0]] and picked.components["a"].tolist() == [5, 1]
    assert picked.record(1, samples(a=FIRST)[0], kind="train", seed=0, sample_id=0).total == scores.total[0]


def test_the_record_of_a_text_holds_the_text(tmp_path):
    scores = finished(Scorer([a()]))
    answer = Sample(text="seven", prompt="3 + 4", group_id=0)
    save_samples(tmp_path, 1, [scores.record(2, answer, kind="train", seed=0, sample_id=2)])
    (row,) = read_samples(tmp_path)[1]
    assert row["text"] == "seven" and row["prompt"] == "3 + 4" and row["rewards"] == {"a": 3.0}
    picture = samples(a=FIRST)[0]
    assert scores.record(0, picture, kind="train", seed=0, sample_id=0).content is picture.image


def load(tmp_path: Path, reward: dict, advantage: dict | None = None) -> TrajectoryRLConfig:
    overrides = {"reward": reward, "algorithm": {"advantage": advantage} if advantage else {}}
    return load_config(TrajectoryRLConfig, ROOT / "configs" / "quickstart" / "rl.yaml", overrides)


def test_a_configuration_names_it_and_is_dumped_to_the_same(tmp_path):
    rewards = [{"type": "brightness", "normalise": "group"}, {"type": "sharpness", "normalise": [0.1, 0.5]}]
    config = load(tmp_path, {"rewards": rewards, "combination": {"type": "minimum"}})
    assert config.reward.combination == Minimum() and config.reward.rewards[1].normalise == (0.1, 0.5)
    (tmp_path / "dumped.yaml").write_text(config_text(config))
    assert load_config(TrajectoryRLConfig, tmp_path / "dumped.yaml") == config
    assert load(tmp_path, {}).reward.combination == WeightedSum()


@pytest.mark.parametrize("how", [[0.5, 0.5], [1.0, 0.0], [0.0, math.inf], "groups", [1.0]])
def test_a_wrong_normalisation_is_refused_by_name(tmp_path, how):
    with pytest.raises(ConfigError, match="normalise"):
        load(tmp_path, {"rewards": [{"type": "brightness", "normalise": how}]})


@pytest.mark.parametrize(
    ("reward", "what"),
    [
        ({"rewards": [{"type": "brightness", "normalise": "batch"}]}, "normalise of 'brightness'"),
        ({"combination": "minimum"}, "reward.combination"),
    ],
)
def test_gdpo_does_its_own_normalisation(tmp_path, reward, what):
    with pytest.raises(ConfigError, match=f"gdpo.*{what}"):
        load(tmp_path, reward, {"type": "gdpo"})
    assert load(tmp_path, {}, {"type": "gdpo"}).algorithm.advantage == GDPO()
