"""FLUX.1 dev and schnell, and FLUX.1 Kontext for editing: FluxTransformer2DModel, a CLIP encoder and T5.

The dev models are guidance-distilled (arXiv 2210.03142): the guidance scale is an input of the transformer, and there
is no unconditional branch. schnell has no such input; a guidance scale other than 1 then runs both branches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato.config.open_mappings import Keywords
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart
from sfumato.models.diffusion.latents import (
    PATCH,
    FlowTokens,
    KLLatents,
    SourceLatents,
    grid_ids,
    num_tokens,
    pack,
    text_shapes,
    unpack,
)
from sfumato.models.diffusion.scratch import (
    build_autoencoder,
    build_clip_encoder,
    build_clip_tokenizer,
    build_t5_encoder,
    build_t5_tokenizer,
)


class Flux(KLLatents, FlowTokens):
    """FLUX.1 dev and schnell."""

    pipeline_class = "FluxPipeline"
    parallel_plan = plans.FLUX
    lora_targets = plans.FLUX_TARGETS  # flow_grpo scripts/train_flux.py
    caches_steps = True
    encoder_names = ("text_encoder", "text_encoder_2")
    prompt_tokenizer = "tokenizer_2"

    @classmethod
    def blueprint(cls) -> Blueprint:
        def infer(parts: Keywords) -> dict[str, object]:
            vae = parts["vae"].config
            return {
                **cls.channels_of(vae.latent_channels, 2 ** (len(vae.block_out_channels) - 1)),
                "joint_attention_dim": parts["text_encoder_2"].config.d_model,
                "pooled_projection_dim": parts["text_encoder"].config.hidden_size,
            }

        return Blueprint(
            denoiser="FluxTransformer2DModel",
            vae=build_autoencoder,
            texts={
                "text_encoder": TextPart(build_clip_encoder, build_clip_tokenizer, {"projection": False}),
                "text_encoder_2": TextPart(build_t5_encoder, build_t5_tokenizer, section="t5"),
            },
            infer=infer,
        )

    @classmethod
    def channels_of(cls, latent_channels: int, spatial_factor: int) -> dict[str, int]:
        """The transformer's channels of tokens, of an autoencoder that makes so many channels of so many pixels a
        side."""
        return {"in_channels": latent_channels * PATCH**2}

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` of T5 and ``pooled`` ``[B, P]`` of CLIP, as the pipeline computes them."""
        prompt_embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt=prompts, device=self.device, max_sequence_length=self.max_sequence_length
        )
        return {"prompt_embeds": prompt_embeds, "pooled": pooled}

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        clip = self.pipeline.text_encoder
        t5 = self.pipeline.text_encoder_2
        return {
            **text_shapes(self.max_sequence_length, t5.config.d_model, t5.dtype),
            "pooled": ((clip.config.hidden_size,), clip.dtype),
        }

    @property
    def gives_sigmas(self) -> bool:
        """False where the pipeline leaves the levels to a scheduler with ``use_flow_sigmas``: FluxPipeline does, the
        pipeline of Kontext does not."""
        return self.takes_image or not self.pipeline.scheduler.config.get("use_flow_sigmas")

    @property
    def embeds_guidance(self) -> bool:
        return bool(self.denoiser.config.guidance_embeds)

    @property
    def default_guidance(self) -> float | None:
        return super().default_guidance if self.embeds_guidance else 1.0  # schnell's pipeline ignores it

    def image_tokens(self, latents: Tensor, embeddings: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The tokens ``[B, T, C]`` of the image that is made and behind them of a given one; positions ``[T, 3]``."""
        tokens = pack(latents)
        ids = patch_ids(latents, 0)
        if "image_latents" in embeddings:
            image = embeddings["image_latents"].to(self.input_dtype)
            tokens = torch.cat([tokens, pack(image)], dim=1)
            ids = torch.cat([ids, patch_ids(image, 1)])
        return tokens, ids

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        """The velocity; ``embeddings["guidance"]`` ``[B]`` is 1 where it is not given."""
        dtype = self.input_dtype
        device = latents.device
        tokens, ids = self.image_tokens(latents, embeddings)
        sigma = sigma.to(device)
        guidance = embeddings.get("guidance", torch.ones_like(sigma)).to(device) if self.embeds_guidance else None
        prompt_embeds = embeddings["prompt_embeds"].to(dtype)
        velocity = self.denoiser(
            hidden_states=tokens,
            timestep=self.time(sigma),
            guidance=guidance,
            pooled_projections=embeddings["pooled"].to(dtype),
            encoder_hidden_states=prompt_embeds,
            txt_ids=torch.zeros(prompt_embeds.shape[1], 3, device=device),
            img_ids=ids,
            return_dict=False,
        )[0]
        # Behind the tokens of the image that is made come those of the image to be edited: they are dropped.
        return unpack(velocity[:, : num_tokens(latents.shape)], *latents.shape[-2:])


class FluxKontext(SourceLatents, Flux):
    """FLUX.1 Kontext: the tokens of the image to be edited follow those of the image that is made.

    The image keeps its size, whereas diffusers' pipeline first resizes it to one of the sizes that the model was
    trained with, about a megapixel.
    """

    pipeline_class = "FluxKontextPipeline"


def patch_ids(latents: Tensor, image: int) -> Tensor:
    """Positions of an image's tokens, patches of latents ``[..., H, W]``, float32 ``[T, 3]``: see ``grid_ids``."""
    rows, columns = (length // PATCH for length in latents.shape[-2:])
    return grid_ids(rows, columns, image, latents.device)
