"""Base class of Hunyuan's families: prompts are read by Qwen2.5-VL, and what they quote by ByT5.

Shapes: B prompts, T tokens of Qwen2.5-VL with D features, G bytes with E features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato.errors import ConfigError
from sfumato.models.diffusion.latents import FlowSchedule


class HunyuanText(FlowSchedule):
    """Base class of Hunyuan's families: prompts are read by Qwen2.5-VL, and what they quote by ByT5."""

    encoder_names = ("text_encoder", "text_encoder_2")
    gives_sigmas = True
    knows_size = False

    def check_components(self) -> None:
        if self.denoiser.config.use_meanflow:  # which takes a second time
            raise ConfigError(
                f"{self.pipeline_class}: a transformer with use_meanflow is not trained: take another one"
            )

    @abstractmethod
    def read_prompts(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """What Qwen2.5-VL makes of B prompts, ``[B, T, D]``, and the mask of their tokens, int64 ``[B, T]``."""

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``prompt_mask`` of Qwen2.5-VL, T is ``max_sequence_length``, and
        ``glyph_embeds`` ``[B, G, E]`` and ``glyph_mask`` of ByT5; masks are bool ``[B, T]`` and ``[B, G]``."""
        embeds, mask = self.read_prompts(prompts)
        _, _, glyphs, glyph_mask = self.pipeline.encode_prompt(
            prompts, device=self.device, batch_size=len(prompts), prompt_embeds=embeds, prompt_embeds_mask=mask
        )
        return {
            "prompt_embeds": embeds,
            "prompt_mask": mask.bool(),
            "glyph_embeds": glyphs.to(embeds.dtype),
            "glyph_mask": glyph_mask.bool(),
        }

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        dtype = self.pipeline.text_encoder.dtype
        features = self.pipeline.text_encoder.config.get_text_config().hidden_size
        glyphs = self.pipeline.tokenizer_2_max_length
        return {
            "prompt_embeds": ((self.max_sequence_length, features), dtype),
            "prompt_mask": ((self.max_sequence_length,), torch.bool),
            "glyph_embeds": ((glyphs, self.pipeline.text_encoder_2.config.d_model), dtype),
            "glyph_mask": ((glyphs,), torch.bool),
        }

    def text_inputs(self, embeddings: dict[str, Tensor]) -> dict[str, Tensor]:
        """The network's arguments for the embeddings of prompts."""
        return {
            "encoder_hidden_states": embeddings["prompt_embeds"].to(self.input_dtype),
            "encoder_attention_mask": embeddings["prompt_mask"],
            "encoder_hidden_states_2": embeddings["glyph_embeds"].to(self.input_dtype),
            "encoder_attention_mask_2": embeddings["glyph_mask"],
        }
