"""Base class of Kandinsky 5: prompts are read by Qwen2.5-VL and CLIP, and Kandinsky5Transformer3DModel is run.

The network has no mask for prompts, so it runs row by row on prompts without padding: its pipelines let a sample read
the padding of its batch. Whatever the precision, the network rounds queries and keys to bfloat16.

Shapes: B samples, C F H W latent channels, frames, height and width, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart
from sfumato.models.diffusion.latents import (
    PATCH,
    FlowSchedule,
    PaddedPrompts,
    embed_one_by_one,
    pad_embeds,
    token_counts,
)
from sfumato.models.diffusion.scratch import (
    build_clip_encoder,
    build_clip_tokenizer,
    build_qwen_tokenizer,
    build_qwen_vl_encoder,
    build_qwen_vl_processor,
)

if TYPE_CHECKING:
    from transformers import Qwen2VLProcessor

LARGEST_GRID = 128
"""Tokens along a side, and latent frames, of which the network has positions."""


class KandinskyText(PaddedPrompts, FlowSchedule):
    """Base class of Kandinsky 5's families."""

    parallel_plan = plans.KANDINSKY5
    lora_targets = (
        *("to_query", "to_key", "to_value"),
        *("self_attention.out_layer", "cross_attention.out_layer"),
    )
    encoder_names = ("text_encoder", "text_encoder_2")
    knows_size = False
    template_words: ClassVar[str]
    """Words of the pipeline's template, which become tokens of a tokenizer that is made here."""
    build_vae: ClassVar[Callable[..., nn.Module]]
    """Makes the autoencoder of a description."""

    @classmethod
    def blueprint(cls) -> Blueprint:
        """As ``DiffusionModel``; ``build`` raises MissingDependencyError without torchvision."""

        def build_processor(words: Sequence[str] = ()) -> Qwen2VLProcessor:
            return build_qwen_vl_processor(build_qwen_tokenizer(words, cls.template_words))

        return Blueprint(
            denoiser="Kandinsky5Transformer3DModel",
            vae=cls.build_vae,
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
            outputs=("out_layer.out_layer",),
        )

    @property
    def longest_side(self) -> int:
        return self.probe_size * LARGEST_GRID

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

        def embed(prompt: str) -> dict[str, Tensor]:
            embeds, pooled, _ = self.pipeline.encode_prompt(prompt, max_sequence_length=length, device=self.device)
            return {**pad_embeds(embeds, length), "pooled": pooled}

        return embed_one_by_one(prompts, embed)

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        width_of_clip = self.pipeline.text_encoder_2.config.hidden_size
        return {
            **super().embedding_shapes(height, width),
            "pooled": ((width_of_clip,), self.pipeline.text_encoder.dtype),
        }

    def predict_rows(
        self,
        inputs: Tensor,
        sigma: Tensor,
        embeddings: dict[str, Tensor],
        scale_factor: tuple[float, float, float] = (1.0, 1.0, 1.0),
    ) -> Tensor:
        """Runs the network on one sample at a time.

        Args:
            inputs: ``[B, C, F, H, W]``, with all channels that the network takes.
            sigma: noise levels ``[B]``.
            embeddings: of B prompts.
            scale_factor: by which positions in time, height and width are divided.

        Returns:
            The velocity ``[B, C, F, H, W]``, of the channels of the latents.
        """
        dtype = self.input_dtype
        prompts = embeddings["prompt_embeds"].to(dtype)
        pooled = embeddings["pooled"].to(dtype)
        time = self.timestep(sigma.to(inputs.device)).to(dtype)
        frames, height, width = inputs.shape[2:]
        grid = [torch.arange(size, device=inputs.device) for size in (frames, height // PATCH, width // PATCH)]
        channels_last = inputs.permute(0, 2, 3, 4, 1)
        rows = [
            self.denoiser(
                hidden_states=channels_last[row : row + 1],
                encoder_hidden_states=prompts[row : row + 1, :length],
                timestep=time[row : row + 1],
                pooled_projections=pooled[row : row + 1],
                visual_rope_pos=grid,
                text_rope_pos=torch.arange(length, device=inputs.device),
                scale_factor=scale_factor,
                return_dict=False,
            )
            for row, length in enumerate(token_counts(embeddings["prompt_mask"]))
        ]
        return torch.cat(rows).permute(0, 4, 1, 2, 3)
