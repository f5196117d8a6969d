"""The sum of all rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sfumato.rewards.combinations.combination import Combination


@dataclass(frozen=True)
class WeightedSum(Combination):
    """Sum of weight times value."""

    type: ClassVar[str] = "weighted_sum"

    def combine(
        self, values: Mapping[str, np.ndarray], weights: Mapping[str, float], metadata: Sequence[dict[str, Any]] | None
    ) -> np.ndarray:
        """``Σ weight · value`` in the order of the rewards, [B]."""
        del metadata
        total = np.zeros(len(next(iter(values.values()))))
        for label, each in values.items():
            total += weights[label] * each
        return total
