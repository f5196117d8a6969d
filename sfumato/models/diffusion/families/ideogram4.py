"""Ideogram 4: Ideogram4Transformer2DModel, in which text and image are one sequence, and 13 layers of Qwen3-VL.

Guidance takes a second network, ``unconditional_transformer``, which reads no text and stays as it is. The network
predicts x0 - eps at a time that runs from 0 (noise) to 1. Noise levels are the quantiles of a logit-normal
distribution, of which a larger picture shifts the mean.
"""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sfumato.models.diffusion import plans
from sfumato.models.diffusion.conditioning import Conditioning
from sfumato.models.diffusion.described import Blueprint, TextPart, build_pipeline
from sfumato.models.diffusion.flux2_latents import Flux2Latents
from sfumato.models.diffusion.latents import PATCH, PaddedPrompts, embed_one_by_one, grid_ids
from sfumato.models.diffusion.scratch_autoencoders import build_flux2_autoencoder
from sfumato.models.diffusion.scratch_encoders import build_qwen3_vl_encoder, build_qwen3_vl_tokenizer
from sfumato.models.diffusion.valueless_masks import compute_positions_off_meta

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    from sfumato.models.diffusion.base import DiffusersModule

BASE_SIDE = 512
"""Side in pixels of the square pictures whose noise levels are not shifted."""
LARGEST_SIDE = 2048
"""Side in pixels of the pictures that the pipeline makes by default."""
LOGIT_STD = 1.5
"""Standard deviation of the logits of the noise levels, the pipeline's default."""
FIRST_GUIDANCE = 7.0
"""The scale of the pipeline's own call in all steps but the last three."""


