"""Kandinsky 5 from text to images: Kandinsky5Transformer3DModel with cross attention to Qwen2.5-VL, and CLIP.

The network has no mask for prompts, so it runs row by row on prompts without padding: its pipeline lets a picture read
the padding of its batch. Whatever the precision, the network rounds queries and keys to bfloat16.
"""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart, build_pipeline
from sfumato.models.diffusion.latents import (
    PATCH,
    FlowSchedule,
    KLLatents,
    check_size,
    padded,
    text_shapes,
    token_counts,
)
from sfumato.models.diffusion.scratch import (
    build_autoencoder,
    build_clip_encoder,
    build_clip_tokenizer,
    build_qwen_tokenizer,
    build_qwen_vl_encoder,
    build_qwen_vl_processor,
)
from sfumato.parallel.plan import ParallelPlan

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline
    from transformers import Qwen2VLProcessor

LARGEST_GRID = 128
"""Tokens along a side of which the network has positions."""
TEMPLATE_WORDS = (
    "system\nYou are a prompt engineer. Describe the image by detailing the color, shape, size, texture, quantity, "
    "text, spatial relationships of the objects and background:\nuser\n{}"
)
"""Words of the pipeline's template, which become tokens of a tokenizer that is made here."""


def build_processor(words: Sequence[str] = ()) -> Qwen2VLProcessor:
    """A processor of Qwen2.5-VL whose tokens are bytes, words of the pipeline's template, and ``words``."""
    return build_qwen_vl_processor(build_qwen_tokenizer(words, TEMPLATE_WORDS))


class Kandinsky5(KLLatents, FlowSchedule):
    """Kandinsky 5 Image Lite."""

    pipeline_class: ClassVar[str] = "Kandinsky5T2IPipeline"
    parallel_plan: ClassVar[ParallelPlan] = plans.KANDINSKY5
    lora_targets: ClassVar[tuple[str, ...]] = (
        *("to_query", "to_key", "to_value"),
        *("self_attention.out_layer", "cross_attention.out_layer"),
    )
    encoder_names: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2")
    knows_size: ClassVar[bool] = False

    @classmethod
    def build(cls, description: Mapping[str, object], seed: int) -> DiffusionPipeline:
        """Builds a pipeline with random weights; sections are those of ``build_pipeline``.

        The pipeline takes the autoencoder to make an eighth of a side.

        Raises:
            MissingDependencyError: without torchvision.
        """
        import diffusers

        blueprint = Blueprint(
            pipeline=diffusers.Kandinsky5T2IPipeline,
            denoiser=diffusers.Kandinsky5Transformer3DModel,
            vae=build_autoencoder,
            texts={
                "text_encoder": TextPart(build_qwen_vl_encoder, build_processor),
                "text_encoder_2": TextPart(build_clip_encoder, build_clip_tokenizer, {"projection": False}),
            },
            infer=lambda parts: {
                "in_visual_dim": parts["vae"].config.latent_channels,
                "out_visual_dim": parts["vae"].config.latent_channels,
                "in_text_dim": parts["text_encoder"].config.text_config.hidden_size,
                "in_text_dim2": parts["text_encoder_2"].config.hidden_size,
            },
            outputs=lambda transformer: [transformer.out_layer.out_layer],
        )
        return build_pipeline(blueprint, description, seed)

    @property
    def vae_factor(self) -> int:
        return self.pipeline.vae_scale_factor_spatial

    def _latent_scale(self, like: Tensor) -> tuple[float | Tensor, float | Tensor]:
        return 0.0, self.pipeline.vae.config.scaling_factor  # the pipeline does not shift them

    @property
    def probe_size(self) -> int:
        return self.vae_factor * PATCH

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        check_size(height, width, self.probe_size, frames, longest=self.probe_size * LARGEST_GRID)
        return (self.denoiser.config.in_visual_dim, height // self.vae_factor, width // self.vae_factor)

    @property
    def input_dtype(self) -> torch.dtype:
        """dtype of the embedding of pictures: diffusers keeps other parameters in float32, the first one among them."""
        return self.denoiser.visual_embeddings.in_layer.weight.dtype

    def prompt_as_read(self, prompt: str) -> str:
        """The prompt with the end of the template; the pipeline drops the beginning of it from the embeddings."""
        return prompt + self.pipeline.prompt_template.partition("{}")[2]

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]``, ``prompt_mask``, bool ``[B, T]``, and ``pooled`` ``[B, P]`` of CLIP; T is
        ``max_sequence_length``."""
        length = self.max_sequence_length
        embeddings = {}
        for prompt in dict.fromkeys(prompts):  # one by one: a batch would be padded to the longest
            embeds, pooled, _ = self.pipeline.encode_prompt(prompt, max_sequence_length=length, device=self.device)
            embeddings[prompt] = {**padded(embeds, length), "pooled": pooled}
        names = embeddings[prompts[0]]
        return {name: torch.cat([embeddings[prompt][name] for prompt in prompts]) for name in names}

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        encoder = self.pipeline.text_encoder
        width_of_clip = self.pipeline.text_encoder_2.config.hidden_size
        shapes = text_shapes(
            self.max_sequence_length, encoder.config.text_config.hidden_size, encoder.dtype, torch.bool
        )
        return shapes | {"pooled": ((width_of_clip,), encoder.dtype)}

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        dtype = self.input_dtype
        prompts = embeddings["prompt_embeds"].to(dtype)
        pooled = embeddings["pooled"].to(dtype)
        time = self.timestep(sigma.to(latents.device)).to(dtype)
        pictures = latents.permute(0, 2, 3, 1)[:, None]  # [B, F, H, W, C] of one frame
        grid = [torch.arange(size // PATCH, device=latents.device) for size in latents.shape[-2:]]
        rows = [
            self.denoiser(
                hidden_states=pictures[row : row + 1],
                encoder_hidden_states=prompts[row : row + 1, :length],
                timestep=time[row : row + 1],
                pooled_projections=pooled[row : row + 1],
                visual_rope_pos=[torch.arange(1, device=latents.device), *grid],
                text_rope_pos=torch.arange(length, device=latents.device),
                return_dict=False,
            )
            for row, length in enumerate(token_counts(embeddings["prompt_mask"]))
        ]
        return torch.cat(rows)[:, 0].permute(0, 3, 1, 2)
