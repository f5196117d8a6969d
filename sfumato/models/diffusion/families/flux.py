"""FLUX.1 dev and schnell, and FLUX.1 Kontext for editing: FluxTransformer2DModel, a CLIP encoder and T5.

The dev models are guidance-distilled (arXiv 2210.03142): the guidance scale is an input of the transformer, and there
is no unconditional branch. schnell has no such input; a guidance scale other than 1 then runs both branches.
"""


# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from sfumato.models.diffusion import plans
from sfumato.models.diffusion.latents import (
    PATCH,
    FlowTokens,
    KLLatents,
    check_size,
    grid_ids,
    num_tokens,
    pack,
    unpack,
)
from sfumato.models.diffusion.scratch import (
    build_autoencoder,
    build_clip_encoder,
    build_clip_tokenizer,
    build_t5_encoder,
    build_t5_tokenizer,
    section_of,
    start_at_zero,
    unknown_keys,
)
from sfumato.parallel.plan import ParallelPlan

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline


class Flux(KLLatents, FlowTokens):
    """FLUX.1 dev and schnell."""

    pipeline_class: ClassVar[str] = "FluxPipeline"
    parallel_plan: ClassVar[ParallelPlan] = plans.FLUX
    lora_targets: ClassVar[tuple[str, ...]] = (  # flow_grpo scripts/train_flux.py
        *plans.JOINT_TARGETS,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )
    caches_steps: ClassVar[bool] = True
    encoder_names: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2")
    prompt_tokenizer: ClassVar[str] = "tokenizer_2"

    @classmethod
    def build(cls, description: Mapping[str, object], seed: int) -> DiffusionPipeline:
        """Builds a pipeline with random weights.

        Sections are ``transformer``, ``scheduler`` (arguments of their diffusers classes), ``vae``, ``text_encoder``
        (width, layers, ... of CLIP), ``t5``, and ``tokenizer`` (words, max_length). Channels and text widths of the
        transformer follow from the other sections.
        """
        import diffusers

        unknown_keys(description, {"pipeline", "transformer", "vae", "scheduler", "text_encoder", "tokenizer", "t5"})
        denoiser = section_of(description, "transformer", diffusers.FluxTransformer2DModel)
        vae_settings = section_of(description, "vae", build_autoencoder)
        scheduler = section_of(description, "scheduler", diffusers.FlowMatchEulerDiscreteScheduler)
        tokens = section_of(description, "tokenizer", build_clip_tokenizer)
        text = section_of(description, "text_encoder", build_clip_encoder, reserved=["tokenizer", "projection"])
        t5 = section_of(description, "t5", build_t5_encoder, reserved=["tokenizer", "silent"])
        tokenizer = build_clip_tokenizer(**tokens)
        t5_tokenizer = build_t5_tokenizer(tokens.get("words", ()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            clip = build_clip_encoder(tokenizer, projection=False, **text)
            t5_encoder = build_t5_encoder(t5_tokenizer, silent=False, **{"width": 32, **t5})
            vae = build_autoencoder(**vae_settings)
            latent_channels = vae.config.latent_channels  # pyright: ignore[reportAttributeAccessIssue]  (a FrozenDict)
            spatial_factor = 2 ** (len(vae.config.block_out_channels) - 1)  # pyright: ignore[reportAttributeAccessIssue]  (a FrozenDict)
            inferred = {
                **cls.channels_of(latent_channels, spatial_factor),
                "joint_attention_dim": t5_encoder.config.d_model,
                "pooled_projection_dim": clip.config.hidden_size,
            }
            transformer = diffusers.FluxTransformer2DModel(**{**inferred, **denoiser})
            start_at_zero(transformer.proj_out)
        return getattr(diffusers, cls.pipeline_class)(
            transformer=transformer,
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**scheduler),
            vae=vae,
            text_encoder=clip,
            tokenizer=tokenizer,
            text_encoder_2=t5_encoder,
            tokenizer_2=t5_tokenizer,
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

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor
        check_size(height, width, factor * PATCH, frames)
        return (self.pipeline.vae.config.latent_channels, height // factor, width // factor)

    @property
    def gives_sigmas(self) -> bool:
        """False where the pipeline leaves the levels to a scheduler with ``use_flow_sigmas``: FluxPipeline does, the
        pipeline of Kontext does not."""
        return self.takes_image or not self.pipeline.scheduler.config.get("use_flow_sigmas")

    @property
    def embeds_guidance(self) -> bool:
        return bool(self.denoiser.config.guidance_embeds)

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


class FluxKontext(Flux):
    """FLUX.1 Kontext: the tokens of the image to be edited follow those of the image that is made.

    The image keeps its size, whereas diffusers' pipeline first resizes it to one of the sizes that the model was
    trained with, about a megapixel.
    """

    pipeline_class: ClassVar[str] = "FluxKontextPipeline"
    takes_image: ClassVar[bool] = True

    def embed_edit(self, prompt: str, image: np.ndarray) -> dict[str, Tensor]:
        """What ``embed_prompts`` returns, and ``image_latents`` ``[1, C, H, W]``."""
        self.latent_shape(*image.shape[:2])  # raises ValueError for a size that does not divide
        pixels = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None]
        return {**self.embed_prompts([prompt]), "image_latents": self.encode_pixels(pixels)}


def patch_ids(latents: Tensor, image: int) -> Tensor:
    """Positions of an image's tokens, patches of latents ``[..., H, W]``, float32 ``[T, 3]``: see ``grid_ids``."""
    rows, columns = (length // PATCH for length in latents.shape[-2:])
    return grid_ids(rows, columns, image, latents.device)
