"""Runs rewards over a batch, keeps their failures apart from their values, and adds up what is optimised."""

from __future__ import annotations

import functools
import math
import numbers
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sfumato.errors import ConfigError, RewardError, UserError
from sfumato.rewards.base import Failure, Reward, Sample
from sfumato.tracking.samples import SampleRecord

TIMED_OUT = "timed out"
"""How the reason of a call that took too long begins."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a batch of B samples was given."""

    total: np.ndarray
    """Weighted sum of the rewards that are optimised, float64 [B]; NaN where one of non-zero weight failed."""
    components: dict[str, np.ndarray]
    """Values of every reward by label, unweighted, float64 [B]; NaN where it failed."""
    failures: list[str]
    """One message per reward and reason, with the number of samples; empty when all went well."""
    notes: list[str] = field(default_factory=list)
    """What else happened, such as requests that were tried again."""
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Metrics of the rewards' own that are shares: how many of how many."""

    @staticmethod
    def cat(parts: Sequence[Scores]) -> Scores:
        """Scores of several micro-batches or ranks, in order."""
        return Scores(
            total=np.concatenate([each.total for each in parts]),
            components={
                name: np.concatenate([each.components[name] for each in parts]) for name in parts[0].components
            },
            failures=[failure for each in parts for failure in each.failures],
            notes=[note for each in parts for note in each.notes],
            counts={
                name: (sum(each.counts[name][0] for each in parts), sum(each.counts[name][1] for each in parts))
                for name in parts[0].counts
            },
        )

    def metrics(self, prefix: str) -> dict[str, float]:
        """Means of what could be scored, the spread of the total, and the shares that failed."""
        values = {"total": self.total, **self.components}
        means = {f"{prefix}reward/{name}": _nan_mean(each) for name, each in values.items()}
        scored = self.total[np.isfinite(self.total)]
        spread = float(scored.std()) if len(scored) else math.nan
        failed = float(np.isnan(self.total).mean())
        shares = {f"{prefix}{name}": part / whole if whole else math.nan for name, (part, whole) in self.counts.items()}
        return {**means, **shares, f"{prefix}reward/std": spread, f"{prefix}reward/failed": failed}

    def record(self, row: int, sample: Sample, **about: Any) -> SampleRecord:
        """One sample with its scores, for the run folder; ``about`` are the record's other fields."""
        rewards = {name: float(each[row]) for name, each in self.components.items()}
        return SampleRecord(
            content=sample.image,
            source=sample.source,
            prompt=sample.prompt,
            rewards=rewards,
            total=float(self.total[row]),
            **about,
        )


class Scorer:
    """Scores batches with a list of rewards.

    Args:
        rewards: built rewards with different labels.
        max_failed_fraction: share of a batch, 0 to 1, that may be without total before ``check_budget`` raises.
        require_objective: demand a reward that is optimised; False for a scorer that only evaluates.

    Raises:
        ConfigError: no rewards, something that is none, equal labels, a fraction out of range, nothing to optimise.
    """

    def __init__(
        self, rewards: list[Reward], *, max_failed_fraction: float = 0.5, require_objective: bool = True
    ) -> None:
        if not rewards:
            raise ConfigError("reward.rewards is empty: list at least one reward, such as {type: brightness}")
        for reward in rewards:
            if not isinstance(reward, Reward):
                raise ConfigError(
                    f"reward.rewards holds a {type(reward).__name__}, which does not derive from "
                    "sfumato.rewards.base.Reward"
                )
        twice = [label for label, count in Counter(reward.label for reward in rewards).items() if count > 1]
        if twice:
            raise ConfigError(f"several rewards are called {twice[0]!r}: set a different 'name' on each")
        if not 0 <= max_failed_fraction <= 1:
            raise ConfigError(f"max_failed_fraction must be from 0 to 1, not {max_failed_fraction}")
        self.rewards = list(rewards)
        self.max_failed_fraction = max_failed_fraction
        self.objective = [reward for reward in rewards if not reward.evaluation_only and reward.weight != 0]
        if require_objective and not self.objective:
            raise ConfigError(
                "no reward is optimised: one needs a non-zero 'weight' and 'evaluation_only: false' "
                f"(rewards: {', '.join(reward.label for reward in rewards)})"
            )

    def prepare(self) -> None:
        """Loads every reward's engine. Raises MissingDependencyError that says how to install what is missing."""
        for reward in self.rewards:
            reward.prepare()

    def score(self, samples: list[Sample], objective_only: bool = False) -> Scores:
        """Scores a batch with every reward, one after the other.

        A reward that raises, hangs longer than its ``timeout_s``, or returns something other than one finite number
        per sample leaves NaN for the samples concerned and a message in ``failures``.

        Args:
            samples: B samples; those of one group need not stand together.
            objective_only: leave out rewards that are only watched.

        Returns:
            The scores in the order of the samples. ``total`` is NaN throughout when nothing is optimised.

        Raises:
            UserError: what a reward raised as such (missing dependency, bad data) is passed on.
        """
        components: dict[str, np.ndarray] = {}
        failures: list[str] = []
        notes: list[str] = []
        counts: dict[str, tuple[int, int]] = {}
        for reward in self.objective if objective_only else self.rewards:
            values, reasons = score_with(reward, samples)
            components[reward.label] = values
            failures += [
                f"{_failure_prefix(reward)}{reason} ({count} of {len(samples)} samples)"
                for reason, count in Counter(reason for reason in reasons if reason).items()
            ]
            notes += [f"{reward.label}: {note}" for note in reward.take_notes()]
            counts |= reward.take_counts()
        total = np.zeros(len(samples)) if self.objective else np.full(len(samples), math.nan)
        for reward in self.objective:
            total += reward.weight * components[reward.label]
        return Scores(total=total, components=components, failures=failures, notes=notes, counts=counts)

    def check_budget(self, scores: Scores) -> None:
        """Raises RewardError when more than ``max_failed_fraction`` of the batch has no total.

        Rewards that are not optimised never raise, whatever they returned.
        """
        num_samples, num_failed = len(scores.total), int(np.isnan(scores.total).sum())
        if not self.objective or num_failed <= self.max_failed_fraction * num_samples:
            return
        prefixes = tuple(_failure_prefix(reward) for reward in self.objective)
        reasons = "; ".join(failure for failure in scores.failures if failure.startswith(prefixes))
        raise RewardError(
            f"{num_failed} of {num_samples} samples have no reward, more than max_failed_fraction "
            f"{self.max_failed_fraction} allows: {reasons}"
        )


