"""How well an image compresses: rewards that need no model.

From "Training Diffusion Models with Reinforcement Learning" (Black et al., 2023, https://arxiv.org/abs/2305.13301).
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from PIL import Image

from sfumato.rewards.base import Reward, Sample

JPEG_QUALITY = 95


def jpeg_num_bytes(image: np.ndarray) -> int:
    """Size in bytes of an image, uint8 [H, W, 3], written as JPEG of quality 95."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=JPEG_QUALITY)
    return buffer.tell()


@dataclass(frozen=True, kw_only=True)
class JpegIncompressibility(Reward):
    """JPEG size in thousands of bytes: more detail, more reward."""

    type: ClassVar[str] = "jpeg_incompressibility"

    def score(self, samples: list[Sample]) -> list[float]:
        """``bytes / 1000``, positive, for each image."""
        return [jpeg_num_bytes(sample.image) / 1000 for sample in samples]


@dataclass(frozen=True, kw_only=True)
class JpegCompressibility(Reward):
    """Minus the JPEG size in units of 500,000 bytes: less detail, more reward."""

    type: ClassVar[str] = "jpeg_compressibility"

    def score(self, samples: list[Sample]) -> list[float]:
        """``-bytes / 1000 / 500``, negative and near zero, for each image."""
        return [-jpeg_num_bytes(sample.image) / 1000 / 500 for sample in samples]
