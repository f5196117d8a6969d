"""The base of tables that are one file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.errors import DataError

if TYPE_CHECKING:
    from sfumato.data.files.row_table import RowTable

MAX_LINE = 64 * 2**20
"""Bytes of the longest line of a .jsonl file, and of the longest caption, that is read."""


class FileRows:
    """The base of tables that are one file. A subclass adds ``__len__`` and ``__getitem__``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    if TYPE_CHECKING:

        def __len__(self) -> int: ...

        def __getitem__(self, index: int) -> dict[str, object]: ...

    def folder(self, index: int) -> Path:
        """The folder of the file."""
        return self.path.parent

    def describe(self, index: int) -> str:
        """File and row number, for messages."""
        return f"{self.path}, row {index + 1}"

    def fingerprint(self) -> str:
        """The file with its size and time."""
        return file_fingerprint([self.path])

    def column(self, key: str) -> list[object]:
        """See ``read_column``."""
        return read_column(self, key)


def read_column(rows: RowTable, key: str) -> list[object]:
    """One column of all rows. For a row that is broken or has no such column, the list holds a DataError."""
    values: list[object] = []
    for index in range(len(rows)):
        try:
            row = rows[index]
            values.append(row[key] if key in row else missing_column_error(key, row, rows.describe(index)))
        except DataError as error:
            values.append(error)
    return values


def missing_column_error(key: str, columns: Iterable[str], where: str) -> DataError:
    """The error for a missing column, which names the columns that there are."""
    return DataError(f"{where}: no column {key!r}; its columns are {', '.join(map(str, columns))}")


def file_fingerprint(paths: list[Path]) -> str:
    """Files with their sizes and times, one a line; those that do not exist are left out.

    ctime tells a file from one that replaced it with the same size and mtime (``rsync -t``).
    """
    stats = [(path.resolve(), path.stat()) for path in paths if path.is_file()]
    return "\n".join(f"{path} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}" for path, stat in stats)
