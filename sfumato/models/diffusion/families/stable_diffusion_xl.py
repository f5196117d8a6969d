"""Stable Diffusion XL (arXiv 2307.01952): the UNet takes a pooled embedding, size and crop of the image, too."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfumato.algorithms.device import to_device
from sfumato.config.open_mappings import Keywords
from sfumato.models.diffusion.conditioning import Conditioning
from sfumato.models.diffusion.families.stable_diffusion import StableDiffusion
from sfumato.models.diffusion.scratch import build_clip_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StableDiffusionXL(StableDiffusion):
    """Stable Diffusion XL: two text encoders, and a pooled embedding, size and crop of the image as conditions."""

    pipeline_class = "StableDiffusionXLPipeline"
    encoder_names = ("text_encoder", "text_encoder_2")

    @classmethod
    def _build_encoders(cls, tokenizer: PreTrainedTokenizerBase, settings: Keywords) -> dict[str, object]:
        return {
            "tokenizer": tokenizer,
            "tokenizer_2": copy.deepcopy(tokenizer),
            "text_encoder": build_clip_encoder(tokenizer, projection=False, **settings),
            "text_encoder_2": build_clip_encoder(tokenizer, **settings),
            "add_watermarker": False,
        }

    @classmethod
    def _unet_settings(cls, settings: Keywords, parts: Keywords) -> Keywords:
        first = parts["text_encoder"].config
        second = parts["text_encoder_2"].config
        time_width = settings.get("addition_time_embed_dim", 8)
        return {
            "cross_attention_dim": first.hidden_size + second.hidden_size,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": time_width,
            "projection_class_embeddings_input_dim": second.projection_dim + 6 * time_width,  # pooled, and six numbers
            **settings,
        }

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``pooled`` ``[B, P]``.

        With the pipeline's ``force_zeros_for_empty_prompt`` both are zero for the empty prompt, as in its unconditional
        branch.
        """
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompts, device=self.device, do_classifier_free_guidance=False
        )
        if self.pipeline.config.force_zeros_for_empty_prompt:  # pyright: ignore[reportAttributeAccessIssue]  (a FrozenDict)
            has_text = torch.tensor([prompt != "" for prompt in prompts], device=embeds.device)
            embeds = torch.where(has_text[:, None, None], embeds, 0)
            pooled = torch.where(has_text[:, None], pooled, 0)
        return {"prompt_embeds": embeds, "pooled": pooled}

    def with_framing(self, conditioning: Conditioning, framing: Tensor | None) -> Conditioning:
        if framing is None:
            return conditioning
        tensors = {**conditioning.tensors, "framing": to_device(framing, self.device)}
        return replace(conditioning, tensors=tensors)

    def _added_conditions(self, latents: Tensor, embeddings: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """The pooled embedding, and six numbers of each image: original size, top left of the crop, size of the output.

        In training they are those of the picture, as in diffusers' train_text_to_image_sdxl.py. Otherwise the image is
        said to be original in size and not cropped, as in the pipeline.
        """
        factor = self.pipeline.vae_scale_factor
        size = [latents.shape[-2] * factor, latents.shape[-1] * factor]
        uncropped = torch.tensor([*size, 0, 0, *size], dtype=torch.float32, device=latents.device)
        time_ids = uncropped.expand(len(latents), -1)
        if "framing" in embeddings:
            time_ids = torch.cat([embeddings["framing"].to(time_ids), time_ids[:, 4:]], dim=1)
        return {"text_embeds": embeddings["pooled"].float(), "time_ids": time_ids}
