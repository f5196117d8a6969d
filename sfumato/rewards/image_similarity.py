"""How much an edited image resembles the one that it was made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sfumato.errors import DataError
from sfumato.rewards.base import Sample
from sfumato.rewards.pretrained import PretrainedReward


@dataclass(frozen=True, kw_only=True)
class ImageSimilarity(PretrainedReward):
    """Cosine of the embeddings of the image and of its source image, by CLIP, SigLIP or DINOv2."""

    type: ClassVar[str] = "image_similarity"

    @staticmethod
    def load(folder: str, device: str, dtype: str) -> Any:
        """A model that embeds images."""
        from sfumato.rewards.networks.embedder import load_embedder

        return load_embedder(folder, device, dtype)

    def score_batch(self, network: Any, samples: list[Sample]) -> Any:
        """``cos(embed(image), embed(source image))`` for each sample, [B]. Raises DataError without source image."""
        for sample in samples:
            if sample.source is None:
                raise DataError(
                    f"reward {self.label!r} compares with the image that was edited, but the sample of prompt "
                    f"{sample.prompt!r} has none: it is for editing"
                )
        sources = network.images([sample.source for sample in samples])
        return (network.images([sample.image for sample in samples]) * sources).sum(dim=-1)
