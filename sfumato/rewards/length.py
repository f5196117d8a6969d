"""Rewards for the length of a language model's answer, in tokens that the policy drew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from sfumato.errors import ConfigError, DataError
from sfumato.rewards.base import Reward, Sample


@dataclass(frozen=True, kw_only=True)
class Overlong(Reward):
    """DAPO's soft punishment of long answers (arXiv 2503.14476, eq. 13), to be added to what answers are worth.

    0 up to ``max_length - buffer`` tokens, from there falling in a straight line to -1 at ``max_length``.
    """

    type: ClassVar[str] = "overlong"
    modality: ClassVar[str] = "text"

    max_length: int
    """Tokens at which the punishment is whole; mostly the limit of what is drawn."""
    buffer: int
    """Last tokens before max_length, over which the punishment grows."""
    capped: bool = True
    """-1 for all beyond max_length (the paper, OpenRLHF); false lets the line fall on (verl, AReaL)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("max_length", "buffer")
        if self.buffer > self.max_length:
            raise ConfigError(
                f"buffer {self.buffer} of reward {self.label!r} must be at most its max_length {self.max_length}"
            )

    def score(self, samples: list[Sample]) -> list[float]:
        """``min(0, (max_length - buffer - tokens) / buffer)`` for each text, and not below -1 when capped.

        Raises DataError for an image.
        """
        lowest = -1.0 if self.capped else float("-inf")
        free = self.max_length - self.buffer
        return [max(lowest, min(0.0, (free - num_tokens(sample, self.label)) / self.buffer)) for sample in samples]


@dataclass(frozen=True, kw_only=True)
class Length(Reward):
    """How well the length of an answer suits, from 0 to 1."""

    type: ClassVar[str] = "length"
    modality: ClassVar[str] = "text"

    target: int
    """How many tokens an answer should have."""
    form: Literal["near", "at_most"] = "near"
    """near: 1 at the target, 0 from that many tokens away from it; at_most: 1 up to the target, 0 beyond."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("target")

    def score(self, samples: list[Sample]) -> list[float]:
        """``max(0, 1 - |tokens - target| / target)`` for each text, or whether there are at most ``target``.

        Raises DataError for an image.
        """
        lengths = [num_tokens(sample, self.label) for sample in samples]
        if self.form == "at_most":
            return [float(length <= self.target) for length in lengths]
        return [max(0.0, 1 - abs(length - self.target) / self.target) for length in lengths]


def num_tokens(sample: Sample, label: str) -> int:
    """Tokens of a text. Raises DataError for an image."""
    if sample.text is None:
        raise DataError(f"reward {label!r} scores texts, but the sample of prompt {sample.prompt!r} has none")
    return sample.num_tokens
