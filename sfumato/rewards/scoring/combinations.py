"""Combines the values of several rewards, each normalised before, into the total that is optimised."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from sfumato.config.open_mappings import JsonObject
from sfumato.config.user_functions import import_function
from sfumato.errors import ConfigError
from sfumato.rewards.scoring.calls import describe_error

ROUNDING = 1e-12
"""Values that differ by no more than this part of the largest, or of 1, are equal, as advantages have it."""

LEAST_STD = 1e-6
"""Smallest standard deviation that is divided by; values that are all equal become 0."""

Normalise = Literal["none", "group", "batch"] | tuple[float, float]
Values = Mapping[str, np.ndarray]
Rows = Sequence[JsonObject] | None


@dataclass(frozen=True)
class Combination(ABC):
    """Base of every combination. A subclass states ``type: ClassVar[str]`` and defines ``combine``."""

    type: ClassVar[str]
    takes_metadata: ClassVar[bool] = False

    def prepare(self) -> None:  # noqa: B027  (most have nothing to load)
        """Raises ConfigError when something is missing."""

    @abstractmethod
    def combine(self, values: Values, weights: Mapping[str, float], metadata: Rows) -> np.ndarray:
        """Totals of B samples, each a function of that sample's values alone.

        Args:
            values: of the optimised rewards by label, normalised, float64 [B]; NaN where a reward failed.
            weights: theirs, none of them 0.
            metadata: B rows of the data, for a combination that ``takes_metadata``.

        Returns:
            float64 [B]; a sample of which a value is NaN has no total, whatever stands here.
        """


def normalise_values(values: np.ndarray, how: Normalise, group_ids: np.ndarray | None) -> np.ndarray:
    """The values of a reward as they go into the combination.

    Standardising subtracts the mean and divides by the standard deviation (divisor N), or by ``LEAST_STD`` where that
    is larger. Values that are all equal but for rounding, or the only one, become 0. What failed (NaN) counts in no
    statistic.

    Args:
        values: float64 [B].
        how: none; group or batch, to standardise within groups or over all; or the range that becomes 0 to 1.
        group_ids: [B]; None standardises nothing, where samples are none of an iteration.
    """
    if not isinstance(how, str):
        low, high = how
        return (values - low) / (high - low)
    if how == "none" or group_ids is None:
        return values
    result = np.full_like(values, np.nan)
    for group in np.unique(group_ids) if how == "group" else [None]:
        members = np.isfinite(values) & (True if group is None else group_ids == group)
        result[members] = _standardise(values[members])
    return result


def _standardise(values: np.ndarray) -> np.ndarray:
    # what differs by rounding alone becomes exactly 0: divided by LEAST_STD it would be a spread
    if len(values) == 0 or np.ptp(values) <= ROUNDING * max(np.abs(values).max(), 1.0):
        return np.zeros_like(values)
    return (values - values.mean()) / max(values.std(), LEAST_STD)


@dataclass(frozen=True)
class WeightedSum(Combination):
    """Sum of weight times value."""

    type: ClassVar[str] = "weighted_sum"

    def combine(self, values: Values, weights: Mapping[str, float], metadata: Rows) -> np.ndarray:
        """``Σ weight · value`` in the order of the rewards, [B]."""
        del metadata
        total = np.zeros(len(next(iter(values.values()))))
        for label, reward_values in values.items():
            total += weights[label] * reward_values
        return total


@dataclass(frozen=True)
class Minimum(Combination):
    """Smallest of weight times value: no reward is bought with another one."""

    type: ClassVar[str] = "minimum"

    def combine(self, values: Values, weights: Mapping[str, float], metadata: Rows) -> np.ndarray:
        """``min(weight · value)``, [B]."""
        del metadata
        return np.min([weights[label] * reward_values for label, reward_values in values.items()], axis=0)


@dataclass(frozen=True)
class FunctionCombination(Combination):
    """What a function of your own makes of the values."""

    type: ClassVar[str] = "function"
    takes_metadata: ClassVar[bool] = True

    path: str
    """Where it stands: my_module:my_function, or folder/file.py:my_function. It is called with {label: float64 [B]} and
    B rows of metadata, and returns B numbers."""

    def prepare(self) -> None:
        """Imports the function. Raises ConfigError when there is none."""
        import_function(self.path)

    def combine(self, values: Values, weights: Mapping[str, float], metadata: Rows) -> np.ndarray:
        """What the function returns, [B]; weights are its own business.

        Raises:
            ConfigError: it raised, or returned something else.
        """
        del weights
        function = import_function(self.path)
        num_samples = len(next(iter(values.values())))
        try:
            total = np.asarray(function({name: array.copy() for name, array in values.items()}, metadata), np.float64)
        except Exception as error:
            where = getattr(getattr(function, "__code__", None), "co_filename", None)
            raise ConfigError(f"reward.combination {self.path}: {describe_error(error, where)}") from error
        if total.shape != (num_samples,):
            raise ConfigError(
                f"reward.combination {self.path} returned shape {list(total.shape)} for {num_samples} samples"
            )
        return total
