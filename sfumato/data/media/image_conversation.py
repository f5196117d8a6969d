"""Conversations with images, videos and audio: where a row holds these, and how they become tokens of a document."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from sfumato.config.open_mappings import JsonObject
from sfumato.config.text_data import TextDataConfig
from sfumato.data.files.file_columns import find_file
from sfumato.data.files.row_table import FiledRow
from sfumato.data.media.document_media import Span, images_of
from sfumato.data.media.kinds import NAMES, AudioFile, Medium, VideoFile
from sfumato.data.media.limits import ImageLimits, MediaLimits
from sfumato.data.media.vision import MediaProcessor
from sfumato.data.text.chat import ChatTemplate
from sfumato.data.text.chat_message import Messages
from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.format import TextFormat, TextTransform, build_template, fit
from sfumato.data.text.messages import read_tools
from sfumato.data.text.row_layouts import CONVERSATION_KEYS, read_conversation
from sfumato.data.text.tokenise import Asking, Tokens, ask_alone
from sfumato.errors import DataError

COLUMNS = {"image": ("images", "image"), "video": ("videos", "video"), "audio": ("audios", "audio")}
"""Columns of a row's media by kind, each a list or a single value. ``<image>``, ``<video>`` or ``<audio>`` in a
message's text marks the place of the next one of its column."""

KEYS = ("path", "url", "bytes", "base64")
"""Keys of a message's part that may hold its file, besides the key that is called like the part's type."""

PART_LIMITS = (
    *("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width"),
    *("fps", "nframes", "num_frames", "sample_fps", "min_frames", "max_frames"),
    *("video_start", "video_end", "start", "end", "start_time", "end_time"),
)
"""Keys of a message's part by which qwen_vl_utils and others size or cut one medium alone, which is refused here."""

OTHER_MARK = re.compile(r"<(img|video|audio)>[^<\n]+</\1>|<\|?(image|video|audio)[ _-]?\d+\|?>")
"""How data for the first Qwen-VL and Qwen-Audio, and older data of ms-swift, names a file within a text, and how data
of MMMU and for Phi-3 numbers it."""

BOX_MARK = re.compile(r"<(bbox|ref-object)>")
"""What ms-swift replaces by values of a row's column ``objects``."""


@dataclass(frozen=True)
class ImageConversation(ImageLimits, TextFormat):
    """Conversations with images, of which the assistant's messages are in the loss; columns messages or conversations,
    and images."""

    type: ClassVar[str] = "image_conversation"
    has_images: ClassVar[bool] = True

    def transform(self, config: TextDataConfig, tokenizer: Any) -> TextTransform:
        """As ``TextFormat``; ``tokenizer`` is what ``limited`` returned."""
        reader: MediaProcessor = tokenizer
        template, fingerprint = build_template(config, reader.tokenizer, reader.fingerprint)
        keys = config.text_keys or CONVERSATION_KEYS
        transform = ImageConversationTransform(template, reader, keys, config.max_seq_len, config.overlong, fingerprint)
        return cast("TextTransform", transform)  # it is given rows that know their folder, as ``has_images`` promises


@dataclass(frozen=True)
class MediaConversation(MediaLimits, ImageConversation):
    """Conversations with images, videos and audio, of which the assistant's messages are in the loss; columns messages
    or conversations, images, videos and audios."""

    type: ClassVar[str] = "media_conversation"


