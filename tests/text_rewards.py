"""Rewards and an environment that a tiny language model with random weights can learn within a few updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sfumato.data.text.prompts import TextPrompt
from sfumato.rewards.base import Reward, Sample


@dataclass(frozen=True, kw_only=True)
class Ascii(Reward):
    """The share of an answer's characters that are ASCII; bytes drawn at random are mostly none."""

    type: ClassVar[str] = "ascii"

    def score(self, samples: list[Sample]) -> list[float]:
        return [
            sum(character.isascii() for character in sample.text or "") / max(len(sample.text or ""), 1)
            for sample in samples
        ]


@dataclass(frozen=True, kw_only=True)
class FirstIsAscii(Reward):
    """1 where an answer begins with a character that is ASCII: groups often have no spread."""

    type: ClassVar[str] = "first_is_ascii"

    def score(self, samples: list[Sample]) -> list[float]:
        return [float((sample.text or "")[:1].isascii()) for sample in samples]


class Echo:
    """An environment that tells how an action begins, and rewards one that begins with a character that is ASCII."""

    def reset(self, prompt: TextPrompt) -> str:
        return f"{prompt.text}?"

    def step(self, action: str) -> tuple[str, float, bool]:
        begins_well = action[:1].isascii()
        return f" {begins_well} ", float(begins_well), not action
