"""Sana-Video (arXiv 2509.24695): SanaVideoTransformer3DModel with linear attention, Wan's autoencoder and Gemma 2."""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Unpack

from sfumato.errors import ConfigError
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart, build_pipeline
from sfumato.models.diffusion.families.sana import PUBLISHED_SCHEDULE, SanaText
from sfumato.models.diffusion.latents import VideoLatents
from sfumato.models.diffusion.scratch import build_wan_autoencoder
from sfumato.models.diffusion.scratch_encoders import build_gemma2_encoder, build_gemma_tokenizer
from sfumato.parallel.plan import ParallelPlan

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    from sfumato.models.diffusion.base import ModelOptions


class SanaVideo(SanaText, VideoLatents):
    """Sana-Video from text, with Wan's autoencoder."""

    pipeline_class: ClassVar[str] = "SanaVideoPipeline"
    parallel_plan: ClassVar[ParallelPlan] = plans.SANA_VIDEO

    def __init__(self, pipeline: DiffusionPipeline, **options: Unpack[ModelOptions]) -> None:
        """As ``DiffusionModel``. Raises ConfigError for an autoencoder other than Wan's."""
        kind = type(pipeline.vae).__name__
        if kind != "AutoencoderKLWan":
            raise ConfigError(
                f"{self.pipeline_class} with the autoencoder {kind} is not known here: take the 480p model"
            )
        super().__init__(pipeline, **options)

    @classmethod
    def build(cls, description: Mapping[str, object], seed: int) -> DiffusionPipeline:
        """Builds a pipeline with random weights; sections are those of ``build_pipeline``."""
        import diffusers

        blueprint = Blueprint(
            pipeline=diffusers.SanaVideoPipeline,
            denoiser=diffusers.SanaVideoTransformer3DModel,
            vae=build_wan_autoencoder,
            texts={"text_encoder": TextPart(build_gemma2_encoder, build_gemma_tokenizer)},
            infer=lambda parts: {
                "in_channels": parts["vae"].config.z_dim,
                "out_channels": parts["vae"].config.z_dim,
                "caption_channels": parts["text_encoder"].config.hidden_size,
            },
            outputs=lambda transformer: [transformer.proj_out],
            scheduler=diffusers.DPMSolverMultistepScheduler,
            scheduler_settings=PUBLISHED_SCHEDULE,
        )
        return build_pipeline(blueprint, description, seed)

    @property
    def longest_side(self) -> int:
        return self.probe_size * self.denoiser.config.rope_max_seq_len
