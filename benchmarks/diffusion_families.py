"""SD3, FLUX and Qwen-Image with random weights, small or in their published sizes, and diffusers' own forward of each.

The descriptions are what ``model.config_path`` takes; weights are filled where the model computes, so that a large one
exists once. Encoders have the published widths, but one layer: prompts are embedded before anything is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sfumato.config.sections import LoraConfig
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.load import find_families
from sfumato.models.lora import add_lora
from sfumato.parallel.weights import build_on_meta

Embeddings = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """One family in two sizes."""

    small: dict[str, Any]
    """Description of about two million parameters, for images of 32 pixels."""
    real: dict[str, Any]
    """Description with the published transformer."""
    tokens: tuple[int, int]
    """model.max_sequence_length of both."""
    guidance: float
    forward: Callable[[DiffusionModel, torch.Tensor, torch.Tensor, Embeddings, float], torch.Tensor]
    """diffusers' transformer as the pipeline calls it: model, latents, sigma, embeddings of one branch, guidance."""
    rescales: bool = False
    """Guidance keeps the norm of every token."""


def sd3(
    model: DiffusionModel, latents: torch.Tensor, sigma: torch.Tensor, embeddings: Embeddings, guidance: float
) -> torch.Tensor:
    return model.denoiser(
        hidden_states=latents,
        timestep=(sigma * 1000).expand(len(latents)),
        encoder_hidden_states=embeddings["prompt_embeds"],
        pooled_projections=embeddings["pooled"],
        return_dict=False,
    )[0]


def flux(
    model: DiffusionModel, latents: torch.Tensor, sigma: torch.Tensor, embeddings: Embeddings, guidance: float
) -> torch.Tensor:
    from diffusers import FluxPipeline

    batch, channels, height, width = latents.shape
    ids = FluxPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, latents.device, torch.float32)
    velocity = model.denoiser(
        hidden_states=FluxPipeline._pack_latents(latents, batch, channels, height, width),
        timestep=sigma.expand(batch),
        guidance=torch.full((batch,), guidance, device=latents.device),
        pooled_projections=embeddings["pooled"],
        encoder_hidden_states=embeddings["prompt_embeds"],
        txt_ids=torch.zeros(embeddings["prompt_embeds"].shape[1], 3, device=latents.device),
        img_ids=ids,
        return_dict=False,
    )[0]
    factor = model.pipeline.vae_scale_factor
    return FluxPipeline._unpack_latents(velocity, height * factor, width * factor, factor)


