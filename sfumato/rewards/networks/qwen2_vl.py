"""What rewards made of Qwen2-VL share: its published weights, how a question is put to it, and its hidden states."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sfumato.config.trust import load_pretrained, make_from_config
from sfumato.errors import ConfigError
from sfumato.parallel.weights import build_on_meta
from sfumato.rewards.networks.folder import (
    Network,
    assign_tensors,
    check_folder,
    check_model_type,
    load_image_processor,
    load_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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


class QwenRater(Network):
    """Base of networks that rate by the hidden states of tokens of their own, which stand in the question.

    A subclass makes ``model``, by ``build_body``, and its heads.
    """

    model: Any
    """Qwen2-VL without its language head."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        model_type: str,
        files: Sequence[str],
        reward_tokens: tuple[str, ...],
    ) -> None:
        """Raises ConfigError when the folder holds a model of another type, or lacks one of ``files``."""
        check_model_type(folder, (model_type,))
        check_folder(folder, *files)
        super().__init__(device, dtype)
        self.processor = load_image_processor(folder)
        self.tokenizer: PreTrainedTokenizerFast = load_tokenizer(folder)
        vocabulary = self.tokenizer.get_vocab()
        self.tokenizer.add_tokens([token for token in reward_tokens if token not in vocabulary], special_tokens=True)
        self.reward_ids = torch.tensor(self.tokenizer.convert_tokens_to_ids(list(reward_tokens)), device=device)

    def count_tokens(self, grids: torch.Tensor) -> list[int]:
        """Tokens that each picture or video takes in a text, by its grids of patches, int ``[B, 3]``."""
        return (grids.prod(dim=1) // self.processor.merge_size**2).tolist()

    def rated_states(self, texts: list[str], features: Any, placeholder: int) -> torch.Tensor:
        """Hidden states of the last layer at the reward tokens of B texts, one text after the other, float32.

        Args:
            texts: with ``placeholder`` in the places of pictures or videos.
            features: what the image encoder gives for these.
            placeholder: token whose places the features take.
        """
        tokens = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").to(self.device)
        embeddings = self.model.get_input_embeddings()(tokens.input_ids)
        is_seen = (tokens.input_ids == placeholder).unsqueeze(-1)
        embeddings = embeddings.masked_scatter(is_seen, torch.cat(tuple(features.pooler_output)).to(embeddings))
        # Positions simply count the tokens, also those of the image: so these rewards were trained.
        hidden = self.model.language_model(
            inputs_embeds=embeddings, attention_mask=tokens.attention_mask, use_cache=False
        ).last_hidden_state
        return hidden[torch.isin(tokens.input_ids, self.reward_ids)].float()


def split_head(
    tensors: Iterable[tuple[str, torch.Tensor]], prefix: str, device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of the body, by the names of ``Qwen2VLModel``, and those of the head, in float32, without the prefix
    of their names. They are moved one by one, so that the CPU's memory never holds all. The language head's are left
    out."""
    body: dict[str, torch.Tensor] = {}
    head: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name.startswith(prefix):
            head[name.removeprefix(prefix)] = tensor.to(device, torch.float32)
        elif not name.startswith("lm_head."):
            body[rename_weight(name)] = tensor.to(device, dtype)
    return body, head


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
