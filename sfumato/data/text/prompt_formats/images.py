"""Prompts with images, videos and audio, for models that take these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from sfumato.data.media.image_conversation import COLUMNS, take_media
from sfumato.data.media.limits import ImageLimits, MediaLimits
from sfumato.data.text.chat_message import as_text
from sfumato.data.text.prompt_formats.base import PromptRow, other_columns
from sfumato.data.text.prompt_formats.files import Prompts
from sfumato.errors import DataError

if TYPE_CHECKING:
    from sfumato.data.files.row_table import FiledRow


@dataclass(frozen=True)
class ImagePrompts(ImageLimits, Prompts):
    """As ``prompts``, with images in the texts or messages and a column images."""

    type: ClassVar[str] = "image_prompts"
    has_images: ClassVar[bool] = True

    def read(self, row: dict[str, object], where: str) -> PromptRow:
        prompt = super().read(row, where)
        content = prompt.content
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        messages, files = take_media(messages, cast("FiledRow", row), where, self.media)
        for number, message in enumerate(messages, 1):
            if "content" in message and not as_text(message["content"]).strip():
                raise DataError(f"{where}: message {number}: content must be a text or an image, not nothing")
        columns = [name for kind in self.media for name in COLUMNS[kind]]
        return PromptRow(messages, other_columns(prompt.metadata, *columns), prompt.tools, files)


@dataclass(frozen=True)
class MediaPrompts(MediaLimits, ImagePrompts):
    """The same with images, videos and audio, and columns images, videos and audios."""

    type: ClassVar[str] = "media_prompts"
