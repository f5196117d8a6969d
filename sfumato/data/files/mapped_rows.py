"""Rows of a table whose columns and roles get the names that the formats know."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.data.files.dataset_info import RowMapping
from sfumato.data.files.file_rows import read_column

if TYPE_CHECKING:
    from sfumato.data.files.row_table import RowTable


class MappedRows:
    """A table whose rows a mapping converts when they are read."""

    def __init__(self, rows: RowTable, mapping: RowMapping) -> None:
        self.rows = rows
        self.mapping = mapping

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, object]:
        return self.mapping.convert(self.rows[index])

    def describe(self, index: int) -> str:
        """File and row number, for messages."""
        return self.rows.describe(index)

    def folder(self, index: int) -> Path:
        """The folder of the list: paths in rows are relative to it."""
        del index
        return Path(self.mapping.folder)

    def fingerprint(self) -> str:
        """The file with its size and time, and the mapping."""
        return f"{self.rows.fingerprint()} {self.mapping}"

    def column(self, key: str) -> list[object]:
        """See ``read_column``."""
        return read_column(self, key)
