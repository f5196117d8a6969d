"""Prompts with images, videos and audio, for models that take these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from sfumato.data.media.image_conversation import COLUMNS, take_media
from sfumato.data.media.limits import ImageLimits, MediaLimits
from sfumato.data.text.chat_message import as_text
from sfumato.data.text.format import find_key
from sfumato.data.text.messages import read_tools
from sfumato.data.text.prompt_formats.base import PromptRow, other_columns, text_or_messages
from sfumato.data.text.prompt_formats.files import Prompts
from sfumato.errors import DataError

if TYPE_CHECKING:
    from sfumato.data.files.row_table import FiledRow


@dataclass(frozen=True)
class ImagePrompts(ImageLimits, Prompts):
    """A column of texts or of messages in which images stand, and a column images; all others are metadata."""

    type: ClassVar[str] = "image_prompts"
    has_images: ClassVar[bool] = True

    def read(self, row: dict[str, object], where: str) -> PromptRow:
        key = find_key(row, [self.prompt_key], where)
        content = text_or_messages(row[key], where, key)
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        messages, files = take_media(messages, cast("FiledRow", row), where, self.media)
        for number, message in enumerate(messages, 1):
            if "content" in message and not as_text(message["content"]).strip():
                raise DataError(f"{where}: message {number}: content must be a text or an image, not nothing")
        columns = [name for kind in self.media for name in COLUMNS[kind]]
        metadata = other_columns(row, key, "tools", *columns)
        return PromptRow(messages, metadata, read_tools(row, where), files)


@dataclass(frozen=True)
class MediaPrompts(MediaLimits, ImagePrompts):
    """The same with images, videos and audio, and columns images, videos and audios."""

    type: ClassVar[str] = "media_prompts"
