"""Stable Audio 3 (arXiv 2605.17991): StableAudio3DiTModel, T5Gemma, and an autoencoder of stereo sound.

The length of the sound goes in beside the text, as one more token and in the modulation of every block.
"""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart
from sfumato.models.diffusion.latents import FlowSchedule
from sfumato.models.diffusion.scratch_encoders import build_t5gemma_encoder
from sfumato.models.diffusion.scratch_sound import (
    build_duration_embedder,
    build_same_autoencoder,
    build_short_gemma_tokenizer,
)
from sfumato.models.diffusion.waveform_latents import WaveformLatents

LONGEST_PROMPT = 256
"""Tokens of a prompt that the pipeline reads; shorter ones are filled up to it, and the network reads the padding."""


class StableAudio3(WaveformLatents, FlowSchedule):
    """Stable Audio 3 from text."""

    pipeline_class = "StableAudio3Pipeline"
    parallel_plan = plans.STABLE_AUDIO3
    lora_targets = ()  # diffusers' class takes no adapters
    encoder_names = ("text_encoder", "duration_embedder")

    @classmethod
    def blueprint(cls) -> Blueprint:
        return Blueprint(
            denoiser="StableAudio3DiTModel",
            vae=build_same_autoencoder,
            texts={"text_encoder": TextPart(build_t5gemma_encoder, build_short_gemma_tokenizer)},
            infer=lambda parts: {
                "io_channels": parts["vae"].config.latent_dim,
                "cond_token_dim": parts["duration_embedder"].config.output_dim,
                "global_cond_dim": parts["duration_embedder"].config.output_dim,
                "local_add_cond_dim": parts["vae"].config.latent_dim + 1,
            },
            scheduler_settings={"num_train_timesteps": 1},
            further={"duration_embedder": build_duration_embedder},
        )

    @property
    def prompt_limit(self) -> int:
        return min(self.pipeline.tokenizer.model_max_length, LONGEST_PROMPT)

    @torch.no_grad()
    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T + 1, D]`` of the text and the length, ``prompt_mask``, int ``[B, T + 1]``, and
        ``duration_embeds`` ``[B, D]``; T is ``prompt_limit``."""
        pipeline = self.pipeline
        embeds, mask = pipeline.encode_prompt(prompts, self.device, 1)
        duration = pipeline.encode_duration(self.milliseconds / 1000, self.device, 1, len(prompts))
        context, context_mask = pipeline.prepare_cross_attention(embeds, mask, duration)
        return {"prompt_embeds": context, "prompt_mask": context_mask, "duration_embeds": duration}

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        tokens = self.prompt_limit + 1
        dtype = self.pipeline.text_encoder.dtype
        features = self.pipeline.duration_embedder.config.output_dim
        return {
            "prompt_embeds": ((tokens, features), dtype),
            "prompt_mask": ((tokens,), torch.int64),
            "duration_embeds": ((features,), self.pipeline.duration_embedder.dtype),
        }

    @property
    def samples_per_latent(self) -> int:
        return self.pipeline.vae.downsampling_ratio

    @property
    def latent_channels(self) -> int:
        return self.pipeline.vae.config.latent_dim

    def longest_seconds(self) -> float:
        """What the embedder of the length tells apart; it would take a longer sound to be of this length."""
        if self.encoders_freed:
            return self._longest
        self._longest = float(self.pipeline.duration_embedder.config.max_val)
        return self._longest

    def sigmas(self, num_steps: int, latent_shape: Sequence[int]) -> Tensor:
        """Noise levels at even distances of the logarithm of the signal to noise ratio, as the pipeline has them."""
        from diffusers.pipelines.stable_audio_3.pipeline_stable_audio_3 import logsnr_sigma_schedule

        call = inspect.signature(type(self.pipeline).__call__).parameters
        levels = logsnr_sigma_schedule(num_steps, call["logsnr_min"].default, call["logsnr_max"].default)
        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config)
        scheduler.set_timesteps(sigmas=levels)
        return scheduler.sigmas.to(torch.float32)

    @torch.no_grad()
    def pixels_to_latents(self, pixels: Tensor) -> Tensor:
        return self.pipeline.vae.encode(self.whole_frames(pixels)).latents.float()

    @torch.no_grad()
    def latents_to_pixels(self, latents: Tensor) -> Tensor:
        return self.cut(self.pipeline.vae.decode(latents.to(self.pipeline.vae.dtype)).sample)

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        return self.denoiser(
            latents,
            self.timestep(sigma.to(latents.device)),
            encoder_hidden_states=embeddings["prompt_embeds"].to(self.input_dtype),
            global_hidden_states=embeddings["duration_embeds"].to(self.input_dtype),
            encoder_attention_mask=embeddings["prompt_mask"],
            return_dict=False,
        )[0]
