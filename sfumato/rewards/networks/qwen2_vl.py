"""What rewards made of Qwen2-VL share: its published weights, how a question is put to it, and its hidden states."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sfumato.config.trust import load_pretrained, make_from_config
from sfumato.errors import ConfigError
from sfumato.parallel.weights import build_on_meta
from sfumato.rewards.networks.folder import assign_tensors

if TYPE_CHECKING:
    from transformers import BatchEncoding, Qwen2VLModel

INSTRUCTION_FILE = "instruction.txt"
PROMPT_FIELD = "{text_prompt}"
NAMES = ((r"^model\.(visual|language_model)\.", r"\1."), (r"^model\.", "language_model."))  # new and old transformers


def rename_weight(name: str) -> str:
    """The name that transformers' ``Qwen2VLModel`` has for a weight of a published file."""
    for pattern, replacement in NAMES:
        renamed = re.sub(pattern, replacement, name)
        if renamed != name:  # the second pattern matches what the first one does, and more
            return renamed
    return name


def read_instruction(path: Path, reward_tokens: tuple[str, ...]) -> str:
    """The question of a model, with ``{text_prompt}`` for the prompt.

    Raises ConfigError unless it holds this and each of the model's tokens once, the tokens in their order.
    """
    text = path.read_bytes().decode("utf-8")
    for part in (PROMPT_FIELD, *reward_tokens):
        if text.count(part) != 1:
            raise ConfigError(f"{path} must hold {part} exactly once: make it with sfumato.rewards.convert instruction")
    if sorted(reward_tokens, key=text.index) != list(reward_tokens):
        raise ConfigError(f"{path} must hold {', '.join(reward_tokens)} in this order")
    return text


def build_body(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    reward_tokens: tuple[str, ...],
    num_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """Qwen2-VL without its language head.

    Args:
        folder: with the ``config.json`` of the base model.
        weights: under the names of ``Qwen2VLModel``.
        reward_tokens: tokens that the base model lacks.
        num_tokens: those of the tokenizer, with the reward's.
        device, dtype: of the weights.

    Raises:
        ConfigError: the weights have another vocabulary, or are others than the model's.
    """
    from transformers import AutoConfig, AutoModel

    config = load_pretrained(AutoConfig, folder)
    embeddings = weights.get("language_model.embed_tokens.weight")
    if embeddings is not None:
        config.text_config.vocab_size = len(embeddings)  # with the tokens for the reward, as published
        if num_tokens > len(embeddings):
            raise ConfigError(
                f"model_path {folder}: the tokenizer has {num_tokens} tokens with {', '.join(reward_tokens)}, the "
                f"weights have {len(embeddings)}: take the tokenizer of the model that they were trained from"
            )
    model = build_on_meta(lambda: make_from_config(AutoModel, config, attn_implementation="sdpa", dtype=dtype))
    return assign_tensors(model, {name: tensor.to(device, dtype) for name, tensor in weights.items()}, folder).to(
        device
    )


def scaled_size(height: int, width: int, least_pixels: int, most_pixels: int) -> tuple[int, int]:
    """Height and width of a scaled picture: multiples of 28 with about ``least_pixels`` to ``most_pixels`` pixels."""
    # Qwen2-VL's patches of 14 pixels are merged two by two, so sides are multiples of 28
    sides = [max(28, round(side / 28) * 28) for side in (height, width)]
    if math.prod(sides) > most_pixels:
        shrink = math.sqrt(height * width / most_pixels)
        sides = [max(28, math.floor(side / shrink / 28) * 28) for side in (height, width)]
    elif math.prod(sides) < least_pixels:
        grow = math.sqrt(least_pixels / (height * width))
        sides = [math.ceil(side * grow / 28) * 28 for side in (height, width)]
    return sides[0], sides[1]


def format_chat(vision: str, question: str) -> str:
    """The conversation as Qwen2-VL's chat template writes it, with the tokens of a picture or video."""
    return (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n<|vision_start|>{vision}<|vision_end|>{question}<|im_end|>\n<|im_start|>assistant\n"
    )


def hidden_states(model: Qwen2VLModel, tokens: BatchEncoding, features: Any, placeholder: int) -> torch.Tensor:
    """Hidden states of the last layer, ``[B, L, D]``.

    Args:
        model: Qwen2-VL without its language head.
        tokens: what the tokenizer gives for B texts, padded on the right.
        features: what the image encoder gives for their pictures or videos.
        placeholder: token whose places the features take.
    """
    embeddings = model.get_input_embeddings()(tokens.input_ids)
    is_seen = (tokens.input_ids == placeholder).unsqueeze(-1)
    embeddings = embeddings.masked_scatter(is_seen, torch.cat(tuple(features.pooler_output)).to(embeddings))
    # Positions simply count the tokens, also those of the image: so these rewards were trained.
    return model.language_model(
        inputs_embeds=embeddings, attention_mask=tokens.attention_mask, use_cache=False
    ).last_hidden_state
