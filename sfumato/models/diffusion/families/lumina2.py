"""Lumina-Image 2 (arXiv 2503.21758): Lumina2Transformer2DModel, in which text and image are one sequence, and Gemma 2.

The network predicts x0 - eps at a time that runs from 0 (noise) to 1. The pipeline puts a system prompt before every
prompt, but not before the empty one of guidance.
"""

from __future__ import annotations

from torch import Tensor, nn

from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart
from sfumato.models.diffusion.latents import FlowSchedule, KLLatents, PaddedPrompts, token_counts
from sfumato.models.diffusion.scratch import build_autoencoder
from sfumato.models.diffusion.scratch_encoders import build_gemma2_encoder, build_gemma_tokenizer

SMALLEST_NORM = 1e-12
"""Lower bound of a norm, which is zero in a model with new weights."""


class Lumina2(PaddedPrompts, KLLatents, FlowSchedule):
    """Lumina-Image 2."""

    pipeline_class = "Lumina2Pipeline"
    parallel_plan = plans.LUMINA2
    # diffusers examples/dreambooth/train_dreambooth_lora_lumina2.py
    lora_targets = ("to_k", "to_q", "to_v", "to_out.0")
    gives_sigmas = True
    knows_size = False  # the pipeline takes the number of channels for that of tokens

    def prepare_denoiser(self, denoiser: nn.Module) -> None:
        denoiser.get_submodule("rope_embedder").register_forward_pre_hook(_count_tokens)

    @classmethod
    def blueprint(cls) -> Blueprint:
        """As ``DiffusionModel``; the pipeline takes the autoencoder to make an eighth of a side."""
        return Blueprint(
            denoiser="Lumina2Transformer2DModel",
            vae=build_autoencoder,
            texts={"text_encoder": TextPart(build_gemma2_encoder, build_gemma_tokenizer)},
            infer=lambda parts: {
                "in_channels": parts["vae"].config.latent_channels,
                "cap_feat_dim": parts["text_encoder"].config.hidden_size,
            },
            outputs=("norm_out.linear_2",),
            scheduler_settings={"shift": 6.0},
        )

    def prompt_as_read(self, prompt: str) -> str:
        """The prompt behind the system prompt, which counts towards the limit."""
        return f"{self.pipeline.system_prompt} <Prompt Start> {prompt}" if prompt else ""

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``prompt_mask``, bool ``[B, T]``; T is ``max_sequence_length``."""
        embeds, mask = self.pipeline._get_gemma_prompt_embeds(
            [self.prompt_as_read(prompt) for prompt in prompts], self.device, self.max_sequence_length
        )
        return {"prompt_embeds": embeds, "prompt_mask": mask.bool()}

    @property
    def patch(self) -> int:
        return self.denoiser.config.patch_size

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
