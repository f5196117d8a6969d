"""Rewards that a tiny language model with random weights can learn within a few updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sfumato.rewards.base import Reward, Sample


@dataclass(frozen=True, kw_only=True)
class Digits(Reward):
    """The share of an answer's characters that are digits."""

    type: ClassVar[str] = "digits"

    def score(self, samples: list[Sample]) -> list[float]:
        return [
            sum(each.isdigit() for each in sample.text or "") / max(len(sample.text or ""), 1) for sample in samples
        ]
