"""One call of a reward: what it returned, checked, or what went wrong, in words."""

from __future__ import annotations

import math
import numbers
import traceback
from dataclasses import dataclass
from typing import Any

from sfumato.errors import UserError
from sfumato.rewards.base import Failure, Reward, Sample

TIMED_OUT = "timed out"
"""How the reason of a call that took too long begins."""

LARGEST = 1e30
"""Largest magnitude of a value, and of a total. Squares of far larger ones overflow, in float64 above 1e154, and
advantages are float32; a reward whose values are so large has no meaningful scale."""

Checked = list[tuple[float, str]]
"""For each sample its value and "", or NaN and the reason why it has none."""


@dataclass(frozen=True)
class Outcome:
    """The checked values of a call, and whether its thread or process was lost."""

    values: Checked
    is_lost: bool = False
    """The thread or the process of the call was lost with it."""


def score_batch(reward: Reward, samples: list[Sample]) -> Checked:
    """Calls ``score`` here and now, on samples that it may change.

    Raises:
        UserError: what the reward raised as such; anything else that it raises is a reason.
    """
    num_samples = len(samples)  # the list is the reward's, which may empty it
    try:
        return check_values(reward.score(samples), num_samples)
    except UserError:
        raise
    except BaseException as error:  # whatever a reward raises, sys.exit included, is an unscored batch
        return mark_failed(describe_error(error, reward.source_file), num_samples)


def mark_failed(reason: str, num_samples: int) -> Checked:
    """So many samples without a value."""
    return [(math.nan, reason)] * num_samples


def describe_error(error: BaseException, own_file: str | None) -> str:
    """Kind, text and place of an error: in ``own_file`` where possible, since that is the one to look into."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # of an error whose text cannot be had, the kind must do
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == own_file), frames[-1])
    return f"{text} (at {frame.filename}:{frame.lineno})"


def check_values(result: Any, num_samples: int) -> Checked:
    """Checks what ``score`` returned; a value that is no finite number becomes NaN with a reason.

    Args:
        result: a list, tuple, array or tensor if the reward keeps its promise.
        num_samples: length that it must have; otherwise no sample has a value.
    """
    if hasattr(result, "tolist"):  # an array or a tensor
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        return mark_failed(f"returned a {type(result).__name__}, not a list of numbers", num_samples)
    if len(result) != num_samples:
        return mark_failed(f"returned {len(result)} values for {num_samples} samples", num_samples)
    return [_check_value(value) for value in result]


def _check_value(value: Any) -> tuple[float, str]:
    if isinstance(value, Failure):
        return math.nan, value.reason or "failed for no stated reason"
    if getattr(value, "shape", None) == ():  # an array's or a tensor's element
        value = value.item()
    if not isinstance(value, numbers.Real):
        return math.nan, f"returned a {type(value).__name__}, not a number"
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the largest float
        number = math.inf
    if math.isnan(number):
        return math.nan, "returned NaN"
    if math.isinf(number):
        return math.nan, "returned an infinite value"
    if abs(number) > LARGEST:
        return math.nan, f"returned {number:.3g}, more than the {LARGEST:g} that statistics of rewards can be made of"
    return number, ""
