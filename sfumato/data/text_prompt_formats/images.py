"""Prompts in which images stand, for models that see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sfumato.data.image_conversation import COLUMNS, ImageConversation, as_text, take_media
from sfumato.data.text import find_key, read_tools
from sfumato.data.text_prompt_formats.base import PromptRow, other_columns, text_or_messages
from sfumato.data.text_prompt_formats.files import Prompts
from sfumato.data.vision import ImageReader
from sfumato.errors import DataError


@dataclass(frozen=True)
class ImagePrompts(Prompts):
    """A column of texts or of messages in which images stand, and a column images; all others are metadata."""

    type: ClassVar[str] = "image_prompts"
    has_images: ClassVar[bool] = True

    min_pixels: int | None = None
    """Smaller images are scaled up to so many pixels; null: the model's own limit."""
    max_pixels: int | None = None
    """Larger images are scaled down to so many pixels; null: the model's own limit."""

    def __post_init__(self) -> None:
        ImageConversation(self.min_pixels, self.max_pixels)  # refuses limits that are none

    def limited(self, reader: ImageReader) -> ImageReader:
        """A reader that scales images as these fields say. Raises ConfigError when the model's processor cannot."""
        return reader.limited(self.min_pixels, self.max_pixels)

    def read(self, row: dict[str, Any], where: str) -> PromptRow:
        key = find_key(row, [self.prompt_key], where)
        content = text_or_messages(row[key], where, key)
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        messages, files = take_media(messages, row, where)
        for number, message in enumerate(messages, 1):
            if "content" in message and not as_text(message["content"]).strip():
                raise DataError(f"{where}: message {number}: content must be a text or an image, not nothing")
        metadata = other_columns(row, key, "tools", *COLUMNS["image"])
        return PromptRow(messages, metadata, read_tools(row, where), files)
