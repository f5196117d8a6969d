"""Qwen-Image-Edit (arXiv 2508.02324) and its 2509 and 2511, which read images with the prompt."""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from dataclasses import replace

import numpy as np
from PIL import Image
from torch import Tensor

from sfumato.config.open_mappings import Keywords
from sfumato.config.sections import MOST_SOURCE_IMAGES
from sfumato.models.diffusion.described import Blueprint
from sfumato.models.diffusion.families.qwen_image import QwenImage
from sfumato.models.diffusion.latents import (
    SourceLatents,
    count_image_tokens,
    encode_sources,
    padded_with_images,
)
from sfumato.models.diffusion.scratch import build_qwen_vl_processor


def _make_processor(parts: Keywords, min_pixels: int = 28 * 28, max_pixels: int = 1280 * 28 * 28) -> object:
    return build_qwen_vl_processor(parts["tokenizer"], min_pixels, max_pixels)


class QwenImageEdit(SourceLatents, QwenImage):
    """Qwen-Image-Edit: Qwen2.5-VL reads the image with the prompt, and the image's tokens follow those of the one made.

    The image keeps its size, whereas diffusers' pipeline first resizes it to about a megapixel.
    """

    pipeline_class = "QwenImageEditPipeline"

    @classmethod
    def blueprint(cls) -> Blueprint:
        """As ``DiffusionModel``; ``build`` raises MissingDependencyError without torchvision."""
        return replace(super().blueprint(), further={"processor": _make_processor})

    def embed_edit(self, prompt: str, image: np.ndarray) -> dict[str, Tensor]:
        """What ``embed_prompts`` returns, for prompt and image, and ``image_latents`` ``[1, C, H, W]``; of several
        images ``[1, S, C, H, W]``.

        ``max_sequence_length`` limits the prompt and its template; the tokens of the images come on top.

        Raises:
            ConfigError: for a longer prompt, which cannot be truncated, since it follows the image.
        """
        self.latent_shape(*image.shape[-3:-1])
        several = image if image.ndim == 4 else image[None]
        vlm_images = [self._resize_for_encoder(Image.fromarray(one)) for one in several]
        embeds, _ = self.pipeline.encode_prompt(prompt=[prompt or " "], image=vlm_images, device=self.device)
        image_tokens = sum(map(self._count_image_tokens, vlm_images))
        embeddings = padded_with_images(self, prompt, embeds, image_tokens)
        return {**embeddings, "image_latents": encode_sources(self, image)}

    def image_tokens(self, height: int, width: int) -> int:
        image = self._resize_for_encoder(Image.new("RGB", (width, height)))
        return self.max_source_images * self._count_image_tokens(image)

    def _resize_for_encoder(self, image: Image.Image) -> Image.Image:
        """The image in the size in which Qwen2.5-VL reads it."""
        return image

    def _count_image_tokens(self, image: Image.Image) -> int:
        """Number of tokens that Qwen2.5-VL makes of an image."""
        return count_image_tokens(self.pipeline.processor, image.height, image.width)


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-2509 and 2511, with one image or several, which are resized for Qwen2.5-VL alone, as in the
    pipeline."""

    pipeline_class = "QwenImageEditPlusPipeline"
    most_source_images = MOST_SOURCE_IMAGES

    def _resize_for_encoder(self, image: Image.Image) -> Image.Image:
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

        width, height = plus.calculate_dimensions(plus.CONDITION_IMAGE_SIZE, image.width / image.height)
        return self.pipeline.image_processor.resize(image, height, width)
