"""Builders of the parts of families that make sound, with random weights; other builders stand in ``scratch.py``."""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from sfumato.config.open_mappings import Keywords
from sfumato.models.diffusion.scratch_encoders import build_gemma_tokenizer

if TYPE_CHECKING:
    from diffusers import AutoencoderOobleck
    from diffusers.models.autoencoders.autoencoder_same import AutoencoderSAME
    from diffusers.pipelines.ace_step import AceStepConditionEncoder
    from diffusers.pipelines.stable_audio_3 import StableAudio3DurationEmbedder
    from transformers import GemmaTokenizer


def build_same_autoencoder(
    patch_size: int = 32,
    channels: int = 16,
    strides: Iterable[int] = (2,),
    latent_channels: int = 8,
    audio_channels: int = 2,
    sampling_rate: int = 8000,
    cosines: bool = False,
    latent_std: float = 1.0,
) -> AutoencoderSAME:
    """An AutoencoderSAME.

    Args:
        patch_size: samples that are taken together.
        channels: of the blocks.
        strides: of the blocks, each with two layers; none leaves a projection of the patches.
        latent_channels: of the latents.
        audio_channels: of the sound.
        sampling_rate: samples per second.
        cosines: begin as the discrete cosine transform of each patch, which loses nothing, instead of random weights.
            It takes no strides, and as many latent channels as a patch has samples.
        latent_std: of the autoencoder's own latents, which are divided by it.

    Raises:
        ValueError: when ``cosines`` meets strides, or another number of latent channels.
    """
    from diffusers import AutoencoderSAME

    strides = [*strides]
    vae = AutoencoderSAME(
        audio_channels=audio_channels,
        patch_size=patch_size,
        encoder_channels=channels,
        encoder_c_mults=[1] * len(strides),
        encoder_strides=strides,
        encoder_transformer_depths=[2] * len(strides),
        latent_dim=latent_channels,
        dim_heads=8,
        sampling_rate=sampling_rate,
    )
    cast(torch.Tensor, vae.bottleneck.running_std).fill_(latent_std)
    if cosines:
        if strides or latent_channels != audio_channels * patch_size:
            raise ValueError(
                f"vae.cosines: needs no strides, and latent_channels {audio_channels * patch_size} "
                "(audio_channels x patch_size)"
            )
        matrix = torch.block_diag(*[cosine_transform(patch_size)] * audio_channels)
        _set_linear(vae.encoder.proj, matrix)
        _set_linear(vae.decoder.proj, matrix.T)
    else:
        for name, parameter in vae.named_parameters():  # diffusers starts the layers' outputs at zero
            if name.endswith(("to_out.weight", "ff.proj_out.weight", "new_tokens")):
                nn.init.normal_(parameter, std=0.3)
    return vae


def cosine_transform(size: int) -> torch.Tensor:
    """The matrix of the orthonormal discrete cosine transform (type II), float32 ``[size, size]``."""
    places = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (places + 0.5) * places[:, None]) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float()


def _set_linear(layer: nn.Linear, weight: torch.Tensor) -> None:
    """Sets the weight of a layer, and its bias to zero."""
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.zero_()


def build_short_gemma_tokenizer(words: Iterable[str] = (), max_length: int = 256) -> GemmaTokenizer:
    """A GemmaTokenizer as of ``build_gemma_tokenizer`` for prompts of up to ``max_length`` tokens."""
    tokenizer = build_gemma_tokenizer(words)
    tokenizer.model_max_length = max_length
    return tokenizer


def build_duration_embedder(
    parts: Keywords, fourier_features: int = 16, longest_seconds: float = 384.0
) -> StableAudio3DurationEmbedder:
    """A StableAudio3DurationEmbedder as wide as the text encoder, for sounds of up to ``longest_seconds``."""
    from diffusers.pipelines.stable_audio_3 import StableAudio3DurationEmbedder

    width = parts["text_encoder"].config.encoder.hidden_size
    return StableAudio3DurationEmbedder(output_dim=width, fourier_dim=fourier_features, max_val=longest_seconds)


def build_oobleck_autoencoder(
    width: int = 8,
    ratios: Iterable[int] = (4, 4, 4),
    latent_channels: int = 8,
    audio_channels: int = 2,
    sampling_rate: int = 8000,
) -> AutoencoderOobleck:
    """An AutoencoderOobleck.

    Args:
        width: channels of the first level, each of which has twice as many as the one before.
        ratios: by how much each level makes a sound shorter.
        latent_channels: of the latents.
        audio_channels: of the sound.
        sampling_rate: samples per second.
    """
    from diffusers import AutoencoderOobleck

    ratios = [*ratios]
    return AutoencoderOobleck(
        encoder_hidden_size=latent_channels * 2,  # mean and scale of each latent
        downsampling_ratios=ratios,
        channel_multiples=[2**level for level in range(len(ratios))],
        decoder_channels=width,
        decoder_input_channels=latent_channels,
        audio_channels=audio_channels,
        sampling_rate=sampling_rate,
    )


def build_ace_step_conditions(
    parts: Keywords, width: int = 32, num_layers: int = 2, num_heads: int = 4, num_kv_heads: int = 2
) -> AceStepConditionEncoder:
    """An AceStepConditionEncoder for the text encoder and the autoencoder; its latents of silence are random."""
    from diffusers.pipelines.ace_step import AceStepConditionEncoder

    encoder = AceStepConditionEncoder(
        hidden_size=width,
        intermediate_size=2 * width,
        text_hidden_dim=parts["text_encoder"].config.hidden_size,
        timbre_hidden_dim=parts["vae"].config.decoder_input_channels,
        num_lyric_encoder_hidden_layers=num_layers,
        num_timbre_encoder_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=width // num_heads,
    )
    nn.init.normal_(cast(torch.Tensor, encoder.silence_latent))
    return encoder
