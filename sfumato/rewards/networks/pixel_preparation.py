"""Prepares pictures for networks as image processors on Pillow do, but as tensors, so that gradients flow through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sfumato.errors import ConfigError

BICUBIC = 3
"""Pillow's number of the filter, in the files of image processors."""


def prepare_like(processor: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Scales, cuts out and normalises pictures as an image processor of transformers says.

    Differs from it by its rounding of scaled pictures to 256 levels, which has no gradient.

    Args:
        processor: of CLIP, SigLIP or DINOv2.
        pixels: float32 ``[B, 3, H, W]`` from 0 to 1.

    Returns:
        float32 ``[B, 3, h, w]``.

    Raises:
        ConfigError: for settings that are not followed here.
    """
    height, width = pixels.shape[-2:]
    if getattr(processor, "do_resize", False):
        size = processor.size
        if processor.resample != BICUBIC:
            raise ConfigError(f"image processor: resample {processor.resample} has no gradient here; take 3 (bicubic)")
        if size.get("shortest_edge"):
            pixels = scale_pixels(pixels, *sides_of_shortest(height, width, size["shortest_edge"]))
        elif size.get("height") and size.get("width"):
            pixels = scale_pixels(pixels, size["height"], size["width"])
        else:
            raise ConfigError(f"image processor: size {dict(size)} has no gradient here; take shortest_edge, or both")
    if getattr(processor, "do_center_crop", False):
        pixels = cut_middle(pixels, processor.crop_size["height"], processor.crop_size["width"])
    if not getattr(processor, "do_rescale", True):
        raise ConfigError("image processor: do_rescale false has no gradient here; take true")
    pixels = pixels * (255 * processor.rescale_factor)
    if not getattr(processor, "do_normalize", False):
        return pixels
    return normalise_pixels(pixels, processor.image_mean, processor.image_std)


def sides_of_shortest(height: int, width: int, shortest: int) -> tuple[int, int]:
    """Height and width scaled so that the shorter one is ``shortest``; the longer one is rounded down."""
    if height <= width:
        return shortest, int(shortest * width / height)
    return int(shortest * height / width), shortest


def scale_pixels(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Pictures ``[B, 3, H, W]`` scaled bicubically with Pillow's filter, and cut to 0 to 1 as it does."""
    if pixels.shape[-2:] == (height, width):
        return pixels
    scaled = torch.nn.functional.interpolate(pixels, size=(height, width), mode="bicubic", antialias=True)
    return scaled.clamp(0, 1)


def cut_middle(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The middle ``[B, 3, height, width]`` of pictures at least that large."""
    top = (pixels.shape[-2] - height) // 2
    left = (pixels.shape[-1] - width) // 2
    if min(top, left) < 0:
        raise ConfigError(
            f"image processor: the middle {height} x {width} cannot be cut out of pictures of "
            f"{pixels.shape[-2]} x {pixels.shape[-1]}"
        )
    return pixels[..., top : top + height, left : left + width]


def normalise_pixels(pixels: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """``(pixels - mean) / std`` of each of three channels of ``[B, 3, H, W]``."""
    means, stds = torch.tensor([list(mean), list(std)], dtype=pixels.dtype, device=pixels.device)[:, :, None, None]
    return (pixels - means) / stds