def _nan_mean(values: np.ndarray) -> float:
    scored = values[np.isfinite(values)]
    return float(scored.mean()) if len(scored) else math.nan


def _failure_prefix(reward: Reward) -> str:
    return f"{reward.label} (evaluation only): " if reward.evaluation_only else f"{reward.label}: "


def score_with(reward: Reward, samples: list[Sample]) -> tuple[np.ndarray, list[str]]:
    """Scores B samples with one reward, failures kept apart as ``Scorer.score`` does.

    Returns:
        Values float64 [B], and for each sample the reason why it has none ("" where it has one).

    Raises:
        UserError: what the reward raised as such.
    """
    values = np.full(len(samples), math.nan)
    reasons = [""] * len(samples)
    timed_out = ""
    for indices in _calls(reward, samples):
        parts = [reward.seen(samples[index]) for index in indices]
        batch = [each for part in parts for each in part]
        # After one hanging call the other groups are not tried: each would cost the full timeout again.
        result, failed = (None, timed_out) if timed_out else _call(functools.partial(reward.score, batch), reward)
        timed_out = failed if failed.startswith(TIMED_OUT) else timed_out
        checked = [(math.nan, failed)] * len(batch) if failed else _check_values(result, len(batch))
        rest = iter(checked)
        for index, part in zip(indices, parts, strict=True):
            values[index], reasons[index] = _mean([next(rest) for _ in part])
    return values, reasons


def _mean(checked: list[tuple[float, str]]) -> tuple[float, str]:
    """Value and reason of a sample from those of its frames: without value when one of them has none."""
    failed = [reason for _, reason in checked if reason]
    return (math.nan, failed[0]) if failed else (sum(value for value, _ in checked) / len(checked), "")


def _calls(reward: Reward, samples: list[Sample]) -> list[list[int]]:
    """Which samples go into each call of the reward."""
    if not reward.groupwise:
        return [list(range(len(samples)))] if samples else []
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    return list(groups.values())


def _call(function: Callable[[], Any], reward: Reward) -> tuple[Any, str]:
    """Result of a call in a thread of its own, and the reason why there is none. Raises what is a UserError.

    Python cannot stop a thread, so a call that hangs is left behind; as a daemon it does not keep the process alive.
    """
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = function()
        except BaseException as error:  # whatever a reward raises, sys.exit included, is an unscored batch
            outcome["error"] = error

    thread = threading.Thread(target=run, name=f"reward-{reward.label}", daemon=True)
    thread.start()
    thread.join(reward.timeout_s)
    if not outcome and thread.is_alive():
        return None, f"{TIMED_OUT} after {reward.timeout_s:g} s"
    error = outcome.get("error")
    if isinstance(error, UserError):
        raise error
    if error is not None:
        return None, f"{type(error).__name__}: {error} (at {_place(error, reward)})"
    return outcome["result"], ""


def _place(error: BaseException, reward: Reward) -> str:
    """``file:line`` of the error: in the reward's own file where possible, since that is the one to look into."""
    frames = traceback.extract_tb(error.__traceback__)
    own = getattr(sys.modules.get(type(reward).__module__), "__file__", None)
    frame = next((each for each in reversed(frames) if each.filename == own), frames[-1])
    return f"{frame.filename}:{frame.lineno}"


def _check_values(result: Any, num_samples: int) -> list[tuple[float, str]]:
    """For each sample its value and "", or NaN and the reason why the value does not count."""
    if hasattr(result, "tolist"):  # an array or a tensor
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        return [(math.nan, f"returned a {type(result).__name__}, not a list of numbers")] * num_samples
    if len(result) != num_samples:
        return [(math.nan, f"returned {len(result)} values for {num_samples} samples")] * num_samples
    return [_check_value(value) for value in result]


def _check_value(value: Any) -> tuple[float, str]:
    if isinstance(value, Failure):
        return math.nan, value.reason
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
    return number, ""
