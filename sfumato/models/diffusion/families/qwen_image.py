"""Qwen-Image (arXiv 2508.02324): QwenImageTransformer2DModel and Qwen2.5-VL; ``qwen_image_edit.py`` has its edits.

The model takes prompts of any length. Here they are padded to one length, with a mask, so that a sample does not depend
on the other prompts of its batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart, make_empty_pipeline
from sfumato.models.diffusion.latents import (
    PATCH,
    PaddedPrompts,
    QwenLatents,
    embed_one_by_one,
    num_tokens,
    pack,
    pad_embeds,
    split_images,
    unpack,
)
from sfumato.models.diffusion.scratch import build_qwen_autoencoder, build_qwen_tokenizer, build_qwen_vl_encoder

SMALLEST_NORM = 1e-12
"""Lower bound of the norm of a token, which is zero in a model with new weights."""


class QwenImage(PaddedPrompts, QwenLatents):
    """Qwen-Image."""

    pipeline_class = "QwenImagePipeline"
    parallel_plan = plans.QWEN_IMAGE
    lora_targets = (  # flow_grpo scripts/train_qwenimage_edit_plus.py
        *plans.JOINT_TARGETS,
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )
    caches_steps = True

    @classmethod
    def blueprint(cls) -> Blueprint:
        template = make_empty_pipeline(cls.pipeline_type()).prompt_template_encode
        text = TextPart(build_qwen_vl_encoder, build_qwen_tokenizer, {}, {"template": template})
        return Blueprint(
            denoiser="QwenImageTransformer2DModel",
            vae=build_qwen_autoencoder,
            texts={"text_encoder": text},
            infer=lambda parts: {
                "in_channels": parts["vae"].config.z_dim * PATCH**2,
                "out_channels": parts["vae"].config.z_dim,
                "joint_attention_dim": parts["text_encoder"].config.text_config.hidden_size,
            },
        )

    def prompt_as_read(self, prompt: str) -> str:
        """The prompt with the end of the template; the pipeline drops the beginning of it from the embeddings."""
        return prompt + self.pipeline.prompt_template_encode.partition("{}")[2]

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``prompt_mask``, bool ``[B, T]``; T is ``max_sequence_length``."""
        length = self.max_sequence_length

        def embed(prompt: str) -> dict[str, Tensor]:
            text = [prompt or " "]  # the authors of the model use a space as the empty prompt
            return pad_embeds(
                self.pipeline.encode_prompt(prompt=text, device=self.device, max_sequence_length=length)[0], length
            )

        return embed_one_by_one(prompts, embed)

    def guide(self, unconditional: Tensor, conditional: Tensor, scale: float | Tensor) -> Tensor:
        """Classifier-free guidance, after which every token is rescaled to its norm in the conditional branch.

        The pipeline does the same.
        """
        height, width = conditional.shape[-2:]
        guided = pack(super().guide(unconditional, conditional, scale))
        conditional_norm = pack(conditional).norm(dim=-1, keepdim=True)
        guided_norm = guided.norm(dim=-1, keepdim=True)
        return unpack(guided * (conditional_norm / guided_norm.clamp_min(SMALLEST_NORM)), height, width)

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        dtype = self.input_dtype
        images = [latents, *split_images(embeddings, dtype)]
        shape = [(1, image.shape[-2] // PATCH, image.shape[-1] // PATCH) for image in images]
        velocity = self.denoiser(
            hidden_states=torch.cat([pack(image) for image in images], dim=1),
            timestep=self.time(sigma.to(latents.device)),
            encoder_hidden_states=embeddings["prompt_embeds"].to(dtype),
            encoder_hidden_states_mask=embeddings["prompt_mask"],
            img_shapes=[shape] * len(latents),
            return_dict=False,
        )[0]
        return unpack(velocity[:, : num_tokens(latents.shape)], *latents.shape[-2:])
