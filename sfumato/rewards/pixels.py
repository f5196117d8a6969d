"""Rewards that are computed from the pixels alone: statistics for tests, tutorials and first runs, and JPEG sizes."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from PIL import Image

from sfumato.errors import ConfigError, DataError
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.differentiable import DifferentiableReward

if TYPE_CHECKING:
    import torch

COLOURS = {
    "black": (0, 0, 0),
    "white": (255, 255, 255),
    "grey": (128, 128, 128),
    "red": (255, 0, 0),
    "green": (0, 128, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "orange": (255, 165, 0),
    "purple": (128, 0, 128),
    "pink": (255, 192, 203),
    "brown": (165, 42, 42),
}
SIDES = ("left", "right", "top", "bottom")


@dataclass(frozen=True, kw_only=True)
class Brightness(DifferentiableReward):
    """Mean of all pixel values, from 0 (black) to 1 (white)."""

    type: ClassVar[str] = "brightness"
    modality: ClassVar[str] = "image"

    def score(self, samples: list[Sample]) -> list[float]:
        """``mean(pixels) / 255`` for each image."""
        return [float(sample.pixels.mean()) / 255 for sample in samples]

    def score_pixels(self, pixels: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """As ``DifferentiableReward.score_pixels``."""
        del prompts
        return pixels.flatten(1).mean(dim=1)


@dataclass(frozen=True, kw_only=True)
class Sharpness(DifferentiableReward):
    """Mean difference of neighbouring pixels, from 0 (one plain colour) to 1 (a chessboard of pixels)."""

    type: ClassVar[str] = "sharpness"
    modality: ClassVar[str] = "image"

    def score(self, samples: list[Sample]) -> list[float]:
        """``mean|difference to the right or downward neighbour| / 255`` for each image."""
        return [_measure_sharpness(sample.pixels.astype(np.float64) / 255) for sample in samples]

    def score_pixels(self, pixels: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """As ``DifferentiableReward.score_pixels``."""
        del prompts
        steps = [pixels.diff(dim=dim).abs().flatten(1) for dim in (-2, -1)]
        total = steps[0].sum(dim=1) + steps[1].sum(dim=1)
        return total / max(steps[0].shape[1] + steps[1].shape[1], 1)  # an image of one pixel has no neighbours


@dataclass(frozen=True, kw_only=True)
class Symmetry(DifferentiableReward):
    """Likeness of the image and its mirror image, left to right, from 0 to 1 (equal)."""

    type: ClassVar[str] = "symmetry"
    modality: ClassVar[str] = "image"

    def score(self, samples: list[Sample]) -> list[float]:
        """``1 - mean|pixels - mirrored pixels| / 255`` for each image."""
        images = [sample.pixels.astype(np.int64) for sample in samples]  # differences of uint8 would wrap around
        return [1 - float(np.abs(image - image[:, ::-1]).mean()) / 255 for image in images]

    def score_pixels(self, pixels: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """As ``DifferentiableReward.score_pixels``."""
        del prompts
        return 1 - (pixels - pixels.flip(-1)).abs().flatten(1).mean(dim=1)


@dataclass(frozen=True, kw_only=True)
class _WordReward(Reward):
    """Base of rewards that score by a word from ``choices``: the value of their field, else the first in the prompt."""

    modality: ClassVar[str] = "image"

    field: ClassVar[str]
    choices: ClassVar[Collection[str]]

    def __post_init__(self) -> None:
        super().__post_init__()
        if (word := getattr(self, self.field)) and word not in self.choices:
            choices = ", ".join(self.choices)
            raise ConfigError(f"{self.field} of reward {self.label!r} must be one of {choices}, or empty, not {word!r}")

    def check_row(self, prompt: str, metadata: dict[str, object]) -> None:
        """Raises DataError when the field is empty and the prompt has none of the words."""
        self._pick_word(prompt)

    def _pick_word(self, prompt: str) -> str:
        in_prompt = (word for word in re.findall(r"[a-z]+", prompt.casefold()) if word in self.choices)
        word = getattr(self, self.field) or next(in_prompt, "")
        if not word:
            raise DataError(f"reward {self.label!r} finds none of {', '.join(self.choices)} in prompt {prompt!r}")
        return word


@dataclass(frozen=True, kw_only=True)
class Colour(_WordReward, DifferentiableReward):
    """Nearness of the pixels to a colour, on average, from 0 to 1 (all of that colour)."""

    type: ClassVar[str] = "colour"
    field: ClassVar[str] = "colour"
    choices: ClassVar[Collection[str]] = COLOURS

    colour: str = ""
    """Name of the colour, such as red; empty: the first name of a colour in the prompt."""

    @property
    def reads_prompt(self) -> bool:
        """See ``DifferentiableReward``."""
        return not self.colour

    def score(self, samples: list[Sample]) -> list[float]:
        """``1 - mean(distance to the colour) / (255 √3)`` for each image. Raises DataError as ``check_row`` does."""
        targets = [COLOURS[self._pick_word(sample.prompt)] for sample in samples]
        distances = [
            np.linalg.norm(sample.pixels.astype(np.float64) - target, axis=-1).mean()
            for sample, target in zip(samples, targets, strict=True)
        ]
        return [1 - float(distance) / (255 * 3**0.5) for distance in distances]

    def score_pixels(self, pixels: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """As ``DifferentiableReward.score_pixels``. Raises DataError as ``check_row`` does."""
        targets = pixels.new_tensor([COLOURS[self._pick_word(prompt)] for prompt in prompts]) / 255
        # its gradient is 0, and not NaN, where a pixel has just that colour
        distances = (pixels - targets[:, :, None, None]).norm(dim=1)
        return 1 - distances.flatten(1).mean(dim=1) / 3**0.5


@dataclass(frozen=True, kw_only=True)
class Placement(_WordReward):
    """Share of what is drawn that lies in one half of the image, from 0 to 1; 0.5 for an empty image."""

    type: ClassVar[str] = "placement"
    field: ClassVar[str] = "side"
    choices: ClassVar[Collection[str]] = SIDES

    side: str = ""
    """The half: left, right, top or bottom; empty: the first of these words in the prompt."""

    def score(self, samples: list[Sample]) -> list[float]:
        """``Σ ink in the half / Σ ink``; ink is the distance of a pixel to the median colour of the border."""
        sides = [self._pick_word(sample.prompt) for sample in samples]
        return [_share_of_ink(sample.pixels, side) for sample, side in zip(samples, sides, strict=True)]


def _measure_sharpness(image: np.ndarray) -> float:
    """For float [H, W, 3] from 0 to 1. An image of one pixel has no neighbours and is not sharp."""
    steps = np.concatenate([np.abs(np.diff(image, axis=axis)).ravel() for axis in (0, 1)])
    return float(steps.mean()) if len(steps) else 0.0


def _share_of_ink(image: np.ndarray, side: str) -> float:
    border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    ink = np.abs(image.astype(np.float64) - np.median(border, axis=0)).sum(axis=-1)
    along = ink.sum(axis=0 if side in ("left", "right") else 1)
    if side in ("right", "bottom"):  # so that the asked half is the first one
        along = along[::-1]
    half = len(along) // 2
    middle = along[half] / 2 if len(along) % 2 else 0.0  # the line in the middle belongs to both halves
    total = along.sum()
    return float((along[:half].sum() + middle) / total) if total else 0.5


JPEG_QUALITY = 95


def jpeg_num_bytes(image: np.ndarray) -> int:
    """Size in bytes of an image, uint8 [H, W, 3], written as JPEG of quality 95."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=JPEG_QUALITY)
    return buffer.tell()


@dataclass(frozen=True, kw_only=True)
class JpegIncompressibility(Reward):
    """JPEG size in thousands of bytes: more detail, more reward (Black et al., 2023, arXiv 2305.13301)."""

    type: ClassVar[str] = "jpeg_incompressibility"
    modality: ClassVar[str] = "image"

    def score(self, samples: list[Sample]) -> list[float]:
        """``bytes / 1000``, positive, for each image."""
        return [jpeg_num_bytes(sample.pixels) / 1000 for sample in samples]


@dataclass(frozen=True, kw_only=True)
class JpegCompressibility(Reward):
    """Minus the JPEG size in units of 500,000 bytes: less detail, more reward."""

    type: ClassVar[str] = "jpeg_compressibility"
    modality: ClassVar[str] = "image"

    def score(self, samples: list[Sample]) -> list[float]:
        """``-bytes / 1000 / 500``, negative and near zero, for each image."""
        return [-jpeg_num_bytes(sample.pixels) / 1000 / 500 for sample in samples]
