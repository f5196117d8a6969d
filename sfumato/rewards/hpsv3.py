"""HPSv3: what people prefer, by a Qwen2-VL with a head that rates the image.

From "HPSv3: Towards Wide-Spectrum Human Preference Score" (Ma et al., 2025, https://arxiv.org/abs/2508.03789) and its
code, https://github.com/MizzenAI/HPSv3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sfumato.errors import DataError
from sfumato.rewards.base import Sample
from sfumato.rewards.pretrained import PretrainedReward

_SPECIAL = re.compile(r"<\|\w+\|>")


@dataclass(frozen=True, kw_only=True)
class HpsV3(PretrainedReward):
    """Preference of people for an image given its prompt, about 0 to 15, by HPSv3."""

    type: ClassVar[str] = "hpsv3"

    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Type of the model's weights; the head's are float32."""
    batch_size: int = 4
    """Samples in one forward pass."""

    @staticmethod
    def load(folder: str, device: str, dtype: str) -> Any:
        """The published network, from a folder of Qwen2-VL with HPSv3's weights and instruction."""
        from sfumato.rewards.networks.hpsv3 import load_hpsv3

        return load_hpsv3(folder, device, dtype)

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raises DataError for a prompt with what the model takes for a token of its own, such as ``<|Reward|>``."""
        found = _SPECIAL.search(prompt)
        if found:
            raise DataError(f"reward {self.label!r} cannot read prompt {prompt!r}: take {found.group()} out of it")

    def score_batch(self, network: Any, samples: list[Sample]) -> Any:
        """The mean of the predicted distribution of the preference for each sample, [B]."""
        for sample in samples:
            self.check_row(sample.prompt, sample.metadata)
        return network([sample.image for sample in samples], [sample.prompt for sample in samples])[:, 0]
