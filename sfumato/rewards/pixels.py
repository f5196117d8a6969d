"""Rewards that are statistics of the pixels: for tests, tutorials, and a first run of anything new."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sfumato.rewards.base import Reward, Sample


@dataclass(frozen=True, kw_only=True)
class Brightness(Reward):
    """Mean of all pixel values, from 0 (black) to 1 (white)."""

    type: ClassVar[str] = "brightness"

    def score(self, samples: list[Sample]) -> list[float]:
        """``mean(pixels) / 255`` for each image."""
        return [float(sample.image.mean()) / 255 for sample in samples]
