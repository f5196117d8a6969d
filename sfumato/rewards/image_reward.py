"""ImageReward: what people prefer, by a BLIP model that reads the prompt while it looks at the image.

From "ImageReward: Learning and Evaluating Human Preferences for Text-to-Image Generation" (Xu et al., 2023,
https://arxiv.org/abs/2304.05977) and its code, https://github.com/THUDM/ImageReward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sfumato.rewards.base import Sample
from sfumato.rewards.pretrained import PretrainedReward


@dataclass(frozen=True, kw_only=True)
class ImageReward(PretrainedReward):
    """Preference of people for an image given its prompt, about -2 to 2 and 0 on average, by ImageReward."""

    type: ClassVar[str] = "image_reward"

    @staticmethod
    def load(folder: str, device: str, dtype: str) -> Any:
        """The published network, from a folder with its weights, ``med_config.json`` and BERT's tokenizer."""
        from sfumato.rewards.networks.image_reward import load_image_reward

        return load_image_reward(folder, device, dtype)

    def score_batch(self, network: Any, samples: list[Sample]) -> Any:
        """``(head(features) - 0.1672) / 1.0333`` for each sample, [B]."""
        return network([sample.image for sample in samples], [sample.prompt for sample in samples])
