"""What a combination is, and how the values of a reward are normalised before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

LEAST_STD = 1e-6
"""Smallest standard deviation that is divided by; values that are all equal become 0."""

Normalise = Literal["none", "group", "batch"] | tuple[float, float]


@dataclass(frozen=True)
class Combination(ABC):
    """Base of every combination. A subclass states ``type: ClassVar[str]`` and defines ``combine``."""

    type: ClassVar[str]
    takes_metadata: ClassVar[bool] = False

    def prepare(self) -> None:  # noqa: B027  (most have nothing to load)
        """Raises ConfigError when something is missing."""

    @abstractmethod
    def combine(
        self, values: Mapping[str, np.ndarray], weights: Mapping[str, float], metadata: Sequence[dict[str, Any]] | None
    ) -> np.ndarray:
        """Totals of B samples, each a function of that sample's values alone.

        Args:
            values: of the optimised rewards by label, normalised, float64 [B]; NaN where a reward failed.
            weights: theirs, none of them 0.
            metadata: B rows of the data, for a combination that ``takes_metadata``.

        Returns:
            float64 [B]; a sample of which a value is NaN has no total, whatever stands here.
        """


def normalised(values: np.ndarray, how: Normalise, group_ids: np.ndarray | None) -> np.ndarray:
    """The values of a reward as they go into the combination.

    Standardising subtracts the mean and divides by the standard deviation (divisor N), or by ``LEAST_STD`` where that
    is larger. Values that are all equal, or the only one, become 0. What failed (NaN) counts in no statistic.

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
        result[members] = _standardised(values[members])
    return result


def _standardised(values: np.ndarray) -> np.ndarray:
    if len(values) == 0 or values.min() == values.max():
        return np.zeros_like(values)
    return (values - values.mean()) / max(values.std(), LEAST_STD)
