"""FLUX.1 Fill: a picture is filled where its mask is white; both are channels of the transformer's input.

A sample starts from two source images, the picture and its mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sfumato.models.diffusion.families.flux import Flux, patch_ids
from sfumato.models.diffusion.latents import PATCH, pack

FILLED = 0.5
"""Masks of at least so much white are filled, of less are not."""


class FluxFill(Flux):
    """FLUX.1 Fill dev."""

    pipeline_class = "FluxFillPipeline"
    takes_image = True
    least_source_images = 2
    most_source_images = 2

    @classmethod
    def channels_of(cls, latent_channels: int, spatial_factor: int) -> dict[str, int]:
        latent = latent_channels * PATCH**2
        return {"in_channels": 2 * latent + spatial_factor**2 * PATCH**2, "out_channels": latent}

    def source_problem(self, count: int) -> str:
        return "" if count == 2 else f"{count} source images, and {self.pipeline_class} takes a picture and its mask"

    def embed_edit(self, prompt: str, image: np.ndarray) -> dict[str, Tensor]:
        """What ``embed_prompts`` returns, and ``image_latents`` ``[1, C + D, H, W]``.

        Args:
            prompt: of the whole picture.
            image: uint8 ``[2, H, W, 3]``, the picture and its mask, which is white where it is filled.

        Returns:
            C channels of the picture's latents, what is filled made grey before, and D of the mask's pixels.
        """
        picture, mask = image
        height, width = picture.shape[:2]
        self.latent_shape(height, width)  # raises ValueError for a size that does not divide
        grey = np.asarray(Image.fromarray(mask).convert("L"), np.float32) / 255
        is_filled = torch.from_numpy(grey >= FILLED).to(self.device)[None, None]
        vae = self.pipeline.vae
        pixels = torch.from_numpy(picture.copy()).permute(2, 0, 1)[None].to(vae.device, vae.dtype) / 127.5 - 1
        shift, scale = self._latent_scale(pixels)
        latents = vae.encode(pixels.masked_fill(is_filled.to(vae.device), 0.0)).latent_dist.mode().float()
        side = self.pipeline.vae_scale_factor
        mask_pixels = torch.nn.functional.pixel_unshuffle(is_filled.float(), side).to(latents.device)
        return {
            **self.embed_prompts([prompt]),
            "image_latents": torch.cat([(latents - shift) * scale, mask_pixels], dim=1),
        }

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        channels, *sides = self.latent_shape(height, width)
        shape = (channels + self.pipeline.vae_scale_factor**2, *sides)
        return {**super().embedding_shapes(height, width), "image_latents": (shape, torch.float32)}

    def image_tokens(self, latents: Tensor, embeddings: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        source_tokens = pack(embeddings["image_latents"].to(self.input_dtype))
        return torch.cat([pack(latents), source_tokens], dim=2), patch_ids(latents, 0)