def qwen_image(
    model: DiffusionModel, latents: torch.Tensor, sigma: torch.Tensor, embeddings: Embeddings, guidance: float
) -> torch.Tensor:
    from diffusers import QwenImagePipeline

    batch, channels, height, width = latents.shape
    velocity = model.denoiser(
        hidden_states=QwenImagePipeline._pack_latents(latents, batch, channels, height, width),
        timestep=sigma.expand(batch),
        encoder_hidden_states=embeddings["prompt_embeds"],
        encoder_hidden_states_mask=embeddings["prompt_mask"],
        img_shapes=[[(1, height // 2, width // 2)]] * batch,
        return_dict=False,
    )[0]
    factor = model.pipeline.vae_scale_factor
    return QwenImagePipeline._unpack_latents(velocity, height * factor, width * factor, factor)[:, :, 0]


SMALL = {"num_attention_heads": 4, "attention_head_dim": 32}
VAE = {"channels": [8, 8, 8], "norm_groups": 4, "latent_channels": 4}
REAL_VAE = {"channels": [8, 8, 8, 8], "norm_groups": 4, "latent_channels": 16}
QWEN_VAE = {"base_width": 4, "multipliers": [1, 1, 1], "latent_channels": 4}

FAMILIES = {
    "sd3": Family(
        small={
            "pipeline": "StableDiffusion3Pipeline",
            "transformer": {
                **SMALL,
                "num_layers": 4,
                "in_channels": 4,
                "out_channels": 4,
                "caption_projection_dim": 128,
                "sample_size": 8,
                "pos_embed_max_size": 8,
                "qk_norm": "rms_norm",
            },
            "vae": VAE,
            "text_encoder": {"width": 32, "num_layers": 1},
            "t5": {},
            "tokenizer": {"max_length": 8},
        },
        real={  # Stable Diffusion 3.5 medium
            "pipeline": "StableDiffusion3Pipeline",
            "transformer": {
                "num_layers": 24,
                "num_attention_heads": 24,
                "attention_head_dim": 64,
                "in_channels": 16,
                "out_channels": 16,
                "joint_attention_dim": 4096,
                "caption_projection_dim": 1536,
                "pooled_projection_dim": 2048,
                "sample_size": 128,
                "pos_embed_max_size": 384,
                "dual_attention_layers": list(range(13)),
                "qk_norm": "rms_norm",
            },
            "vae": REAL_VAE,
            "text_encoder": {"width": 1024, "num_layers": 1, "num_heads": 16},
            "t5": {},
            "scheduler": {"shift": 3.0},
        },
        tokens=(1, 256),
        guidance=4.5,
        forward=sd3,
    ),
    "flux": Family(
        small={
            "pipeline": "FluxPipeline",
            "transformer": {
                **SMALL,
                "num_layers": 2,
                "num_single_layers": 4,
                "guidance_embeds": True,
                "axes_dims_rope": [8, 12, 12],
            },
            "vae": VAE,
            "text_encoder": {"width": 32, "num_layers": 1},
            "t5": {"width": 64},
            "tokenizer": {"max_length": 8},
        },
        real={  # FLUX.1 dev
            "pipeline": "FluxPipeline",
            "transformer": {
                "num_layers": 19,
                "num_single_layers": 38,
                "num_attention_heads": 24,
                "attention_head_dim": 128,
                "guidance_embeds": True,
            },
            "vae": REAL_VAE,
            "text_encoder": {"width": 768, "num_layers": 1, "num_heads": 12},
            "t5": {"width": 4096},
            "scheduler": {"use_dynamic_shifting": True, "shift": 3.0},
        },
        tokens=(9, 512),
        guidance=3.5,
        forward=flux,
    ),
    "qwen_image": Family(
        small={
            "pipeline": "QwenImagePipeline",
            "transformer": {**SMALL, "num_layers": 4, "axes_dims_rope": [8, 12, 12]},
            "vae": QWEN_VAE,
            "text_encoder": {"width": 64, "num_layers": 1},
        },
        real={
            "pipeline": "QwenImagePipeline",
            "transformer": {"num_layers": 60, "num_attention_heads": 24, "attention_head_dim": 128},
            "vae": {"base_width": 4, "multipliers": [1, 1, 1, 1], "latent_channels": 16},
            "text_encoder": {"width": 3584, "num_layers": 1, "num_heads": 28, "num_kv_heads": 4},
            "scheduler": {"use_dynamic_shifting": True, "shift_terminal": 0.02},
        },
        tokens=(9, 128),
        guidance=4.0,
        forward=qwen_image,
        rescales=True,
    ),
}


def build(
    name: str, size: str, device: torch.device, dtype: torch.dtype, lora_rank: int = 0, text_tokens: int | None = None
) -> DiffusionModel:
    """A model of random weights.

    Args:
        name: of ``FAMILIES``.
        size: "small" or "real".
        device: where it computes.
        dtype: of the weights; other than float32 is autocast's, too.
        lora_rank: of adapters, which alone are trained then; 0 trains all weights.
        text_tokens: model.max_sequence_length; None takes the family's.
    """
    family = FAMILIES[name]
    description = family.small if size == "small" else family.real
    cls = find_families()[description["pipeline"]]
    pipeline = build_on_meta(lambda: cls.build(description, seed=0))
    autocast = None if dtype == torch.float32 else dtype
    model = cls(pipeline, text_tokens or family.tokens[size == "real"], autocast)
    model.device = device
    generator = torch.Generator(device).manual_seed(0)
    for component in model.components.values():
        fill(component, device, dtype, generator)
    if lora_rank:
        add_lora(model.denoiser, LoraConfig(rank=lora_rank, alpha=2 * lora_rank), model.lora_targets, seed=0)
    else:
        model.denoiser.requires_grad_(True)
    model.denoiser.eval()
    return model


def fill(module: nn.Module, device: torch.device | str, dtype: torch.dtype | None, generator: torch.Generator) -> None:
    """Puts small random numbers, and ones into norms, where a module has weights on meta; moves its buffers.

    Args:
        module: gets weights that are not trained.
        device: where it computes.
        dtype: of the weights; None leaves each its own.
        generator: on that device.
    """
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            weight = torch.empty(parameter.shape, dtype=dtype or parameter.dtype, device=device)
            if parameter.ndim == 1 and name == "weight":
                weight.fill_(1.0)
            else:
                weight.normal_(std=0.02, generator=generator)
            owner._parameters[name] = nn.Parameter(weight, requires_grad=False)
        for name, buffer in owner._buffers.items():
            owner._buffers[name] = None if buffer is None else buffer.to(device)
