"""What the frozen parts of a diffusion model take while they work: text encoders and autoencoder, on meta."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sfumato.config.open_mappings import Keywords
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.frozen_parts import EMBED_BATCH
from sfumato.models.estimate.peak_memory import peak_bytes

TAKE_MASKS = {"t5gemma", "qwen3", "gemma3_text"}
"""Language models that would make masks of the values of tokens or positions, which there are none of on meta."""

TEMPLATE_TOKENS = 64
"""Tokens of the template around a prompt that a language model reads, of which its embedding has none."""


@torch.no_grad()
def decoding_bytes(model: DiffusionModel, size: tuple[int, int]) -> int:
    """Bytes of the activations while pictures or videos are decoded, as many at a time as ``decode`` takes.

    Args:
        model: on meta.
        size: height and width in pixels; a video has ``model.frames`` frames.
    """
    latents = torch.empty(1, *model.latent_shape(*size, model.frames), device="meta")
    chunk = latents.expand(model.decoded_at_a_time(latents), *latents.shape[1:])
    return peak_bytes(lambda: model.latents_to_pixels(chunk).float().add(1).clamp(0, 1))


@torch.no_grad()
def encoding_bytes(model: DiffusionModel, size: tuple[int, int]) -> int:
    """Bytes of the activations while prompts are embedded, the longest that are read.

    Args:
        model: on meta.
        size: height and width in pixels of a prompt's image, for a family that takes one.
    """
    shapes = model.embedding_shapes(*size)
    longest = max((shape[0] for shape, _ in shapes.values() if len(shape) == 2), default=1)
    parts = [model.components[name] for name in model.encoder_names if name in model.components]
    # those of diffusers embed a number, such as the length of a sound, and take next to nothing
    parts = [part for part in parts if hasattr(part.config, "get_text_config")]
    return max((peak_bytes(partial(_encode, part, longest, model.max_sequence_length)) for part in parts), default=0)


def _encode(part: Any, length: int, prompt_length: int) -> object:
    """Runs an encoder on prompts of the greatest length; a language model reads them one by one.

    Args:
        part: the encoder, on meta.
        length: tokens of an embedding, those of a prompt's image included.
        prompt_length: ``model.max_sequence_length``.
    """
    config = part.config
    if hasattr(config, "image_size"):  # it reads the first frame of a video
        side = config.image_size
        return part(pixel_values=torch.empty(1, 3, side, side, device="meta", dtype=part.dtype))
    if hasattr(config.get_text_config(), "num_key_value_heads"):
        width = config.get_text_config().hidden_size
        embedded = torch.empty(1, length + TEMPLATE_TOKENS, width, device="meta", dtype=part.dtype)
        decoder = part.get_decoder() if hasattr(part, "lm_head") else part
        masks = dict.fromkeys(("full_attention", "sliding_attention"))
        kinds = {config.model_type, config.get_text_config().model_type}
        masked: Keywords = {"attention_mask": masks} if kinds & TAKE_MASKS else {}
        if "qwen3_vl" in kinds:
            # in positions of one dimension transformers looks for packed sequences, which cannot be seen on meta
            masked["position_ids"] = torch.empty(3, *embedded.shape[:2], dtype=torch.int64, device="meta")
        return getattr(decoder, "language_model", decoder)(
            inputs_embeds=embedded, output_hidden_states=True, use_cache=False, **masked
        )
    positions = getattr(config, "max_position_embeddings", None)  # of CLIP, whose last layers are taken; T5 has none
    ids = torch.zeros(EMBED_BATCH, positions or max(prompt_length, 1), dtype=torch.int64, device="meta")
    return part(input_ids=ids, output_hidden_states=positions is not None)
