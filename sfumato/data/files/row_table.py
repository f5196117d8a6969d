"""What a table of rows is, and a row that knows where the files lie that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, cast


class RowTable(Protocol):
    """A table with random access."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, object]:
        """The row. Raises DataError that names file and row."""
        ...

    def describe(self, index: int) -> str:
        """File and row number, for messages."""
        ...

    def fingerprint(self) -> str:
        """Identifies the rows, for caches: by the files, their sizes and times."""
        ...


class FiledRows(RowTable, Protocol):
    """A table from files. Its rows may name other files by paths."""

    def folder(self, index: int) -> Path:
        """The folder that paths in a row are relative to."""
        ...


class FileTable(FiledRows, Protocol):
    """A table from files, of which a column can be read without the others."""

    def column(self, key: str) -> list[object]:
        """One column of all rows; where a row of it is broken, the list may hold a DataError."""
        ...


class FiledRow(dict[str, object]):
    """A row that knows the folder that its paths are relative to. For rows made in code it is the working folder."""

    folder = Path()


def read_row_with_folder(rows: RowTable, index: int) -> FiledRow:
    """Reads a row for a transform with media. Raises DataError as the table does."""
    row = FiledRow(rows[index])
    if hasattr(rows, "folder"):
        row.folder = cast("FiledRows", rows).folder(index)
    return row
