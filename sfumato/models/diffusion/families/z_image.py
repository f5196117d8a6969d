"""Z-Image (arXiv 2511.22699): ZImageTransformer2DModel, in which text and image are one sequence, and a Qwen3 encoder.

The network predicts the negative velocity, x0 - eps, at a time that runs from 0 (noise) to 1. A guidance_scale g of its
pipeline is g + 1 here, so that the scale means the same for every family.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart
from sfumato.models.diffusion.latents import PATCH, FlowTokens, KLLatents, PaddedPrompts, pad_rows, token_counts
from sfumato.models.diffusion.scratch import build_autoencoder, build_qwen_tokenizer
from sfumato.models.diffusion.scratch_encoders import build_qwen3_encoder


class ZImage(PaddedPrompts, KLLatents, FlowTokens):
    """Z-Image and Z-Image-Turbo."""

    pipeline_class = "ZImagePipeline"
    parallel_plan = plans.Z_IMAGE
    # diffusers examples/dreambooth/train_dreambooth_lora_z_image.py
    lora_targets = ("to_k", "to_q", "to_v", "to_out.0")

    @classmethod
    def blueprint(cls) -> Blueprint:
        return Blueprint(
            denoiser="ZImageTransformer2DModel",
            vae=build_autoencoder,
            texts={"text_encoder": TextPart(build_qwen3_encoder, build_qwen_tokenizer, {}, {"template": ""})},
            infer=lambda parts: {
                "in_channels": parts["vae"].config.latent_channels,
                "cap_feat_dim": parts["text_encoder"].config.hidden_size,
            },
            outputs=("all_final_layer.*.linear",),
        )

    def prompt_as_read(self, prompt: str) -> str:
        """The prompt as a message of a chat, with the chat template."""
        messages = [{"role": "user", "content": prompt}]
        return self.pipeline.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``prompt_mask``, bool ``[B, T]``; T is ``max_sequence_length``."""
        length = self.max_sequence_length
        rows, _ = self.pipeline.encode_prompt(
            list(prompts), device=self.device, do_classifier_free_guidance=False, max_sequence_length=length
        )
        return pad_rows(rows, length)

    @property
    def default_guidance(self) -> float | None:
        scale = super().default_guidance
        return None if scale is None else scale + 1

    @property
    def longest_side(self) -> int:
        return self.probe_size * min(self.denoiser.config.axes_lens[1:])

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        lengths = token_counts(embeddings["prompt_mask"])
        prompts = embeddings["prompt_embeds"].to(self.input_dtype)
        outputs = self.denoiser(
            list(latents[:, :, None].unbind()),  # the network takes a list of videos, here of one frame
            1 - self.time(sigma.to(latents.device)),
            [row[:length] for row, length in zip(prompts, lengths, strict=True)],
            patch_size=PATCH,
            return_dict=False,
        )[0]
        return -torch.stack(outputs)[:, :, 0]
