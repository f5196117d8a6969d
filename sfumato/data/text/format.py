"""The base of data formats, which turn rows into token sequences, and what formats share."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeGuard, TypeVar, cast

import numpy as np

from sfumato.config.text_data import TextDataConfig
from sfumato.data.text.answer_end import facts_of
from sfumato.data.text.chat import ChatTemplate, build_chat_template
from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.generation_blocks import GENERATION
from sfumato.data.text.tokenise import check_fast, stay_in_one_thread
from sfumato.errors import ConfigError, DataError, OverlongError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from sfumato.data.files.row_table import FiledRow
    from sfumato.data.media.kinds import Medium
    from sfumato.data.media.vision import MediaProcessor
    from sfumato.data.text.chat import Encoded

Rendered = TypeVar("Rendered")

VERSION = 2
"""To be raised when the same rows become other tokens, so that token stores made before are not used."""


class TextTransform(Protocol):
    """Turns rows into samples. It must be picklable, since it runs in worker processes.

    A transform whose documents have ``numbers`` sets ``has_numbers = True``. One whose documents have media is a
    ``MediaTransform``.

    Two optional methods, ``asks`` and ``encode``, let the texts of many rows be encoded together: ``asks(row, where)``
    is a generator that yields lists of texts, is sent the tokens of each, and returns what a call would return;
    ``encode(texts)`` makes these tokens (see ``sfumato.data.text.row_samples``).
    """

    documents_per_sample: ClassVar[int]
    if TYPE_CHECKING:  # read-only, so that a field of a frozen dataclass fits

        @property
        def fingerprint(self) -> str: ...

    else:
        fingerprint: str
        """Identifies everything that changes the samples of a row."""

    def __call__(self, row: dict[str, object], where: str) -> list[TextSample]:
        """The samples of a row, at least one. Raises DataError that names ``where``."""
        ...


class MediaTransform(TextTransform, Protocol):
    """A transform whose documents have media. It gets rows that know their ``folder`` (``FiledRow``)."""

    has_images: ClassVar[bool]
    """True."""
    if TYPE_CHECKING:

        @property
        def reader(self) -> MediaProcessor: ...

    else:
        reader: MediaProcessor
        """Opens the media; ``data.cache_media`` alone asks for it."""

    def files(self, row: FiledRow, where: str) -> Sequence[Medium]:
        """All media of a row. Raises DataError that names ``where``."""
        ...


def has_media(transform: TextTransform) -> TypeGuard[MediaTransform]:
    """Whether the documents of a transform have media."""
    return getattr(transform, "has_images", False)


@dataclass(frozen=True)
class TextFormat(ABC):
    """What the rows of ``data`` hold: base of every format, whose fields are its parameters.

    A subclass states ``type: ClassVar[str]`` and makes the transform. One from elsewhere is named by import path,
    ``data_type: my_module:MyFormat``.
    """

    type: ClassVar[str]
    documents_per_sample: ClassVar[int] = 1
    """2 for a better and a worse answer, which tasks/train_text_dpo.py compares."""
    numbers: ClassVar[str] = ""
    """What the numbers are that documents say of tokens: margins (at the last token of the better answer), labels (at
    the last token of an answer) or steps (at the tokens that end them); empty: there are none."""
    has_images: ClassVar[bool] = False
    """Whether documents may have images; then ``transform`` is given a ``MediaProcessor`` instead of a tokenizer."""
    draws: ClassVar[bool] = False
    """Whether images in messages of the assistant are drawn."""
    has_answers: ClassVar[bool] = True
    """Whether the loss mask holds answers, the last token of which ends them."""
    ignores: ClassVar[tuple[str, ...]] = ()
    """Fields of ``data`` that have no effect."""

    def limited(self, reader: MediaProcessor) -> MediaProcessor:
        """The reader of a model's images with the limits of this format."""
        return reader

    @abstractmethod
    def transform(self, config: TextDataConfig, tokenizer: Any) -> TextTransform:
        """What makes samples of rows.

        Args:
            config: the data section.
            tokenizer: a fast transformers tokenizer.

        Raises:
            ConfigError: when tokenizer, chat template and format do not fit together.
        """


def build_transform(
    config: TextDataConfig, tokenizer: PreTrainedTokenizerBase, reader: MediaProcessor | None = None
) -> TextTransform:
    """The transform that turns the rows of ``data`` into samples; arguments and errors as ``TextFormat.transform``.

    ``reader`` is the one of a model with images or sound.
    """
    check_fast(tokenizer)
    stay_in_one_thread()
    if config.data_type.has_images and reader is None:
        raise ConfigError(f"data.data_type {config.data_type.type} needs a model that sees images")
    transform = config.data_type.transform(config, reader if config.data_type.has_images else tokenizer)
    if config.chat_template_options != getattr(getattr(transform, "template", None), "options", {}):
        raise ConfigError(
            f"data.chat_template_options: the format {config.data_type.type} does not give them to its chat template: "
            "remove them, or let its transform have a template that build_chat_template makes with them"
        )
    return transform


