"""Base classes of families: latents of images and videos, latents as tokens, and the schedules of flow matching.

Shapes: B samples, C H W latent channels, height and width, T tokens; a token is a patch of 2 x 2 latent pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sfumato.algorithms.device import to_device
from sfumato.config.open_mappings import Keywords
from sfumato.errors import ConfigError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.schedulers import (
    LARGEST_IMAGE,
    LARGEST_SHIFT,
    PATCH,
    check_flow_scheduler,
    flow_shift,
    flow_sigmas,
)
from sfumato.models.diffusion.valueless_masks import has_values

PIXELS_AT_ONCE = 8 * 512 * 512
"""Most pixels that an autoencoder encodes or decodes at a time: eight images of 512 x 512."""


def in_slices(compute: Callable[[Tensor], Tensor], inputs: Tensor, pixels: int) -> Tensor:
    """Runs a convolutional network on a few samples at a time, so that its memory does not grow with the batch.

    All slices have one size, and the last one is filled up: kernels may round differently in a batch of another size.

    Args:
        compute: the network, from ``[b, ...]`` to ``[b, ...]``.
        inputs: ``[B, ...]``.
        pixels: pixels of one sample, all frames together.

    Returns:
        The outputs ``[B, ...]``.
    """
    count = len(inputs)
    num_slices = -(-count // max(PIXELS_AT_ONCE // pixels, 1))
    if num_slices < 2:
        return compute(_to_convolution_layout(inputs))
    size = -(-count // num_slices)  # rounded up; indices past the end repeat the last sample
    rows = torch.arange(num_slices * size).clamp(max=count - 1).to(inputs.device)
    return torch.cat([compute(_to_convolution_layout(inputs[part])) for part in rows.split(size)])[:count]


def _to_convolution_layout(inputs: Tensor) -> Tensor:
    """Gives images on a GPU the memory layout in which convolutions compute; cuDNN converts the weights to it."""
    if inputs.device.type == "cuda" and inputs.ndim == 4:
        return inputs.contiguous(memory_format=torch.channels_last)
    return inputs


def check_size(height: int, width: int, unit: int, frames: int = 1, longest: int | None = None) -> None:
    """Raises ValueError for an image size that a model cannot make.

    Args:
        height, width: of the image, in pixels.
        unit: height and width must be multiples of it.
        frames: must be 1.
        longest: most pixels along a side, for models with a limited number of positions.
    """
    if frames != 1:
        raise ValueError(f"frames {frames}: this model makes single images")
    if height % unit or width % unit or not height or not width:
        raise ValueError(f"height {height} and width {width} must be multiples of {unit} pixels")
    if longest is not None and max(height, width) > longest:
        raise ValueError(f"height {height} and width {width} may be {longest} pixels at most: it has no more positions")


def check_frames(frames: int, step: int) -> int:
    """Number of latent frames of a video, of which the first one stands for one frame and each other for ``step``.

    Raises:
        ValueError: when the number of frames does not divide.
    """
    if frames < 1 or (frames - 1) % step:
        nearest = max(frames - 1, 0) // step * step + 1
        raise ValueError(
            f"frames {frames} must be 1 more than a multiple of {step}, such as {nearest} or {nearest + step}"
        )
    return (frames - 1) // step + 1


def pack(latents: Tensor) -> Tensor:
    """Packs latents ``[B, C, H, W]`` into tokens ``[B, H/2 * W/2, 4C]``, row by row, as FLUX and Qwen-Image do."""
    tokens = latents.unflatten(-1, (-1, PATCH)).unflatten(-3, (-1, PATCH))  # [B, C, H/2, 2, W/2, 2]
    return tokens.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Unpacks tokens ``[B, H/2 * W/2, 4C]`` into latents ``[B, C, H, W]``: the inverse of ``pack``."""
    patches = tokens.unflatten(2, (-1, PATCH, PATCH)).unflatten(1, (height // PATCH, width // PATCH))
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def num_tokens(latent_shape: Sequence[int], patch: int = PATCH) -> int:
    """Number of tokens of an image, given the shape of its latent, ``[..., H, W]``."""
    return (latent_shape[-2] // patch) * (latent_shape[-1] // patch)


def encode_sources(model: DiffusionModel, images: np.ndarray) -> Tensor:
    """Encodes the source images of a sample: latents ``[1, C, H, W]`` of one, ``[1, S, C, H, W]`` of several.

    Args:
        model: whose sizes they have.
        images: uint8 ``[H, W, 3]`` or ``[S, H, W, 3]``.
    """
    several = images if images.ndim == 4 else images[None]
    pixels = torch.from_numpy(np.ascontiguousarray(several)).permute(0, 3, 1, 2)
    # one by one, so that the bits of an image do not depend on how many there are
    latents = torch.cat([model.encode_pixels(image[None]) for image in pixels])
    return latents[None] if images.ndim == 4 else latents


def source_shape(model: DiffusionModel, height: int, width: int) -> tuple[int, ...]:
    """Shape of the latents of as many source images as a sample has at most, without the batch."""
    several = (model.max_source_images,) if model.max_source_images > 1 else ()
    return (*several, *model.latent_shape(height, width))


def split_images(embeddings: dict[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The latents ``[B, C, H, W]`` of each source image; none where a sample has none."""
    if "image_latents" not in embeddings:
        return []
    latents = embeddings["image_latents"].to(dtype)
    return [*latents.unbind(1)] if latents.ndim == 5 else [latents]


def lead_to_given(velocity: Tensor, latents: Tensor, given: Tensor, sigma: Tensor) -> Tensor:
    """A velocity that leads to given latents at the start: eps - x0 = (x - x0) / sigma, with x0 what is given.

    Args:
        velocity: ``[B, C, F, ...]`` of frames or tokens, at noise levels ``sigma`` ``[B]``.
        latents: x, of the same shape.
        given: ``[B, C, G, ...]``, the first G frames or tokens.
    """
    num_given = given.shape[2]
    level = sigma.to(latents).reshape(-1, *[1] * (latents.ndim - 1))
    to_given = (latents[:, :, :num_given] - given.to(latents)) / level
    return torch.cat([to_given.to(velocity.dtype), velocity[:, :, num_given:]], dim=2)


def grid_ids(rows: int, columns: int, image: int, device: torch.device) -> Tensor:
    """Positions of an image's tokens: number of the image, row and column, float32 ``[T, 3]``."""
    sides = [torch.arange(length, device=device, dtype=torch.float32) for length in (rows, columns)]
    grid = torch.stack(torch.meshgrid(*sides, indexing="ij"), dim=-1).flatten(0, 1)
    return torch.nn.functional.pad(grid, (1, 0), value=float(image))


def pad_embeds(embeds: Tensor, length: int) -> dict[str, Tensor]:
    """Pads embeddings ``[1, T, D]``: ``prompt_embeds`` ``[1, length, D]`` and ``prompt_mask``, false at the padding."""
    return {
        "prompt_embeds": torch.nn.functional.pad(embeds, (0, 0, 0, length - embeds.shape[1])),
        "prompt_mask": (torch.arange(length, device=embeds.device) < embeds.shape[1])[None],
    }


def padded_with_images(model: DiffusionModel, prompt: str, embeds: Tensor, image_tokens: int) -> dict[str, Tensor]:
    """What ``pad_embeds`` returns for a prompt that is read with images, whose tokens come on top of its limit.

    Args:
        model: ``max_sequence_length`` limits the prompt and its template.
        prompt: for messages.
        embeds: ``[1, T, D]``, those of the images among them.
        image_tokens: number of these.

    Raises:
        ConfigError: for a longer prompt, which cannot be cut, since it follows the images.
    """
    length = model.max_sequence_length + image_tokens
    if embeds.shape[1] > length:
        raise ConfigError(
            f"model.max_sequence_length {model.max_sequence_length}: this prompt takes "
            f"{embeds.shape[1] - image_tokens} tokens, and one that goes with an image cannot be cut: {prompt!r}"
        )
    return pad_embeds(embeds, length)


def count_image_tokens(processor: Any, height: int, width: int) -> int:
    """Number of tokens that Qwen2.5-VL makes of an image, given its processor."""
    images = processor.image_processor
    return images.get_number_of_image_patches(height, width, {}) // images.merge_size**2


def text_shapes(
    length: int, width: int, dtype: torch.dtype, mask_dtype: torch.dtype | None = None
) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """What ``embedding_shapes`` returns for ``prompt_embeds`` ``[B, length, width]``, and ``prompt_mask`` if any."""
    shapes: dict[str, tuple[Sequence[int], torch.dtype]] = {"prompt_embeds": ((length, width), dtype)}
    return shapes if mask_dtype is None else shapes | {"prompt_mask": ((length,), mask_dtype)}


def embed_one_by_one(prompts: Sequence[str], embed: Callable[[str], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Embeds prompts one by one, and equal ones once, where a batch would be padded to the longest, which changes bits.

    Args:
        prompts: B prompts.
        embed: makes tensors ``[1, ...]`` of a prompt, by name.

    Returns:
        Tensors ``[B, ...]`` by name.
    """
    rows = {prompt: embed(prompt) for prompt in dict.fromkeys(prompts)}
    return {name: torch.cat([rows[prompt][name] for prompt in prompts]) for name in rows[prompts[0]]}


def pad_rows(rows: Sequence[Tensor], length: int) -> dict[str, Tensor]:
    """What ``pad_embeds`` returns for B embeddings ``[T, D]`` of their own lengths, ``[B, length, ...]``."""
    parts = [pad_embeds(row[None], length) for row in rows]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def token_counts(mask: Tensor) -> list[int]:
    """Number of tokens of each prompt of a mask ``[B, T]``; T if tensors have no values (memory and FLOP counts)."""
    if not has_values(mask):
        return [mask.shape[1]] * len(mask)
    return mask.sum(dim=1).tolist()


class PaddedPrompts(DiffusionModel):
    """Base class of families with one text encoder, whose embeddings are padded to ``max_sequence_length``."""

    mask_dtype: ClassVar[torch.dtype | None] = torch.bool
    """dtype of ``prompt_mask``; None where there is none, since the network reads the padding."""

    @property
    def prompt_features(self) -> int:
        """Features of a token of ``prompt_embeds``: those of the text encoder."""
        return self.pipeline.text_encoder.config.get_text_config().hidden_size

    def image_tokens(self, height: int, width: int) -> int:
        """Tokens of source images of a size, which come on top of a prompt's where the encoder reads both."""
        return 0

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        length = self.max_sequence_length + self.image_tokens(height, width)
        return text_shapes(length, self.prompt_features, self.pipeline.text_encoder.dtype, self.mask_dtype)


class KLLatents(DiffusionModel):
    """Base class of families whose autoencoder is an AutoencoderKL."""

    @property
    def probe_size(self) -> int:
        return self.vae_factor * self.patch

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        check_size(height, width, self.probe_size, frames, longest=self.longest_side)
        return (self.pipeline.vae.config.latent_channels, height // self.vae_factor, width // self.vae_factor)

    @torch.no_grad()
    def pixels_to_latents(self, pixels: Tensor) -> Tensor:
        """Encodes uint8 pixels ``[B, 3, H, W]`` to float32 latents ``[B, C, h, w]``: the posterior's mode, scaled."""
        vae = self.pipeline.vae
        num_pixels = pixels.shape[-2] * pixels.shape[-1]
        pixels = to_device(pixels, vae.device).to(vae.dtype) / 127.5 - 1
        latents = in_slices(lambda part: vae.encode(part).latent_dist.mode(), pixels, num_pixels).float()
        shift, scale = self._latent_scale(latents)
        return (latents - shift) * scale

    def latents_to_pixels(self, latents: Tensor) -> Tensor:
        """Decodes latents ``[B, C, h, w]`` to pixels ``[B, 3, H, W]``, about [-1, 1]."""
        vae = self.pipeline.vae
        shift, scale = self._latent_scale(latents)
        latents = (latents.float() / scale + shift).to(vae.dtype)
        num_pixels = latents.shape[-2] * latents.shape[-1] * self.vae_factor**2
        return in_slices(lambda part: vae.decode(part, return_dict=False)[0], latents, num_pixels)

    @property
    def vae_factor(self) -> int:
        """Pixels along each side of a latent pixel."""
        return self.pipeline.vae_scale_factor

    def _latent_scale(self, like: Tensor) -> tuple[float | Tensor, float | Tensor]:
        """The shift to subtract from the autoencoder's latents, and the scale to multiply them by afterwards.

        Args:
            like: a tensor on the device of the latents.
        """
        return self.pipeline.vae.config.shift_factor or 0.0, self.pipeline.vae.config.scaling_factor


class VideoLatents(DiffusionModel):
    """Base class of families with an autoencoder of videos, for which an image is a video of one frame.

    Latents are normalised by mean and standard deviation of each channel.
    """

    @property
    def latent_channels(self) -> int:
        """Channels of the latents."""
        return self.pipeline.vae.config.z_dim

    @property
    def spatial_patch(self) -> int:
        """Latent pixels along each side of a token."""
        patch = self.denoiser.config.patch_size
        return patch if isinstance(patch, int) else patch[1]

    @property
    def probe_size(self) -> int:
        return self.pipeline.vae_scale_factor_spatial * self.spatial_patch

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor_spatial
        check_size(height, width, self.probe_size, longest=self.longest_side)
        latent_frames = check_frames(frames, self.pipeline.vae_scale_factor_temporal)
        return (self.latent_channels, latent_frames, height // factor, width // factor)

    @torch.no_grad()
    def pixels_to_latents(self, pixels: Tensor) -> Tensor:
        """Encodes uint8 pixels ``[B, 3, (F,) H, W]`` to normalised float32 latents ``[B, C, f, h, w]``."""
        vae = self.pipeline.vae
        video = pixels[:, :, None] if pixels.ndim == 4 else pixels
        return self._encode(video.to(vae.device, vae.dtype) / 127.5 - 1)

    def _encode(self, video: Tensor) -> Tensor:
        """Encodes videos ``[B, 3, F, H, W]`` in [-1, 1] to normalised latents ``[B, C, f, h, w]``."""
        return self.normalize(self.pipeline.vae.encode(video).latent_dist.mode().float())

    def latents_to_pixels(self, latents: Tensor) -> Tensor:
        """Decodes latents to pixels ``[B, 3, H, W]``, or ``[B, F, 3, H, W]`` of several frames, about [-1, 1]."""
        vae = self.pipeline.vae
        video = vae.decode(self.denormalize(latents.float()).to(vae.dtype), return_dict=False)[0]
        return video[:, :, 0] if video.shape[2] == 1 else video.transpose(1, 2)

    def normalize(self, latents: Tensor) -> Tensor:
        """The latents of the network for those of the autoencoder, float32 ``[B, C, f, h, w]``."""
        mean, std = self._latent_statistics(latents)
        return (latents - mean) / std

    def denormalize(self, latents: Tensor) -> Tensor:
        """The inverse of ``normalize``."""
        mean, std = self._latent_statistics(latents)
        return latents * std + mean

    def _latent_statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each latent channel, ``[C, 1, 1, 1]``, on the device of ``like``."""
        config = self.pipeline.vae.config
        both = torch.tensor([config.latents_mean, config.latents_std], dtype=torch.float32, device=like.device)
        mean, std = both[:, :, None, None, None]
        return mean, std


class ScaledVideoLatents(VideoLatents):
    """Base class of families whose latents are those of an autoencoder of videos times its ``scaling_factor``."""

    @property
    def latent_channels(self) -> int:
        return self.pipeline.vae.config.latent_channels

    def normalize(self, latents: Tensor) -> Tensor:
        return latents * self.pipeline.vae.config.scaling_factor

    def denormalize(self, latents: Tensor) -> Tensor:
        return latents / self.pipeline.vae.config.scaling_factor


class SourceLatents(DiffusionModel):
    """Base class, before that of the same family from text, of families that take the latents of source images."""

    takes_image: ClassVar[bool] = True

    def embed_edit(self, prompt: str, image: np.ndarray) -> dict[str, Tensor]:
        """What ``embed_prompts`` returns, and ``image_latents``: see ``encode_sources``.

        Of a first frame they are ``[1, C, 1, H, W]``, and ``frames`` must be set before.
        """
        height, width = image.shape[-3:-1]
        self.latent_shape(height, width, self.frames)  # raises ValueError for a size that does not divide
        return {**self.embed_prompts([prompt]), "image_latents": encode_sources(self, image)}

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        shapes = super().embedding_shapes(height, width)
        return {**shapes, "image_latents": (source_shape(self, height, width), torch.float32)}


class FlowSchedule(DiffusionModel):
    """Base class of flow models: noise levels of training and of sampling are those of the pipeline's scheduler."""

    largest_shift: ClassVar[float] = LARGEST_SHIFT
    """``max_shift`` of a dynamic shift if the scheduler does not set it: the default of the pipeline."""
    knows_size: ClassVar[bool] = True
    """Whether the pipeline passes the size of an image to its scheduler, which a dynamic shift needs."""

    def check_scheduler(self) -> None:
        check_flow_scheduler(self.pipeline.scheduler, self.knows_size, self.gives_sigmas)

    gives_sigmas: ClassVar[bool] = False
    """Whether the pipeline passes the noise levels before the shift to the scheduler, and not only their number."""

    def dynamic_mu(self, tokens: int, num_steps: int | None) -> float | None:
        """The shift mu of a scheduler with a dynamic shift, where the pipeline has a formula of its own for it.

        Args:
            tokens: of an image.
            num_steps: of a trajectory; None is that of training.
        """
        return None

    def sigmas(self, num_steps: int, latent_shape: Sequence[int]) -> Tensor:
        settings: Keywords = {"largest_shift": self.largest_shift, "gives_sigmas": self.gives_sigmas}
        if self.pipeline.scheduler.config.get("use_dynamic_shifting"):
            settings["patch"] = self.patch  # a dynamic shift counts tokens
            settings["mu"] = self.dynamic_mu(num_tokens(latent_shape, self.patch), num_steps)
        return flow_sigmas(self.pipeline.scheduler, num_steps, latent_shape, **settings)

    @property
    def shift(self) -> float:
        """The timestep shift of the largest image that the scheduler was made for."""
        scheduler = self.pipeline.scheduler
        mu = self.dynamic_mu(scheduler.config.get("max_image_seq_len", LARGEST_IMAGE), None)
        return flow_shift(scheduler, largest_shift=self.largest_shift, mu=mu)

    def shift_at(self, latent_shape: Sequence[int]) -> float:
        mu = self.dynamic_mu(num_tokens(latent_shape, self.patch), None)
        return flow_shift(
            self.pipeline.scheduler, latent_shape, patch=self.patch, largest_shift=self.largest_shift, mu=mu
        )

    def timestep(self, sigma: Tensor) -> Tensor:
        """The scheduler's timesteps of noise levels ``[B]``."""
        return sigma * self.pipeline.scheduler.config.num_train_timesteps


class FlowTokens(FlowSchedule):
    """Base class of families with the schedule of FLUX."""

    gives_sigmas: ClassVar[bool] = True

    def time(self, sigma: Tensor) -> Tensor:
        """The network's time input for noise levels ``[B]``: thousandths of the scheduler's timesteps."""
        return sigma * (self.pipeline.scheduler.config.num_train_timesteps / 1000)


class QwenLatents(VideoLatents, FlowTokens):
    """Base class of families of images with Qwen-Image's autoencoder, for which an image is a video of one frame."""

    @property
    def probe_size(self) -> int:
        return self.pipeline.vae_scale_factor * PATCH

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor
        check_size(height, width, self.probe_size, frames)
        return (self.latent_channels, height // factor, width // factor)

    def pixels_to_latents(self, pixels: Tensor) -> Tensor:
        return super().pixels_to_latents(pixels)[:, :, 0]  # a video of one frame

    def latents_to_pixels(self, latents: Tensor) -> Tensor:
        return super().latents_to_pixels(latents[:, :, None])
