"""The base of the formats of prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sfumato.config.open_mappings import JsonObject
from sfumato.config.text_rl_data import TextPromptDataConfig
from sfumato.data.files.row_table import RowTable
from sfumato.data.files.rows import open_rows, text_field
from sfumato.data.text.chat_message import Messages
from sfumato.data.text.messages import are_written_messages, read_messages

if TYPE_CHECKING:
    from sfumato.data.media.kinds import Medium
    from sfumato.data.media.vision import MediaProcessor


@dataclass(frozen=True)
class PromptRow:
    """What a format reads from a row."""

    content: str | Messages
    """The prompt: a text, or messages."""
    metadata: JsonObject
    """What rewards need to know. The correct answer, where there is one, is ``answer``, whatever the format."""
    tools: list[JsonObject] | None = None
    """JSON schemas of tools, which the chat template shows."""
    images: Sequence[Medium] = ()
    """Files of the images, videos and audio that the messages refer to, in their order."""


@dataclass(frozen=True)
class PromptFormat(ABC):
    """What the rows of ``data`` hold: base of every format. A subclass states ``type: ClassVar[str]``.

    One from elsewhere is named by import path, ``data_type: my_module:MyFormat``.
    """

    type: ClassVar[str]
    makes_rows: ClassVar[bool] = False
    """Whether rows are made in code, so that there is no data.train_path."""
    has_images: ClassVar[bool] = False
    """Whether prompts may have images, for a model that sees; then rows that are read know their ``folder``."""
    media: ClassVar[tuple[str, ...]] = ()
    """Kinds of media that prompts may have."""
    columns: ClassVar[str] = ""
    """What messages call the rows, with the columns that are read; empty: the type alone."""
    text_column: ClassVar[str] = "prompt"
    """Column that the lines of a .txt file are."""

    def open(self, config: TextPromptDataConfig, split: str, seed: int) -> RowTable:
        """The rows of a split.

        Args:
            config: the data section.
            split: "train" or "eval".
            seed: of rows that are made in code.

        Raises:
            DataError: when a file is missing or broken.
        """
        del seed
        option = f"{split}_path"
        return open_rows(str(getattr(config, option)), self.text_column, f"data.{option}", split == "eval")

    def limited(self, reader: MediaProcessor) -> MediaProcessor:
        """The reader of a model's images with the limits of this format."""
        return reader

    def describe(self, row: dict[str, object]) -> str:
        """What a row is read as, for the log."""
        del row
        return self.columns or self.type

    @abstractmethod
    def read(self, row: dict[str, object], where: str) -> PromptRow:
        """The prompt of a row. Raises DataError that names ``where``, which is file and row."""


def other_columns(row: dict[str, object], *names: str) -> dict[str, object]:
    """The columns of a row that have a value, without ``names``."""
    return {key: value for key, value in row.items() if key not in names and value is not None}


def text_or_messages(value: object, where: str, column: str) -> str | Messages:
    """A prompt: a text that is not empty, or messages, perhaps as JSON. Raises DataError that names the row."""
    if isinstance(value, str) and not are_written_messages(value):
        return text_field({column: value}, column, where)
    return read_messages(value, where)
