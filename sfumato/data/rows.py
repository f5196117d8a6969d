"""Rows of .jsonl, .parquet and .txt files with random access; every error names the file and the row."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from sfumato.errors import DataError


class Rows(Protocol):
    """A table with random access."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The row. Raises DataError that names file and row."""
        ...

    def describe(self, index: int) -> str:
        """File and row number, for messages."""
        ...


class JsonlRows:
    """A .jsonl file: one JSON object a line, blank lines skipped. Only line positions are kept in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts: list[tuple[int, int]] = []  # line number, byte position
        position = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._starts.append((number, position))
                position += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self.path.open("rb") as file:
            file.seek(self._starts[index][1])
            line = file.readline()
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{self.describe(index)}: not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{self.describe(index)}: must be a JSON object, not {type(row).__name__}")
        return row

    def describe(self, index: int) -> str:
        return f"{self.path}, line {self._starts[index][0]}"


class ParquetRows:
    """A .parquet file, memory-mapped through datasets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _ = self._table  # a broken file is found here, not in the middle of training

    @cached_property
    def _table(self) -> Any:
        import datasets
        import pyarrow

        try:
            return datasets.Dataset.from_parquet(str(self.path))
        except (pyarrow.ArrowInvalid, datasets.exceptions.DatasetGenerationError, OSError) as error:
            raise DataError(f"{self.path} cannot be read as parquet: {error}") from error

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import pyarrow

        try:
            return self._table.with_format("arrow")[index].to_pylist()[0]
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{self.describe(index)}: {error}") from error

    def describe(self, index: int) -> str:
        return f"{self.path}, row {index + 1}"


class TextRows:
    """A .txt file: one text a line, as a row with a single column; blank lines skipped."""

    def __init__(self, path: Path, column: str) -> None:
        self.path, self.column = path, column
        lines = read_text(path).split("\n")  # splitlines would also split at characters inside a text
        self._lines = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {self.column: self._lines[index][1]}

    def describe(self, index: int) -> str:
        return f"{self.path}, line {self._lines[index][0]}"


def open_rows(path: str | Path, text_column: str, option: str) -> Rows:
    """Opens a table by its ending.

    Args:
        path: a .jsonl, .parquet or .txt file.
        text_column: name of the only column of a .txt file.
        option: the configuration field that holds the path, for messages.

    Raises:
        DataError: when the file is missing, empty, or of another kind.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{option}: file not found: {path}")
    kinds = {".jsonl": JsonlRows, ".parquet": ParquetRows}
    if path.suffix == ".txt":
        rows: Rows = TextRows(path, text_column)
    elif path.suffix in kinds:
        rows = kinds[path.suffix](path)
    else:
        raise DataError(f"{option}: {path} must end in .jsonl, .parquet or .txt")
    if len(rows) == 0:
        raise DataError(f"{option}: {path} has no rows")
    return rows


def read_text(path: Path) -> str:
    """A text file. Raises DataError that names it when it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error


def text_field(row: dict[str, Any], key: str, where: str) -> str:
    """A non-empty string column of a row. Raises DataError that names the row and the columns there are."""
    if key not in row:
        raise DataError(f"{where}: no column {key!r}; its columns are {', '.join(map(str, row))}")
    value = row[key]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: column {key!r} must be a non-empty text, not {value!r}")
    return value