class Ideogram4(PaddedPrompts, Flux2Latents):
    """Ideogram 4."""

    pipeline_class = "Ideogram4Pipeline"
    parallel_plan = plans.IDEOGRAM4
    lora_targets = (  # 3xela/ideogram-lora, attention_mlp
        *("to_k", "to_q", "to_v", "to_out.0"),
        *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
    )
    knows_size = False

    @classmethod
    def build(cls, description: Mapping[str, object], seed: int) -> DiffusionPipeline:
        """As ``DiffusionModel``; the second network has the settings of the first."""

        def assemble(transformer: DiffusersModule, **parts: object) -> DiffusionPipeline:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed + 1)
                second = type(transformer).from_config(transformer.config)
            made = {"transformer": transformer, "unconditional_transformer": second}
            return cls.pipeline_type()(**made, **parts)

        return build_pipeline(assemble, cls.blueprint(), description, seed)

    @classmethod
    def blueprint(cls) -> Blueprint:
        """As ``DiffusionModel``; the text encoder must have 36 layers."""
        from diffusers.pipelines.ideogram4.pipeline_ideogram4 import QWEN3_VL_ACTIVATION_LAYERS

        return Blueprint(
            denoiser="Ideogram4Transformer2DModel",
            vae=build_flux2_autoencoder,
            texts={"text_encoder": TextPart(build_qwen3_vl_encoder, build_qwen3_vl_tokenizer)},
            infer=lambda parts: {
                "in_channels": parts["vae"].config.latent_channels * PATCH**2,
                "llm_features_dim": parts["text_encoder"].config.text_config.hidden_size
                * len(QWEN3_VL_ACTIVATION_LAYERS),
            },
            outputs=("final_layer.linear",),
        )

    def prepare_denoiser(self, denoiser: nn.Module) -> None:
        compute_positions_off_meta(denoiser, "rotary_emb")

    def to_patches(self, latents: Tensor) -> Tensor:
        return super().to_patches(latents).unflatten(1, (-1, PATCH**2)).transpose(1, 2).flatten(1, 2)

    def from_patches(self, patches: Tensor) -> Tensor:
        return super().from_patches(patches.unflatten(1, (PATCH**2, -1)).transpose(1, 2).flatten(1, 2))

    def sigmas(self, num_steps: int, latent_shape: Sequence[int]) -> Tensor:
        from diffusers.pipelines.ideogram4.pipeline_ideogram4 import _logit_normal_sigmas

        levels = _logit_normal_sigmas(num_steps, math.log(self.shift_at(latent_shape)), std=LOGIT_STD)
        scheduler = copy.deepcopy(self.pipeline.scheduler)
        scheduler.set_timesteps(sigmas=levels.tolist())
        return scheduler.sigmas.to(torch.float32)

    @property
    def shift(self) -> float:
        return LARGEST_SIDE / BASE_SIDE

    def shift_at(self, latent_shape: Sequence[int]) -> float:
        """The shift of a picture: shifting by s adds log s to the mean of the logits of the noise levels."""
        height, width = (length * self.probe_size for length in latent_shape[-2:])
        return math.sqrt(height * width) / BASE_SIDE

    def prompt_as_read(self, prompt: str) -> str:
        """The prompt as a message of a chat, with the chat template."""
        messages = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
        return self.pipeline.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``prompt_mask``, bool ``[B, T]``, with the padding before the prompt.

        What the encoder makes of a token does not depend on later ones, so longer prompts are cut afterwards.
        """
        length = self.max_sequence_length
        tokenizer = self.pipeline.tokenizer

        def embed(prompt: str) -> dict[str, Tensor]:
            num_tokens = len(tokenizer(self.prompt_as_read(prompt), add_special_tokens=False)["input_ids"])
            features = self.pipeline.encode_prompt(prompt, 0, 0, num_tokens, self.device)[0][0, :length]
            start = length - len(features)
            embeds = torch.nn.functional.pad(features, (0, 0, start, 0))[None]
            return {
                "prompt_embeds": embeds.to(self.pipeline.text_encoder.dtype),  # the pipeline made float32 of them
                "prompt_mask": torch.arange(length, device=embeds.device)[None] >= start,
            }

        return embed_one_by_one(prompts, embed)

    @property
    def prompt_features(self) -> int:
        return self.denoiser.config.llm_features_dim

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        prompts = embeddings["prompt_embeds"].to(self.input_dtype)
        return self._run(self.denoiser, latents, sigma, prompts, embeddings["prompt_mask"])

    @property
    def default_guidance(self) -> float | None:
        return FIRST_GUIDANCE

    def predict_velocity(
        self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, guidance_scale: float = 1.0
    ) -> Tensor:
        """As ``DiffusionModel``, with guidance by the second network; CFG parallelism gains nothing."""
        conditional = super().predict_velocity(latents, sigma, conditioning, 1.0)
        if guidance_scale == 1.0:
            return conditional
        second = self.pipeline.unconditional_transformer
        prompts = latents.new_zeros(len(latents), 0, second.config.llm_features_dim, dtype=second.dtype)
        mask = torch.zeros(len(latents), 0, dtype=torch.bool, device=latents.device)
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            unconditional = self._run(second, latents.to(second.dtype), sigma, prompts, mask)
        return self.guide(unconditional.float(), conditional, guidance_scale)

    @staticmethod
    def _run(network: nn.Module, latents: Tensor, sigma: Tensor, prompts: Tensor, mask: Tensor) -> Tensor:
        """The velocity that a network predicts of latents behind prompts ``[B, T, D]`` with a mask ``[B, T]``."""
        from diffusers.models.transformers import transformer_ideogram4 as ideogram

        rows, columns = latents.shape[-2:]
        num_pixels = rows * columns
        num_text = mask.shape[1]
        tokens = latents.flatten(2).transpose(1, 2)
        text_ids = torch.where(mask, mask.cumsum(1) - 1, 0)[:, :, None].expand(-1, -1, 3)
        image_ids = grid_ids(rows, columns, 0, latents.device).long() + ideogram.IMAGE_POSITION_OFFSET
        is_read = torch.cat([mask, mask.new_ones(len(mask), num_pixels)], dim=1)
        kinds = is_read.long() * ideogram.OUTPUT_IMAGE_INDICATOR
        kinds[:, :num_text] = mask.long() * ideogram.LLM_TOKEN_INDICATOR
        velocity = network(
            hidden_states=torch.nn.functional.pad(tokens, (0, 0, num_text, 0)),
            timestep=(1 - sigma.to(latents.device)).to(latents.dtype),
            encoder_hidden_states=torch.nn.functional.pad(prompts, (0, 0, 0, num_pixels)),
            position_ids=torch.cat([text_ids, image_ids.expand(len(mask), -1, -1)], dim=1),
            segment_ids=torch.where(is_read, 1, ideogram.SEQUENCE_PADDING_INDICATOR),
            indicator=kinds,
            return_dict=False,
        )[0]
        return -velocity[:, num_text:].transpose(1, 2).unflatten(2, (rows, columns))
