"""Conversations in which images stand: where a row has them, and how they become tokens of a document."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from sfumato.config.text_data import TextDataConfig
from sfumato.data.chat import ChatTemplate, build_chat_template
from sfumato.data.pictures import File, find_file, read_image
from sfumato.data.row_samples import FiledRow
from sfumato.data.text import (
    Document,
    Messages,
    TextFormat,
    TextSample,
    TextTransform,
    find_key,
    fingerprint_of,
    fit,
    read_messages,
    read_tools,
)
from sfumato.data.tokenise import Asking, Tokens, ask_alone
from sfumato.data.vision import ImageReader, Images, Span
from sfumato.errors import DataError

MARK = "<image>"
"""What stands in a message's text where the next image of the row's column ``images`` belongs."""

COLUMNS = ("images", "image")
"""Columns of a row's images: a list, or one."""

KEYS = ("image", "path", "url", "bytes", "base64")
"""Where a part of a message of type image has its image."""


@dataclass(frozen=True)
class ImageConversation(TextFormat):
    """Conversations with images, of which the assistant's messages are in the loss; columns messages or conversations,
    and images."""

    type: ClassVar[str] = "image_conversation"
    has_images: ClassVar[bool] = True

    min_pixels: int | None = None
    """Smaller images are scaled up to so many pixels; null: the model's own limit."""
    max_pixels: int | None = None
    """Larger images are scaled down to so many pixels; null: the model's own limit."""

    def __post_init__(self) -> None:
        for name in ("min_pixels", "max_pixels"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")

    def limited(self, reader: ImageReader) -> ImageReader:
        """A reader that scales images as these fields say. Raises ConfigError when the model's processor cannot."""
        return reader.limited(self.min_pixels, self.max_pixels)

    def transform(self, config: TextDataConfig, tokenizer: Any) -> TextTransform:
        """As ``TextFormat``; ``tokenizer`` is what ``limited`` returned."""
        reader: ImageReader = tokenizer
        template = build_chat_template(config.chat_template, reader.tokenizer)
        made_of = fingerprint_of(config, reader.tokenizer, [template.text, template.tool_text, reader.fingerprint])
        keys = config.text_keys or ["messages", "conversations"]
        return ImageConversationTransform(template, reader, keys, config.max_seq_len, config.overlong, made_of)


@dataclass(frozen=True)
class ImageConversationTransform:
    """A conversation with images, of which the loss mask holds the assistant's tokens."""

    documents_per_sample: ClassVar[int] = 1
    has_images: ClassVar[bool] = True
    template: ChatTemplate
    reader: ImageReader
    keys: list[str]
    max_seq_len: int
    overlong: str
    fingerprint: str

    def __call__(self, row: FiledRow, where: str) -> list[TextSample]:
        """One sample, or one for each answer when the template renders the history of each in another way."""
        return ask_alone(self.asks(row, where), self.encode)

    def encode(self, texts: list[str]) -> list[Tokens]:
        """The tokens of texts, with their places."""
        return self.template.encoder(texts)

    def files(self, row: FiledRow, where: str) -> list[File]:
        """The images of a row, in the order of its messages."""
        return self._read(row, where)[1]

    def asks(self, row: FiledRow, where: str) -> Asking[list[TextSample]]:
        """As a call. Every image is read, so that broken ones are found before the run."""
        messages, files = self._read(row, where)
        opened = [read_image(file, where, still=True) for file in files]
        try:
            replacements, shapes = self.reader.place(opened)
        except ValueError as error:
            raise DataError(f"{where}: {type(self.reader.processor).__name__} refuses an image: {error}") from error
        counts: list[int] = []

        def expand(text: str, spans: list[Span], num_messages: int) -> tuple[str, list[Span]]:
            shown = [message.get("content") or [] for message in messages[:num_messages]]
            counts.append(sum(part["type"] == "image" for content in shown for part in content))
            return self.reader.expand(text, spans, replacements[: counts[-1]], where)

        encoded = yield from self.template.asks(messages, where, read_tools(row, where), expand)
        found = []
        for tokens, count in zip(encoded, counts, strict=True):
            document = fit(tokens, self.max_seq_len, self.overlong, where)
            if len(document.input_ids) < len(tokens[0]) and self._is_image(tokens[0])[len(document.input_ids) :].any():
                raise DataError(f"{where}: cut to data.max_seq_len {self.max_seq_len} tokens it would lose an image")
            images = Images(shapes[:count], partial(_first, files, count), where) if count else None
            found.append(TextSample((Document(document.input_ids, document.loss_mask, images=images),)))
        return found

    def _is_image(self, input_ids: Any) -> Any:
        return self.reader.kinds(input_ids) != 0

    def _read(self, row: FiledRow, where: str) -> tuple[Messages, list[File]]:
        """Messages whose contents are lists of parts, and the images that stand in them."""
        messages = read_messages(row[find_key(row, self.keys, where)], where)
        waiting = _column(row, where)
        given, files = len(waiting), []
        for index, message in enumerate(messages):
            if message.get("content") is None:
                continue
            place = f"{where}: message {index + 1}"
            parts = []
            for part in _parts(message["content"], place, given > 0):
                if part["type"] == "text":
                    parts.append({"type": "text", "text": part["text"]})
                    continue
                value = next((part[key] for key in KEYS if part.get(key) is not None), None)
                if value is None and not waiting:
                    raise DataError(f"{place}: an image is missing: the row's column 'images' has {given}")
                files.append(_open(waiting.pop(0) if value is None else value, row.folder, place))
                parts.append({"type": "image"})
            message["content"] = parts
        if waiting:
            raise DataError(
                f"{where}: {len(waiting)} of {given} images in its column have no place in a message: put {MARK} where "
                "an image belongs, or a part of type image"
            )
        return messages, files


def _first(files: list[File], count: int) -> Sequence[File]:
    return files[:count]


def _column(row: FiledRow, where: str) -> list[Any]:
    """The images of a row's own column."""
    name = next((name for name in COLUMNS if row.get(name) is not None), None)
    if name is None:
        return []
    value = row[name]
    images = value if isinstance(value, list) else [value]
    if any(image is None for image in images):
        raise DataError(f"{where}: an image of column {name!r} is null")
    return list(images)


def _parts(content: Any, place: str, has_column: bool) -> list[dict[str, Any]]:
    """Text and images of a message's content, in order; marks of images in a text become parts."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise DataError(f"{place}: content must be a text, or a list of parts of type text or image")
    found = []
    for part in content:
        kind = part.get("type")
        if kind in ("image", "image_url"):
            value = part.get("image_url")
            found.append({"type": "image", "url": value["url"] if isinstance(value, dict) else value} | _only(part))
        elif kind == "text" and isinstance(part.get("text"), str):
            texts = part["text"].split(MARK) if has_column else [part["text"]]
            for number, text in enumerate(texts):
                found += [{"type": "image"}] * (number > 0)
                found += [{"type": "text", "text": text}] * bool(text)
        else:
            raise DataError(f"{place}: a part of type {kind!r} is neither a text nor an image")
    return found


def _only(part: dict[str, Any]) -> dict[str, Any]:
    given = {key: part[key] for key in KEYS if part.get(key) is not None}
    return {"url": f"data:;base64,{given['base64']}"} if "base64" in given else given


def _open(value: Any, folder: Path, place: str) -> File:
    """The file of an image, or what it holds. Raises DataError that names the message."""
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        raise DataError(f"{place}: {value}: images are not downloaded: give a file, bytes, or a data: URL")
    if isinstance(value, str) and value.startswith("data:"):
        head, _, text = value.partition(",")
        if not head.endswith(";base64"):
            raise DataError(f"{place}: a data: URL of an image must be base64")
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise DataError(f"{place}: an image is no valid base64: {error}") from error
    if isinstance(value, str) and value.startswith("file://"):
        value = value.removeprefix("file://")
    return find_file({"image": value}, "image", folder, place)
