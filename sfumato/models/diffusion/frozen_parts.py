"""What of a diffusion pipeline is not trained: text encoders with the memory of their embeddings, and the autoencoder.

Shapes: B samples, C H W latent channels, height and width, T tokens; F frames.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.errors import DataError, NonFiniteError
from sfumato.models.diffusion.conditioning import Conditioning, image_digests
from sfumato.parallel.finite import finite_rows

EMBED_BATCH = 8
"""Prompts are always embedded so many at a time: the bits of an embedding would depend on the batch shape."""

DECODE_BATCH = 8
"""Small pictures are always decoded so many at a time: the bits of a convolution depend on the size of the batch."""

DECODE_POSITIONS = 1024
"""Positions of latents that are decoded at a time at most, so that larger pictures and videos come one by one."""

MAX_REMEMBERED = 1024
"""Prompts whose embeddings are kept while the encoders are there; T5-XXL's take about 3 MB each."""


class FrozenParts(ABC):
    """The half of a model family that turns prompts into embeddings, pixels into latents, and latents into pixels.

    With an ``idle_device`` its networks are on ``device`` only while they do so.
    """

    pipeline_class: ClassVar[str]
    """Name of the diffusers pipeline, as model_index.json has it."""
    encoder_names: ClassVar[tuple[str, ...]]
    """Text encoders, which can be freed when all prompts are embedded."""
    autoencoder_names: ClassVar[tuple[str, ...]] = ("vae",)
    """What makes latents of pixels, and pixels of latents."""
    optional_parts: ClassVar[tuple[str, ...]] = ()
    """Encoders that a pipeline may be without."""
    prompt_tokenizer: ClassVar[str] = "tokenizer"
    """The pipeline's tokenizer for the encoder that reads the longest prompts."""
    takes_image: ClassVar[bool] = False
    """Every sample starts from an image of its own (editing, image to video) besides the prompt."""

    def __init__(self, pipeline: Any) -> None:
        """Takes a diffusers pipeline with all its components."""
        self.pipeline = pipeline
        self.encoders_freed = False
        self.device = torch.device("cpu")
        """Where the networks are and the denoiser computes."""
        self.idle_device: torch.device | None = None
        """Where text encoders and autoencoder wait for work; None leaves them where they are."""
        self.say: Callable[[str], None] = lambda text: None
        """The function that is told of prompts that are cut."""
        self._cut: set[int] = set()
        """Hashes of prompts that were cut."""
        self._prompts: dict[tuple[str, str], dict[str, Tensor]] = {}
        """Remembered embeddings by prompt and digest of its image, empty without one."""
        for component in self.components.values():
            component.requires_grad_(False).eval()

    @abstractmethod
    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """Runs the text encoders: tensors ``[B, ...]`` by the names that ``denoise`` takes."""

    def embed_edit(self, prompt: str, image: np.ndarray) -> dict[str, Tensor]:
        """What ``denoise`` takes for one prompt and its image: tensors ``[1, ...]``; only where ``takes_image``.

        Args:
            prompt: what is to become of the image.
            image: uint8 ``[H, W, 3]``, already of the size that the model is to see.

        Raises:
            ValueError: for a size that does not divide.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no image")

    @abstractmethod
    def pixels_to_latents(self, pixels: Tensor) -> Tensor:
        """What ``encode_pixels`` returns; the autoencoder is on ``device``."""

    @abstractmethod
    def latents_to_pixels(self, latents: Tensor) -> Tensor:
        """What ``decode`` rounds: pixels of any floating dtype, about [-1, 1]; the autoencoder is on ``device``."""

    @property
    def components(self) -> dict[str, nn.Module]:
        """The pipeline's neural networks by name."""
        return {
            name: component for name, component in self.pipeline.components.items() if isinstance(component, nn.Module)
        }

    @contextmanager
    def at_work(self, *names: str) -> Iterator[None]:
        """Inside, these components are on ``device``; afterwards they wait where they waited before.

        Args:
            names: of the pipeline's components; those that a pipeline does without may be among them.
        """
        components = [self.components[name] for name in names if name in self.components]
        moved = (
            []
            if self.idle_device is None
            else [component for component in components if device_of(component) != self.device]
        )
        try:
            for component in moved:
                component.to(self.device)
            yield
        finally:
            for component in moved:
                component.to(self.idle_device)

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """uint8 pixels to float32 latents ``[B, *latent_shape]``, the mode of the posterior.

        Args:
            pixels: ``[B, 3, H, W]`` of images, or ``[B, 3, F, H, W]`` of videos for a family that makes them.
        """
        with self.at_work(*self.autoencoder_names):
            return self.pixels_to_latents(pixels)

    def decode(self, latents: Tensor) -> Tensor:
        """Latents ``[B, *latent_shape]`` to uint8 pixels ``[B, 3, H, W]``; of several frames ``[B, F, 3, H, W]``.

        What is decoded at a time always has the size that belongs to the shape of a latent, so that a picture does not
        depend on how micro-batches and ranks share the work.

        Raises:
            NonFiniteError: when a pixel is NaN or infinite.
        """
        pixels, is_finite = self.decode_marked(latents)
        if not is_finite.all():
            raise NonFiniteError(f"{int((~is_finite).sum())} of {len(pixels)} decoded pictures are not finite")
        return pixels

    def decode_marked(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """What ``decode`` returns, and which pictures were finite before they were rounded: bool ``[B]``.

        uint8 has no NaN: rounding makes it a black pixel like any other.
        """
        chunk_size = max(1, min(DECODE_BATCH, DECODE_POSITIONS // latents[0, 0].numel()))
        pixels, is_finite = [], []
        with self.at_work(*self.autoencoder_names):
            for chunk in latents.split(chunk_size):
                padding = chunk[-1:].expand(chunk_size - len(chunk), *chunk.shape[1:])
                decoded = self.latents_to_pixels(torch.cat([chunk, padding]))[: len(chunk)]
                if not decoded.is_floating_point():
                    raise TypeError(f"{type(self).__name__}.latents_to_pixels must return pixels before rounding")
                decoded = decoded.float()
                pixels.append(((decoded / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8))
                is_finite.append(finite_rows(decoded))
        return torch.cat(pixels), torch.cat(is_finite)

    def encode_prompts(
        self, prompts: Sequence[str], with_negative: bool = True, images: Sequence[np.ndarray] | None = None
    ) -> Conditioning:
        """Conditioning of B prompts; embeddings that are remembered are not computed again.

        Args:
            prompts: B prompts.
            with_negative: add the empty prompt, which guidance and prompt dropout need.
            images: B images, uint8 ``[H, W, 3]`` of one size, for a family that ``takes_image``; the empty prompt then
                goes with each of them.

        Returns:
            Conditioning of B rows on the denoiser's device.

        Raises:
            DataError: when images are missing, needless, or of several sizes.
            RuntimeError: when the encoders were freed and a prompt was not embedded before.
        """
        if not self.encoders_freed and len(self._prompts) > MAX_REMEMBERED:
            self.forget_prompts()
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

    def remember_prompts(
        self, prompts: Sequence[str], images: Sequence[np.ndarray] | None = None, with_negative: bool = True
    ) -> None:
        """Embeds the prompts that are not remembered yet; they are kept on the CPU.

        Args are those of ``encode_prompts``.

        Raises:
            DataError, RuntimeError: as ``encode_prompts``.
        """
        self._check_images(prompts, images)
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
        working = self.encoder_names if images_by_digest is None else (*self.encoder_names, *self.autoencoder_names)
        with torch.no_grad(), self.at_work(*working):
            self._embed(missing, images_by_digest)
        for prompt, _ in missing:
            self._say_if_cut(prompt)

    def _embed(self, missing: list[tuple[str, str]], images_by_digest: dict[str, np.ndarray] | None) -> None:
        if images_by_digest is not None:
            for prompt, digest in missing:  # one by one: the bits of an embedding must not depend on its batch
                self._keep([(prompt, digest)], self.embed_edit(prompt, images_by_digest[digest]))
            return
        for start in range(0, len(missing), EMBED_BATCH):
            chunk = missing[start : start + EMBED_BATCH]
            texts = [prompt for prompt, _ in chunk]
            self._keep(chunk, self.embed_prompts(texts + [texts[-1]] * (EMBED_BATCH - len(texts))))

    @property
    def prompt_limit(self) -> int:
        """Most tokens of a prompt that are read."""
        return self.max_sequence_length

    def prompt_as_read(self, prompt: str) -> str:
        """A prompt with what the encoder reads around it, as far as that counts for ``prompt_limit``."""
        return prompt

    def _say_if_cut(self, prompt: str) -> None:
        """Counts prompts that are longer than what is read, and says the first and each doubling of their number."""
        tokenizer = getattr(self.pipeline, self.prompt_tokenizer, None)
        if tokenizer is None or hash(prompt) in self._cut:
            return
        num_tokens = len(tokenizer(self.prompt_as_read(prompt), verbose=False)["input_ids"])
        if num_tokens <= self.prompt_limit:
            return
        self._cut.add(hash(prompt))
        count = len(self._cut)
        if count & (count - 1) == 0:  # a power of two
            shown = prompt if len(prompt) < 80 else f"{prompt[:77]}..."
            subject = "prompt was" if count == 1 else "different prompts were"
            hint = " (model.max_sequence_length)" if self.prompt_limit == self.max_sequence_length else ""
            self.say(
                f"{count} {subject} cut so far, since the model reads {self.prompt_limit} tokens of each{hint}; this one "
                f"has {num_tokens}: {shown!r}"
            )

    def _keep(self, keys: Sequence[tuple[str, str]], embedded: dict[str, Tensor]) -> None:
        on_host = {name: tensor[: len(keys)].to("cpu") for name, tensor in embedded.items()}
        for row, key in enumerate(keys):
            self._prompts[key] = {name: tensor[row].clone() for name, tensor in on_host.items()}

    def _check_images(self, prompts: Sequence[str], images: Sequence[np.ndarray] | None) -> None:
        if (images is not None) != self.takes_image:
            problem = "needs an image with every prompt" if self.takes_image else "takes no images: leave them out"
            raise DataError(f"{self.pipeline_class} {problem}")
        if images is None:
            return
        if len(images) != len(prompts):
            raise DataError(f"{len(prompts)} prompts with {len(images)} images: give one image per prompt")
        wrong = [
            image for image in images if image.dtype != np.uint8 or image.ndim != 3 or image.shape != images[0].shape
        ]
        if wrong:
            raise DataError(
                f"images of one batch must be uint8 [H, W, 3] of one size; there are {images[0].shape} of "
                f"{images[0].dtype} and {wrong[0].shape} of {wrong[0].dtype}: resize them"
            )

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        """Shape of one row, and dtype, of each tensor of a conditioning, also where the encoders are on meta.

        A family that takes images takes one of that height and width in pixels.
        """
        images = self.blank_images(1, height, width)
        embedded = self.embed_prompts([""]) if images is None else self.embed_edit("", images[0])
        return {name: (tensor.shape[1:], tensor.dtype) for name, tensor in embedded.items()}

    def example_embeddings(self, height: int, width: int) -> dict[str, Tensor]:
        """Some conditioning of one row, as of ``embedding_shapes``; one that is remembered if encoders were freed."""
        if self.encoders_freed:
            return {name: tensor[None] for name, tensor in next(iter(self._prompts.values())).items()}
        return self.encode_prompts([""], with_negative=False, images=self.blank_images(1, height, width)).tensors

    def blank_images(self, count: int, height: int, width: int) -> list[np.ndarray] | None:
        """Black images for ``encode_prompts``; None for a family that takes none."""
        return [np.zeros((height, width, 3), np.uint8)] * count if self.takes_image else None

    def forget_prompts(self) -> None:
        """Drops the remembered embeddings."""
        self._prompts.clear()

    def free_encoders(self) -> None:
        """Drops the text encoders from memory. Prompts embedded before stay available; saving leaves them out."""
        for name in self.encoder_names:
            setattr(self.pipeline, name, None)
        self.encoders_freed = True


def device_of(module: nn.Module) -> torch.device:
    """Where a module's weights are."""
    return next(module.parameters()).device
