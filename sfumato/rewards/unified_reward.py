"""UnifiedReward: a vision-language model that was trained to score images against their captions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sfumato.rewards.base import Sample
from sfumato.rewards.http.chat_completions import Reply
from sfumato.rewards.judge import Judge
from sfumato.rewards.judging.replies import final_text, number_after


@dataclass(frozen=True, kw_only=True)
class UnifiedReward(Judge):
    """Final score of UnifiedReward, 1 to 5, divided by 5."""

    type: ClassVar[str] = "unified_reward"

    def read(self, reply: Reply, *samples: Sample) -> float:
        """The number after ``Final Score:``, divided by 5."""
        return number_after(final_text(reply), "Final Score", 1, 5) / 5
