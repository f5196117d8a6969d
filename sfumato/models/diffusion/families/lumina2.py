"""Lumina-Image 2 (arXiv 2503.21758): Lumina2Transformer2DModel, in which text and image are one sequence, and Gemma 2.

The network predicts x0 - eps at a time that runs from 0 (noise) to 1. The pipeline puts a system prompt before every
prompt, but not before the empty one of guidance.
"""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Unpack

import torch
from torch import Tensor, nn

from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart, build_pipeline
from sfumato.models.diffusion.latents import FlowSchedule, KLLatents, text_shapes, token_counts
from sfumato.models.diffusion.scratch import build_autoencoder
from sfumato.models.diffusion.scratch_encoders import build_gemma2_encoder, build_gemma_tokenizer
from sfumato.parallel.plan import ParallelPlan

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    from sfumato.models.diffusion.base import ModelOptions

SMALLEST_NORM = 1e-12
"""Lower bound of a norm, which is zero in a model with new weights."""


class Lumina2(KLLatents, FlowSchedule):
    """Lumina-Image 2."""

    pipeline_class: ClassVar[str] = "Lumina2Pipeline"
    parallel_plan: ClassVar[ParallelPlan] = plans.LUMINA2
    # diffusers examples/dreambooth/train_dreambooth_lora_lumina2.py
    lora_targets: ClassVar[tuple[str, ...]] = ("to_k", "to_q", "to_v", "to_out.0")
    encoder_names: ClassVar[tuple[str, ...]] = ("text_encoder",)
    knows_size: ClassVar[bool] = False  # the pipeline takes the number of channels for that of tokens

    def __init__(self, pipeline: DiffusionPipeline, **options: Unpack[ModelOptions]) -> None:
        """As ``DiffusionModel``."""
        super().__init__(pipeline, **options)
        self.set_denoiser(pipeline.transformer)

    def set_denoiser(self, denoiser: nn.Module) -> None:
        super().set_denoiser(denoiser)
        denoiser.get_submodule("rope_embedder").register_forward_pre_hook(_count_tokens)

    @classmethod
    def build(cls, description: Mapping[str, object], seed: int) -> DiffusionPipeline:
        """Builds a pipeline with random weights; sections are those of ``build_pipeline``.

        The pipeline takes the autoencoder to make an eighth of a side.
        """
        import diffusers

        blueprint = Blueprint(
            pipeline=diffusers.Lumina2Pipeline,
            denoiser=diffusers.Lumina2Transformer2DModel,
            vae=build_autoencoder,
            texts={"text_encoder": TextPart(build_gemma2_encoder, build_gemma_tokenizer)},
            infer=lambda parts: {
                "in_channels": parts["vae"].config.latent_channels,
                "cap_feat_dim": parts["text_encoder"].config.hidden_size,
            },
            outputs=lambda transformer: [transformer.norm_out.linear_2],
            scheduler_settings={"shift": 6.0},
        )
        return build_pipeline(blueprint, description, seed)

    def prompt_as_read(self, prompt: str) -> str:
        """The prompt behind the system prompt, which counts towards the limit."""
        return f"{self.pipeline.system_prompt} <Prompt Start> {prompt}" if prompt else ""

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``prompt_mask``, bool ``[B, T]``; T is ``max_sequence_length``."""
        embeds, mask = self.pipeline._get_gemma_prompt_embeds(
            [self.prompt_as_read(prompt) for prompt in prompts], self.device, self.max_sequence_length
        )
        return {"prompt_embeds": embeds, "prompt_mask": mask.bool()}

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        encoder = self.pipeline.text_encoder
        return text_shapes(self.max_sequence_length, encoder.config.hidden_size, encoder.dtype, torch.bool)

    @property
    def gives_sigmas(self) -> bool:
        return True

    @property
    def patch(self) -> int:
        return self.denoiser.config.patch_size

    @property
    def probe_size(self) -> int:
        return self.pipeline.vae_scale_factor * self.patch

    @property
    def longest_side(self) -> int:
        return self.probe_size * min(self.denoiser.config.axes_lens[1:])

    def guide(self, unconditional: Tensor, conditional: Tensor, scale: float | Tensor) -> Tensor:
        """Classifier-free guidance, after which every row of pixels has its norm in the conditional branch.

        The pipeline does the same.
        """
        guided = super().guide(unconditional, conditional, scale)
        norms = [velocity.norm(dim=-1, keepdim=True) for velocity in (conditional, guided)]
        return guided * (norms[0] / norms[1].clamp_min(SMALLEST_NORM))

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        return -self.denoiser(
            hidden_states=latents,
            timestep=1 - sigma.to(latents.device),
            encoder_hidden_states=embeddings["prompt_embeds"].to(self.input_dtype),
            encoder_attention_mask=embeddings["prompt_mask"],
            return_dict=False,
        )[0]


class _PromptLengths:
    """Stands for a mask of prompts where only its shape and the number of tokens of each are asked for."""

    def __init__(self, mask: Tensor) -> None:
        self.shape = mask.shape
        self._lengths = token_counts(mask)

    def sum(self, dim: int) -> _PromptLengths:
        """The numbers of tokens, for ``tolist``."""
        return self

    def tolist(self) -> list[int]:
        """The number of tokens of each prompt."""
        return self._lengths


def _count_tokens(module: nn.Module, args: tuple[Tensor, Tensor | _PromptLengths]) -> tuple[Tensor, _PromptLengths]:
    """Hook before the network computes positions: counts of memory and FLOPs run it on masks without values."""
    latents, mask = args
    return latents, mask if isinstance(mask, _PromptLengths) else _PromptLengths(mask)
