"""A reward that compares the samples of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sfumato.rewards.base import Reward, Sample


@dataclass(frozen=True, kw_only=True)
class Ranked(Reward):
    """Place by brightness within the group, from 0 to 1."""

    groupwise: ClassVar[bool] = True

    def score(self, samples: list[Sample]) -> list[float]:
        order = sorted(range(len(samples)), key=lambda index: float(samples[index].image.mean()))
        return [order.index(index) / max(len(samples) - 1, 1) for index in range(len(samples))]