def fingerprint_of(config: TextDataConfig, tokenizer: PreTrainedTokenizerBase, templates: list[str]) -> str:
    """A hash of what the tokens of a row depend on: settings, tokenizer, chat templates and the code of the format."""
    # ``build_transform`` takes fast tokenizers alone
    backend = json.loads(cast("PreTrainedTokenizerFast", tokenizer).backend_tokenizer.to_str())
    # The state of truncation and padding is left out, since calls of the tokenizer change it.
    backend = {key: value for key, value in backend.items() if key not in ("truncation", "padding")}
    settings = config.model_dump(include={"data_type", "text_keys", "max_seq_len", "overlong"})
    parts = [VERSION, backend, tokenizer.special_tokens_map, templates, settings, *source_of(config.data_type)]
    if not templates:
        parts.append("a text that carries its own end gets no other")
    if templates and (end_fingerprint := facts_of(tokenizer).fingerprint):
        parts.append(end_fingerprint)
    if any(GENERATION.search(template) for template in templates):
        parts.append("an answer that is shown in part has a sample of its own")
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def build_template(
    config: TextDataConfig, tokenizer: PreTrainedTokenizerBase, *other_parts: str
) -> tuple[ChatTemplate, str]:
    """The chat template of ``data``, and the fingerprint of a format that renders rows by it; ``other_parts`` are what
    their tokens depend on besides. Raises as ``build_chat_template``."""
    template = build_chat_template(config.chat_template, tokenizer, config.chat_template_options)
    return template, fingerprint_of(config, tokenizer, [template.text, template.tool_text, *other_parts])


def source_of(text_format: TextFormat) -> list[str]:
    """The source code of a user's own format, changes of which may make other tokens; empty for formats of sfumato."""
    module = sys.modules[type(text_format).__module__]
    return [] if module.__name__.startswith("sfumato.") else [inspect.getsource(module)]


def find_key(row: Mapping[str, object], keys: list[str], where: str) -> str:
    """The first of ``keys`` that the row has a value for. Raises DataError that lists the row's columns."""
    for key in keys:
        if row.get(key) is not None:
            return key
    raise DataError(f"{where}: no column {' or '.join(map(repr, keys))}; its columns are {', '.join(map(str, row))}")


def refuse_equal(documents: Sequence[Document], names: Sequence[str], where: str) -> None:
    """Raises DataError when a better and a worse answer have the same tokens: such a pair teaches nothing."""
    better, worse = documents
    if np.array_equal(better.input_ids, worse.input_ids):
        raise DataError(
            f"{where}: {' and '.join(names)} are the same {len(better.input_ids)} tokens, cut to data.max_seq_len "
            "where they were longer"
        )


def single_answer(rendered: Sequence[Rendered], where: str) -> Rendered:
    """The only one of what a chat template renders a conversation as. Raises DataError where there are several."""
    if len(rendered) > 1:
        raise DataError(
            f"{where}: the chat template renders earlier answers anew after each message, so an answer of several "
            "assistant messages is no single text"
        )
    return rendered[0]


def fit(encoded: Encoded, max_seq_len: int, overlong: str, where: str) -> Document:
    """Makes a document of at most ``max_seq_len`` tokens.

    Args:
        encoded: the tokens and their loss mask.
        max_seq_len: most tokens.
        overlong: what to do with a longer one: ``stop``, ``skip`` or ``truncate``.
        where: file and row, for messages.

    Raises:
        OverlongError: when it is longer and ``overlong`` is ``stop``.
        DataError: when it is longer and ``overlong`` is ``skip``, or nothing of its loss mask remains.
    """
    input_ids, loss_mask = encoded
    if len(input_ids) > max_seq_len:
        too_long = f"{where}: has {len(input_ids)} tokens, more than data.max_seq_len {max_seq_len}"
        if overlong == "stop":
            raise OverlongError(f"{too_long}; raise it, or set data.overlong to skip or truncate")
        if overlong == "skip":
            raise DataError(too_long)
        input_ids, loss_mask = input_ids[:max_seq_len], loss_mask[:max_seq_len]
        if not loss_mask.any():
            raise DataError(f"{too_long}, and the first {max_seq_len} hold nothing to learn")
    return Document(input_ids, loss_mask)
