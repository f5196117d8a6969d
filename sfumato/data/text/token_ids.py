"""Tokens and texts of single texts, which transformers' annotations do not tell from those of lists of texts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sfumato.data.text.stop_strings import Decode


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that fills rows up; a tokenizer without one was given one when it was loaded."""
    return cast("int", tokenizer.pad_token_id)


def token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    """The number of a token."""
    return cast("int", tokenizer.convert_tokens_to_ids(token))


def decode_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], **options: bool) -> str:
    """The text of some tokens; options are those of transformers' ``decode``."""
    return cast("str", tokenizer.decode(cast("list[int]", token_ids), **options))  # any sequence is taken


def whole_decode(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Decodes the tokens of a text, special tokens included, as they are."""
    return partial(decode_text, tokenizer, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def token_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """A function that gives the text of one token within an answer, its space before it included; it remembers texts.

    Some tokenizers drop the space of the first token that they decode, so each is decoded behind another one.
    """
    decode = whole_decode(tokenizer)
    before = list(tokenizer.encode("a", add_special_tokens=False))[-1:]
    prefix = decode(before)

    @functools.cache
    def text_of(token: int) -> str:
        text = decode([*before, token])
        return text[len(prefix) :] if text.startswith(prefix) else decode([token])

    return text_of
