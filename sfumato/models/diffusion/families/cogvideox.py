"""CogVideoX and CogVideoX 1.5 (arXiv 2408.06072): CogVideoXTransformer3DModel, which predicts v, and T5.

Where the scheduler is CogVideoXDPMScheduler its noise levels are taken, and steps are made by the dynamics or solver.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.config.open_mappings import Keywords
from sfumato.errors import ConfigError
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart
from sfumato.models.diffusion.latents import PaddedPrompts, ScaledVideoLatents
from sfumato.models.diffusion.noise_schedule import VariancePreserving
from sfumato.models.diffusion.schedulers import check_cogvideox_scheduler
from sfumato.models.diffusion.scratch import build_t5_encoder, build_t5_tokenizer
from sfumato.models.diffusion.scratch_autoencoders import build_cogvideox_autoencoder

PUBLISHED_SCHEDULE = {
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
    "snr_shift_scale": 1.0,
}
"""Settings of the published schedulers; the snr_shift_scale is 3 for 2B and 1 for 5B."""


class CogVideoX(PaddedPrompts, ScaledVideoLatents, VariancePreserving):
    """CogVideoX from text."""

    pipeline_class = "CogVideoXPipeline"
    frame_rate = 8.0
    parallel_plan = plans.COGVIDEOX
    # diffusers examples/cogvideo/train_cogvideox_lora.py
    lora_targets = ("to_k", "to_q", "to_v", "to_out.0")
    mask_dtype = None

    @classmethod
    def blueprint(cls) -> Blueprint:
        return Blueprint(
            denoiser="CogVideoXTransformer3DModel",
            vae=build_cogvideox_autoencoder,
            texts={"text_encoder": TextPart(build_t5_encoder, build_t5_tokenizer)},
            infer=lambda parts: {
                "in_channels": parts["vae"].config.latent_channels,
                "out_channels": parts["vae"].config.latent_channels,
                "text_embed_dim": parts["text_encoder"].config.d_model,
            },
            scheduler="CogVideoXDDIMScheduler",
            scheduler_settings=PUBLISHED_SCHEDULE,
        )

    def check_components(self) -> None:
        transformer = getattr(self.pipeline, self.denoiser_name, None)  # one of a scheduler alone has none
        if transformer is not None and transformer.config.patch_size_t is not None:
            self.frame_rate = 16.0  # CogVideoX 1.5
        if transformer is None or self.max_sequence_length == transformer.config.max_text_seq_length:
            return
        config = transformer.config
        # added to text and video together
        if not config.use_rotary_positional_embeddings or config.use_learned_positional_embeddings:
            raise ConfigError(
                f"model.max_sequence_length {self.max_sequence_length}: this {self.pipeline_class} has positions for "
                f"{config.max_text_seq_length} tokens of a prompt: set it to that"
            )

    def check_scheduler(self) -> None:
        check_cogvideox_scheduler(self.pipeline.scheduler)

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` with the padding, which the model reads; T is ``max_sequence_length``."""
        embeds, _ = self.pipeline.encode_prompt(
            prompts,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=self.device,
        )
        return {"prompt_embeds": embeds}

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        shape = super().latent_shape(height, width, frames)
        latent_frames = shape[1]
        step = self.pipeline.vae_scale_factor_temporal
        together = self.denoiser.config.patch_size_t or 1
        if latent_frames % together:
            raise ValueError(
                f"frames {frames} are {latent_frames} latent frames, which must be a multiple of {together}: take "
                f"{frames + (together - latent_frames % together) * step} frames"
            )
        return shape

    @property
    def input_dtype(self) -> torch.dtype:
        """float32, in which latents are rescaled before they are cast to the dtype of the network's weights."""
        return torch.float32

    def network_inputs(self, latents: Tensor, embeddings: dict[str, Tensor]) -> Keywords:
        """The network's arguments for latents ``[B, C, F, H, W]`` of its own path, and for a given frame if any."""
        return {"hidden_states": latents.transpose(1, 2)}  # frames come first

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        sigma = sigma.to(latents.device, torch.float32)
        dtype = super().input_dtype
        frames, height, width = latents.shape[2:]
        factor = self.pipeline.vae_scale_factor_spatial
        rotary = None
        if self.denoiser.config.use_rotary_positional_embeddings:
            rotary = self.pipeline._prepare_rotary_positional_embeddings(
                height * factor, width * factor, frames, latents.device
            )
        predicted = self.denoiser(
            **self.network_inputs(self.variance_preserving(latents, sigma).to(dtype), embeddings),
            encoder_hidden_states=embeddings["prompt_embeds"].to(dtype),
            timestep=self.timestep(sigma),
            image_rotary_emb=rotary,
            return_dict=False,
        )[0]
        return self.velocity(predicted.transpose(1, 2), latents, sigma)
