"""EditReward: how people would rate the edit of a picture by an instruction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from sfumato.rewards.base import Sample
from sfumato.rewards.pretrained import ChatModelReward, source_of

if TYPE_CHECKING:
    import torch

    from sfumato.rewards.networks.edit_reward import EditRewardNetwork


@dataclass(frozen=True, kw_only=True)
class EditReward(ChatModelReward):
    """Mean of two ratings of an edit: how it follows the instruction, and its quality.

    A Qwen2.5-VL-7B or MiMo-VL-7B with two heads (Wu et al., 2025, https://arxiv.org/abs/2509.26346).
    """

    type: ClassVar[str] = "edit_reward"
    modality: ClassVar[str] = "image"
    compares_source: ClassVar[bool] = True
    loader: ClassVar[str] = "sfumato.rewards.networks.edit_reward:load_edit_reward"

    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Type of the model's weights; the heads' are float32."""
    batch_size: int = 4
    """Samples in one forward pass."""

    def score_batch(self, network: EditRewardNetwork, samples: list[Sample]) -> torch.Tensor:
        """The mean of both ratings for each sample, [B]. Raises DataError without source image."""
        for sample in samples:  # those of a reward server come without check_row
            self.check_row(sample.prompt, sample.metadata)
        sources = [source_of(sample, self.label) for sample in samples]
        images = [sample.pixels for sample in samples]
        return network(images, sources, [sample.prompt for sample in samples]).mean(dim=1)
