"""Builders of further autoencoders with random weights; the first ones stand in ``scratch.py``."""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
    from diffusers.models.autoencoders.autoencoder_kl_cogvideox import AutoencoderKLCogVideoX
    from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
    from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import AutoencoderKLHunyuanVideo
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanimage import AutoencoderKLHunyuanImage
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import AutoencoderKLHunyuanVideo15
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import AutoencoderKLQwenImage21


def build_flux2_autoencoder(
    channels: Iterable[int] = (16, 32, 32),
    latent_channels: int = 4,
    layers_per_block: int = 1,
    norm_groups: int = 8,
) -> AutoencoderKLFlux2:
    """An AutoencoderKLFlux2 without attention, whose statistics of latents are random, too.

    Each entry of ``channels`` but the last halves the size of the image.
    """
    from diffusers import AutoencoderKLFlux2

    channels = tuple(channels)
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=channels,
        layers_per_block=layers_per_block,
        latent_channels=latent_channels,
        norm_num_groups=norm_groups,
        mid_block_add_attention=False,
    )
    torch.nn.init.normal_(vae.bn.running_mean, std=0.2)  # pyright: ignore[reportArgumentType]
    torch.nn.init.uniform_(vae.bn.running_var, 0.5, 2.0)  # pyright: ignore[reportArgumentType]
    return vae


def build_dc_autoencoder(
    channels: Iterable[int] = (8, 16, 16),
    latent_channels: int = 4,
    layers_per_block: int = 1,
    scaling_factor: float = 1.0,
) -> AutoencoderDC:
    """An AutoencoderDC of residual blocks; each entry of ``channels`` but the last halves the size of the image."""
    from diffusers import AutoencoderDC

    channels = tuple(channels)
    layers = (layers_per_block,) * len(channels)
    return AutoencoderDC(
        latent_channels=latent_channels,
        encoder_block_out_channels=channels,
        decoder_block_out_channels=channels,
        encoder_layers_per_block=layers,
        decoder_layers_per_block=layers,
        encoder_qkv_multiscales=((),) * len(channels),
        decoder_qkv_multiscales=((),) * len(channels),
        scaling_factor=scaling_factor,
    )


def build_cogvideox_autoencoder(
    channels: Iterable[int] = (8, 8, 16),
    latent_channels: int = 4,
    layers_per_block: int = 1,
    norm_groups: int = 4,
    scaling_factor: float = 1.0,
    invert_scale_latents: bool = False,
) -> AutoencoderKLCogVideoX:
    """An AutoencoderKLCogVideoX: the first frame becomes a latent frame of its own, and so do every four after it.

    Each entry of ``channels`` but the last halves the size of the image; there must be three at least.
    ``invert_scale_latents`` is about first frames alone.
    """
    from diffusers import AutoencoderKLCogVideoX

    channels = tuple(channels)
    return AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * len(channels),  # pyright: ignore[reportArgumentType]
        up_block_types=("CogVideoXUpBlock3D",) * len(channels),  # pyright: ignore[reportArgumentType]
        block_out_channels=channels,  # pyright: ignore[reportArgumentType]
        latent_channels=latent_channels,
        layers_per_block=layers_per_block,
        norm_num_groups=norm_groups,
        scaling_factor=scaling_factor,
        invert_scale_latents=invert_scale_latents,
    )


def build_hunyuan_video_autoencoder(
    channels: Iterable[int] = (8, 8, 16, 16),
    latent_channels: int = 4,
    layers_per_block: int = 1,
    norm_groups: int = 4,
    scaling_factor: float = 1.0,
) -> AutoencoderKLHunyuanVideo:
    """An AutoencoderKLHunyuanVideo: the first frame becomes a latent frame of its own, and so do every four after it.

    Each entry of ``channels`` but the last halves the size of the image; there must be three at least.
    """
    from diffusers import AutoencoderKLHunyuanVideo

    channels = tuple(channels)
    return AutoencoderKLHunyuanVideo(
        latent_channels=latent_channels,
        down_block_types=("HunyuanVideoDownBlock3D",) * len(channels),
        up_block_types=("HunyuanVideoUpBlock3D",) * len(channels),
        block_out_channels=channels,  # pyright: ignore[reportArgumentType]
        layers_per_block=layers_per_block,
        norm_num_groups=norm_groups,
        scaling_factor=scaling_factor,
        spatial_compression_ratio=2 ** (len(channels) - 1),
    )


def build_hunyuan_video15_autoencoder(
    channels: Iterable[int] = (16, 16, 16),
    latent_channels: int = 4,
    layers_per_block: int = 1,
    scaling_factor: float = 1.0,
) -> AutoencoderKLHunyuanVideo15:
    """An AutoencoderKLHunyuanVideo15: the first frame becomes a latent frame of its own, and so do every four after it.

    Each entry of ``channels`` but the last halves the size of the image; there must be three at least, and the last one
    a multiple of twice ``latent_channels``.
    """
    from diffusers import AutoencoderKLHunyuanVideo15

    channels = tuple(channels)
    return AutoencoderKLHunyuanVideo15(
        latent_channels=latent_channels,
        block_out_channels=channels,  # pyright: ignore[reportArgumentType]
        layers_per_block=layers_per_block,
        spatial_compression_ratio=2 ** (len(channels) - 1),
        scaling_factor=scaling_factor,
    )


def build_hunyuan_image_autoencoder(
    channels: Iterable[int] = (32, 64),
    latent_channels: int = 4,
    layers_per_block: int = 1,
    scaling_factor: float = 1.0,
) -> AutoencoderKLHunyuanImage:
    """An AutoencoderKLHunyuanImage.

    Each entry of ``channels``, multiples of 32, but the last halves the size of the image; the last one must be a
    multiple of twice ``latent_channels``.
    """
    from diffusers import AutoencoderKLHunyuanImage

    channels = tuple(channels)
    ratio = 2 ** (len(channels) - 1)
    return AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=latent_channels,
        block_out_channels=channels,
        layers_per_block=layers_per_block,
        spatial_compression_ratio=ratio,
        sample_size=32 * ratio,
        scaling_factor=scaling_factor,
    )


def build_qwen21_autoencoder(
    base_width: int = 8,
    multipliers: Iterable[int] = (1, 1, 1, 2, 2),
    latent_channels: int = 4,
    layers_per_block: int = 1,
    latents_mean: Iterable[float] | None = None,
    latents_std: Iterable[float] | None = None,
) -> AutoencoderKLQwenImage21:
    """An AutoencoderKLQwenImage21 of colour and transparency; each entry of ``multipliers`` but the first halves the
    size."""
    from diffusers import AutoencoderKLQwenImage21

    multipliers = list(multipliers)
    return AutoencoderKLQwenImage21(
        base_dim=base_width,
        decoder_base_dim=None,
        z_dim=latent_channels,
        dim_mult=multipliers,
        num_res_blocks=layers_per_block,
        temperal_downsample=[False] * (len(multipliers) - 1),
        latents_mean=list(latents_mean or [0.0] * latent_channels),
        latents_std=list(latents_std or [1.0] * latent_channels),
        scale_factor_spatial=2 ** (len(multipliers) - 1),
    )