@dataclass(frozen=True)
class ImageConversationTransform:
    """A conversation with the kinds of media that the reader takes; the loss mask holds the assistant's tokens."""

    documents_per_sample: ClassVar[int] = 1
    has_images: ClassVar[bool] = True
    draws: ClassVar[bool] = False
    """Whether media may stand in answers, too."""
    template: ChatTemplate
    reader: MediaProcessor
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

    def files(self, row: FiledRow, where: str) -> list[Medium]:
        """The media of a row, in the order of its messages."""
        return self._read(row, where)[1]

    def asks(self, row: FiledRow, where: str) -> Asking[list[TextSample]]:
        """The samples of a row, as a generator that asks for the tokens of texts (see ``TextTransform``).

        Every image and video is read, so that a broken one is found before the run.
        """
        messages, files = self._read(row, where)
        placed = self._place(files, where)
        documents = yield from self._documents(messages, files, placed, read_tools(row, where), where)
        return [TextSample((document,)) for document in documents]

    def _place(self, files: list[Medium], where: str) -> tuple[list[str], np.ndarray]:
        """The placeholder text of each medium, and the shapes of ``MediaRefs``, int32 ``[n, 3]``."""
        return self.reader.place_files(files, where)

    def _documents(
        self,
        messages: Messages,
        files: list[Medium],
        placed: tuple[list[str], np.ndarray],
        tools: Sequence[Mapping[str, object]] | None,
        where: str,
    ) -> Asking[list[Document]]:
        """The documents that the template makes of a conversation: one, or one for each answer.

        Args:
            messages: whose contents are lists of parts.
            files: of the media, in the order of the messages.
            placed: as of ``_place``.
            tools: that the messages may call.
            where: file and row, for messages.
        """
        replacements, shapes = placed
        counts = []

        def expand(text: str, spans: list[Span], num_messages: int) -> tuple[str, list[Span]]:
            # A document may hold the first messages alone: its media are the first ones, up to this count.
            shown = [message.get("content") or [] for message in messages[:num_messages]]
            counts.append(sum(part["type"] != "text" for content in shown for part in content))
            return self.reader.expand(text, spans, replacements[: counts[-1]], where)

        encoded = yield from self.template.asks(messages, where, tools, expand)
        documents = []
        for tokens, count in zip(encoded, counts, strict=True):
            document = fit(tokens, self.max_seq_len, self.overlong, where)
            if len(document.input_ids) < len(tokens[0]) and self._is_medium(tokens[0])[len(document.input_ids) :].any():
                raise DataError(
                    f"{where}: cut to data.max_seq_len {self.max_seq_len} tokens it would lose an image or a video"
                )
            if not self.reader.draws and (document.loss_mask & self._is_medium(document.input_ids)).any():
                raise DataError(
                    f"{where}: an image or other medium stands in an answer that is learned, but this model is not "
                    "trained to draw: put it into a message of the user, or give the answer loss_mask 0"
                )
            images = images_of(files[:count], shapes[:count], where)
            documents.append(Document(document.input_ids, document.loss_mask, images=images))
        return documents

    def _is_medium(self, input_ids: np.ndarray) -> np.ndarray:
        """Which tokens stand for a part of a medium: bool ``[L]``."""
        return self.reader.kinds(input_ids) != 0

    def _read(self, row: FiledRow, where: str) -> tuple[Messages, list[Medium]]:
        """The messages of a row, whose contents are lists of parts, and the media that these name."""
        return self._take(read_conversation(row, self.keys, where), row, where)

    def _take(self, messages: Messages, row: FiledRow, where: str) -> tuple[Messages, list[Medium]]:
        """As ``_read``, for messages that have been read from the row."""
        return take_media(messages, row, where, self.reader.media, self.draws)


def take_media(
    messages: Messages, row: FiledRow, where: str, media: Sequence[str] = ("image",), draws: bool = False
) -> tuple[Messages, list[Medium]]:
    """Messages whose contents are lists of parts, and the files of the images and other media that these name.

    Args:
        messages: of a row; they stay as they are.
        row: its columns may hold files, and it knows the folder that paths are relative to.
        where: file and row, for messages.
        media: kinds of media that are allowed.
        draws: whether a mark in an answer asks for a file, too, and is no text that the model is to write.

    Raises:
        DataError: when a file is missing or is no file, a file of a column has no place in a message, or a mark in a
            message that is a text has no file.
    """
    unplaced_files = {kind: _read_column(row, kind, where) for kind in media}
    num_files = {kind: len(column) for kind, column in unplaced_files.items()}
    files = []
    messages = [dict(message) for message in messages]
    for index, message in enumerate(messages):
        if message.get("content") is None:
            continue
        place = f"{where}: message {index + 1}"
        if row.get("objects") is not None and (mark := BOX_MARK.search(str(message["content"]))):
            raise DataError(
                f"{place}: {mark[0]} stands for a value of column 'objects' in data of ms-swift, which is not filled "
                "in here: write names and boxes into the text, in the form and the coordinates of the model"
            )
        if isinstance(message["content"], str) and (draws or message.get("role") != "assistant"):
            _refuse_marks_without_files(message["content"], place, num_files)
            _refuse_marks_not_read(message["content"], place, row, media)
        parts = []
        for part in _split_content(message["content"], place, num_files):
            if part["type"] == "text":
                parts.append({"type": "text", "text": part["text"]})
                continue
            kind = part["type"]
            value = next((part[key] for key in (kind, *KEYS) if part.get(key) is not None), None)
            if value is None and not unplaced_files[kind]:
                raise DataError(
                    f"{place}: {NAMES[kind]} is missing: the message names no file ({', '.join((kind, *KEYS))}), and "
                    f"the row's column '{COLUMNS[kind][0]}' has {num_files[kind]}"
                )
            if value is None:
                next_index = num_files[kind] - len(unplaced_files[kind])
                if part["index"] not in (None, next_index):
                    raise DataError(
                        f"{place}: {NAMES[kind]} of index {part['index']} stands where that of index {next_index} "
                        f"would: give the column '{COLUMNS[kind][0]}' in the order in which the messages show it"
                    )
                value = unplaced_files[kind].pop(0)
            file = find_file({kind: value}, kind, row.folder, place, kind)
            files.append({"video": VideoFile, "audio": AudioFile}[kind](file) if kind != "image" else file)
            parts.append({"type": kind})
        message["content"] = parts
    for kind, unplaced in unplaced_files.items():
        if unplaced:
            raise DataError(
                f"{where}: {len(unplaced)} of {num_files[kind]} {kind}s in its column have no place in a message: put "
                f"<{kind}> where {NAMES[kind]} belongs, or a part of type {kind}"
            )
    return messages, files


