"""The scorer when all goes well: sums, weights, labels, groups, and the combinations that it refuses."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from sfumato.errors import ConfigError, RewardError
from sfumato.rewards.base import Failure, Reward, Sample
from sfumato.rewards.pixels import Brightness, JpegIncompressibility
from sfumato.rewards.scoring.scorer import Scorer


@dataclass(frozen=True, kw_only=True)
class RankInGroup(Reward):
    """Rank by brightness among the samples of one call."""

    groupwise: ClassVar[bool] = True

    def score(self, samples):
        means = np.array([sample.image.mean() for sample in samples])
        return [float((means < mean).sum()) for mean in means]


@dataclass(frozen=True, kw_only=True)
class AsArray(Reward):
    """Brightness in the containers that numeric code returns."""

    kind: str

    def score(self, samples):
        values = np.array([sample.image.mean() / 255 for sample in samples], dtype=np.float32)
        kinds = {"array": values, "tensor": torch.from_numpy(values), "tuple": tuple(values)}
        return kinds.get(self.kind, list(torch.from_numpy(values)))


def samples_of(levels, group_ids=None):
    group_ids = group_ids or [0] * len(levels)
    return [
        Sample(image=np.full((8, 8, 3), level, np.uint8), prompt="p", group_id=group)
        for level, group in zip(levels, group_ids, strict=True)
    ]


def test_total_is_the_weighted_sum_of_what_is_optimised():
    bright = Brightness(weight=2.0)
    dark = Brightness(name="dark", weight=-0.5)
    watched = JpegIncompressibility(weight=100.0, evaluation_only=True)
    idle = Brightness(name="idle", weight=0.0)
    scorer = Scorer([bright, dark, watched, idle])
    scorer.prepare()
    samples = samples_of([0, 51, 255])
    scores = scorer.score(samples)
    assert list(scores.components) == ["brightness", "dark", "jpeg_incompressibility", "idle"]
    np.testing.assert_allclose(scores.total, [0.0, 0.3, 1.5])
    np.testing.assert_allclose(scores.components["dark"], [0.0, 0.2, 1.0])
    np.testing.assert_allclose(scores.components["jpeg_incompressibility"], watched.score(samples))
    assert scores.total.dtype == np.float64 and scores.components["idle"].dtype == np.float64
    assert scores.failures == []
    scorer.check_budget(scores)


def test_groupwise_rewards_see_whole_groups_and_values_return_to_their_samples():
    scores = Scorer([RankInGroup()]).score(samples_of([9, 100, 3, 50, 6, 200], group_ids=[7, 1, 7, 1, 7, 1]))
    np.testing.assert_array_equal(scores.total, [2, 1, 0, 0, 1, 2])


@pytest.mark.parametrize("kind", ["array", "tensor", "tuple", "list of tensors"])
def test_arrays_and_tensors_count_as_lists(kind):
    scores = Scorer([AsArray(kind=kind)]).score(samples_of([0, 51, 255]))
    assert scores.failures == []
    np.testing.assert_allclose(scores.total, [0.0, 0.2, 1.0], rtol=1e-6)


def test_an_empty_batch_is_no_failure():
    scorer = Scorer([Brightness(), RankInGroup()])
    scores = scorer.score([])
    assert scores.total.shape == (0,) and scores.failures == []
    scorer.check_budget(scores)


def test_a_scorer_that_only_evaluates_has_no_total():
    scorer = Scorer([Brightness(evaluation_only=True)], require_objective=False)
    scores = scorer.score(samples_of([51]))
    assert np.isnan(scores.total).all()
    np.testing.assert_allclose(scores.components["brightness"], [0.2])
    scorer.check_budget(scores)


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ([], {}, "empty"),
        ([Brightness(), Brightness(weight=2.0)], {}, "'name'"),
        ([Brightness(name="ocr"), JpegIncompressibility(name="ocr")], {}, "'name'"),
        ([Brightness(evaluation_only=True)], {}, "evaluation_only"),
        ([Brightness(weight=0.0)], {}, "weight"),
        ([Brightness(), "brightness"], {}, "sfumato.rewards.base.Reward"),
        ([Brightness()], {"max_failed_fraction": 1.5}, "max_failed_fraction"),
        ([Brightness()], {"max_failed_fraction": float("nan")}, "max_failed_fraction"),
    ],
)
def test_impossible_combinations_are_refused(rewards, options, message):
    with pytest.raises(ConfigError, match=message):
        Scorer(rewards, **options)


def video_of(levels):
    frames = np.stack([np.full((8, 8, 3), level, np.uint8) for level in levels])
    return Sample(image=frames, prompt="p", group_id=0)


def test_a_video_has_the_mean_of_every_so_manieth_frame():
    samples = [video_of([0, 255, 255, 255, 51, 255]), *samples_of([102]), video_of([255])]
    np.testing.assert_allclose(Scorer([Brightness()]).score(samples).total, [0.1, 0.4, 1.0])
    every = Scorer([Brightness(frame_step=1)]).score(samples)
    np.testing.assert_allclose(every.total, [(4 * 255 + 51) / 255 / 6, 0.4, 1.0])


def test_a_video_of_which_a_frame_failed_has_no_value():
    @dataclass(frozen=True, kw_only=True)
    class FailsInTheDark(Reward):
        def score(self, samples):
            return [float("nan") if sample.image.max() == 0 else 1.0 for sample in samples]

    scores = Scorer([FailsInTheDark(frame_step=1)]).score([video_of([9, 0, 0]), video_of([9, 9]), *samples_of([0])])
    np.testing.assert_array_equal(scores.total, [np.nan, 1.0, np.nan])
    assert scores.failures == ["FailsInTheDark: returned NaN (2 of 3 samples)"]


def test_a_reward_that_takes_videos_sees_them_whole():
    @dataclass(frozen=True, kw_only=True)
    class NumFrames(Reward):
        takes_video: ClassVar[bool] = True

        def score(self, samples):
            return [len(sample.frames) for sample in samples]

    assert Scorer([NumFrames()]).score([video_of([1, 2, 3, 4, 5]), *samples_of([0])]).total.tolist() == [5, 1]
    NumFrames().check_video()
    Brightness().check_video()
    with pytest.raises(ConfigError, match="'RankInGroup' compares the images of a group and takes no videos"):
        RankInGroup().check_video()
    with pytest.raises(ConfigError, match="frame_step of reward 'brightness' must be at least 1, not 0"):
        Brightness(frame_step=0)


def test_errors_that_are_of_one_sample_each_are_told_in_part():
    @dataclass(frozen=True, kw_only=True)
    class QuotesTheSample(Reward):
        def score(self, samples):
            return [Failure(f"cannot read {max(int(sample.image.max()), 4)}") for sample in samples]

    scores = Scorer([QuotesTheSample(), QuotesTheSample(name="other")]).score(samples_of(list(range(20))))
    told = [failure for failure in scores.failures if failure.startswith("other: ")]
    assert len(told) == 9 and len(scores.failures) == 18
    assert told[0] == "other: cannot read 4 (5 of 20 samples)"
    assert told[-1] == "other: 8 other reasons (8 of 20 samples)"
    with pytest.raises(RewardError, match="QuotesTheSample: 8 other reasons"):
        Scorer([QuotesTheSample()]).check_budget(scores)
