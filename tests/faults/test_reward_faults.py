"""Rewards that fail: every failure is NaN and named, none is a zero, and a person's mistake stops the run."""

import math
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from sfumato.errors import DataError, MissingDependencyError, RewardError
from sfumato.rewards.base import Failure, Reward, Sample
from sfumato.rewards.ocr import OcrReward
from sfumato.rewards.pixels import Brightness
from sfumato.rewards.scoring.scorer import Scorer

BATCH = 4


@dataclass(frozen=True, kw_only=True)
class Returning(Reward):
    """Returns what it is told to."""

    type: ClassVar[str] = "returning"
    result: Any

    def score(self, samples):
        return self.result


@dataclass(frozen=True, kw_only=True)
class Raising(Reward):
    """Raises what it is told to."""

    type: ClassVar[str] = "raising"
    error: BaseException

    def score(self, samples):
        raise self.error


@dataclass(frozen=True, kw_only=True)
class Hanging(Reward):
    """Hangs until the event is set."""

    type: ClassVar[str] = "hanging"
    release: threading.Event

    def score(self, samples):
        self.release.wait(30)
        return [1.0] * len(samples)


@dataclass(frozen=True, kw_only=True)
class FailingGroup(Reward):
    """Fails for one group."""

    type: ClassVar[str] = "failing_group"
    groupwise: ClassVar[bool] = True
    group_id: int
    hang: bool = False

    def score(self, samples):
        if samples[0].group_id == self.group_id:
            if self.hang:
                time.sleep(5)
            raise RuntimeError("this group is cursed")
        return [1.0] * len(samples)


def batch(prompt="p", group_ids=(0, 0, 1, 1)):
    image = np.full((8, 8, 3), 51, np.uint8)
    return [Sample(image=image, prompt=prompt, group_id=group) for group in group_ids]


NAN = math.nan
INF = math.inf


@pytest.mark.parametrize(
    ("result", "expected", "reason", "count"),
    [
        ([1, NAN, 3, 4], [1, NAN, 3, 4], "NaN", 1),
        ([1, INF, -INF, 4], [1, NAN, NAN, 4], "infinite", 2),
        ([10**400, 2, 3, 4], [NAN, 2, 3, 4], "infinite", 1),
        (["0.5", 2, 3, 4], [NAN, 2, 3, 4], "str, not a number", 1),
        ([np.str_("1"), 2, 3, 4], [NAN, 2, 3, 4], "not a number", 1),
        ([None, 2, 3, 4], [NAN, 2, 3, 4], "NoneType, not a number", 1),
        ([[1], 2, 3, 4], [NAN, 2, 3, 4], "list, not a number", 1),
        (np.ones((4, 1)), [NAN] * 4, "list, not a number", 4),
        ([Failure(""), 2, 3, 4], [NAN, 2, 3, 4], "no stated reason", 1),
        ([1, 2, 3], [NAN] * 4, "3 values for 4 samples", 4),
        ([1, 2, 3, 4, 5], [NAN] * 4, "5 values for 4 samples", 4),
        ([], [NAN] * 4, "0 values for 4 samples", 4),
        (1.0, [NAN] * 4, "float, not a list", 4),
        (np.float64(1.0), [NAN] * 4, "not a list", 4),
        (None, [NAN] * 4, "NoneType, not a list", 4),
        ("1234", [NAN] * 4, "str, not a list", 4),
        ({0: 1, 1: 1, 2: 1, 3: 1}, [NAN] * 4, "dict, not a list", 4),
    ],
)
def test_wrong_values_become_nan_and_are_named(result, expected, reason, count):
    scores = Scorer([Returning(result=result), Brightness()]).score(batch())
    expected = np.array(expected, dtype=np.float64)
    np.testing.assert_array_equal(scores.components["returning"], expected)
    np.testing.assert_allclose(scores.total, expected + 0.2)
    np.testing.assert_allclose(scores.components["brightness"], 0.2)
    (failure,) = scores.failures
    assert failure.startswith("returning: ") and reason in failure and f"({count} of 4 samples)" in failure


@pytest.mark.parametrize("error", [RuntimeError("boom"), ValueError("boom"), SystemExit("boom")])
def test_a_reward_that_raises_is_nan_and_named_with_its_place(error):
    scores = Scorer([Raising(error=error)]).score(batch())
    assert np.isnan(scores.total).all()
    (failure,) = scores.failures
    assert f"raising: {type(error).__name__}: boom" in failure
    assert f"{__file__}:" in failure and "(4 of 4 samples)" in failure


def test_a_reward_that_hangs_is_abandoned_and_the_next_call_works():
    release = threading.Event()
    scorer = Scorer([Hanging(release=release, timeout_s=0.2), Brightness()])
    start = time.monotonic()
    scores = scorer.score(batch())
    assert time.monotonic() - start < 5
    assert np.isnan(scores.total).all() and np.isnan(scores.components["hanging"]).all()
    np.testing.assert_allclose(scores.components["brightness"], 0.2)
    assert scores.failures == ["hanging: timed out after 0.2 s (4 of 4 samples)"]
    left_behind = [thread for thread in threading.enumerate() if thread.name == "reward-hanging"]
    assert len(left_behind) == 1 and left_behind[0].daemon
    release.set()
    np.testing.assert_allclose(scorer.score(batch()).total, 1.2)


