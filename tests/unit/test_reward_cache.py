"""Equal samples are scored once: what counts as equal, what is never remembered, and that values do not change."""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.scoring.one_reward import ScoreCache, digest_samples
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.tracking.waveforms import Waveform

CALLS: list[list[str]] = []


@dataclass(frozen=True, kw_only=True)
class Counting(Reward):
    """Mean of the image; 13 fails. Keeps a list of what it was asked."""

    cached: ClassVar[bool] = True

    def score(self, samples):
        CALLS.append([sample.prompt for sample in samples])
        means = [float(sample.image.mean()) for sample in samples]
        return [math.nan if mean == 13 else mean for mean in means]


@dataclass(frozen=True, kw_only=True)
class Ranking(Counting):
    """Rank in the group."""

    groupwise: ClassVar[bool] = True

    def score(self, samples):
        means = super().score(samples)
        return [float(sum(other < mean for other in means)) for mean in means]


@pytest.fixture(autouse=True)
def _forget():
    CALLS.clear()


class Files:
    """Images of a prompt."""

    def __init__(self, *files):
        self.files = files

    def find(self):
        return self.files


def sample(level, prompt="p", group_id=0, **fields):
    return Sample(image=np.full((4, 4, 3), level, np.uint8), prompt=prompt, group_id=group_id, **fields)


def test_everything_that_a_reward_sees_counts_and_the_group_number_does_not():
    base = sample(1, source=np.zeros((2, 2, 3), np.uint8), metadata={"target": "x", "n": [1]})
    others = [
        dataclasses.replace(base, image=base.image + 1),
        dataclasses.replace(base, image=base.image.reshape(2, 8, 3)),
        dataclasses.replace(base, image=base.image[None]),
        dataclasses.replace(base, prompt="q"),
        dataclasses.replace(base, source=None),
        dataclasses.replace(base, source=base.source + 1),
        dataclasses.replace(base, metadata={"target": "x", "n": [1.0]}),
        dataclasses.replace(base, metadata={"target": "x"}),
        dataclasses.replace(base, image=None, text="p"),
        dataclasses.replace(base, image=None, text="p", num_tokens=3),
        dataclasses.replace(base, image=None, text="p", is_truncated=True),
        dataclasses.replace(base, image=None, text="p", messages=[{"role": "user", "content": "p"}]),
        dataclasses.replace(base, image=None, sound=Waveform(np.zeros((1, 8), np.int16), 4)),
        dataclasses.replace(base, image=None, sound=Waveform(np.zeros((1, 8), np.int16), 8)),
        dataclasses.replace(base, sound=Waveform(np.zeros((1, 8), np.int16), 4), frame_rate=2.0),
        dataclasses.replace(base, sound=Waveform(np.zeros((1, 8), np.int16), 4), frame_rate=4.0),
        dataclasses.replace(base, images=Files(b"a")),
        dataclasses.replace(base, images=Files(b"b")),
    ]
    changed = {name for other in others for name, value in vars(other).items() if value is not getattr(base, name)}
    fields = {field.name for field in dataclasses.fields(Sample)}
    assert changed == fields - {"group_id", "damage", "scores"}, "a field of a sample that is new here"
    digests = [digest_samples([changed_sample]) for changed_sample in [base, *others]]
    assert len(set(digests)) == len(digests) and all(len(digest) == 16 for digest in digests)
    assert digest_samples([dataclasses.replace(base, group_id=5, image=base.image.copy())]) == digests[0]
    assert digest_samples([base, others[0]]) != digest_samples([others[0], base])


def test_equal_samples_are_scored_once_in_a_batch_and_over_batches():
    scorer = Scorer([Counting()], cache_size=100)
    scores = scorer.score([sample(1), sample(2), sample(1), sample(1, "q")])
    assert scores.total.tolist() == [1, 2, 1, 1] and CALLS == [["p", "p", "q"]]
    assert scores.remembered == {"Counting": 1}
    scores = scorer.score([sample(2), sample(3)])
    assert scores.total.tolist() == [2, 3] and CALLS[1:] == [["p"]] and scores.remembered == {"Counting": 1}
    assert scores.timings(0.0)["scoring/remembered_share_Counting"] == 0.5
    assert scorer.score([sample(2)]).total.tolist() == [2] and len(CALLS) == 2, "nothing is left to ask"


def test_failures_are_not_remembered_and_reach_every_equal_sample():
    scorer = Scorer([Counting()], cache_size=100)
    for _ in range(2):
        scores = scorer.score([sample(13), sample(2), sample(13)])
        np.testing.assert_array_equal(scores.total, [math.nan, 2, math.nan])
        assert scores.failures == ["Counting: returned NaN (2 of 3 samples)"]
    assert CALLS == [["p", "p"], ["p"]]


def test_groups_are_remembered_whole():
    scorer = Scorer([Ranking()], cache_size=100)
    group = [sample(3), sample(1), sample(2)]
    again = [dataclasses.replace(member, group_id=7) for member in group]
    mixed = [member for pair in zip(group, again, strict=True) for member in pair]
    assert scorer.score(mixed).total.tolist() == [2, 2, 0, 0, 1, 1] and len(CALLS) == 1
    assert scorer.score(again).total.tolist() == [2, 0, 1] and len(CALLS) == 1
    assert scorer.score(group[:2]).total.tolist() == [1, 0] and len(CALLS) == 2, "a part is another group"


@pytest.mark.parametrize("size", [0, 2])
def test_the_least_recently_used_are_forgotten(size):
    scorer = Scorer([Counting()], cache_size=size)
    for level in (1, 2, 1, 3, 2):
        assert scorer.score([sample(level)]).total.tolist() == [level]
    assert len(CALLS) == (5 if size == 0 else 4), "2 was forgotten when 3 came, since 1 had been used again"


def test_a_reward_that_does_not_say_so_is_asked_every_time():
    @dataclass(frozen=True, kw_only=True)
    class Plain(Counting):
        cached: ClassVar[bool] = False

    scorer = Scorer([Plain()], cache_size=100)
    assert scorer.score([sample(1), sample(1)]).remembered == {}
    assert CALLS == [["p", "p"]]


def test_threads_share_a_cache():
    cache = ScoreCache(50)
    values = [np.array([float(number)]) for number in range(100)]

    def use(number):
        key = bytes([number % 100])
        result = cache.get(key)
        assert result is None or result[0] == number % 100
        cache.put(key, values[number % 100])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(4000)))
    assert len(cache._values) == 50
