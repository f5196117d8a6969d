"""FLUX.2 dev and klein: Flux2Transformer2DModel with Mistral 3 or Qwen3, whose hidden states of three layers are read.

Latents are patches of 2 x 2 of the autoencoder's, normalised by the statistics of its batch norm. dev is
guidance-distilled: the scale is an input of the transformer. klein has two branches; its distilled models are made for
a scale of 1, and diffusers' pipeline ignores another one. The same models edit images, one or several: with
``model.from_images`` the tokens of these follow those of the image that is made.
"""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sfumato.config.sections import MOST_SOURCE_IMAGES
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart
from sfumato.models.diffusion.flux2_latents import Flux2Latents
from sfumato.models.diffusion.latents import PATCH, PaddedPrompts, SourceLatents, grid_ids, split_images
from sfumato.models.diffusion.scratch import build_qwen_tokenizer
from sfumato.models.diffusion.scratch_autoencoders import build_flux2_autoencoder
from sfumato.models.diffusion.scratch_encoders import (
    build_mistral3_causal_encoder,
    build_pixtral_processor,
    build_qwen3_causal_encoder,
)

SOURCE_STEP = 10
"""The first source image has this number along the first axis of positions, the second twice as much, and so on."""

TRAINED_STEPS = 50
"""Steps whose shift training has: the schedule depends on their number, and the pipelines take so many by default."""


class Flux2Klein(PaddedPrompts, Flux2Latents):
    """FLUX.2 klein, base and distilled."""

    pipeline_class = "Flux2KleinPipeline"
    image_family = "Flux2KleinEdit"
    parallel_plan = plans.FLUX2
    # diffusers examples/dreambooth/train_dreambooth_lora_flux2.py
    lora_targets = ("to_k", "to_q", "to_v", "to_out.0", "to_qkv_mlp_proj")
    mask_dtype = None
    text_part: ClassVar[TextPart] = TextPart(build_qwen3_causal_encoder, build_qwen_tokenizer)

    @classmethod
    def blueprint(cls) -> Blueprint:
        return Blueprint(
            denoiser="Flux2Transformer2DModel",
            vae=build_flux2_autoencoder,
            texts={"text_encoder": cls.text_part},
            infer=lambda parts: {
                "in_channels": parts["vae"].config.latent_channels * PATCH**2,
                "joint_attention_dim": 3 * parts["text_encoder"].config.get_text_config().hidden_size,
            },
            settings=("is_distilled",) if cls.pipeline_class == Flux2Klein.pipeline_class else (),
        )

    def prompt_as_read(self, prompt: str) -> str:
        """The prompt as a message of a chat, with the chat template."""
        return self.pipeline.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` with the padding, which the model reads; T is ``max_sequence_length``."""
        embeds, _ = self.pipeline.encode_prompt(
            prompt=prompts, device=self.device, max_sequence_length=self.max_sequence_length
        )
        return {"prompt_embeds": embeds}

    @property
    def prompt_features(self) -> int:
        return 3 * super().prompt_features

    def dynamic_mu(self, tokens: int, num_steps: int | None) -> float:
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        return compute_empirical_mu(tokens, num_steps or TRAINED_STEPS)

    @property
    def embeds_guidance(self) -> bool:
        return bool(self.denoiser.config.guidance_embeds)

    @property
    def default_guidance(self) -> float | None:
        return 1.0 if self.pipeline.config.get("is_distilled") else super().default_guidance

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        """The velocity; ``embeddings["guidance"]`` ``[B]`` is 1 where it is not given."""
        sigma = sigma.to(latents.device)
        guidance = embeddings.get("guidance", torch.ones_like(sigma)).to(latents.device)
        prompt_embeds = embeddings["prompt_embeds"].to(self.input_dtype)
        positions = torch.arange(prompt_embeds.shape[1], device=latents.device, dtype=torch.float32)[:, None]
        rows, columns = latents.shape[-2:]
        images = [latents, *split_images(embeddings, latents.dtype)]
        ids = [grid_ids(rows, columns, SOURCE_STEP * number, latents.device) for number in range(len(images))]
        velocity = self.denoiser(
            hidden_states=torch.cat([image.flatten(2).transpose(1, 2) for image in images], dim=1),
            timestep=self.time(sigma),
            guidance=guidance if self.embeds_guidance else None,
            encoder_hidden_states=prompt_embeds,
            txt_ids=torch.nn.functional.pad(positions, (3, 0)),  # image, row, column, and place in the text
            img_ids=torch.nn.functional.pad(torch.cat(ids), (0, 1)),
            return_dict=False,
        )[0]
        return velocity[:, : rows * columns].transpose(1, 2).unflatten(2, (rows, columns))


class Flux2KleinEdit(SourceLatents, Flux2Klein):
    """FLUX.2 klein with source images. They have the size of the image that is made, whereas diffusers' pipeline keeps
    theirs up to a megapixel."""

    most_source_images = MOST_SOURCE_IMAGES


class Flux2(Flux2Klein):
    """FLUX.2 dev, whose prompts are read behind a system message."""

    pipeline_class = "Flux2Pipeline"
    image_family = "Flux2Edit"
    text_part = TextPart(build_mistral3_causal_encoder, build_pixtral_processor)

    def prompt_as_read(self, prompt: str) -> str:
        """The prompt behind the system message, with the chat template."""
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        (messages,) = format_input([prompt], self.pipeline.system_message)
        return self.pipeline.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)


class Flux2Edit(Flux2KleinEdit, Flux2):
    """FLUX.2 dev with source images."""

    pipeline_class = "Flux2Pipeline"
    text_part = Flux2.text_part
