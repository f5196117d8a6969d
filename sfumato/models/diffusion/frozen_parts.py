"""The frozen components of a diffusion pipeline: text encoders, whose embeddings are cached, and the autoencoder.

Shapes: B samples, C H W latent channels, height and width, T tokens; F frames.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.config.sections import LONGEST_PROMPT
from sfumato.errors import ConfigError, DataError, NonFiniteError
from sfumato.models.diffusion.conditioning import Conditioning, image_digests
from sfumato.parallel.finite import finite_rows

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

EMBED_BATCH = 8
"""Prompts are always embedded in batches of this size, since the bits of an embedding depend on the batch size."""

DECODE_BATCH = 8
"""Small pictures are always decoded in batches of this size, since the bits of a convolution depend on it."""

DECODE_POSITIONS = 1024
"""Most positions of latents that are decoded at a time, so that larger pictures and videos are decoded one by one."""

CLIP_ENCODERS = {"CLIPTextModel", "CLIPTextModelWithProjection"}
"""Classes of text encoders for which pipelines pad every prompt to the tokenizer's ``model_max_length``."""

PREVIEW_AUTOENCODER = "AutoencoderTiny"
"""Class of TAESD and its like, whose latents are no distributions."""

TRAINED_AUTOENCODER = "AutoencoderKL"
"""Class of the autoencoders that are trained here."""

MAX_REMEMBERED = 1024
"""Prompts whose embeddings are cached while the encoders are in memory; those of T5-XXL take about 3 MB each."""


