"""Builders of the parts of LTX-2 with random weights; other builders stand in ``scratch.py``."""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from sfumato.config.open_mappings import Keywords

if TYPE_CHECKING:
    from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video
    from diffusers.pipelines.ltx2 import LTX2TextConnectors


def build_ltx2_autoencoder(
    width: int = 8, latent_channels: int = 4, levels: int = 2, layers_per_block: int = 1
) -> AutoencoderKLLTX2Video:
    """An AutoencoderKLLTX2Video, whose statistics of latents are random, too.

    Each of the ``levels`` halves the sides of a video and the number of frames after the first.
    """
    from diffusers import AutoencoderKLLTX2Video

    vae = AutoencoderKLLTX2Video(
        latent_channels=latent_channels,
        block_out_channels=(width,) * levels,
        down_block_types=("LTX2VideoDownBlock3D",) * levels,
        decoder_block_out_channels=(width,) * levels,
        layers_per_block=(layers_per_block,) * (levels + 1),
        decoder_layers_per_block=(layers_per_block,) * (levels + 1),
        spatio_temporal_scaling=(True,) * levels,
        decoder_spatio_temporal_scaling=(True,) * levels,
        decoder_inject_noise=(False,) * (levels + 1),
        downsample_type=("spatiotemporal",) * levels,
        upsample_type=("spatiotemporal",) * levels,
        upsample_residual=(True,) * levels,
        upsample_factor=(1,) * levels,
        patch_size=1,
    )
    _randomise_statistics(vae)
    return vae


def build_ltx2_audio_autoencoder(
    parts: Keywords, width: int = 4, mel_bins: int = 8, sample_rate: int = 16000, hop_length: int = 160
) -> AutoencoderKLLTX2Audio:
    """An AutoencoderKLLTX2Audio of stereo sound, whose tokens have as many features as those of the video.

    Args:
        parts: the components that are made already; ``vae`` is among them.
        width: channels; latents have ``mel_bins / 4`` bands.
        mel_bins: bands of the mel spectrogram.
        sample_rate: samples per second.
        hop_length: samples from one frame of the spectrogram to the next.
    """
    from diffusers import AutoencoderKLLTX2Audio

    features = parts["vae"].config.latent_channels
    vae = AutoencoderKLLTX2Audio(
        base_channels=width,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        latent_channels=features // (mel_bins // 4),
        sample_rate=sample_rate,
        mel_hop_length=hop_length,
        mel_bins=mel_bins,
    )
    _randomise_statistics(vae)
    return vae


def _randomise_statistics(vae: nn.Module) -> None:
    """Random means and deviations of latents in place of zeros and ones."""
    nn.init.normal_(vae.get_buffer("latents_mean"), std=0.2)
    nn.init.uniform_(vae.get_buffer("latents_std"), 0.5, 2.0)


def build_ltx2_vocoder(parts: Keywords, width: int = 16, extends_bandwidth: bool = False) -> nn.Module:
    """A vocoder with a leaky ReLU that makes 40 samples of each frame of a spectrogram (LTX-2's makes 240).

    Args:
        parts: the components that are made already; ``audio_vae`` is among them.
        width: channels, halved by each of two stages.
        extends_bandwidth: a second vocoder brings the sound of the first, of 16,000 Hz, to three times its rate, as in
            LTX-2.3; a frame then makes 480 samples.
    """
    from diffusers.pipelines.ltx2 import LTX2Vocoder, LTX2VocoderWithBWE

    config = parts["audio_vae"].config
    blocks: Keywords = {"resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3]]}
    shared: Keywords = {"in_channels": config.output_channels * config.mel_bins, "hidden_channels": width}
    if not extends_bandwidth:
        return LTX2Vocoder(
            **shared,
            **blocks,
            upsample_kernel_sizes=[16, 15],
            upsample_factors=[8, 5],
            output_sampling_rate=40 * config.sample_rate // config.mel_hop_length,
        )
    vocoder = LTX2VocoderWithBWE(
        **shared,
        **blocks,
        upsample_kernel_sizes=[20, 16],
        upsample_factors=[20, 8],
        bwe_in_channels=config.output_channels * config.mel_bins,
        bwe_hidden_channels=width,
        bwe_upsample_kernel_sizes=[15, 16],
        bwe_upsample_factors=[15, 16],
        bwe_resnet_kernel_sizes=[3],
        bwe_resnet_dilations=[[1, 3]],
        num_mel_channels=config.mel_bins,
    )
    nn.init.uniform_(vocoder.mel_stft.get_buffer("mel_basis"))  # zeros in diffusers, as a checkpoint holds it
    nn.init.normal_(vocoder.mel_stft.stft_fn.get_buffer("forward_basis"), std=0.05)
    return vocoder


def build_ltx2_connectors(
    parts: Keywords, num_heads: int = 2, num_layers: int = 1, registers: int = 8, sound_width: int = 0
) -> LTX2TextConnectors:
    """An LTX2TextConnectors between the text encoder and the transformer.

    Args:
        parts: the components that are made already; ``text_encoder`` is among them.
        num_heads: of both connectors.
        num_layers: of both connectors.
        registers: a prompt is filled up with them to a multiple of their number.
        sound_width: features of a prompt for the sound; a prompt is then projected for the video and for the sound, as
            in LTX-2.3. 0 projects it once, as LTX-2 does.
    """
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    text = parts["text_encoder"].config.get_text_config()
    width = text.hidden_size
    heads: Keywords = {}
    widths = {"video": width, "audio": sound_width or width}
    for part, part_width in widths.items():
        heads |= {
            f"{part}_connector_num_attention_heads": num_heads,
            f"{part}_connector_attention_head_dim": part_width // num_heads,
            f"{part}_connector_num_layers": num_layers,
            f"{part}_connector_num_learnable_registers": registers,
            f"{part}_gated_attn": sound_width > 0,
        }
    return LTX2TextConnectors(
        caption_channels=width,
        text_proj_in_factor=text.num_hidden_layers + 1,
        per_modality_projections=sound_width > 0,
        video_hidden_dim=width,
        audio_hidden_dim=widths["audio"],
        proj_bias=sound_width > 0,
        **heads,
    )


def infer_ltx2_transformer(parts: Keywords) -> Keywords:
    """Arguments of the transformer that follow from the other components."""
    vae = parts["vae"]
    audio_vae = parts["audio_vae"]
    connectors = parts["connectors"]
    features = vae.config.latent_channels
    return {
        "in_channels": features,
        "out_channels": features,
        "audio_in_channels": features,
        "audio_out_channels": features,
        "vae_scale_factors": (
            vae.temporal_compression_ratio,
            vae.spatial_compression_ratio,
            vae.spatial_compression_ratio,
        ),
        "audio_sampling_rate": audio_vae.config.sample_rate,
        "audio_hop_length": audio_vae.config.mel_hop_length,
        "audio_scale_factor": audio_vae.temporal_compression_ratio,
        "caption_channels": connectors.config.caption_channels,
        "use_prompt_embeddings": not connectors.config.per_modality_projections,
    }
