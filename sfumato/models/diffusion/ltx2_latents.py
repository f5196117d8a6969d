"""Base class of LTX-2's families: the latents of videos and their sound.

An autoencoder makes the latents of the sound of its mel spectrogram, and a vocoder makes the waveform of a spectrogram.
"""

from __future__ import annotations

from torch import Tensor

from sfumato.models.diffusion.mel_spectrogram import log_mel_spectrogram
from sfumato.models.diffusion.video_with_sound import PartSizes, VideoSoundFamily


class LTX2Latents(VideoSoundFamily):
    """Base class of LTX-2's families."""

    autoencoder_names = ("vae", "audio_vae", "vocoder")
    frame_rate = 24.0  # the pipeline's default

    @property
    def spatial_unit(self) -> int:
        return self.pipeline.vae.spatial_compression_ratio

    @property
    def temporal_unit(self) -> int:
        return self.pipeline.vae.temporal_compression_ratio

    @property
    def probe_size(self) -> int:
        return self.spatial_unit

    @property
    def token_features(self) -> int:
        return self.denoiser.config.in_channels

    @property
    def encoded_rate(self) -> int:
        return self.pipeline.audio_vae.config.sample_rate

    @property
    def sampling_rate(self) -> int:
        return self.pipeline.vocoder.config.output_sampling_rate

    @property
    def num_channels(self) -> int:
        return self.pipeline.audio_vae.config.in_channels

    def sound_tokens(self, frames: int) -> int:
        vae = self.pipeline.audio_vae
        tokens_per_second = vae.config.sample_rate / vae.config.mel_hop_length / vae.temporal_compression_ratio
        return round(frames / self.frame_rate * tokens_per_second)

    def video_to_tokens(self, pixels: Tensor) -> Tensor:
        vae = self.pipeline.vae
        latents = vae.encode(pixels.to(vae.dtype) / 127.5 - 1).latent_dist.mode().float()
        scaled = self.pipeline._normalize_latents(latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        return scaled.flatten(2)

    def tokens_to_video(self, tokens: Tensor, sizes: PartSizes) -> Tensor:
        vae = self.pipeline.vae
        latents = tokens.float().unflatten(2, sizes[:3])
        latents = self.pipeline._denormalize_latents(
            latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor
        )
        return vae.decode(latents.to(vae.dtype), return_dict=False)[0]

    def sound_to_tokens(self, sound: Tensor, length: int) -> Tensor:
        vae = self.pipeline.audio_vae
        config = vae.config
        mel = log_mel_spectrogram(sound, config.sample_rate, config.mel_hop_length, config.mel_bins)
        # the first latent frame stands for one frame of the spectrogram, as the decoder has it
        ratio = vae.temporal_compression_ratio
        mel = mel[:, :, : ratio * (length - 1) + 1]
        packed = self.pipeline._pack_audio_latents(vae.encode(mel.to(vae.dtype)).latent_dist.mode().float())
        return self.pipeline._normalize_audio_latents(packed, vae.latents_mean, vae.latents_std).mT

    def tokens_to_sound(self, tokens: Tensor) -> Tensor:
        vae = self.pipeline.audio_vae
        packed = self.pipeline._denormalize_audio_latents(tokens.mT.float(), vae.latents_mean, vae.latents_std)
        bins = vae.config.mel_bins // vae.mel_compression_ratio
        latents = self.pipeline._unpack_audio_latents(packed, tokens.shape[2], num_mel_bins=bins)
        return self.pipeline.vocoder(vae.decode(latents.to(vae.dtype), return_dict=False)[0])