def _read_column(row: FiledRow, kind: str, where: str) -> list[object]:
    """The media of one kind in a row's column; empty where the row has no such column, or an empty one."""
    names = [name for name in COLUMNS[kind] if row.get(name) not in (None, "", [])]
    if not names:
        return []
    if len(names) > 1:
        raise DataError(f"{where}: both columns '{names[0]}' and '{names[1]}' hold {kind}s: leave one of them out")
    name = names[0]
    value = row[name]
    values = value if isinstance(value, list) else [value]
    if any(item is None for item in values):
        raise DataError(f"{where}: {NAMES[kind]} of column {name!r} is null")
    return list(values)


def _refuse_marks_without_files(text: str, place: str, num_files: Mapping[str, int]) -> None:
    """Raises DataError for a mark such as ``<image>`` in a message that is a text, in a row without files of its kind.

    The model would be trained on the mark's letters, and without the image. Arguments are those of ``_split_content``.
    """
    if mark := OTHER_MARK.search(text):
        kind = (mark[1] or mark[2]).replace("img", "image")
        raise DataError(
            f"{place}: {mark[0]}, as in data of MMMU or for the first Qwen-VL, is not read: write <{kind}> there, and "
            f"the file in the column '{COLUMNS[kind][0]}'"
        )
    for kind in (kind for kind, number in num_files.items() if not number):
        if f"<{kind}>" in text:
            raise DataError(
                f"{place}: <{kind}> stands for {NAMES[kind]}, and the row's column '{COLUMNS[kind][0]}' holds none: "
                "give it; a text that only mentions it is written as a list of parts, "
                '[{"type": "text", "text": ...}]'
            )


def _refuse_marks_not_read(text: str, place: str, row: FiledRow, media: Sequence[str]) -> None:
    """Raises DataError for a mark with a file in the row's column, of a kind that is not among ``media``."""
    for kind in (kind for kind in COLUMNS if kind not in media and f"<{kind}>" in text):
        if _read_column(row, kind, place):
            raise DataError(
                f"{place}: <{kind}> stands for {NAMES[kind]}, which is not read here: take data.data_type "
                "media_conversation (media_preference, of RL media_prompts) and a model that takes it"
            )


def _split_content(content: object, place: str, num_files: Mapping[str, int]) -> list[JsonObject]:
    """The parts of a message's content, in order: texts, images and other media.

    A mark such as ``<image>`` in a text becomes a part where the row's column holds files of that kind; otherwise it
    stays text.

    Args:
        content: of a message.
        place: file, row and message, for errors.
        num_files: files in the row's column by kind, of the kinds that are allowed.

    Raises:
        DataError: when the content is neither a text nor a list of such parts.
    """
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise DataError(f"{place}: content must be a text, or a list of parts of type text or {' or '.join(num_files)}")
    marks = {f"<{kind}>": kind for kind, number in num_files.items() if number}
    parts: list[JsonObject] = []
    for part in content:
        kind = str(part.get("type"))
        if kind.removesuffix("_url") in num_files:
            if refused := next((key for key in PART_LIMITS if part.get(key) is not None), None):
                raise DataError(
                    f"{place}: {refused} of a single part cannot be followed: the limits of data.data_type are for all "
                    "media, and videos are read whole: remove it"
                )
            value = part.get(kind) if kind.endswith("_url") else None
            kind = kind.removesuffix("_url")
            url = value["url"] if isinstance(value, dict) else value  # OpenAI's parts nest the address in a mapping
            parts.append({"type": kind, "url": url, "index": part.get("index")} | _source_of(part, kind))
        elif kind == "text" and isinstance(part.get("text"), str):
            for text in re.split(f"({'|'.join(marks)})", part["text"]) if marks else [part["text"]]:
                parts += [
                    {"type": marks[text], "index": None} if text in marks else {"type": "text", "text": text}
                ] * bool(text)
        elif kind == "text":
            raise DataError(f"{place}: a part of type 'text' has no text under 'text'")
        else:
            names = ", ".join(NAMES[name] for name in num_files)
            hint = " (data.data_type media_conversation reads it)" if kind.startswith(("video", "audio")) else ""
            raise DataError(f"{place}: a part of type {kind!r} is neither a text nor {names}{hint}")
    return parts


def _source_of(part: Mapping[str, object], kind: str) -> dict[str, object]:
    """The keys of a part that hold its file; base64 becomes a data URL."""
    sources = {key: part[key] for key in (kind, *KEYS) if part.get(key) is not None}
    return {"url": f"data:;base64,{sources['base64']}"} if "base64" in sources else sources
