"""Qwen-Image 2.1: QwenImage21Transformer2DModel, in which text and images are one causal sequence, and Qwen3-VL.

Where an image's tokens are depends on the length of the prompt before them, so the network runs row by row on prompts
without padding: in a batch of its pipeline a picture depends on the longest of the prompts. With ``model.from_images``
source images stand within the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sfumato.config.sections import MOST_SOURCE_IMAGES
from sfumato.errors import ConfigError
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart
from sfumato.models.diffusion.latents import (
    PaddedPrompts,
    SourceLatents,
    embed_one_by_one,
    encode_sources,
    num_tokens,
    pad_embeds,
    padded_with_images,
    split_images,
    token_counts,
)
from sfumato.models.diffusion.qwen_image21_latents import SLOT, QwenImage21Latents, count_segments
from sfumato.models.diffusion.scratch import build_qwen_tokenizer
from sfumato.models.diffusion.scratch_autoencoders import build_qwen21_autoencoder
from sfumato.models.diffusion.scratch_encoders import (
    build_qwen3_vl_causal_encoder,
    build_qwen3_vl_processor,
)
from sfumato.models.diffusion.valueless_masks import has_values

SYSTEM_TURN = "system\nComprehend and analyze the provided prompt.\nuser\n{}\nassistant\n"
"""Words of the pipeline's template, which become tokens of a tokenizer that is made here."""


class QwenImage21(PaddedPrompts, QwenImage21Latents):
    """Qwen-Image 2.1 from text."""

    pipeline_class = "QwenImage21Pipeline"
    image_family = "QwenImage21Edit"
    parallel_plan = plans.QWEN_IMAGE21
    lora_targets = (  # radixark/miles_diffusion, its Flow-GRPO of this model
        *("to_k", "to_q", "to_v", "to_out.0"),
        *("img_mlp.proj", "img_mlp.out", "img_mlp.gate_layer"),
    )
    prompt_tokenizer = "processor"

    @classmethod
    def blueprint(cls) -> Blueprint:
        """As ``DiffusionModel``; the autoencoder must make a sixteenth of a side.

        ``build`` raises MissingDependencyError without torchvision.
        """
        tokenizer_fixed = {"template": SYSTEM_TURN}
        text = TextPart(build_qwen3_vl_causal_encoder, build_qwen_tokenizer, {}, tokenizer_fixed)
        return Blueprint(
            denoiser="QwenImage21Transformer2DModel",
            vae=build_qwen21_autoencoder,
            texts={"text_encoder": text},
            infer=lambda parts: {
                "in_channels": parts["vae"].config.z_dim,
                "out_channels": parts["vae"].config.z_dim,
                "context_in_dim": parts["text_encoder"].config.text_config.hidden_size,
            },
            scheduler_settings={"use_dynamic_shifting": True},
            settings=("sample_sigmas",),
            further={"processor": build_qwen3_vl_processor},
            unused=("tokenizer",),
        )

    def prompt_as_read(self, prompt: str) -> str:
        """The prompt with its turn of the template; the pipeline drops the system's from the embeddings."""
        return self.pipeline.prompt_template_t2i.partition("<|im_end|>\n")[2].format(prompt)

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``prompt_mask``, bool ``[B, T]``; T is ``max_sequence_length``.

        What the encoder makes of a token does not depend on later ones, so longer prompts are cut afterwards.
        """
        length = self.max_sequence_length
        return embed_one_by_one(
            prompts,
            lambda prompt: pad_embeds(self.pipeline.encode_prompt(prompt, device=self.device)[0][:, :length], length),
        )

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        prompts = embeddings["prompt_embeds"].to(self.input_dtype)
        images = [*split_images(embeddings, latents.dtype), latents]
        tokens = torch.cat([image.flatten(2).transpose(1, 2) for image in images], dim=1)
        time = self.time(sigma.to(latents.device))
        shapes = [(1, *image.shape[-2:]) for image in images]
        num_made = num_tokens(latents.shape, 1)
        mask = embeddings["prompt_mask"]
        slots = embeddings.get("image_slots", torch.zeros_like(mask))
        slots = torch.cat([slots, slots.new_ones(len(slots), num_made // SLOT)], dim=1)
        if not has_values(mask):
            velocity = count_segments(
                self.denoiser, prompts, tokens, time, [height * width for _, height, width in shapes]
            )
        else:
            rows = []
            for row, length in enumerate(token_counts(mask)):
                is_read = torch.ones_like(slots[row])
                is_read[length : mask.shape[1]] = False
                output = self.denoiser(
                    hidden_states=tokens[row : row + 1],
                    encoder_hidden_states=prompts[row : row + 1, :length],
                    timestep=time[row : row + 1],
                    img_shapes=[shapes],
                    img_mask=slots[row : row + 1, is_read],
                    return_dict=False,
                )[0]
                rows.append(output[:, -num_made:])
            velocity = torch.cat(rows)
        return velocity.transpose(1, 2).unflatten(2, latents.shape[-2:])


class QwenImage21Edit(SourceLatents, QwenImage21):
    """Qwen-Image 2.1 with source images. They keep their size, whereas the pipeline brings them to its resolution."""

    most_source_images = MOST_SOURCE_IMAGES

    def embed_edit(self, prompt: str, image: np.ndarray) -> dict[str, Tensor]:
        """What ``embed_prompts`` returns, for prompt and images, ``image_slots``, bool ``[1, T]``, and
        ``image_latents`` ``[1, C, H, W]``, of several images ``[1, S, C, H, W]``.

        ``max_sequence_length`` limits the prompt and its template; the places of the images come on top.

        Raises:
            ConfigError: for a longer prompt, which cannot be cut, since it follows the images, or when the processor
                changes the size of the images.
        """
        shape = self.latent_shape(*image.shape[-3:-1])
        several = image if image.ndim == 4 else image[None]
        embeds, _, is_slot = self.pipeline.encode_prompt(prompt, image=list(several), device=self.device)
        expected = len(several) * num_tokens(shape, 1) // SLOT
        if int(is_slot.sum()) != expected:
            raise ConfigError(
                f"the model's processor makes {int(is_slot.sum())} tokens of {len(several)} images of "
                f"{image.shape[-3]} x {image.shape[-2]} pixels in place of {expected}: take sizes between its "
                "min_pixels and max_pixels"
            )
        embeddings = padded_with_images(self, prompt, embeds, expected)
        num_padding = embeddings["prompt_mask"].shape[1] - is_slot.shape[1]
        return {
            **embeddings,
            "image_slots": torch.nn.functional.pad(is_slot, (0, num_padding)),
            "image_latents": encode_sources(self, image),
        }

    def image_tokens(self, height: int, width: int) -> int:
        return self.max_source_images * num_tokens(self.latent_shape(height, width), 1) // SLOT

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        shapes = super().embedding_shapes(height, width)
        return {**shapes, "image_slots": shapes["prompt_mask"]}
