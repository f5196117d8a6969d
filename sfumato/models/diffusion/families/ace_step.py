"""ACE-Step 1.5 (arXiv 2602.00744): music from a caption and lyrics, by AceStepTransformer1DModel.

Its blocks have no argument for the mask of prompts, so a hook gives it to them.
"""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor, nn

from sfumato.config.open_mappings import Keywords
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.ace_step_text import ACEStepText
from sfumato.models.diffusion.described import Blueprint, TextPart
from sfumato.models.diffusion.latents import FlowSchedule
from sfumato.models.diffusion.scratch import build_qwen_tokenizer
from sfumato.models.diffusion.scratch_encoders import build_qwen3_encoder
from sfumato.models.diffusion.scratch_sound import build_ace_step_conditions, build_oobleck_autoencoder

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    from sfumato.models.diffusion.base import ModelOptions

GUIDANCE: Keywords = {"eta": 0.0, "norm_threshold": 2.5, "use_original_formulation": True, "norm_dim": (2,)}
"""Settings of the guidance (arXiv 2410.02416), as the pipeline has them, over time."""
PEAK = 10 ** (-1 / 20)
"""Largest sample of every waveform, which the pipeline scales to it: -1 decibel."""
SILENT = 1e-6
"""Waveforms below it are not scaled up to that, as in the pipeline."""

_prompt_mask: ContextVar[Tensor | None] = ContextVar("prompt_mask", default=None)
"""Which tokens of the prompts are no padding, bool ``[B, 1, 1, T]``, while the network runs for a model here."""


def _mask_padding(
    block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Hook before a block: its attention to the prompt leaves padding out, for which the network has no argument."""
    return args, {**kwargs, "encoder_attention_mask": _prompt_mask.get()}


class ACEStep(ACEStepText, FlowSchedule):
    """ACE-Step 1.5 base, SFT and turbo, from text."""

    pipeline_class = "AceStepPipeline"
    parallel_plan = plans.ACE_STEP
    # acestep/training/configs.py: the four projections of attention to the sound and to the prompt
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    knows_size = False

    gives_sigmas = True

    def __init__(self, pipeline: DiffusionPipeline, **options: Unpack[ModelOptions]) -> None:
        """As ``DiffusionModel``."""
        super().__init__(pipeline, **options)
        self._has_said_guidance = False
        self._silence: Tensor = pipeline.condition_encoder.silence_latent  # stays when encoders are freed

    def prepare_denoiser(self, denoiser: nn.Module) -> None:
        for block in denoiser.get_submodule("layers").children():
            block.register_forward_pre_hook(_mask_padding, with_kwargs=True)

    @classmethod
    def blueprint(cls) -> Blueprint:
        return Blueprint(
            denoiser="AceStepTransformer1DModel",
            vae=build_oobleck_autoencoder,
            texts={"text_encoder": TextPart(build_qwen3_encoder, build_qwen_tokenizer)},
            infer=lambda parts: {
                "audio_acoustic_hidden_dim": parts["vae"].config.decoder_input_channels,
                "in_channels": 3 * parts["vae"].config.decoder_input_channels,
                "encoder_hidden_size": parts["condition_encoder"].config.hidden_size,
            },
            outputs=("proj_out_conv",),
            scheduler_settings={"num_train_timesteps": 1},
            further={"condition_encoder": build_ace_step_conditions},
        )

    @property
    def samples_per_latent(self) -> int:
        return self.pipeline.vae.hop_length

    @property
    def latent_channels(self) -> int:
        return self.pipeline.vae.config.decoder_input_channels

    def longest_seconds(self) -> float:
        """As long as the latents of silence, from which a sound is made."""
        return self._silence.shape[1] * self.samples_per_latent / self.sampling_rate

    @property
    def pipeline_shift(self) -> float:
        """The shift that the pipeline applies before that of its scheduler."""
        return inspect.signature(type(self.pipeline).__call__).parameters["shift"].default

    def sigmas(self, num_steps: int, latent_shape: Sequence[int]) -> Tensor:
        levels = super().sigmas(num_steps, latent_shape)
        return self.pipeline_shift * levels / (1 + (self.pipeline_shift - 1) * levels)

    @property
    def shift(self) -> float:
        return self.pipeline_shift * super().shift

    def shift_at(self, latent_shape: Sequence[int]) -> float:
        return self.shift

    @property
    def embeds_guidance(self) -> bool:
        return self.pipeline.is_turbo  # its weights are guided: one branch is all

    def guidance_at(self, scale: float, sigma: Tensor) -> float | Tensor:
        if scale != 1.0 and not self._has_said_guidance:
            self._has_said_guidance = True
            self.say(
                f"guidance_scale {scale:g} is not used: the guidance of a turbo model is in its weights"
                if self.pipeline.is_turbo
                else "each step is guided by itself here; diffusers adds a part of earlier steps' guidance, so its "
                "sounds differ"
            )
        return scale

    def guide(self, unconditional: Tensor, conditional: Tensor, scale: float | Tensor) -> Tensor:
        """Adaptive projected guidance (arXiv 2410.02416), as the pipeline has it but for its momentum, since a step of
        RL is replayed by itself."""
        from diffusers.guiders.adaptive_projected_guidance import normalized_guidance

        return normalized_guidance(conditional, unconditional, float(scale) - 1, **GUIDANCE)

    @torch.no_grad()
    def pixels_to_latents(self, pixels: Tensor) -> Tensor:
        return self.pipeline.vae.encode(self.whole_frames(pixels)).latent_dist.mode().float()

    def latents_to_pixels(self, latents: Tensor) -> Tensor:
        sound = self.pipeline.vae.decode(latents.to(self.pipeline.vae.dtype)).sample.float()
        return self.cut(sound * (PEAK / sound.abs().amax(dim=(1, 2), keepdim=True).clamp_min(SILENT)))

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        time = self.timestep(sigma.to(latents.device, latents.dtype))
        silence = self._silence[:, : latents.shape[2]].to(latents).expand(len(latents), -1, -1)
        prompt_mask = _prompt_mask.set(embeddings["prompt_mask"][:, None, None])
        try:
            velocity = self.denoiser(
                hidden_states=latents.mT,
                timestep=time,
                timestep_r=time,
                encoder_hidden_states=embeddings["prompt_embeds"].to(self.input_dtype),
                context_latents=torch.cat([silence, torch.ones_like(silence)], dim=-1),
                return_dict=False,
            )[0]
        finally:
            _prompt_mask.reset(prompt_mask)
        return velocity.mT
