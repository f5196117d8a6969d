"""Base class of families that make videos with sound: both parts of a sample are one latent.

A latent is ``[C, T]``: the tokens of the video, frame by frame and row by row, and behind them those of the sound.
Noise, solvers, objectives, log-probabilities and caches of latents see one tensor. The loss of flow matching is the sum
of the means over either part (``part_lengths``); what RL averages, it averages over all tokens alike.

Shapes: B samples, C features of a token, T tokens of both parts, A channels of sound, N samples of sound; f h w latent
frames, height and width of a video, L latent frames of a sound.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Unpack

import torch
from torch import Tensor

from sfumato.models.diffusion.latents import FlowSchedule, check_frames, check_size
from sfumato.models.diffusion.schedulers import dynamic_shift, flow_shift, flow_sigmas
from sfumato.tracking.waveforms import FULL_SCALE

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    from sfumato.models.diffusion.base import ModelOptions


class PartSizes(NamedTuple):
    """Sizes of the parts of a latent."""

    frames: int
    """Latent frames of the video."""
    height: int
    width: int
    """Latent pixels of a frame."""
    sound: int
    """Latent frames of the sound, which are its tokens."""

    @property
    def video(self) -> int:
        """Tokens of the video."""
        return self.frames * self.height * self.width


class VideoSoundFamily(FlowSchedule):
    """A family whose samples are videos with sound."""

    makes_video_with_sound = True

    def __init__(self, pipeline: DiffusionPipeline, **options: Unpack[ModelOptions]) -> None:
        """As ``DiffusionModel``."""
        super().__init__(pipeline, **options)
        # A latent says how many tokens it has, and not of which sides.
        self._sizes: dict[int, PartSizes] = {}

    @property
    @abstractmethod
    def spatial_unit(self) -> int:
        """Pixels along each side of a token."""

    @property
    @abstractmethod
    def temporal_unit(self) -> int:
        """Frames of a latent frame, but for the first, which stands for one."""

    @property
    @abstractmethod
    def token_features(self) -> int:
        """C."""

    @abstractmethod
    def sound_tokens(self, frames: int) -> int:
        """Tokens of the sound of a video of so many frames."""

    @abstractmethod
    def video_to_tokens(self, pixels: Tensor) -> Tensor:
        """Encodes uint8 pixels ``[B, 3, F, H, W]`` to normalised tokens ``[B, C, f h w]``."""

    @abstractmethod
    def tokens_to_video(self, tokens: Tensor, sizes: PartSizes) -> Tensor:
        """Decodes tokens ``[B, C, f h w]`` to ``[B, 3, F, H, W]``, about [-1, 1]."""

    @abstractmethod
    def sound_to_tokens(self, sound: Tensor, length: int) -> Tensor:
        """Encodes sound in floating point, ``[B, A, N]`` of ``encoded_rate``, to normalised tokens ``[B, C, L]``.

        ``length`` is L.
        """

    @abstractmethod
    def tokens_to_sound(self, tokens: Tensor) -> Tensor:
        """Decodes tokens ``[B, C, L]`` to a waveform ``[B, A, N]`` of ``sampling_rate``, about [-1, 1]."""

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """``(C, T)``. Raises ValueError, also for a second size that has as many tokens as one before."""
        check_size(height, width, self.spatial_unit)
        latent_frames = check_frames(frames, self.temporal_unit)
        rows = height // self.spatial_unit
        columns = width // self.spatial_unit
        sizes = PartSizes(latent_frames, rows, columns, self.sound_tokens(frames))
        num_tokens = sizes.video + sizes.sound
        before = self._sizes.setdefault(num_tokens, sizes)
        if before != sizes:
            raise ValueError(
                f"videos of {tuple(sizes)} and {tuple(before)} latents (frames, height, width, sound) have equally "
                "many tokens, by which they are told apart: take one size"
            )
        return (self.token_features, num_tokens)

    def sizes_of(self, latent_shape: Sequence[int]) -> PartSizes:
        """The sizes of the parts of a latent whose shape ``latent_shape`` has given."""
        return self._sizes[latent_shape[-1]]

    def part_lengths(self, latent_shape: Sequence[int]) -> tuple[int, ...]:
        sizes = self.sizes_of(latent_shape)
        return (sizes.video, sizes.sound)

    def split(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of the video ``[B, C, f h w]`` and of the sound ``[B, C, L]``."""
        video, sound = latents.split(self.part_lengths(latents.shape), dim=-1)
        return video, sound

    def encode_pixels(self, pixels: Tensor, sound: Tensor | None = None) -> Tensor:
        video = pixels if pixels.ndim == 5 else pixels[:, :, None]
        self.latent_shape(video.shape[3], video.shape[4], video.shape[2])
        length = self.sound_tokens(video.shape[2])
        if sound is None:
            num_samples = -(-video.shape[2] * self.encoded_rate // round(self.frame_rate))
            sound = torch.zeros(len(pixels), self.num_channels, num_samples, dtype=torch.int16)
        with torch.no_grad(), self.at_work(*self.autoencoder_names):
            video_tokens = self.video_to_tokens(video.to(self.device))
            waveform = sound.to(self.device).float() / FULL_SCALE
            return torch.cat([video_tokens, self.sound_to_tokens(waveform, length)], dim=-1)

    def pixels_to_latents(self, pixels: Tensor) -> Tensor:
        """``encode_pixels`` with silence."""
        return self.encode_pixels(pixels)

    def latents_to_pixels(self, latents: Tensor) -> Tensor:
        """Decodes the video of latents to ``[B, 3, H, W]``, or ``[B, F, 3, H, W]`` of several frames."""
        video = self.tokens_to_video(self.split(latents)[0], self.sizes_of(latents.shape))
        return video[:, :, 0] if video.shape[2] == 1 else video.transpose(1, 2)

    def decode_sound(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        def rounded(waveform: Tensor) -> Tensor:
            return (waveform.clamp(-1, 1) * FULL_SCALE).round().to(torch.int16)

        return self._decode_chunks(latents, lambda chunk: self.tokens_to_sound(self.split(chunk)[1]), rounded)

    def _mu(self, latent_shape: Sequence[int]) -> float | None:
        """The dynamic shift of the scheduler, which counts the tokens of the video alone; None where it has none."""
        scheduler = self.pipeline.scheduler
        if not scheduler.config.get("use_dynamic_shifting"):
            return None
        return dynamic_shift(scheduler, self.sizes_of(latent_shape).video, self.largest_shift)

    def sigmas(self, num_steps: int, latent_shape: Sequence[int]) -> Tensor:
        mu = self._mu(latent_shape)
        return flow_sigmas(self.pipeline.scheduler, num_steps, latent_shape, gives_sigmas=self.gives_sigmas, mu=mu)

    def shift_at(self, latent_shape: Sequence[int]) -> float:
        return flow_shift(self.pipeline.scheduler, latent_shape, mu=self._mu(latent_shape))
