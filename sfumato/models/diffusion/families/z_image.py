"""Z-Image (arXiv 2511.22699): ZImageTransformer2DModel, in which text and image are one sequence, and a Qwen3 encoder.

The network predicts the negative velocity, x0 - eps, at a time that runs from 0 (noise) to 1. A guidance_scale g of its
pipeline is g + 1 here, so that the scale means the same for every family.
"""


# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from sfumato.models.diffusion import plans
from sfumato.models.diffusion.latents import PATCH, FlowTokens, KLLatents, check_size, token_counts
from sfumato.models.diffusion.scratch import (
    build_autoencoder,
    build_qwen3_encoder,
    build_qwen_tokenizer,
    section_of,
    start_at_zero,
    unknown_keys,
)
from sfumato.parallel.plan import ParallelPlan

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline


class ZImage(KLLatents, FlowTokens):
    """Z-Image and Z-Image-Turbo."""

    pipeline_class: ClassVar[str] = "ZImagePipeline"
    parallel_plan: ClassVar[ParallelPlan] = plans.Z_IMAGE
    # diffusers examples/dreambooth/train_dreambooth_lora_z_image.py
    lora_targets: ClassVar[tuple[str, ...]] = ("to_k", "to_q", "to_v", "to_out.0")
    encoder_names: ClassVar[tuple[str, ...]] = ("text_encoder",)

    @classmethod
    def build(cls, description: Mapping[str, object], seed: int) -> DiffusionPipeline:
        """Builds a pipeline with random weights.

        Sections are ``transformer``, ``scheduler`` (arguments of their diffusers classes), ``vae``, ``text_encoder``
        (width, layers, ... of Qwen3) and ``tokenizer`` (words). Channels and text width of the transformer follow from
        the other sections.
        """
        from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

        unknown_keys(description, {"pipeline", "transformer", "vae", "scheduler", "text_encoder", "tokenizer"})
        denoiser = section_of(description, "transformer", ZImageTransformer2DModel)
        vae_settings = section_of(description, "vae", build_autoencoder)
        scheduler = section_of(description, "scheduler", FlowMatchEulerDiscreteScheduler)
        words = section_of(description, "tokenizer", build_qwen_tokenizer, reserved=["template"])
        text = section_of(description, "text_encoder", build_qwen3_encoder, reserved=["tokenizer"])
        tokenizer = build_qwen_tokenizer(**words)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            encoder = build_qwen3_encoder(tokenizer, **text)
            vae = build_autoencoder(**vae_settings)
            inferred = {"in_channels": vae.config.latent_channels, "cap_feat_dim": encoder.config.hidden_size}  # pyright: ignore[reportAttributeAccessIssue]  (a FrozenDict)
            transformer = ZImageTransformer2DModel(**{**inferred, **denoiser})
            start_at_zero(*(layer.linear for layer in transformer.all_final_layer.values()))  # pyright: ignore[reportArgumentType]
        return ZImagePipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(**scheduler),
            vae=vae,
            text_encoder=encoder,
            tokenizer=tokenizer,  # pyright: ignore[reportArgumentType]
        )

    def prompt_as_read(self, prompt: str) -> str:
        """The prompt as a message of a chat, with the chat template."""
        messages = [{"role": "user", "content": prompt}]
        return self.pipeline.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``prompt_mask``, bool ``[B, T]``; T is ``max_sequence_length``."""
        length = self.max_sequence_length
        rows, _ = self.pipeline.encode_prompt(
            list(prompts), device=self.device, do_classifier_free_guidance=False, max_sequence_length=length
        )
        embeds = [torch.nn.functional.pad(row, (0, 0, 0, length - len(row))) for row in rows]
        masks = [torch.arange(length, device=row.device) < len(row) for row in rows]
        return {"prompt_embeds": torch.stack(embeds), "prompt_mask": torch.stack(masks)}

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        encoder = self.pipeline.text_encoder
        length = self.max_sequence_length
        return {
            "prompt_embeds": ((length, encoder.config.hidden_size), encoder.dtype),
            "prompt_mask": ((length,), torch.bool),
        }

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor
        unit = self.probe_size
        check_size(height, width, unit, frames, longest=unit * min(self.denoiser.config.axes_lens[1:]))
        return (self.denoiser.config.in_channels, height // factor, width // factor)

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        lengths = token_counts(embeddings["prompt_mask"])
        prompts = embeddings["prompt_embeds"].to(self.input_dtype)
        outputs = self.denoiser(
            list(latents[:, :, None].unbind()),  # the network takes a list of videos, here of one frame
            1 - self.time(sigma.to(latents.device)),
            [row[:length] for row, length in zip(prompts, lengths, strict=True)],
            patch_size=PATCH,
            return_dict=False,
        )[0]
        return -torch.stack(outputs)[:, :, 0]
