"""Parts of video pipelines made from scratch, as ``scratch`` makes those of image pipelines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def build_umt5_encoder(tokenizer: Any, width: int = 32, num_layers: int = 2, num_heads: int = 4) -> torch.nn.Module:
    """A UMT5EncoderModel with random weights; its output has ``width`` features."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=max(width // num_heads, 1),
        d_ff=2 * width,
        num_layers=num_layers,
        num_heads=num_heads,
        is_encoder_decoder=False,
        use_cache=False,
    )
    return UMT5EncoderModel(config)


def build_clip_vision_encoder(
    width: int = 32, num_layers: int = 2, num_heads: int = 4, image_size: int = 16, patch_size: int = 8
) -> tuple[torch.nn.Module, Any]:
    """A CLIPVisionModel with random weights, and the processor that makes images of any size fit it."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        image_size=image_size,
        patch_size=patch_size,
    )
    size = {"height": image_size, "width": image_size}
    return CLIPVisionModel(config), CLIPImageProcessor(size={"shortest_edge": image_size}, crop_size=size)


def build_wan_autoencoder(
    channels: int = 8,
    multipliers: Iterable[int] = (1, 1, 1),
    latent_channels: int = 4,
    layers_per_block: int = 1,
    patch_size: int | None = None,
    residual: bool = False,
    latents_mean: Iterable[float] | None = None,
    latents_std: Iterable[float] | None = None,
) -> torch.nn.Module:
    """An AutoencoderKLWan: the first frame alone, then four frames become one.

    Args:
        channels: of the widest resolution; a multiple of 2.
        multipliers: of ``channels``, one for each resolution, at least three; each but the last halves the size. The
            last two steps halve the number of frames too.
        latent_channels: of the latents.
        layers_per_block: residual layers.
        patch_size: pixels along each side that are folded into channels first (4 x 4 x 16 compression: 2).
        residual: shortcuts around the blocks, as in Wan 2.2's 4 x 16 x 16.
        latents_mean, latents_std: of each latent channel, which the latents are normalised by; 0 and 1 if None.

    Raises:
        ValueError: when there are less than three multipliers, or statistics of another number of channels.
    """
    from diffusers import AutoencoderKLWan

    multipliers = list(multipliers)
    if len(multipliers) < 3:
        raise ValueError("multipliers: at least three, since the number of frames is halved twice")
    mean = [0.0] * latent_channels if latents_mean is None else list(latents_mean)
    std = [1.0] * latent_channels if latents_std is None else list(latents_std)
    if {len(mean), len(std)} != {latent_channels}:
        raise ValueError(f"latents_mean and latents_std: one number for each of {latent_channels} latent_channels")
    halvings = len(multipliers) - 1
    folded = 1 if patch_size is None else patch_size
    return AutoencoderKLWan(
        base_dim=channels,
        z_dim=latent_channels,
        dim_mult=multipliers,
        num_res_blocks=layers_per_block,
        temperal_downsample=[index >= halvings - 2 for index in range(halvings)],
        latents_mean=mean,
        latents_std=std,
        is_residual=residual,
        in_channels=3 * folded**2,
        out_channels=3 * folded**2,
        patch_size=patch_size,
        scale_factor_temporal=4,
        scale_factor_spatial=2**halvings * folded,
    )
