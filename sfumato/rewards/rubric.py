"""A number that a language model gives for how far a rubric of your own is met."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sfumato.errors import ConfigError
from sfumato.rewards.base import Sample
from sfumato.rewards.http.chat_completions import Reply
from sfumato.rewards.judge import Judge
from sfumato.rewards.judging.replies import final_text, number_after
from sfumato.rewards.judging.template import read_file


@dataclass(frozen=True, kw_only=True)
class RubricReward(Judge):
    """A judge's score by a rubric of your own, scaled to 0 to 1.

    Raises ConfigError when the rubric is empty or its file missing, or when ``score_range`` is none.
    """

    type: ClassVar[str] = "rubric"

    rubric: str
    """What is good and what is not: a text, or the path of a .txt or .md file that holds it."""
    score_range: tuple[float, float] = (1.0, 10.0)
    """Lowest and highest score that the judge may give."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.score_range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(f"score_range of reward {self.label!r} must be low and high, not {low:g} and {high:g}")
        if not self.variables()["rubric"]:
            raise ConfigError(f"rubric of reward {self.label!r} is empty: say what is good and what is not")

    def variables(self) -> dict[str, Any]:
        """The rubric, and the range as ``low`` and ``high``."""
        low, high = (f"{each:g}" for each in self.score_range)
        return {"rubric": self._text().strip(), "low": low, "high": high}

    def read(self, reply: Reply, *samples: Sample) -> float:
        """``(score - low) / (high - low)`` of the number after the last ``Score:``."""
        low, high = self.score_range
        return (number_after(final_text(reply), "Score", low, high) - low) / (high - low)

    def _text(self) -> str:
        is_path = self.rubric.endswith((".txt", ".md")) and "\n" not in self.rubric
        if is_path and not Path(self.rubric).is_file():
            raise ConfigError(f"rubric of reward {self.label!r}: no file {self.rubric}")
        return _read(self.rubric) if is_path else self.rubric


@functools.cache
def _read(path: str) -> str:
    """A file as it was when it was first asked for, whoever edits it during the run."""
    return read_file(Path(path))
