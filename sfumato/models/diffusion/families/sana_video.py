"""Sana-Video (arXiv 2509.24695): SanaVideoTransformer3DModel with linear attention, Wan's autoencoder and Gemma 2."""

from __future__ import annotations

from sfumato.errors import ConfigError
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart
from sfumato.models.diffusion.families.sana import PUBLISHED_SCHEDULE, SanaText
from sfumato.models.diffusion.latents import VideoLatents
from sfumato.models.diffusion.scratch import build_wan_autoencoder
from sfumato.models.diffusion.scratch_encoders import build_gemma2_encoder, build_gemma_tokenizer


class SanaVideo(SanaText, VideoLatents):
    """Sana-Video from text, with Wan's autoencoder."""

    pipeline_class = "SanaVideoPipeline"
    frame_rate = 16.0
    parallel_plan = plans.SANA_VIDEO

    def check_components(self) -> None:
        kind = type(self.pipeline.vae).__name__
        if kind != "AutoencoderKLWan":
            raise ConfigError(
                f"{self.pipeline_class} with the autoencoder {kind} is not known here: take the 480p model"
            )

    @classmethod
    def blueprint(cls) -> Blueprint:
        return Blueprint(
            denoiser="SanaVideoTransformer3DModel",
            vae=build_wan_autoencoder,
            texts={"text_encoder": TextPart(build_gemma2_encoder, build_gemma_tokenizer)},
            infer=lambda parts: {
                "in_channels": parts["vae"].config.z_dim,
                "out_channels": parts["vae"].config.z_dim,
                "caption_channels": parts["text_encoder"].config.hidden_size,
            },
            scheduler="DPMSolverMultistepScheduler",
            scheduler_settings=PUBLISHED_SCHEDULE,
        )

    @property
    def longest_side(self) -> int:
        return self.probe_size * self.denoiser.config.rope_max_seq_len
