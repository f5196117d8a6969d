"""Kandinsky 5 from an image and a text to an image (arXiv 2511.14993): Qwen2.5-VL reads both."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sfumato.models.diffusion.families.kandinsky5 import Kandinsky5
from sfumato.models.diffusion.latents import (
    SourceLatents,
    count_image_tokens,
    encode_sources,
    padded_with_images,
)

UNCUT = 1 << 20
"""A limit of tokens that no prompt reaches: the pipeline cuts longer ones in the middle of the template."""


class Kandinsky5ImageToImage(SourceLatents, Kandinsky5):
    """Kandinsky 5 Image Lite that edits: the image's latents are channels behind those of the picture that is made.

    The image keeps its size, whereas the pipeline brings it to one of seven resolutions. Of its latents the mode is
    taken, where diffusers draws them at random.
    """

    pipeline_class = "Kandinsky5I2IPipeline"
    template_words = (
        "system\nYou are a prompt engineer. Based on the provided source image (first image) and target image (second "
        "image), create an interesting text prompt that can be used together with the source image to create the "
        "target image:\nuser{}"
    )

    def prompt_as_read(self, prompt: str) -> str:
        """The prompt with the end of the template, but for the image."""
        return super().prompt_as_read(prompt).replace("<|image_pad|>", "")

    def embed_edit(self, prompt: str, image: np.ndarray) -> dict[str, Tensor]:
        """What ``embed_prompts`` returns, for prompt and image, and ``image_latents`` ``[1, C, H, W]``.

        ``max_sequence_length`` limits the prompt and the end of its template; the tokens of the image come on top.

        Raises:
            ConfigError: for a longer prompt, which the pipeline cannot cut, since the image follows it.
        """
        self.latent_shape(*image.shape[:2])
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt, image=Image.fromarray(image), max_sequence_length=UNCUT, device=self.device
        )
        embeddings = padded_with_images(self, prompt, embeds, self.image_tokens(*image.shape[:2]))
        return {**embeddings, "pooled": pooled, "image_latents": encode_sources(self, image)}

    def image_tokens(self, height: int, width: int) -> int:
        """Tokens that Qwen2.5-VL makes of an image, of which the pipeline shows it half of each side."""
        return count_image_tokens(self.pipeline.tokenizer, height // 2, width // 2)

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        image = embeddings["image_latents"].to(latents)
        inputs = torch.cat([latents, image, torch.ones_like(latents[:, :1])], dim=1)
        return self.predict_rows(inputs[:, :, None], sigma, embeddings)[:, :, 0]
