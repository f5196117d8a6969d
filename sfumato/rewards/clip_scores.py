"""How well an image fits its prompt, by CLIP models: CLIP score, PickScore, HPSv2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sfumato.rewards.base import Sample
from sfumato.rewards.pretrained import PretrainedReward


@dataclass(frozen=True, kw_only=True)
class _ClipReward(PretrainedReward):
    """Base of rewards that are a function of the cosine between image and prompt."""

    @staticmethod
    def load(folder: str, device: str, dtype: str) -> Any:
        """A CLIP model with its tokenizer and image processor."""
        from sfumato.rewards.networks.embedder import load_clip

        return load_clip(folder, device, dtype)

    def score_batch(self, network: Any, samples: list[Sample]) -> Any:
        """Cosine of each image with its prompt, [B]."""
        return network.cosines([sample.image for sample in samples], [sample.prompt for sample in samples])


@dataclass(frozen=True, kw_only=True)
class ClipScore(_ClipReward):
    """Cosine of image and prompt times CLIP's own scale, divided by 30 as in Flow-GRPO."""

    type: ClassVar[str] = "clip_score"

    def score_batch(self, network: Any, samples: list[Sample]) -> Any:
        """``exp(logit_scale) · cos / 30`` for each sample, [B]."""
        return network.scale * super().score_batch(network, samples) / 30


@dataclass(frozen=True, kw_only=True)
class PickScore(_ClipReward):
    """Preference of people for an image given its prompt, by PickScore, divided by 26 as in Flow-GRPO."""

    type: ClassVar[str] = "pickscore"

    def score_batch(self, network: Any, samples: list[Sample]) -> Any:
        """``exp(logit_scale) · cos / 26`` for each sample, [B]."""
        return network.scale * super().score_batch(network, samples) / 26


@dataclass(frozen=True, kw_only=True)
class HpsV2(_ClipReward):
    """Preference of people for an image given its prompt, by HPSv2: the cosine itself."""

    type: ClassVar[str] = "hpsv2"
