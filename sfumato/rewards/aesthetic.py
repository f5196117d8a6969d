"""How beautiful an image is, whatever its prompt: the predictor of LAION on embeddings of CLIP ViT-L/14.

From https://github.com/christophschuhmann/improved-aesthetic-predictor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sfumato.rewards.base import Sample
from sfumato.rewards.pretrained import PretrainedReward


@dataclass(frozen=True, kw_only=True)
class Aesthetic(PretrainedReward):
    """Predicted rating of the image by people, about 1 to 10, by LAION's aesthetic predictor."""

    type: ClassVar[str] = "aesthetic"

    @staticmethod
    def load(folder: str, device: str, dtype: str) -> Any:
        """A CLIP model, and the head from ``aesthetic.safetensors`` in the same folder."""
        from sfumato.rewards.networks.aesthetic import load_aesthetic

        return load_aesthetic(folder, device, dtype)

    def score_batch(self, network: Any, samples: list[Sample]) -> Any:
        """``head(embedding / |embedding|)`` of each image, [B]."""
        return network.head(network.embedder.images([sample.image for sample in samples]))
