"""Base class of families that make sound: latents of an autoencoder of waveforms.

Shapes: B samples, C latent channels, T latent frames, A channels of sound, N samples of sound. Where other families
take the height and width of a picture, these take 1 and the length of the sound in milliseconds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.models.diffusion.base import DiffusionModel
from sfumato.tracking.waveforms import FULL_SCALE


class WaveformLatents(DiffusionModel):
    """A family that makes sound."""

    makes_sound = True

    @property
    def sampling_rate(self) -> int:
        return self.pipeline.vae.config.sampling_rate

    @property
    def num_channels(self) -> int:
        return self.pipeline.vae.config.audio_channels

    @property
    def samples_per_latent(self) -> int:
        """Samples of sound that become one latent frame."""
        raise NotImplementedError

    def longest_seconds(self) -> float:
        """Most seconds of sound that the model can make."""
        raise NotImplementedError

    @property
    def latent_channels(self) -> int:
        """Channels of a latent."""
        raise NotImplementedError

    def num_samples(self, milliseconds: int) -> int:
        """Samples of a sound, in each channel."""
        return milliseconds * self.sampling_rate // 1000

    def cut(self, sound: Tensor) -> Tensor:
        """Cuts a decoded sound ``[B, A, N]``, of whole latent frames, to the length that is asked for, if any."""
        return sound[..., : self.num_samples(self.milliseconds)] if self.milliseconds else sound

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Shape ``(C, T)`` of a sound of ``width`` milliseconds.

        Raises:
            ValueError: for the size of a picture, or a length that the model cannot make.
        """
        if height != 1 or frames != 1:
            raise ValueError("it makes sound: set `seconds`, its length, in place of height, width and num_frames")
        longest = self.longest_seconds()
        if not 0 < width <= 1000 * longest:
            raise ValueError(f"a sound of {width / 1000:g} s: it makes at most {longest:g} s")
        num_latents = -(-self.num_samples(width) // self.samples_per_latent)  # rounded up, as the pipelines do
        if num_latents < 1:
            raise ValueError(f"a sound of {width / 1000:g} s has less than one sample of {self.sampling_rate} Hz")
        return (self.latent_channels, num_latents)

    @property
    def probe_size(self) -> int:
        """Milliseconds of a short sound of several latent frames."""
        return max(1, -(-4000 * self.samples_per_latent // self.sampling_rate))

    def probe_content(self) -> Tensor:
        """A short sound for the identity of the autoencoder: int16 ``[1, A, N]``."""
        length = self.num_samples(self.probe_size)
        return (
            ((torch.arange(self.num_channels * length) * 37 % 251 - 125) * 100).to(torch.int16).reshape(1, -1, length)
        )

    def round_decoded(self, decoded: Tensor) -> Tensor:
        """A waveform ``[B, A, N]``, clipped to -1 to 1, as int16."""
        return (decoded.clamp(-1, 1) * FULL_SCALE).round().to(torch.int16)

    def whole_frames(self, pixels: Tensor) -> Tensor:
        """A waveform in floating point, filled up with silence to whole latent frames.

        Args:
            pixels: int16 ``[B, A, N]``.
        """
        vae = self.pipeline.vae
        sound = pixels.to(vae.device).to(vae.dtype) / FULL_SCALE
        return torch.nn.functional.pad(sound, (0, -sound.shape[-1] % self.samples_per_latent))
