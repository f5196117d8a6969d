"""Chroma: ChromaTransformer2DModel, which is FLUX.1 schnell without CLIP, and T5.

The mask of the text's padding is added to the attention's scores as numbers, as diffusers' pipeline does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart
from sfumato.models.diffusion.latents import (
    PATCH,
    FlowTokens,
    KLLatents,
    PaddedPrompts,
    grid_ids,
    pack,
    unpack,
)
from sfumato.models.diffusion.scratch import build_autoencoder, build_t5_encoder, build_t5_tokenizer


class Chroma(PaddedPrompts, KLLatents, FlowTokens):
    """Chroma1."""

    pipeline_class = "ChromaPipeline"
    parallel_plan = plans.CHROMA
    lora_targets = plans.FLUX_TARGETS  # those of FLUX.1

    @classmethod
    def blueprint(cls) -> Blueprint:
        return Blueprint(
            denoiser="ChromaTransformer2DModel",
            vae=build_autoencoder,
            texts={"text_encoder": TextPart(build_t5_encoder, build_t5_tokenizer)},
            infer=lambda parts: {
                "in_channels": parts["vae"].config.latent_channels * PATCH**2,
                "joint_attention_dim": parts["text_encoder"].config.d_model,
            },
        )

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]``, and ``prompt_mask`` ``[B, T]`` of ones and zeros, of the same dtype."""
        embeds, _, mask, *_ = self.pipeline.encode_prompt(
            prompt=prompts,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"prompt_embeds": embeds, "prompt_mask": mask}

    @property
    def mask_dtype(self) -> torch.dtype:  # type: ignore[override]
        """That of the embeddings, to which numbers the mask is added."""
        return self.pipeline.text_encoder.dtype

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        prompt_embeds = embeddings["prompt_embeds"].to(self.input_dtype)
        tokens = pack(latents)
        rows, columns = (length // PATCH for length in latents.shape[-2:])
        mask = torch.nn.functional.pad(embeddings["prompt_mask"].to(tokens.dtype), (0, tokens.shape[1]), value=1.0)
        velocity = self.denoiser(
            hidden_states=tokens,
            timestep=self.time(sigma.to(latents.device)),
            encoder_hidden_states=prompt_embeds,
            txt_ids=torch.zeros(prompt_embeds.shape[1], 3, device=latents.device),
            img_ids=grid_ids(rows, columns, 0, latents.device),
            attention_mask=mask,
            return_dict=False,
        )[0]
        return unpack(velocity, *latents.shape[-2:])
