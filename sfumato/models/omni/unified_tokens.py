"""Tokenizers of published models that draw, which split text into codes of images, too."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from tokenizers import AddedToken

from sfumato.errors import ConfigError
from sfumato.models.omni.hf_image_tokenizers import Emu3Codes, OwnCodes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

MADE = {
    "emu3": {
        "bos_token": "<|extra_203|>",
        "boi_token": "<|image start|>",
        "eoi_token": "<|image end|>",
        "image_wrapper_token": "<|image token|>",
        "eof_token": "<|extra_201|>",
        "image_token": "<image>",
    },
    "janus": {
        "bos_token": "<|begin|>",
        "boi_token": "<begin_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_placeholder>",
    },
    "chameleon": {
        "bos_token": "<s>",
        "boi_token": "<racm3:break>",
        "eoi_token": "<eoss>",
        "sep_token": "<reserved08706>",
        "image_token": "<image>",
    },
}
"""Tokens, by the names of the tokenizer's attributes that transformers' processors read, for models that are built from
a description."""


def add_own_tokens(tokenizer: PreTrainedTokenizerBase, described: PreTrainedConfig, code_names: list[str]) -> None:
    """Adds the tokens of a model to the tokenizer of bytes, and their ids to the model's configuration.

    Args:
        tokenizer: the tokenizer; it is changed.
        described: transformers' configuration of a model that is built from a description; it is changed.
        code_names: tokens of the codes of images that the vocabulary of the model contains.
    """
    named = dict(MADE[described.model_type])  # without the next two, which add_special_tokens takes by name
    lines = [Emu3Codes.LINE_END] if described.model_type == "emu3" else []
    special = {name: named.pop(name) for name in ("bos_token", "sep_token") if name in named}
    other_special = [
        token for token in tokenizer.all_special_tokens if token not in (tokenizer.eos_token, tokenizer.pad_token)
    ]
    all_special = [*other_special, *special.values(), *named.values(), *lines]
    tokenizer.add_special_tokens({**special, "additional_special_tokens": all_special})
    # so that they are saved with the tokenizer
    tokenizer._set_model_specific_special_tokens(named)  # pyright: ignore[reportArgumentType]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in code_names], special_tokens=True)  # pyright: ignore[reportArgumentType]
    if hasattr(described, "vocabulary_map"):
        names = [*named.values(), *lines, *code_names]
        described.vocabulary_map = dict(zip(names, tokenizer.convert_tokens_to_ids(names), strict=True))  # pyright: ignore[reportArgumentType, reportCallIssue]
    described.image_token_id = tokenizer.image_token_id


def with_codes(tokenizer: PreTrainedTokenizerBase, images: OwnCodes) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer that also splits text into codes of images, with the model's ids.

    Raises:
        ConfigError: when codes would get other ids than in the model.
    """
    extended = copy.deepcopy(tokenizer)
    num_gaps = max(images.ids[0] - len(extended), 0)
    gap_names = [f"<|no_token_{index}|>" for index in range(num_gaps)]  # ids of the model without a token
    for names in (gap_names, images.names):
        extended.add_tokens([AddedToken(name, special=True, normalized=False) for name in names], special_tokens=True)  # pyright: ignore[reportArgumentType]
    if extended.convert_tokens_to_ids(images.names) != images.ids:
        raise ConfigError(
            f"the tokenizer's tokens of images, {images.names[0]} to {images.names[-1]}, have other ids than in the "
            f"{images.kind} model: take the tokenizer of this model"
        )
    return extended
