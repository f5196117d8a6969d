"""The worst of all rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sfumato.rewards.combinations.combination import Combination


@dataclass(frozen=True)
class Minimum(Combination):
    """Smallest of weight times value: no reward is bought with another one."""

    type: ClassVar[str] = "minimum"

    def combine(
        self, values: Mapping[str, np.ndarray], weights: Mapping[str, float], metadata: Sequence[dict[str, Any]] | None
    ) -> np.ndarray:
        """``min(weight · value)``, [B]."""
        del metadata
        return np.min([weights[label] * each for label, each in values.items()], axis=0)
