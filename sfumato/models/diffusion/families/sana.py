"""Sana (arXiv 2410.10629, 2501.18427): SanaTransformer2DModel with linear attention, AutoencoderDC and Gemma 2.

The pipeline puts instructions before every prompt, but not before the empty one of guidance; of what Gemma makes of
both, the first token and the last ``max_sequence_length`` - 1 are read.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart
from sfumato.models.diffusion.latents import FlowSchedule, PaddedPrompts, check_size, embed_one_by_one
from sfumato.models.diffusion.scratch_autoencoders import build_dc_autoencoder
from sfumato.models.diffusion.scratch_encoders import build_gemma2_encoder, build_gemma_tokenizer

PUBLISHED_SCHEDULE = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
"""Settings of the published DPMSolverMultistepScheduler."""


class SanaText(PaddedPrompts, FlowSchedule):
    """Base class of Sana's families: prompts and time."""

    # diffusers examples/dreambooth/train_dreambooth_lora_sana.py
    lora_targets = ("to_k", "to_q", "to_v")
    knows_size = False

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``prompt_mask``, bool ``[B, T]``; T is ``max_sequence_length``."""
        instructions = inspect.signature(self.pipeline_type().__call__).parameters["complex_human_instruction"].default

        def embed(prompt: str) -> dict[str, Tensor]:
            embeds, mask, *_ = self.pipeline.encode_prompt(
                prompt,
                do_classifier_free_guidance=False,
                device=self.device,
                max_sequence_length=self.max_sequence_length,
                complex_human_instruction=instructions if prompt else None,
            )
            return {"prompt_embeds": embeds, "prompt_mask": mask.bool()}

        return embed_one_by_one(prompts, embed)

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        velocity = self.denoiser(
            latents,
            encoder_hidden_states=embeddings["prompt_embeds"].to(self.input_dtype),
            encoder_attention_mask=embeddings["prompt_mask"],
            timestep=self.timestep(sigma.to(latents.device)) * self.denoiser.config.get("timestep_scale", 1.0),
            return_dict=False,
        )[0]
        return velocity[:, : latents.shape[1]]  # some models predict a variance, too


class Sana(SanaText):
    """Sana and Sana 1.5, without Sana-Sprint, whose pipeline is another one."""

    pipeline_class = "SanaPipeline"
    parallel_plan = plans.SANA

    @classmethod
    def blueprint(cls) -> Blueprint:
        return Blueprint(
            denoiser="SanaTransformer2DModel",
            vae=build_dc_autoencoder,
            texts={"text_encoder": TextPart(build_gemma2_encoder, build_gemma_tokenizer)},
            infer=lambda parts: {
                "in_channels": parts["vae"].config.latent_channels,
                "out_channels": parts["vae"].config.latent_channels,
                "caption_channels": parts["text_encoder"].config.hidden_size,
            },
            scheduler="DPMSolverMultistepScheduler",
            scheduler_settings=PUBLISHED_SCHEDULE,
        )

    @property
    def probe_size(self) -> int:
        return self.pipeline.vae_scale_factor * self.denoiser.config.patch_size

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor
        check_size(height, width, self.probe_size, frames)
        return (self.denoiser.config.in_channels, height // factor, width // factor)

    @torch.no_grad()
    def pixels_to_latents(self, pixels: Tensor) -> Tensor:
        vae = self.pipeline.vae
        pixels = pixels.to(vae.device, vae.dtype) / 127.5 - 1
        return vae.encode(pixels).latent.float() * vae.config.scaling_factor

    def latents_to_pixels(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        return vae.decode((latents.float() / vae.config.scaling_factor).to(vae.dtype), return_dict=False)[0]
