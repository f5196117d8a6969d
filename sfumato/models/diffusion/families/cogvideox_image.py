"""CogVideoX and CogVideoX 1.5 from a first frame, whose latents are further channels of the input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sfumato.config.open_mappings import Keywords
from sfumato.models.diffusion.described import Blueprint
from sfumato.models.diffusion.families.cogvideox import CogVideoX
from sfumato.models.diffusion.latents import encode_sources

IMAGE_OFFSET = 2.0
"""The pipeline's ``ofs``, an input of CogVideoX 1.5's network."""


class CogVideoXImageToVideo(CogVideoX):
    """CogVideoX from a first frame and a text. ``frames`` must be set before images are embedded.

    Of the frame's latents the mode is taken, where diffusers draws them at random.
    """

    pipeline_class = "CogVideoXImageToVideoPipeline"
    takes_image = True

    @classmethod
    def blueprint(cls) -> Blueprint:
        plain = super().blueprint()
        return replace(
            plain,
            infer=lambda parts: {**plain.infer(parts), "in_channels": 2 * parts["vae"].config.latent_channels},
        )

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        shape = super().latent_shape(height, width, frames)
        config = self.denoiser.config
        if config.use_learned_positional_embeddings and shape[2:] != (config.sample_height, config.sample_width):
            factor = self.pipeline.vae_scale_factor_spatial
            raise ValueError(
                f"height {height} and width {width}: this model has learned positions, and makes "
                f"{config.sample_height * factor} x {config.sample_width * factor} pixels alone"
            )
        return shape

    def embed_edit(self, prompt: str, image: np.ndarray) -> dict[str, Tensor]:
        """What ``embed_prompts`` returns, and ``image_latents`` ``[1, C, 1, H, W]`` of the first frame."""
        height, width, _ = image.shape
        super().latent_shape(height, width, self.frames)
        latents = encode_sources(self, image)
        vae = self.pipeline.vae.config
        if vae.invert_scale_latents:  # CogVideoX 1.5 was trained with frames that are divided by the factor
            latents = latents / vae.scaling_factor**2
        return {**self.embed_prompts([prompt]), "image_latents": latents}

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        factor = self.pipeline.vae_scale_factor_spatial
        shape = (self.pipeline.vae.config.latent_channels, 1, height // factor, width // factor)
        return {**super().embedding_shapes(height, width), "image_latents": (shape, torch.float32)}

    def network_inputs(self, latents: Tensor, embeddings: dict[str, Tensor]) -> Keywords:
        frame = embeddings["image_latents"].to(latents)
        later = latents.shape[2] - 1
        channels = torch.nn.functional.pad(frame, (0, 0, 0, 0, 0, later))
        inputs: Keywords = {"hidden_states": torch.cat([latents, channels], dim=1).transpose(1, 2)}
        if self.denoiser.config.ofs_embed_dim is not None:
            inputs["ofs"] = latents.new_full((1,), IMAGE_OFFSET)
        return inputs
