"""Does the image show the text that the prompt asks for? A vision-language model transcribes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sfumato.rewards.base import Sample
from sfumato.rewards.http.chat_completions import Reply
from sfumato.rewards.judge import Judge
from sfumato.rewards.judging.replies import final_text
from sfumato.rewards.ocr import ocr_target, ocr_text_score


@dataclass(frozen=True, kw_only=True)
class QwenVLOcrReward(Judge):
    """Closeness of a vision-language model's transcription to the text quoted in the prompt, from 0 to 1."""

    type: ClassVar[str] = "qwenvl_ocr"
    takes_video: ClassVar[bool] = False  # the mean over the frames, as for ``ocr``

    max_tokens: int = 256
    """Length of a transcription; one that is cut off does not count."""

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raises DataError when the row has no target."""
        ocr_target(prompt, metadata)
        super().check_row(prompt, metadata)

    def read(self, reply: Reply, *samples: Sample) -> float:
        """``ocr_text_score`` of the reply."""
        return ocr_text_score(final_text(reply), ocr_target(samples[0].prompt, samples[0].metadata))