class FrozenParts(ABC):
    """Turns prompts into embeddings, pixels into latents, and latents into pixels: the frozen half of a model family.

    With an ``idle_device`` its networks are on ``device`` only while they compute.
    """

    pipeline_class: ClassVar[str]
    """Name of the diffusers pipeline, as model_index.json has it."""
    encoder_names: ClassVar[tuple[str, ...]] = ("text_encoder",)
    """Names of text encoders, which can be freed when all prompts are embedded."""
    autoencoder_names: ClassVar[tuple[str, ...]] = ("vae",)
    """Names of components that turn pixels into latents and back."""
    optional_parts: ClassVar[tuple[str, ...]] = ()
    """Names of encoders that a pipeline may lack."""
    prompt_tokenizer: ClassVar[str] = "tokenizer"
    """Name of the tokenizer of the encoder that reads the longest prompts."""
    takes_image: ClassVar[bool] = False
    """Whether every sample starts from an image of its own besides the prompt (editing, image to video)."""
    makes_sound: ClassVar[bool] = False
    """Whether samples are sounds, int16 ``[A, N]`` of A channels, in place of pixels."""
    makes_video_with_sound: ClassVar[bool] = False
    """Whether samples are videos with sound, whose latents hold both (``video_with_sound.py``)."""
    frame_rate: float = 0.0
    """Frames per second at which the model's videos are meant to be played; 0 of a family of pictures or sounds."""
    least_source_images: int = 1
    """Fewest images that a sample can start from, of a family that ``takes_image``."""
    most_source_images: int = 1
    """Most images that a sample can start from: of edits several, of videos perhaps the first and the last frame."""
    max_source_images: int = 1
    """Most images that a sample starts from here, see ``set_source_images``."""
    max_sequence_length: int
    """Tokens of the longest text encoder."""

    def __init__(self, pipeline: DiffusionPipeline) -> None:
        """Takes a diffusers pipeline with all its components."""
        self.pipeline = pipeline
        self.encoders_freed = False
        self.device = torch.device("cpu")
        """Device of the networks, and of the denoiser's inputs and outputs."""
        self.idle_device: torch.device | None = None
        """Device of text encoders and autoencoder while they are not used; None leaves them on ``device``."""
        self.say: Callable[[str], None] = lambda text: None
        """Prints a line; called when prompts are truncated."""
        self._has_said_cut = False
        """Whether the user was told that prompts are truncated."""
        self._prompts: dict[tuple[str, str], dict[str, Tensor]] = {}
        """Cached embeddings by prompt and digest of its image; the digest is empty without an image."""
        for component in self.components.values():
            component.requires_grad_(False).eval()

    @classmethod
    def pipeline_type(cls) -> type[DiffusionPipeline]:
        """The class named ``pipeline_class``: that of diffusers, unless a family overrides this."""
        import diffusers

        return getattr(diffusers, cls.pipeline_class)

    @classmethod
    def call_default(cls, name: str) -> object:
        """What the pipeline's own call takes for an argument that it is not given; None where it has none."""
        parameter = inspect.signature(cls.pipeline_type().__call__).parameters.get(name)
        return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default

    @classmethod
    def prompt_length(cls, configured: int | None) -> int:
        """``model.max_sequence_length``: what is configured, or the pipeline's own; 256 where it states none."""
        if configured is not None:
            return configured
        own = cls.call_default("max_sequence_length")
        return min(own, LONGEST_PROMPT) if isinstance(own, int) else 256

    @abstractmethod
    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """Runs the text encoders: tensors ``[B, ...]`` by the names that ``denoise`` takes."""

    def embed_edit(self, prompt: str, image: np.ndarray) -> dict[str, Tensor]:
        """Runs the encoders on one prompt and its image, for families that ``takes_image``.

        Args:
            prompt: says how to change or continue the image.
            image: uint8 ``[H, W, 3]``, already of the size at which the model reads it; of several images
                ``[S, H, W, 3]``.

        Returns:
            Tensors ``[1, ...]`` by the names that ``denoise`` takes.

        Raises:
            ValueError: for a size that does not divide.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no image")

    @abstractmethod
    def pixels_to_latents(self, pixels: Tensor) -> Tensor:
        """Computes what ``encode_pixels`` returns; the autoencoder is on ``device``."""

    @abstractmethod
    def latents_to_pixels(self, latents: Tensor) -> Tensor:
        """Computes the pixels that ``decode`` rounds, floating point in about [-1, 1]; autoencoder on ``device``."""

    @property
    def components(self) -> dict[str, nn.Module]:
        """The pipeline's neural networks by name."""
        return {
            name: component for name, component in self.pipeline.components.items() if isinstance(component, nn.Module)
        }

    @contextmanager
    def at_work(self, *names: str) -> Iterator[None]:
        """Inside, some components are on ``device``; afterwards they are moved back to ``idle_device``.

        Args:
            names: names of components; those that the pipeline lacks are ignored.
        """
        parts = [self.components[name] for name in names if name in self.components]
        moved = [part for part in parts if self.idle_device is not None and device_of(part) != self.device]
        try:
            for component in moved:
                component.to(self.device)
            yield
        finally:
            for component in moved:
                component.to(self.idle_device)

    def encode_pixels(self, pixels: Tensor, sound: Tensor | None = None) -> Tensor:
        """Encodes uint8 pixels to float32 latents ``[B, *latent_shape]``, the mode of the posterior.

        Args:
            pixels: ``[B, 3, H, W]`` of images, or ``[B, 3, F, H, W]`` of videos for a family that makes them; of a
                family that makes sound int16 ``[B, A, N]``.
            sound: int16 ``[B, A, N]`` of ``encoded_rate``, for a family that makes videos with sound; None is silence.
        """
        assert sound is None, f"{type(self).__name__} makes no sound beside pixels"
        with self.at_work(*self.autoencoder_names):
            return self.pixels_to_latents(pixels)

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents ``[B, *latent_shape]`` to uint8 pixels ``[B, 3, H, W]``; several frames ``[B, F, 3, H, W]``;
        sound to int16 ``[B, A, N]``.

        The number of latents that are decoded at a time depends on the shape of a latent alone, so that the bits of a
        picture do not depend on how the work is split into micro-batches and ranks.

        Raises:
            NonFiniteError: when a pixel is NaN or infinite.
        """
        pixels, is_finite = self.decode_marked(latents)
        if not is_finite.all():
            raise NonFiniteError(f"{int((~is_finite).sum())} of {len(pixels)} decoded pictures are not finite")
        return pixels

    def decode_marked(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what ``decode`` does, and which pictures were finite before rounding: bool ``[B]``.

        Rounding to uint8 turns NaN into an ordinary black pixel, so it must be looked for before.
        """
        return self._decode_chunks(latents, self.latents_to_pixels, self.round_decoded)

    def decode_sound(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Decodes the sound of videos: int16 ``[B, A, N]``, and which were finite before rounding, bool ``[B]``."""
        raise NotImplementedError(f"{type(self).__name__} makes no videos with sound")

    def _decode_chunks(
        self, latents: Tensor, compute: Callable[[Tensor], Tensor], rounded: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Decodes as many latents at a time as their shape allows: what was rounded, and what was finite before."""
        chunk_size = self.decoded_at_a_time(latents)
        outputs = []
        is_finite = []
        with torch.no_grad(), self.at_work(*self.autoencoder_names):
            for chunk in latents.split(chunk_size):
                padding = chunk[-1:].expand(chunk_size - len(chunk), *chunk.shape[1:])
                decoded = compute(torch.cat([chunk, padding]))[: len(chunk)]
                if not decoded.is_floating_point():
                    raise TypeError(f"{type(self).__name__}.latents_to_pixels must return pixels before rounding")
                decoded = decoded.float()
                outputs.append(rounded(decoded))
                is_finite.append(finite_rows(decoded))
        return torch.cat(outputs), torch.cat(is_finite)

    def decode_differentiably(self, latents: Tensor) -> Tensor:
        """Decodes latents ``[B, *latent_shape]`` so that gradients flow to them.

        Pixels are clamped, and not rounded; those that are clamped have no gradient. The autoencoder must stay on
        ``device`` until the backward pass is over.

        Returns:
            float32 ``[B, 3, H, W]`` from 0 to 1; several frames ``[B, F, 3, H, W]``.

        Raises:
            ConfigError: when the family's autoencoder has no gradient, or the family makes sound.
        """
        if self.makes_sound:
            raise ConfigError(f"{self.pipeline_class} makes sound: rewards whose gradient is followed see pictures")
        chunk_size = self.decoded_at_a_time(latents)
        pixels = []
        for chunk in latents.split(chunk_size):
            padding = chunk[-1:].detach().expand(chunk_size - len(chunk), *chunk.shape[1:])
            pixels.append(self.latents_to_pixels(torch.cat([chunk, padding]))[: len(chunk)].float())
        decoded = torch.cat(pixels)
        if latents.requires_grad and not decoded.requires_grad:
            raise ConfigError(f"{self.pipeline_class}: no gradient flows through its autoencoder to the latents")
        return (decoded / 2 + 0.5).clamp(0, 1)

    def recompute_autoencoder(self, recompute: bool) -> None:
        """Whether the autoencoder recomputes its activations in a backward pass, where diffusers' class can."""
        for name in self.autoencoder_names:
            autoencoder = self.components.get(name)
            if not getattr(autoencoder, "_supports_gradient_checkpointing", False):
                continue
            switch = f"{'enable' if recompute else 'disable'}_gradient_checkpointing"
            getattr(autoencoder, switch)()

    def round_decoded(self, decoded: Tensor) -> Tensor:
        """Rounds what ``latents_to_pixels`` gave to uint8, or sound to int16."""
        return ((decoded / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)

    def probe_content(self) -> Tensor:
        """A small sample that identifies the autoencoder by its latents: uint8 ``[1, 3, H, W]``."""
        size = self.probe_size
        return (torch.arange(3 * size * size) * 37 % 256).to(torch.uint8).reshape(1, 3, size, size)

    @property
    @abstractmethod
    def probe_size(self) -> int:
        """Side in pixels of a small square image that the autoencoder accepts."""

    @property
    def patch(self) -> int:
        """Latent pixels along each side of a token; a dynamic shift depends on the number of tokens."""
        return 2

    @property
    def sampling_rate(self) -> int:
        """Samples per second of a sound that is drawn; 0 for a family that makes none."""
        return 0

    @property
    def encoded_rate(self) -> int:
        """Samples per second of a sound that is encoded."""
        return self.sampling_rate

    @property
    def num_channels(self) -> int:
        """Channels of sound; 0 for a family that makes none."""
        return 0

    @staticmethod
    def decoded_at_a_time(latents: Tensor) -> int:
        """How many of such latents ``[B, C, ...]`` are decoded together."""
        return max(1, min(DECODE_BATCH, DECODE_POSITIONS // latents[0, 0].numel()))

    def encode_prompts(
        self, prompts: Sequence[str], with_negative: bool = True, images: Sequence[np.ndarray] | None = None
    ) -> Conditioning:
        """Makes the conditioning of B prompts; embeddings that are cached are not computed again.

        Args:
            prompts: B prompts.
            with_negative: add the embedding of the empty prompt, which guidance and prompt dropout need.
            images: B images, uint8 ``[H, W, 3]`` of one size, for a family that ``takes_image``, or B times as many
                images, ``[S, H, W, 3]``; the empty prompt is then embedded with each of them.

        Returns:
            Conditioning of B rows on the denoiser's device.

        Raises:
            DataError: when images are missing, not taken by the family, or of several sizes.
            RuntimeError: when the encoders were freed and a prompt was not embedded before.
        """
        if not self.encoders_freed and len(self._prompts) > MAX_REMEMBERED:
            self.forget_prompts()
        self._check_images(prompts, images, are_alike=True)
        self.remember_prompts(prompts, images, with_negative)
        digests = image_digests(prompts, images)

        def stack(texts: Sequence[str], digests: Sequence[str]) -> dict[str, Tensor]:
            rows = [self._prompts[key] for key in zip(texts, digests, strict=True)]
            return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

        negative = None
        if with_negative:
            negative = stack([""] * len(prompts), digests) if self.takes_image else stack([""], [""])
        own_negative = with_negative and self.takes_image
        return Conditioning(stack(prompts, digests), negative, own_negative).to(self.device)

    def is_embedded(self, prompt: str) -> bool:
        """Whether the embedding of a prompt without an image is cached."""
        return (prompt, "") in self._prompts

    def remember_prompts(
        self, prompts: Sequence[str], images: Sequence[np.ndarray] | None = None, with_negative: bool = True
    ) -> None:
        """Embeds the prompts that are not cached yet; the cache is on the CPU.

        Args are those of ``encode_prompts``; here images may have several sizes.

        Raises:
            DataError, RuntimeError: as ``encode_prompts``.
        """
        self._check_images(prompts, images, are_alike=False)
        digests = image_digests(prompts, images)
        wanted = dict.fromkeys(zip(prompts, digests, strict=True))
        if with_negative:
            wanted |= dict.fromkeys(("", digest) for digest in (digests if self.takes_image else [""]))
        missing = [key for key in wanted if key not in self._prompts]
        if missing and self.encoders_freed:
            raise RuntimeError(
                f"the text encoders were freed and this prompt was not embedded before: {missing[0][0]!r}"
            )
        if not missing:
            return
        images_by_digest = None if images is None else dict(zip(digests, images, strict=True))
        component_names = (
            self.encoder_names if images_by_digest is None else (*self.encoder_names, *self.autoencoder_names)
        )
        with torch.no_grad(), self.at_work(*component_names):
            self._embed_missing(missing, images_by_digest)
        for prompt, _ in missing:
            self._report_if_truncated(prompt)

    def _embed_missing(self, missing: list[tuple[str, str]], images_by_digest: dict[str, np.ndarray] | None) -> None:
        """Embeds prompts, with their images if there are any, and caches the result."""
        if images_by_digest is not None:
            for prompt, digest in missing:  # one by one: the bits of an embedding must not depend on its batch
                self._keep([(prompt, digest)], self.embed_edit(prompt, images_by_digest[digest]))
            return
        for start in range(0, len(missing), EMBED_BATCH):
            chunk = missing[start : start + EMBED_BATCH]
            texts = [prompt for prompt, _ in chunk]
            # The last chunk is filled up with copies of its last prompt: see EMBED_BATCH.
            self._keep(chunk, self.embed_prompts(texts + [texts[-1]] * (EMBED_BATCH - len(texts))))

    @property
    def prompt_limit(self) -> int:
        """Most tokens of a prompt that the text encoder reads; the rest is truncated."""
        return self.max_sequence_length

    def prompt_as_read(self, prompt: str) -> str:
        """The prompt with the parts of its template that count towards ``prompt_limit``."""
        return prompt

    def _report_if_truncated(self, prompt: str) -> None:
        """Says, of the first prompt that is truncated, what becomes of such prompts."""
        tokenizer = getattr(self.pipeline, self.prompt_tokenizer, None)
        if tokenizer is None or self._has_said_cut:
            return
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor of text and images has one
        num_tokens = len(tokenizer(self.prompt_as_read(prompt), verbose=False)["input_ids"])
        if num_tokens <= self.prompt_limit:
            return
        self._has_said_cut = True
        shown = prompt if len(prompt) < 80 else f"{prompt[:77]}..."
        hint = " (model.max_sequence_length)" if self.prompt_limit == self.max_sequence_length else ""
        self.say(
            f"the model reads the first {self.prompt_limit} tokens of a prompt{hint}; longer ones are cut, the first "
            f"of which has {num_tokens}: {shown!r}"
        )

    def _keep(self, keys: Sequence[tuple[str, str]], embedded: dict[str, Tensor]) -> None:
        """Caches the first rows of embeddings, one for each key; further rows are padding."""
        on_host = {name: tensor[: len(keys)].to("cpu") for name, tensor in embedded.items()}
        for row, key in enumerate(keys):
            # Copies: a view of one row would hold the whole batch in memory.
            self._prompts[key] = {name: tensor[row].clone() for name, tensor in on_host.items()}

    def _check_images(self, prompts: Sequence[str], images: Sequence[np.ndarray] | None, are_alike: bool) -> None:
        if (images is not None) != self.takes_image:
            problem = "needs an image with every prompt" if self.takes_image else "takes no images: leave them out"
            raise DataError(f"{self.pipeline_class} {problem}")
        if images is None:
            return
        if len(images) != len(prompts):
            raise DataError(f"{len(prompts)} prompts with {len(images)} images: give one image per prompt")
        wrong = [image for image in images if image.dtype != np.uint8 or image.ndim not in (3, 4)]
        for image in images if not wrong else ():
            if problem := self.source_problem(1 if image.ndim == 3 else len(image)):
                raise DataError(f"a prompt has {problem}")
        wrong += [image for image in images if are_alike and image.shape != images[0].shape]
        if wrong:
            raise DataError(
                f"images of one batch must be uint8 [H, W, 3] of one size and number; there are {images[0].shape} of "
                f"{images[0].dtype} and {wrong[0].shape} of {wrong[0].dtype}: resize them"
            )

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        """Shape of one row, and dtype, of each tensor of a conditioning. It works with encoders on meta, too.

        Args:
            height, width: in pixels, of the image of a family that ``takes_image``.
        """
        images = self.blank_images(1, height, width, self.max_source_images)
        embedded = self.embed_prompts([""]) if images is None else self.embed_edit("", images[0])
        return {name: (tensor.shape[1:], tensor.dtype) for name, tensor in embedded.items()}

    def example_embeddings(self, height: int, width: int) -> dict[str, Tensor]:
        """The tensors of some conditioning of one row; if the encoders were freed, one from the cache."""
        if self.encoders_freed:
            return {name: tensor[None] for name, tensor in next(iter(self._prompts.values())).items()}
        return self.encode_prompts([""], with_negative=False, images=self.blank_images(1, height, width)).tensors

    def source_problem(self, count: int) -> str:
        """What is wrong with so many source images of a sample; empty if nothing is."""
        if self.least_source_images <= count <= self.most_source_images:
            return ""
        least = self.least_source_images
        most = self.most_source_images
        taken = str(most) if least == most else f"{least} to {most}"
        return f"{count} source images, and this {self.pipeline_class} takes {taken}"

    def blank_images(self, count: int, height: int, width: int, num_sources: int = 0) -> list[np.ndarray] | None:
        """Black images for ``encode_prompts``; None for a family that takes none.

        Args:
            count: of prompts.
            height, width: in pixels.
            num_sources: images of each prompt; 0 takes as few as there can be.
        """
        num_sources = num_sources or self.least_source_images
        several = (num_sources,) if num_sources > 1 else ()
        return [np.zeros((*several, height, width, 3), np.uint8)] * count if self.takes_image else None

    def forget_prompts(self) -> None:
        """Clears the cache of embeddings."""
        self._prompts.clear()

    def free_encoders(self) -> None:
        """Removes the text encoders from the pipeline to free memory. Cached embeddings stay available.

        ``save_pipeline`` then copies the encoders from the folder that the pipeline was loaded from.
        """
        for name in self.encoder_names:
            setattr(self.pipeline, name, None)
        self.encoders_freed = True


def device_of(module: nn.Module) -> torch.device:
    """Device of a module's weights."""
    return next(module.parameters()).device


def check_frozen_parts(pipeline: DiffusionPipeline) -> None:
    """Checks that autoencoder and text encoders of a pipeline can be used with what stands beside them.

    Raises:
        ConfigError: when a tokenizer makes longer prompts than its CLIP encoder has positions, or tokens that its
            encoder has no embedding for; or the autoencoder is one for previews.
    """
    for name, encoder in pipeline.components.items():
        tokenizer_name = name.replace("text_encoder", "tokenizer")
        tokenizer = pipeline.components.get(tokenizer_name)
        if tokenizer is None or tokenizer is encoder or not hasattr(encoder, "get_input_embeddings"):
            continue
        embeddings = len(encoder.get_input_embeddings().weight)
        if hasattr(tokenizer, "get_vocab") and len(tokenizer) > embeddings:
            raise ConfigError(
                f"{tokenizer_name} has {len(tokenizer):,} tokens, and {name} embeddings of {embeddings:,}: save the "
                "encoder, too, to which the tokens were added, or take the tokenizer as it was published"
            )
        if type(encoder).__name__ in CLIP_ENCODERS:
            positions = encoder.config.max_position_embeddings
            if tokenizer.model_max_length > positions:  # endless where the tokenizer's file does not state it
                raise ConfigError(
                    f"the prompts of {tokenizer_name} have {tokenizer.model_max_length:g} tokens, and {name} has "
                    f'{positions} positions: write "model_max_length": {positions} into '
                    f"{tokenizer_name}/tokenizer_config.json"
                )
    if type(pipeline.components.get("vae")).__name__ == PREVIEW_AUTOENCODER:
        raise ConfigError(
            f"its vae is an {PREVIEW_AUTOENCODER}, which is for previews: take the autoencoder that the model was "
            "published with"
        )


def image_autoencoder(pipeline: DiffusionPipeline) -> AutoencoderKL:
    """The autoencoder of a pipeline, to be trained on images.

    Raises:
        ConfigError: for one of another class, such as of videos, or whose latents are not scaled by
            ``shift_factor`` and ``scaling_factor``.
    """
    name = type(pipeline.components.get("vae")).__name__
    if name != TRAINED_AUTOENCODER:
        raise ConfigError(
            f"{TRAINED_AUTOENCODER} alone is trained here, and the vae of {type(pipeline).__name__} is a {name}: "
            "take it from a published model, or a pipeline such as StableDiffusion3Pipeline or FluxPipeline"
        )
    vae = pipeline.components["vae"]
    if getattr(vae.config, "latents_mean", None) is not None:
        raise ConfigError(
            "the vae's latents_mean and latents_std are of the weights before training: set both to null in "
            "vae/config.json, so that scaling_factor is measured anew"
        )
    return vae
