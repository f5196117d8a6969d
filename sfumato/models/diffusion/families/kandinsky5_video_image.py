"""Kandinsky 5 from a first frame and a text (arXiv 2511.14993): the frame stands in place of the first latent frame."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.models.diffusion.families.kandinsky5_video import Kandinsky5Video
from sfumato.models.diffusion.latents import SourceLatents, lead_to_given

ADJUSTED_FRAMES = 4
"""Latent frames at the start of a video whose mean and deviation the pipeline brings near those of later ones."""

LATER_FRAMES = 5
"""Most latent frames after them that the pipeline takes for that."""


class Kandinsky5ImageToVideo(SourceLatents, Kandinsky5Video):
    """Kandinsky 5 Video from a first frame and a text. ``frames`` must be set before images are embedded.

    Of the frame's latents the mode is taken, where diffusers draws them at random.
    """

    pipeline_class = "Kandinsky5I2VPipeline"

    def network_inputs(self, latents: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        frame = embeddings["image_latents"].to(latents)
        inputs = torch.cat([frame, latents[:, :, 1:]], dim=2)
        if not self.denoiser.config.visual_cond:
            return inputs
        is_given = torch.zeros_like(latents[:, :1])
        is_given[:, :, 0] = 1
        return torch.cat([inputs, torch.zeros_like(latents), is_given], dim=1)

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        """The velocity. That of the first latent frame leads to the given frame."""
        velocity = super().denoise(latents, sigma, embeddings)
        return lead_to_given(velocity, latents, embeddings["image_latents"], sigma)

    def latents_to_pixels(self, latents: Tensor) -> Tensor:
        """Decodes latents as the pipeline does, which adjusts the first ones of a video before.

        Shorter videos, which have no later latents to adjust them to, are decoded as they are.
        """
        start = latents[:, :, :ADJUSTED_FRAMES].float()
        later = latents[:, :, ADJUSTED_FRAMES : ADJUSTED_FRAMES + LATER_FRAMES].float()
        if later.shape[2] == 0:
            return super().latents_to_pixels(latents)
        adjust = self.pipeline.adaptive_mean_std_normalization  # one by one: the statistics of later ones are a batch's
        adjusted = torch.cat([adjust(*frames) for frames in zip(start.split(1), later.split(1), strict=True)])
        return super().latents_to_pixels(torch.cat([adjusted, latents[:, :, ADJUSTED_FRAMES:]], dim=2))
