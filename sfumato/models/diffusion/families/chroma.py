"""Chroma: ChromaTransformer2DModel, which is FLUX.1 schnell without CLIP, and T5.

The mask of the text's padding is added to the attention's scores as numbers, as diffusers' pipeline does.
"""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart, build_pipeline
from sfumato.models.diffusion.latents import (
    PATCH,
    FlowTokens,
    KLLatents,
    grid_ids,
    pack,
    text_shapes,
    unpack,
)
from sfumato.models.diffusion.scratch import build_autoencoder, build_t5_encoder, build_t5_tokenizer
from sfumato.parallel.plan import ParallelPlan

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline


class Chroma(KLLatents, FlowTokens):
    """Chroma1."""

    pipeline_class: ClassVar[str] = "ChromaPipeline"
    parallel_plan: ClassVar[ParallelPlan] = plans.CHROMA
    lora_targets: ClassVar[tuple[str, ...]] = (  # those of FLUX.1
        *plans.JOINT_TARGETS,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )
    encoder_names: ClassVar[tuple[str, ...]] = ("text_encoder",)

    @classmethod
    def build(cls, description: Mapping[str, object], seed: int) -> DiffusionPipeline:
        """Builds a pipeline with random weights; sections are those of ``build_pipeline``."""
        import diffusers

        blueprint = Blueprint(
            pipeline=diffusers.ChromaPipeline,
            denoiser=diffusers.ChromaTransformer2DModel,
            vae=build_autoencoder,
            texts={"text_encoder": TextPart(build_t5_encoder, build_t5_tokenizer, {"silent": False})},
            infer=lambda parts: {
                "in_channels": parts["vae"].config.latent_channels * PATCH**2,
                "joint_attention_dim": parts["text_encoder"].config.d_model,
            },
            outputs=lambda transformer: [transformer.proj_out],
        )
        return build_pipeline(blueprint, description, seed)

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]``, and ``prompt_mask`` ``[B, T]`` of ones and zeros, of the same dtype."""
        embeds, _, mask, *_ = self.pipeline.encode_prompt(
            prompt=prompts,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"prompt_embeds": embeds, "prompt_mask": mask}

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        encoder = self.pipeline.text_encoder
        return text_shapes(self.max_sequence_length, encoder.config.d_model, encoder.dtype, encoder.dtype)

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
