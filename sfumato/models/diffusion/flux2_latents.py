"""Base class of families with the autoencoder of FLUX.2."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.models.diffusion.latents import PATCH, FlowTokens, KLLatents, check_size


class Flux2Latents(KLLatents, FlowTokens):
    """Base class of families with latents of AutoencoderKLFlux2: patches of 2 x 2, normalised by its batch norm."""

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        check_size(height, width, self.probe_size, frames)
        channels = self.pipeline.vae.config.latent_channels * PATCH**2
        return (channels, height // self.probe_size, width // self.probe_size)

    def pixels_to_latents(self, pixels: Tensor) -> Tensor:
        mean, std = self._channel_statistics()
        return (self.to_patches(super().pixels_to_latents(pixels)) - mean) / std

    def latents_to_pixels(self, latents: Tensor) -> Tensor:
        mean, std = self._channel_statistics()
        return super().latents_to_pixels(self.from_patches(latents.float() * std + mean))

    def to_patches(self, latents: Tensor) -> Tensor:
        """Patches ``[B, 4C, H/2, W/2]`` of latents ``[B, C, H, W]``, in the order of the batch norm's channels."""
        return torch.nn.functional.pixel_unshuffle(latents, PATCH)

    def from_patches(self, patches: Tensor) -> Tensor:
        """The inverse of ``to_patches``."""
        return torch.nn.functional.pixel_shuffle(patches, PATCH)

    @property
    def batch_norm_eps(self) -> float:
        """What is added to the variances."""
        return self.pipeline.vae.config.batch_norm_eps

    def _latent_scale(self, like: Tensor) -> tuple[float | Tensor, float | Tensor]:
        return 0.0, 1.0  # patches are normalised instead

    def _channel_statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel of the patches, ``[C, 1, 1]``."""
        vae = self.pipeline.vae
        variance = vae.bn.running_var.float() + self.batch_norm_eps
        return vae.bn.running_mean.float()[:, None, None], variance.sqrt()[:, None, None]

    @property
    def patch(self) -> int:
        return 1  # latents are patches already

    @property
    def probe_size(self) -> int:
        return self.vae_factor * PATCH
