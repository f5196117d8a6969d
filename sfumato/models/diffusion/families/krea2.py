"""Krea 2: Krea2Transformer2DModel, in which text and image are one sequence, and Qwen3-VL, of which layers are read.

A guidance_scale g of its pipeline is g + 1 here, so that the scale means the same for every family.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart, make_empty_pipeline
from sfumato.models.diffusion.latents import PATCH, QwenLatents, grid_ids, pack, unpack
from sfumato.models.diffusion.scratch import build_qwen_autoencoder, build_qwen_tokenizer
from sfumato.models.diffusion.scratch_encoders import build_qwen3_vl_encoder

DISTILLED_MU = 1.15
"""The dynamic shift of distilled models, whatever the size of the image."""


class Krea2(QwenLatents):
    """Krea 2, base and distilled."""

    pipeline_class = "Krea2Pipeline"
    parallel_plan = plans.KREA2
    lora_targets = ("to_k", "to_q", "to_v", "to_out.0")  # as for Z-Image

    @classmethod
    def blueprint(cls) -> Blueprint:
        empty = make_empty_pipeline(cls.pipeline_type())
        template = empty.prompt_template_encode_prefix + empty.prompt_template_encode_suffix
        text = TextPart(build_qwen3_vl_encoder, build_qwen_tokenizer, {}, {"template": template})
        return Blueprint(
            denoiser="Krea2Transformer2DModel",
            vae=build_qwen_autoencoder,
            texts={"text_encoder": text},
            infer=lambda parts: {
                "in_channels": parts["vae"].config.z_dim * PATCH**2,
                "text_hidden_dim": parts["text_encoder"].config.text_config.hidden_size,
                "num_text_layers": len(parts.get("text_encoder_select_layers") or empty.text_encoder_select_layers),
            },
            outputs=("final_layer.linear",),
            scheduler_settings={"use_dynamic_shifting": True, "max_image_seq_len": 6400},
            settings=("text_encoder_select_layers", "is_distilled"),
        )

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, L, D]`` of L layers and ``prompt_mask``, bool ``[B, T]``.

        T is ``max_sequence_length``, and the end of the template takes the last tokens.
        """
        embeds, mask = self.pipeline.encode_prompt(prompts, self.device, max_sequence_length=self.max_sequence_length)
        return {"prompt_embeds": embeds, "prompt_mask": mask}

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        encoder = self.pipeline.text_encoder
        layers = len(self.pipeline.text_encoder_select_layers)
        length = self.max_sequence_length
        return {
            "prompt_embeds": ((length, layers, encoder.config.text_config.hidden_size), encoder.dtype),
            "prompt_mask": ((length,), torch.bool),
        }

    def prompt_as_read(self, prompt: str) -> str:
        """The prompt with the end of the template; the pipeline drops the beginning of it from the embeddings."""
        return prompt + self.pipeline.prompt_template_encode_suffix

    def dynamic_mu(self, tokens: int, num_steps: int | None) -> float | None:
        return DISTILLED_MU if self.pipeline.config["is_distilled"] else None

    @property
    def default_guidance(self) -> float | None:
        scale = super().default_guidance
        return 1.0 if self.pipeline.config["is_distilled"] or scale is None else scale + 1

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        prompt_embeds = embeddings["prompt_embeds"].to(self.input_dtype)
        rows, columns = (length // PATCH for length in latents.shape[-2:])
        positions = grid_ids(rows, columns, 0, latents.device)
        velocity = self.denoiser(
            hidden_states=pack(latents),
            encoder_hidden_states=prompt_embeds,
            timestep=sigma.to(latents.device),
            position_ids=torch.nn.functional.pad(positions, (0, 0, prompt_embeds.shape[1], 0)),  # text is at 0
            encoder_attention_mask=embeddings["prompt_mask"],
            return_dict=False,
        )[0]
        return unpack(velocity, *latents.shape[-2:])
