"""Tokenisation of many texts in one call of the tokenizer, for work on rows that asks for the tokens of its texts."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeGuard, TypeVar

import numpy as np

from sfumato.config.open_mappings import Keywords
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

Result = TypeVar("Result")
Asking = Generator[list[str], list["Tokens"], Result]
"""Work on a row: a generator that yields texts, is sent their tokens, and returns what it made of them."""


class Tokens(NamedTuple):
    """The tokens of a text, L of them."""

    input_ids: np.ndarray
    """int32 ``[L]``"""
    starts: np.ndarray | None = None
    """First character of each token, int64 ``[L]``; None where it was not asked for."""
    ends: np.ndarray | None = None
    """Last character of each token, exclusive, int64 ``[L]``."""


@dataclass(frozen=True)
class Encoder:
    """Encodes texts without special tokens around them, as a call of the tokenizer with each text would."""

    tokenizer: PreTrainedTokenizerBase
    with_offsets: bool
    """Whether to return which characters the tokens come from, which takes longer."""

    def __call__(self, texts: list[str]) -> list[Tokens]:
        """The tokens of each text."""
        if not _is_plain(self.tokenizer):
            return [self._encode_by_call(text) for text in texts]
        # The backend keeps settings of earlier calls of the tokenizer: they are reset to what a call here would use.
        backend = self.tokenizer.backend_tokenizer
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if backend.encode_special_tokens != self.tokenizer.split_special_tokens:
            backend.encode_special_tokens = self.tokenizer.split_special_tokens
        if not self.with_offsets:
            encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
            return [Tokens(np.array(encoding.ids, np.int32)) for encoding in encodings]
        encodings = backend.encode_batch(texts, add_special_tokens=False)
        return [_with_offsets(encoding.ids, encoding.offsets) for encoding in encodings]

    def _encode_by_call(self, text: str) -> Tokens:
        """Encodes one text with a tokenizer whose class overrides how transformers encodes."""
        options: Keywords = {
            "add_special_tokens": False,
            "return_offsets_mapping": self.with_offsets,
            "verbose": False,
        }
        encoding = self.tokenizer(text, **options)
        if not self.with_offsets:
            return Tokens(np.array(encoding["input_ids"], np.int32))
        return _with_offsets(encoding["input_ids"], encoding["offset_mapping"])


def begins_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts its beginning-of-sequence token in front of a text by itself."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("")["input_ids"][:1] == [bos]


def with_bos(input_ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Puts the beginning-of-sequence token in front of a text's tokens if the tokenizer does so by itself.

    Tokens, int32 ``[L]``, that already begin with it stay as they are.
    """
    bos = tokenizer.bos_token_id
    if input_ids[:1].tolist() == [bos] or not begins_texts(tokenizer):
        return input_ids
    return np.concatenate([np.array([bos], np.int32), input_ids])


def check_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError for a slow tokenizer, which cannot tell which characters a token comes from."""
    if not tokenizer.is_fast:
        raise ConfigError(
            f"the tokenizer {type(tokenizer).__name__} does not say which characters a token comes from: "
            "model.tokenizer_path needs a fast one, with a tokenizer.json"
        )


def stay_in_one_thread() -> None:
    """Keeps tokenizers from starting a thread per core for a batch; ``data.num_workers`` sets the parallelism instead.

    A value of TOKENIZERS_PARALLELISM that the user has set stays. Child processes inherit it.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def ask_alone(asking: Asking[Result], encode: Callable[[list[str]], list[Tokens]]) -> Result:
    """Runs the work on one row alone and returns its result. Raises what it raises."""
    try:
        texts = next(asking)
        while True:
            texts = asking.send(encode(texts))
    except StopIteration as end:
        return end.value


def _is_plain(tokenizer: PreTrainedTokenizerBase) -> TypeGuard[PreTrainedTokenizerFast]:
    """Whether the tokenizer encodes a text as transformers' fast tokenizers do, with none of its methods overridden."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    base = PreTrainedTokenizerFast
    return kind.__call__ is base.__call__ and getattr(kind, "_encode_plus", None) is base._encode_plus


def _with_offsets(ids: list[int], offsets: Iterable[tuple[int, int]]) -> Tokens:
    """Tokens with the first and the last character of each."""
    places = np.fromiter(chain.from_iterable(offsets), np.int64).reshape(-1, 2)
    return Tokens(np.array(ids, np.int32), places[:, 0], places[:, 1])
