"""A model family in a file of its own: a small network that makes images in pixel space from the letters of a prompt.

``model.family: pixel_mixer:PixelMixerFamily`` names it. The network and its pipeline stand here, too, since diffusers
has none like them; a family of a diffusers pipeline is the last class alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers import ConfigMixin, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.loaders import CogVideoXLoraLoaderMixin, PeftAdapterMixin
from torch import nn

from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.latents import check_size, flow_shift, flow_sigmas
from sfumato.models.diffusion.scratch import section_of, unknown_keys
from sfumato.parallel.plan import ParallelPlan

LETTERS = 128


class MixerBlock(nn.Module):
    """Mixes the features of each pixel with those of the whole image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(2 * width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[B, T, width]`` to the same shape."""
        normed = self.norm(tokens)
        both = torch.cat([normed, normed.mean(dim=1, keepdim=True).expand_as(normed)], dim=-1)
        return tokens + self.down(nn.functional.gelu(self.up(both)))


class PixelMixer(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """Predicts the velocity of noisy pixels."""

    @register_to_config
    def __init__(self, width: int = 32, num_blocks: int = 2) -> None:
        super().__init__()
        self.enter = nn.Linear(3, width)
        self.condition = nn.Linear(LETTERS + 1, width)
        self.blocks = nn.ModuleList(MixerBlock(width) for _ in range(num_blocks))
        self.leave = nn.Linear(width, 3)

    def forward(self, pixels: torch.Tensor, sigma: torch.Tensor, letters: torch.Tensor) -> torch.Tensor:
        """Pixels ``[B, 3, H, W]``, noise levels ``[B]`` and counts of letters ``[B, LETTERS]`` to a velocity."""
        given = self.condition(torch.cat([letters, sigma[:, None]], dim=-1))
        tokens = self.enter(pixels.flatten(2).transpose(1, 2)) + given[:, None]
        for block in self.blocks:
            tokens = block(tokens)
        return self.leave(tokens).transpose(1, 2).unflatten(2, pixels.shape[2:])


class PixelMixerPipeline(DiffusionPipeline, CogVideoXLoraLoaderMixin):
    """What is saved and loaded: the network and its schedule."""

    def __init__(self, transformer: PixelMixer, scheduler: FlowMatchEulerDiscreteScheduler) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)


class PixelMixerFamily(DiffusionModel):
    """What sfumato must know of it."""

    pipeline_class: ClassVar[str] = "PixelMixerPipeline"
    parallel_plan: ClassVar[ParallelPlan] = ParallelPlan(blocks=("MixerBlock",))
    lora_targets: ClassVar[tuple[str, ...]] = ("up", "down")
    encoder_names: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def pipeline_type(cls) -> Any:
        return PixelMixerPipeline

    @classmethod
    def build(cls, description: dict[str, Any], seed: int) -> Any:
        unknown_keys(description, {"pipeline", "transformer", "scheduler"})
        settings = section_of(description, "transformer", PixelMixer)
        scheduler = section_of(description, "scheduler", FlowMatchEulerDiscreteScheduler)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return PixelMixerPipeline(PixelMixer(**settings), FlowMatchEulerDiscreteScheduler(**scheduler))

    def embed_prompts(self, prompts: list[str]) -> dict[str, torch.Tensor]:
        letters = torch.zeros(len(prompts), LETTERS, device=self.device)
        for row, prompt in enumerate(prompts):
            for letter in prompt:
                letters[row, ord(letter) % LETTERS] += 1
        return {"letters": letters}

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        check_size(height, width, 1, frames)
        return (3, height, width)

    @property
    def probe_size(self) -> int:
        return 4

    def pixels_to_latents(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.to(torch.float32) / 127.5 - 1

    def latents_to_pixels(self, latents: torch.Tensor) -> torch.Tensor:
        return latents

    def sigmas(self, num_steps: int, latent_shape: Sequence[int]) -> torch.Tensor:
        return flow_sigmas(self.pipeline.scheduler, num_steps, latent_shape)

    @property
    def shift(self) -> float:
        return flow_shift(self.pipeline.scheduler)

    def denoise(self, latents: torch.Tensor, sigma: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.denoiser(latents, sigma.to(latents), embeddings["letters"].to(latents))
