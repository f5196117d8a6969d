"""Pairs of a better and a worse answer to a prompt in which images and other media stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

from sfumato.config.text_data import TextDataConfig
from sfumato.data.files.row_table import FiledRow
from sfumato.data.media.image_conversation import ImageConversation, ImageConversationTransform, MediaConversation
from sfumato.data.media.kinds import NAMES, Medium
from sfumato.data.media.vision import MediaProcessor
from sfumato.data.text.chat_message import Messages
from sfumato.data.text.document import TextSample
from sfumato.data.text.format import TextTransform, build_template, refuse_equal, single_answer
from sfumato.data.text.messages import read_tools
from sfumato.data.text.pairs import read_pair
from sfumato.data.text.row_layouts import PAIRS, PREFERENCE_KEYS, convert_row
from sfumato.data.text.tokenise import Asking
from sfumato.errors import ConfigError, DataError


@dataclass(frozen=True)
class ImagePreference(ImageConversation):
    """Pairs of a better and a worse answer to a prompt with images; columns prompt, chosen, rejected and images."""

    type: ClassVar[str] = "image_preference"
    documents_per_sample: ClassVar[int] = 2

    def transform(self, config: TextDataConfig, tokenizer: Any) -> TextTransform:
        """As ``TextFormat``; ``tokenizer`` is what ``limited`` returned."""
        reader: MediaProcessor = tokenizer
        keys = config.text_keys or PREFERENCE_KEYS
        if len(keys) not in (2, 3):
            raise ConfigError(
                f"data.text_keys of {self.type} data must be two columns (better and worse conversation) or three "
                f"(prompt, better and worse answer), not {keys}"
            )
        template, fingerprint = build_template(config, reader.tokenizer, reader.fingerprint)
        transform = ImagePreferenceTransform(template, reader, keys, config.max_seq_len, config.overlong, fingerprint)
        return cast("TextTransform", transform)  # it is given rows that know their folder, as ``has_images`` promises


@dataclass(frozen=True)
class MediaPreference(ImagePreference, MediaConversation):
    """Pairs of a better and a worse answer to a prompt with images, videos and audio; columns prompt, chosen, rejected,
    images, videos and audios."""

    type: ClassVar[str] = "media_preference"


@dataclass(frozen=True)
class ImagePreferenceTransform(ImageConversationTransform):
    """A better and a worse answer to the same prompt with images; the loss masks hold the assistant's tokens.

    ``keys`` are the columns of the prompt, the better and the worse answer. There are two of them where the columns
    hold whole conversations, which begin with the prompt.
    """

    documents_per_sample: ClassVar[int] = 2

    def files(self, row: FiledRow, where: str) -> list[Medium]:
        """The images of a row, which both documents share."""
        return self._read_pair(row, where)[1]

    def asks(self, row: FiledRow, where: str) -> Asking[list[TextSample]]:
        """One sample: the better document, then the worse one, each with all images."""
        pair, files = self._read_pair(row, where)
        placed = self._place(files, where)
        tools = read_tools(row, where)
        documents = []
        for name, messages in zip(self.keys[-2:], pair, strict=True):
            answer_documents = yield from self._documents(messages, files, placed, tools, f"{where}, {name}")
            documents.append(single_answer(answer_documents, f"{where}, {name}"))
        refuse_equal(documents, self.keys[-2:], where)
        return [TextSample(tuple(documents))]

    def _read_pair(self, row: FiledRow, where: str) -> tuple[list[Messages], list[Medium]]:
        """Both conversations, whose contents are lists of parts, and the images, which are all in the shared prompt.

        Raises DataError when an answer holds an image.
        """
        columns = convert_row(PAIRS, row, "preference", where) if self.keys == PREFERENCE_KEYS else row
        pair = read_pair(columns, self.keys, where)
        conversations = []
        files = []
        shared = next(index for index, (chosen, rejected) in enumerate(zip(*pair, strict=False)) if chosen != rejected)
        for name, conversation in zip(self.keys[-2:], pair, strict=True):
            messages, files = self._take(conversation, row, where)
            answers = [part for message in messages[shared:] for part in message.get("content") or []]
            for kind in (part["type"] for part in answers if part["type"] != "text"):
                raise DataError(f"{where}: {NAMES[kind]} stands in the answer of {name}: {kind}s belong to the prompt")
            conversations.append(messages)
        return conversations, files
