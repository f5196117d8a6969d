"""ERNIE-Image: ErnieImageTransformer2DModel, in which image and text are one sequence, and Mistral 3.

The part of the pipeline that rewrites prompts (``pe``) is not run: prompts are read as they are.
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
from sfumato.models.diffusion.flux2_latents import Flux2Latents
from sfumato.models.diffusion.latents import PATCH, padded, text_shapes
from sfumato.models.diffusion.scratch import build_qwen_tokenizer
from sfumato.models.diffusion.scratch_autoencoders import build_flux2_autoencoder
from sfumato.models.diffusion.scratch_encoders import build_mistral3_encoder
from sfumato.models.diffusion.valueless_masks import compute_positions_off_meta
from sfumato.parallel.plan import ParallelPlan

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    from sfumato.models.diffusion.base import ModelOptions


class ErnieImage(Flux2Latents):
    """ERNIE-Image and ERNIE-Image-Turbo."""

    pipeline_class: ClassVar[str] = "ErnieImagePipeline"
    parallel_plan: ClassVar[ParallelPlan] = plans.ERNIE_IMAGE
    lora_targets: ClassVar[tuple[str, ...]] = ("to_k", "to_q", "to_v", "to_out.0")  # as for Z-Image
    encoder_names: ClassVar[tuple[str, ...]] = ("text_encoder",)
    knows_size: ClassVar[bool] = False

    @classmethod
    def build(cls, description: Mapping[str, object], seed: int) -> DiffusionPipeline:
        """Builds a pipeline with random weights; sections are those of ``build_pipeline``."""
        import diffusers

        blueprint = Blueprint(
            pipeline=diffusers.ErnieImagePipeline,
            denoiser=diffusers.ErnieImageTransformer2DModel,
            vae=build_flux2_autoencoder,
            texts={"text_encoder": TextPart(build_mistral3_encoder, build_qwen_tokenizer, {"generates": False})},
            infer=lambda parts: {
                "in_channels": parts["vae"].config.latent_channels * PATCH**2,
                "out_channels": parts["vae"].config.latent_channels * PATCH**2,
                "text_in_dim": parts["text_encoder"].config.text_config.hidden_size,
            },
            outputs=lambda transformer: [transformer.final_linear],
        )
        return build_pipeline(blueprint, description, seed)

    def __init__(self, pipeline: DiffusionPipeline, **options: Unpack[ModelOptions]) -> None:
        """As ``DiffusionModel``."""
        super().__init__(pipeline, **options)
        self.set_denoiser(pipeline.transformer)

    def set_denoiser(self, denoiser: nn.Module) -> None:
        super().set_denoiser(denoiser)
        compute_positions_off_meta(denoiser, "pos_embed")

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``prompt_mask``, bool ``[B, T]``; T is ``max_sequence_length``.

        What the encoder makes of a token does not depend on later ones, so longer prompts are cut afterwards.
        """
        length = self.max_sequence_length
        rows = self.pipeline.encode_prompt(prompts, self.device)
        parts = [padded(row[None, :length], length) for row in rows]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        encoder = self.pipeline.text_encoder
        return text_shapes(self.max_sequence_length, encoder.config.text_config.hidden_size, encoder.dtype, torch.bool)

    @property
    def probe_size(self) -> int:
        return self.pipeline.vae_scale_factor  # of patches

    @property
    def batch_norm_eps(self) -> float:
        return 1e-5  # that of the training, by the pipeline, whatever the autoencoder's configuration says

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        return self.denoiser(
            hidden_states=latents,
            timestep=self.timestep(sigma.to(latents.device)),
            text_bth=embeddings["prompt_embeds"].to(self.input_dtype),
            text_lens=embeddings["prompt_mask"].sum(dim=1),
            return_dict=False,
        )[0]
