"""Latents of Qwen-Image 2.1, its noise levels, and what its network computes where tensors have no values.

Its autoencoder has a channel of transparency. Pictures that are given are opaque, and those that are made are shown on
white, as the model's own text encoder sees them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfumato.models.diffusion.latents import QwenLatents, num_tokens
from sfumato.models.diffusion.schedulers import dynamic_shift

if TYPE_CHECKING:
    from sfumato.models.diffusion.base import DiffusersModule

SLOT = 4
"""Tokens of an image for each place that the text encoder has for it."""


class QwenImage21Latents(QwenLatents):
    """Base class of Qwen-Image 2.1: latents that are tokens, of pictures with transparency."""

    @property
    def patch(self) -> int:
        return 1

    def sigmas(self, num_steps: int, latent_shape: Sequence[int]) -> Tensor:
        """As ``DiffusionModel``; of a trajectory with as many steps as ``sample_sigmas`` of the pipeline has, those."""
        levels = self.pipeline.config.get("sample_sigmas")
        if levels is None or len(levels) != num_steps:
            return super().sigmas(num_steps, latent_shape)
        scheduler = copy.deepcopy(self.pipeline.scheduler)
        shifted = scheduler.config.use_dynamic_shifting
        mu = {"mu": dynamic_shift(scheduler, num_tokens(latent_shape, 1), self.largest_shift)} if shifted else {}
        scheduler.set_timesteps(sigmas=levels, **mu)
        return scheduler.sigmas.to(torch.float32)

    def _encode(self, video: Tensor) -> Tensor:
        opaque = torch.ones_like(video[:, : self.pipeline.vae.config.in_channels - 3])
        return super()._encode(torch.cat([video, opaque], dim=1))

    def latents_to_pixels(self, latents: Tensor) -> Tensor:
        decoded = super().latents_to_pixels(latents)
        if decoded.shape[1] == 3:
            return decoded
        alpha = (decoded[:, 3:] / 2 + 0.5).clamp(0, 1)
        return decoded[:, :3] * alpha + (1 - alpha)  # white is 1


def count_segments(
    network: DiffusersModule, prompts: Tensor, tokens: Tensor, time: Tensor, lengths: list[int]
) -> Tensor:
    """What the network computes, for counts of memory and operations: it finds the places of tokens by values.

    Args:
        network: a QwenImage21Transformer2DModel.
        prompts: ``[B, T, D]``, whose places of source images are left out.
        tokens: of the images, ``[B, N, C]``, those of the picture that is made last.
        time: ``[B]``.
        lengths: number of tokens of each image.
    """
    num_text = prompts.shape[1] - sum(lengths[:-1]) // SLOT
    hidden = torch.cat([network.txt_in(prompts[:, :num_text]), network.img_in(tokens)], dim=1)
    ends = [num_text + sum(lengths[:number]) for number in range(len(lengths))]
    segments = [(0, num_text, True), *((start, end, False) for start, end in pairwise(ends))]
    is_made = torch.zeros(hidden.shape[1], dtype=torch.bool, device=hidden.device)
    embedded_time = network.time_text_embed(torch.cat([time, time[:1]]).to(hidden.dtype), hidden)
    modulation = network.modulation(embedded_time)
    positions = torch.zeros(
        hidden.shape[1], network.config.attention_head_dim // 2, dtype=torch.complex64, device=hidden.device
    )
    for block in network.transformer_blocks:
        hidden = block(hidden, modulation, positions, target_token_mask=is_made, segments=segments)
    return network.proj_out(network.norm_out(hidden, embedded_time, is_made))[:, -lengths[-1] :]
