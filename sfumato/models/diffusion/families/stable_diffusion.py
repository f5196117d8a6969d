"""Stable Diffusion 1.5 and 2 (arXiv 2112.10752): UNets that predict noise or v."""


# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfumato.config.open_mappings import Keywords
from sfumato.errors import ConfigError
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.latents import KLLatents
from sfumato.models.diffusion.noise_schedule import VariancePreserving
from sfumato.models.diffusion.scratch import (
    build_autoencoder,
    build_clip_encoder,
    build_clip_tokenizer,
    section_of,
    unknown_keys,
)

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline
    from transformers import PreTrainedTokenizerBase

    from sfumato.config.sections import TrainConfig
    from sfumato.parallel.mesh import Mesh

PUBLISHED_SCHEDULE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}
"""Scheduler settings of every published Stable Diffusion up to XL, which a description may override."""


class StableDiffusion(KLLatents, VariancePreserving):
    """Stable Diffusion 1.5 and 2."""

    pipeline_class = "StableDiffusionPipeline"
    parallel_plan = plans.UNET
    shortest_prompt = 0  # CLIP's length is its own
    lora_targets = (  # diffusers examples/text_to_image/train_text_to_image_lora.py
        "to_k",
        "to_out.0",
        "to_q",
        "to_v",
    )
    denoiser_name = "unet"

    def check_components(self) -> None:
        unet = self.denoiser.config
        channels = self.pipeline.vae.config.latent_channels
        if unet.in_channels != channels or unet.time_cond_proj_dim is not None:
            raise ConfigError(
                f"{self.pipeline_class}: the UNet takes more than {channels} channels of latents, timestep and text "
                "(inpainting, or guidance as an input, in_channels and time_cond_proj_dim): this is not supported"
            )

    @classmethod
    def build(cls, description: Mapping[str, object], seed: int) -> DiffusionPipeline:
        """Builds a pipeline with random weights.

        Sections are ``unet``, which is needed, ``vae``, ``scheduler`` (of DDIMScheduler; it overrides
        ``PUBLISHED_SCHEDULE``), ``text_encoder`` (width, layers, ... of each CLIP encoder) and ``tokenizer`` (words,
        max_length).
        """
        import diffusers

        sections = {"pipeline", "unet", "vae", "scheduler", "text_encoder", "tokenizer"}
        unknown_keys(description, sections, needed="unet")
        unet = section_of(description, "unet", diffusers.UNet2DConditionModel)
        vae = section_of(description, "vae", build_autoencoder, reserved=["shift_factor"])
        scheduler = PUBLISHED_SCHEDULE | section_of(description, "scheduler", diffusers.DDIMScheduler)
        tokens = section_of(description, "tokenizer", build_clip_tokenizer)
        text = section_of(description, "text_encoder", build_clip_encoder, reserved=["tokenizer", "projection"])
        tokenizer = build_clip_tokenizer(**tokens)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            parts = cls._build_encoders(tokenizer, text)
            parts["unet"] = diffusers.UNet2DConditionModel(**cls._unet_settings(unet, parts))
            parts["vae"] = build_autoencoder(**vae)
        pipeline = getattr(diffusers, cls.pipeline_class)
        return pipeline(scheduler=diffusers.DDIMScheduler(**scheduler), **parts)

    @classmethod
    def _build_encoders(cls, tokenizer: PreTrainedTokenizerBase, settings: Keywords) -> dict[str, object]:
        """Arguments of the pipeline besides UNet, autoencoder and scheduler: tokenizers, text encoders, flags."""
        return {
            "tokenizer": tokenizer,
            "text_encoder": build_clip_encoder(tokenizer, projection=False, **settings),
            "safety_checker": None,
            "feature_extractor": None,
            "requires_safety_checker": False,
        }

    @classmethod
    def _unet_settings(cls, settings: Keywords, parts: Keywords) -> Keywords:
        """Arguments of the UNet: ``settings``, and widths that follow from the text encoders in ``parts``."""
        return {"cross_attention_dim": parts["text_encoder"].config.hidden_size, **settings}

    @property
    def prompt_limit(self) -> int:
        """Most tokens of a prompt that CLIP reads."""
        return self.pipeline.tokenizer.model_max_length

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]``, as the pipeline itself computes them."""
        return {"prompt_embeds": self.pipeline.encode_prompt(prompts, self.device, 1, False)[0]}

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        if frames != 1:
            raise ValueError(f"{self.pipeline_class} makes single images")
        factor = self.pipeline.vae_scale_factor
        if height % factor or width % factor:
            raise ValueError(f"height {height} and width {width} must be multiples of {factor} pixels")
        return (self.denoiser.config.in_channels, height // factor, width // factor)

    def _latent_scale(self, like: Tensor) -> tuple[Tensor, Tensor]:
        config = self.pipeline.vae.config
        mean = getattr(config, "latents_mean", None) or [0.0]
        std = getattr(config, "latents_std", None) or [1.0]
        placement: Keywords = {"dtype": torch.float32, "device": like.device}
        scale = config.scaling_factor / torch.tensor(std, **placement)
        return torch.tensor(mean, **placement)[:, None, None], scale[:, None, None]

    @property
    def input_dtype(self) -> torch.dtype:
        """float32, in which latents are rescaled before they are cast to the dtype of the UNet's weights."""
        return torch.float32

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        """The velocity, float32. A noise level above the schedule's largest one is treated as that one."""
        sigma = sigma.to(latents.device, torch.float32)
        dtype = super().input_dtype
        predicted = self.denoiser(
            self.variance_preserving(latents, sigma).to(dtype),
            self.timestep(sigma),
            encoder_hidden_states=embeddings["prompt_embeds"].to(dtype),
            added_cond_kwargs=self._added_conditions(latents, embeddings),
            return_dict=False,
        )[0]
        return self.velocity(predicted, latents, sigma)

    def _added_conditions(self, latents: Tensor, embeddings: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Further conditions of the UNet, by the names that it takes."""
        return None

    def comfyui_name(self, layer: str) -> str:
        """The name in kohya's format, which diffusers reads, too."""
        return f"lora_unet_{layer.replace('.', '_')}"

    def parallelize(self, mesh: Mesh, config: TrainConfig) -> None:
        if mesh.layout.cp > 1:
            raise ConfigError(
                "train.context_parallel_size and train.ulysses_parallel_size: a UNet's convolutions need their "
                "neighbours, so its images cannot be cut: set both to 1"
            )
        super().parallelize(mesh, config)
