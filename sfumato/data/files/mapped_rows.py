"""Rows of a table whose columns and roles get the names that the formats know."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.data.files.dataset_info import RowMapping
from sfumato.data.files.file_rows import no_column
from sfumato.errors import DataError

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
        """One column of all rows. For a row that is broken or has no such column, the list holds a DataError."""
        values = []
        for index in range(len(self)):
            try:
                row = self[index]
                values.append(row[key] if key in row else no_column(key, row, self.describe(index)))
            except DataError as error:
                values.append(error)
        return values
