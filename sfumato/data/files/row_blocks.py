"""Rows of files that are streamed from front to back, a block at a time; each file is opened when its turn comes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from sfumato.data.files.arrow_values import arrow_row
from sfumato.data.files.file_rows import FileRows
from sfumato.data.files.row_table import RowTable
from sfumato.data.files.rows import JoinedRows, JsonlRows, RowFile, empty_file
from sfumato.errors import DataError

if TYPE_CHECKING:
    import pyarrow

    from sfumato.data.files.row_table import FiledRows, FileTable


Table = RowFile | RowTable
"""A file, or rows that are made in code."""


class FilePlace(NamedTuple):
    """A place between two rows of several tables, of numbers that JSON can hold."""

    table: int = 0
    position: int = 0
    """Bytes before it in a .jsonl file, rows before it in any other table."""
    number: int = 0
    """Lines before it in a .jsonl file; in any other table equal to ``position``."""


@dataclass(frozen=True)
class RowBlock:
    """Rows that follow each other, at least one, perhaps from several tables."""

    rows: JoinedRows
    after: FilePlace
    """The place after the block."""
    is_last: bool
    """Whether no row follows."""
    ends: list[int]
    """Running totals of rows: how many rows of the block lie before the end of each of its tables."""
    sources: list[int]
    """Numbers of the sources of these tables."""

    def source(self, index: int) -> int:
        """Number of the source of a row."""
        return self.sources[bisect_right(self.ends, index)]


class RowBlocks:
    """Tables one after the other, in blocks.

    In memory are the positions of a block's lines of .jsonl files, the row groups of .parquet files that a block lies
    in, and of .json, .csv and .txt files the whole file.
    """

    def __init__(self, tables: Sequence[tuple[int, Table]]) -> None:
        """Opens nothing yet.

        Args:
            tables: each with the number of its source.
        """
        self._tables = tables
        self._held: tuple[int, RowTable | _RowGroups] | None = None

    def read(self, start: FilePlace, most: int) -> RowBlock:
        """The block of up to ``most`` rows from a place on, after which there is at least one row.

        Raises:
            DataError: when a file is empty or broken.
        """
        parts: list[RowTable] = []
        sources = []
        place = start
        missing = most
        while missing and place.table < len(self._tables):
            source = self._tables[place.table][0]
            rows, place = self._read_table(place, missing)
            missing -= len(rows)
            if len(rows):
                parts.append(rows)
                sources.append(source)
        # Looks ahead for one more row, so that whoever reads the last block knows it without asking for another.
        after = place
        is_last = True
        while is_last and place.table < len(self._tables):
            rows, place = self._read_table(place, 1)
            is_last = len(rows) == 0
        rows = JoinedRows(cast("list[FileTable]", parts))  # of which a block needs rows, places and folders alone
        return RowBlock(rows, after, is_last, [*accumulate(map(len, parts))], sources)

    def _read_table(self, place: FilePlace, most: int) -> tuple[RowTable, FilePlace]:
        """Up to ``most`` rows of one table, and the place after them, which is in the next table when it has ended."""
        table = self._tables[place.table][1]
        if isinstance(table, RowFile) and table.path.suffix.lower() == ".jsonl":
            lines = JsonlRows(table.fetch(), (place.position, place.number), most)
            if len(lines) == 0 and place.number == 0:
                raise empty_file(table.path, table.option)
            has_ended = len(lines) < most
            after = FilePlace(place.table + 1) if has_ended else FilePlace(place.table, *lines.end)
            return table.with_mapping(lines), after
        whole = self._open(place.table)
        stop = min(place.position + most, len(whole))
        rows: RowTable = (
            whole.part(place.position, stop)
            if isinstance(whole, _RowGroups)
            else _RowSlice(whole, place.position, stop)
        )
        has_ended = stop == len(whole)
        if isinstance(table, RowFile) and isinstance(whole, _RowGroups):  # any other table has been mapped as a whole
            rows = table.with_mapping(rows)
        return rows, FilePlace(place.table + 1) if has_ended else FilePlace(place.table, stop, stop)

    def _open(self, number: int) -> RowTable | _RowGroups:
        """Opens a table; the last one stays open."""
        if self._held is None or self._held[0] != number:
            self._held = None  # frees the memory of the last table before the next one takes some
            self._held = number, _open_table(self._tables[number][1])
        return self._held[1]


def _open_table(table: Table) -> RowTable | _RowGroups:
    """Opens a table so that a block of it can be read. Raises DataError when it is broken or empty."""
    if not isinstance(table, RowFile):
        return table
    if table.path.suffix.lower() != ".parquet":
        return table.open()
    rows = _RowGroups(table.fetch())
    if len(rows) == 0:
        raise empty_file(table.path, table.option)
    return rows


class _RowSlice:
    """Rows of a table from ``start`` to ``stop``."""

    def __init__(self, rows: RowTable, start: int, stop: int) -> None:
        self._rows = rows
        self._start = start
        self._stop = stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> dict[str, object]:
        return self._rows[self._start + index]

    def describe(self, index: int) -> str:
        """File and row number, for messages."""
        return self._rows.describe(self._start + index)

    def folder(self, index: int) -> Path:
        """The folder of the row's file."""
        return cast("FiledRows", self._rows).folder(self._start + index)

    def fingerprint(self) -> str:
        """That of all rows, and which of them these are."""
        return f"{self._rows.fingerprint()} {self._start} {self._stop}"


class _RowGroups:
    """A .parquet file that is read one row group at a time; the last row group stays in memory."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self._path = path
        self._errors = (pyarrow.ArrowException, OSError, ValueError)
        self._group: tuple[int, pyarrow.Table] | None = None
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
            groups = range(self._file.metadata.num_row_groups)
            self._ends = [*accumulate(self._file.metadata.row_group(number).num_rows for number in groups)]
        except self._errors as error:
            raise DataError(f"{path} cannot be read as parquet: {error}") from error

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def part(self, start: int, stop: int) -> _TableRows:
        """Rows from ``start`` to ``stop``."""
        import pyarrow

        tables = []
        for number in range(bisect_right(self._ends, start), len(self._ends)):
            first = self._ends[number - 1] if number else 0
            if first >= stop:
                break
            tables.append(self._read_group(number).slice(max(start - first, 0), stop - max(start, first)))
        return _TableRows(self._path, pyarrow.concat_tables(tables), start)

    def _read_group(self, number: int) -> pyarrow.Table:
        """A row group. Raises DataError when it cannot be read."""
        if self._group is None or self._group[0] != number:
            try:
                self._group = number, self._file.read_row_group(number)
            except self._errors as error:
                raise DataError(f"{self._path}, row group {number + 1}: {error}") from error
        return self._group[1]


class _TableRows(FileRows):
    """Rows of a file that are in memory as a table; ``first`` is the row of the file that the table begins with."""

    def __init__(self, path: Path, table: pyarrow.Table, first: int) -> None:
        super().__init__(path)
        self._table = table
        self._first = first

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> dict[str, object]:
        return arrow_row(self._table.slice(index, 1), self.describe(index))

    def describe(self, index: int) -> str:
        return super().describe(self._first + index)