def test_only_the_failing_group_is_lost():
    scores = Scorer([FailingGroup(group_id=1)]).score(batch(group_ids=(0, 1, 0, 1)))
    np.testing.assert_array_equal(scores.total, [1, NAN, 1, NAN])
    assert "this group is cursed" in scores.failures[0] and "(2 of 4 samples)" in scores.failures[0]


def test_after_a_hanging_group_the_rest_of_the_batch_is_not_waited_for():
    scores = Scorer([FailingGroup(group_id=1, hang=True, timeout_s=0.2)]).score(batch(group_ids=(0, 1, 2, 3)))
    np.testing.assert_array_equal(scores.total, [1, NAN, NAN, NAN])
    assert scores.failures == ["failing_group: timed out after 0.2 s (3 of 4 samples)"]


def test_the_budget_stops_the_run_and_names_rewards_and_reasons():
    watched = Raising(name="watched", error=RuntimeError("not to blame"), evaluation_only=True)
    bad = [NAN, NAN, NAN, 1.0]
    scorer = Scorer([Returning(result=bad), watched], max_failed_fraction=0.5)
    with pytest.raises(RewardError, match=r"3 of 4 samples.*returning: returned NaN \(3 of 4 samples\)") as error:
        scorer.check_budget(scorer.score(batch()))
    assert "not to blame" not in str(error.value)
    for fraction in (0.75, 1.0):
        scorer = Scorer([Returning(result=bad)], max_failed_fraction=fraction)
        scorer.check_budget(scorer.score(batch()))


def test_a_budget_of_zero_allows_no_failure():
    scorer = Scorer([Returning(result=[1, 2, 3, NAN])], max_failed_fraction=0.0)
    with pytest.raises(RewardError):
        scorer.check_budget(scorer.score(batch()))


@pytest.mark.parametrize("fields", [{"evaluation_only": True}, {"weight": 0.0}])
def test_a_reward_that_is_only_watched_never_stops_a_run(fields):
    scorer = Scorer([Brightness(), Raising(error=RuntimeError("boom"), **fields)], max_failed_fraction=0.0)
    scores = scorer.score(batch())
    np.testing.assert_allclose(scores.total, 0.2)
    assert np.isnan(scores.components["raising"]).all() and len(scores.failures) == 1
    scorer.check_budget(scores)


@pytest.mark.parametrize("error", [MissingDependencyError("pip install x"), DataError("row 3")])
def test_a_mistake_that_a_person_must_mend_is_passed_on(error):
    with pytest.raises(type(error), match=str(error)):
        Scorer([Brightness(), Raising(error=error)]).score(batch())


def test_a_prompt_without_target_stops_the_run_by_name():
    with pytest.raises(DataError, match="a plain sky"):
        Scorer([OcrReward()]).score(batch(prompt="a plain sky"))


def test_missing_rapidocr_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr", None)  # makes the import fail as if the package were absent
    reward = OcrReward(engine="rapidocr", batch_size=7)  # an engine that no other test has loaded
    with pytest.raises(MissingDependencyError, match=r"pip install rapidocr onnxruntime"):
        Scorer([reward]).prepare()
    with pytest.raises(MissingDependencyError, match=r"pip install rapidocr onnxruntime"):
        Scorer([reward]).score(batch(prompt='"x"'))


def test_missing_tesseract_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="apt-get install tesseract-ocr"):
        Scorer([OcrReward(engine="tesseract")]).prepare()


def put_program(folder, monkeypatch, script):
    program = folder / "tesseract"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_tesseract_that_fails_is_named_with_its_own_message(monkeypatch, tmp_path):
    put_program(tmp_path, monkeypatch, "cat > /dev/null; echo 'Error opening data file eng.traineddata' >&2; exit 1")
    scores = Scorer([OcrReward(engine="tesseract")]).score(batch(prompt='"x"'))
    assert np.isnan(scores.total).all()
    assert "eng.traineddata" in scores.failures[0]


def test_a_tesseract_that_hangs_is_ended(monkeypatch, tmp_path):
    put_program(tmp_path, monkeypatch, "exec sleep 30")
    reward = OcrReward(engine="tesseract", timeout_s=0.5)
    start = time.monotonic()
    with pytest.raises((TimeoutError, subprocess.TimeoutExpired)):  # by itself, so that no process is left behind
        reward.read([sample.image for sample in batch()])
    assert time.monotonic() - start < 10
    scores = Scorer([reward]).score(batch(prompt='"x"'))
    assert np.isnan(scores.total).all() and len(scores.failures) == 1
