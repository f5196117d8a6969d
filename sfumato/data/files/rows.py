"""Rows of .jsonl, .json, .parquet, .arrow, .tar, .csv and .txt files with random access; errors name file and row.

Tables can be pickled: the worker process that gets one opens the files itself.
"""

from __future__ import annotations

import bisect
import csv
import functools
import io
import itertools
import json
import os
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sfumato.data.files.arrow_values import arrow_column, arrow_row, arrow_rows
from sfumato.data.files.bad_rows import MAX_DEPTH, check_value, parse_json
from sfumato.data.files.compressed import is_compressed, read_text, read_whole
from sfumato.data.files.file_rows import MAX_LINE, FileRows, missing_column_error
from sfumato.data.files.folders import data_ending, find_sources
from sfumato.data.files.row_table import FileTable, RowTable
from sfumato.errors import DataError

if TYPE_CHECKING:
    import datasets
    import pyarrow

    from sfumato.data.files.dataset_info import RowMapping
    from sfumato.data.files.remote import RemoteFile

ARROW_BLOCK = 1000
"""Rows of an Arrow table that are converted to Python values in one call, where all rows are read."""


class JsonlRows(FileRows):
    """A .jsonl file: one JSON object in each line, blank lines skipped. Only the lines' positions are in memory."""

    def __init__(self, path: Path, start: tuple[int, int] = (0, 0), most: int | None = None) -> None:
        """Finds the lines of a file, or of a part of it.

        Args:
            path: the file.
            start: bytes and lines before the part.
            most: rows of the part at most; None reads to the end of the file.
        """
        super().__init__(path)
        self._starts = array("Q")
        self._lines = array("I")
        position, number = start
        continues = False
        with path.open("rb") as file:
            file.seek(position)
            for line in iter(functools.partial(file.readline, MAX_LINE), b""):  # a longer one comes in parts
                if not continues:
                    if len(self._starts) == most:
                        break
                    number += 1
                    if len(line) == MAX_LINE or line.strip():
                        self._starts.append(position)
                        self._lines.append(number)
                position += len(line)
                continues = not line.endswith(b"\n")
        self.end = (position, number)
        """Bytes and lines before what follows the part."""

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, object]:
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            line = file.readline(MAX_LINE)
        if len(line) == MAX_LINE and not line.endswith(b"\n"):
            raise DataError(f"{self.describe(index)}: is longer than the {MAX_LINE:,} bytes that are read")
        return _json_object(parse_json(line, self.describe(index)), self.describe(index))

    def describe(self, index: int) -> str:
        return f"{self.path}, line {self._lines[index]}"


class ParquetRows(FileRows):
    """A .parquet file, memory-mapped through datasets."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        _ = self._table  # reports a broken file now, and not in the middle of training

    @cached_property
    def _table(self) -> datasets.Dataset:
        import datasets.config
        import pyarrow.parquet

        from sfumato.data.files.file_digests import signature_of

        # datasets knows its copy of a file by path and mtime. A file that was replaced may keep both (cp -p, rsync -t),
        # and its old rows would be read.
        signature, _ = signature_of([str(self.path)])
        copies = Path(datasets.config.HF_DATASETS_CACHE) / "sfumato" / signature
        try:
            metadata = pyarrow.parquet.read_metadata(self.path)
            if metadata.num_rows:
                read = functools.partial(datasets.Dataset.from_parquet, str(self.path), cache_dir=str(copies))
                # datasets reads as many rows at a time as the first row group has, which fails where that is empty.
                rows = read() if metadata.row_group(0).num_rows else read(batch_size=ARROW_BLOCK)
                return rows.with_format("arrow")
        except Exception as error:  # of a damaged file pyarrow and datasets raise whatever they come upon
            cause = error.__cause__ or error
            if isinstance(cause, OSError) and cause.errno is not None and os.access(self.path, os.R_OK):
                raise DataError(
                    f"{self.path} is opened as a copy in {copies}, which cannot be written: {cause.strerror}: make "
                    "room, or set HF_DATASETS_CACHE to a folder that has it"
                ) from error
            remedy = ": leave such columns out" if "datasets dtype" in str(cause) else ""  # maps, intervals, views
            raise DataError(f"{self.path} cannot be read as parquet: {cause}{remedy}") from error
        raise DataError(f"{self.path} has no rows")  # datasets would name the size of a batch

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> dict[str, object]:
        return arrow_row(self._table[index], self.describe(index))

    def blocks(self) -> Iterator[pyarrow.Table]:
        """All rows in order, as Arrow tables of up to ``ARROW_BLOCK`` rows."""
        for start in range(0, len(self), ARROW_BLOCK):
            yield self._table[start : start + ARROW_BLOCK]

    def column(self, key: str) -> list[object]:
        """One column of all rows, without reading the others. Raises DataError when there is none."""
        if key not in self._table.column_names:
            raise missing_column_error(key, self._table.column_names, str(self.path))
        return arrow_column(self._table.data.table, key, str(self.path))


class ArrowRows(FileRows):
    """An .arrow file, memory-mapped: the IPC file format, or the stream format that datasets writes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        _ = self._batches

    @cached_property
    def _batches(self) -> list[pyarrow.RecordBatch]:
        """All record batches of the file, whose values stay on disk until they are read."""
        import pyarrow

        try:
            with pyarrow.memory_map(str(self.path)) as source:
                if source.read(6) == b"ARROW1":
                    reader = pyarrow.ipc.open_file(source)
                    return [reader.get_batch(number) for number in range(reader.num_record_batches)]
                source.seek(0)
                return list(pyarrow.ipc.open_stream(source))
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self.path} cannot be read as arrow: {error}") from error

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, object]:
        number, offset = _locate_row(self._ends, index)
        return arrow_row(self._batches[number].slice(offset, 1), self.describe(index))

    def blocks(self) -> Iterator[pyarrow.RecordBatch]:
        """All rows in order, as record batches of up to ``ARROW_BLOCK`` rows."""
        for batch in self._batches:
            for start in range(0, batch.num_rows, ARROW_BLOCK):
                yield batch.slice(start, ARROW_BLOCK)

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path}  # the other process maps the file itself


class LoadedRows(FileRows):
    """Rows of a small file, held in memory."""

    def __init__(self, path: Path, rows: list[tuple[str, object]]) -> None:
        """``rows`` are the rows with their places in the file, such as ``line 3``."""
        super().__init__(path)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, object]:
        row = self._rows[index][1]
        check_value(row, self.describe(index))
        return _json_object(row, self.describe(index))

    def describe(self, index: int) -> str:
        return f"{self.path}, {self._rows[index][0]}"


class LoadedLines(FileRows):
    """Lines of JSON that are held in memory, each of which is parsed when it is asked for."""

    def __init__(self, path: Path, lines: list[tuple[int, bytes]]) -> None:
        """``lines`` are the lines with their numbers in the file."""
        super().__init__(path)
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, object]:
        return _json_object(parse_json(self._lines[index][1], self.describe(index)), self.describe(index))

    def describe(self, index: int) -> str:
        return f"{self.path}, line {self._lines[index][0]}"


class JoinedRows:
    """Several tables, one after the other."""

    def __init__(self, parts: list[FileTable]) -> None:
        self.parts = parts
        self._ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, object]:
        number, offset = _locate_row(self._ends, index)
        return self.parts[number][offset]

    def describe(self, index: int) -> str:
        """File and row number, for messages."""
        number, offset = _locate_row(self._ends, index)
        return self.parts[number].describe(offset)

    def folder(self, index: int) -> Path:
        """The folder of the row's file."""
        number, offset = _locate_row(self._ends, index)
        return self.parts[number].folder(offset)

    def fingerprint(self) -> str:
        """The files with their sizes and times."""
        return "\n".join(part.fingerprint() for part in self.parts)

    def column(self, key: str) -> list[object]:
        """One column of all rows, as of ``FileTable``, file by file."""
        return [value for part in self.parts for value in part.column(key)]


def readable_rows(rows: RowTable) -> Iterator[tuple[int, dict[str, object]]]:
    """Rows with their numbers, in order. Broken rows are left out here: they are reported where they are used.

    Arrow files are read in blocks, which is faster than row by row.
    """
    first = 0
    parts = rows.parts if isinstance(rows, JoinedRows) else [rows]
    for part in parts:
        blocks = part.blocks() if isinstance(part, ParquetRows | ArrowRows) else iter(())
        index = 0
        for block in blocks:
            try:
                values = arrow_rows(block, part.describe(index))
            except DataError:
                break  # this block and those after it are read row by row below, to find the broken rows
            yield from enumerate(values, start=first + index)
            index += len(values)
        for number in range(index, len(part)):
            try:
                row = part[number]
            except DataError:
                continue
            yield first + number, row
        first += len(part)


def read_text_rows(path: Path, column: str) -> LoadedRows:
    """A .txt file: one text a line, as a row with a single column; blank lines skipped."""
    lines = read_text(path).split("\n")  # splitlines would also split at characters inside a text
    numbered = enumerate(lines, start=1)
    return LoadedRows(path, [(f"line {number}", {column: line.strip()}) for number, line in numbered if line.strip()])


def read_jsonl_rows(path: Path) -> LoadedLines:
    """A compressed .jsonl file, which is held in memory: one JSON object a line, blank lines skipped."""
    lines = enumerate(read_whole(path).split(b"\n"), start=1)
    return LoadedLines(path, [(number, line) for number, line in lines if line.strip()])


def read_json_rows(path: Path) -> LoadedRows:
    """A .json file that holds a list of objects. Raises DataError when it holds something else."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise DataError(f"{path}: nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error} (one object a line is a .jsonl file)") from error
    if not isinstance(content, list):
        raise DataError(f"{path} must hold a list of JSON objects, not {type(content).__name__}")
    return LoadedRows(path, [(f"row {number}", row) for number, row in enumerate(content, start=1)])


def read_csv_rows(path: Path) -> LoadedRows:
    """A .csv file whose first line names the columns; values are texts. Raises DataError that names a broken line."""
    rows: list[tuple[str, object]] = []
    columns: list[str] = []
    line = 1
    limit = csv.field_size_limit(sys.maxsize)  # the module's own limit is below the length of a document
    try:
        with io.TextIOWrapper(io.BytesIO(read_whole(path)), encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            for values in reader:
                if values and not columns:
                    columns = values
                elif values and len(values) != len(columns):
                    raise DataError(f"{path}, line {line}: has {len(values)} values for {len(columns)} columns")
                elif values:
                    rows.append((f"line {line}", dict(zip(columns, values, strict=True))))
                line = reader.line_num + 1
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {line}: not UTF-8 text: {error}; save it as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: not valid CSV: {error}") from error
    finally:
        csv.field_size_limit(limit)
    if len(set(columns)) != len(columns):
        raise DataError(f"{path}: two columns have the same name: {', '.join(columns)}")
    return LoadedRows(path, rows)


def open_shard(path: Path) -> FileTable:
    """Opens a shard of webdataset; see ``TarRows``."""
    from sfumato.data.files.webdataset import TarRows

    return TarRows(path)


KINDS: dict[str, Callable[[Path], FileTable]] = {
    ".jsonl": JsonlRows,
    ".json": read_json_rows,
    ".parquet": ParquetRows,
    ".arrow": ArrowRows,
    ".tar": open_shard,
    ".csv": read_csv_rows,
}
"""Functions that open a file, by its ending; .txt and compressed files are opened by ``open_file`` itself."""


def open_rows(path: str | Path, text_column: str, option: str, held_out: bool = False) -> FileTable:
    """Opens files by their endings.

    Args:
        path: a .jsonl, .json, .parquet, .arrow, .tar, .csv or .txt file, a folder of such files (searched with its
            subfolders, in the order of their names; of one that holds several splits, see ``find_sources``), or several
            of these with commas between. All but .parquet, .arrow and .tar files may be compressed. Also URLs, and data
            sets of a ``dataset_info.json`` (see ``find_sources``).
        text_column: name of the only column of a .txt file.
        option: the configuration field that holds the path, for messages.
        held_out: whether the rows are for evaluation.

    Returns:
        The rows of all files, one file after the other.

    Raises:
        DataError: when a file is missing, empty, broken, or of another kind.
    """
    return join_rows([file.open() for file in find_row_files(path, text_column, option, held_out)])


@dataclass(frozen=True)
class RowFile:
    """A file that has not been opened."""

    path: Path
    text_column: str
    """Name of the only column of a .txt file."""
    option: str
    """The configuration field that holds the path, for messages."""
    mapping: RowMapping | None = None
    """What gives columns and roles the names that formats know."""
    remote: RemoteFile | None = None
    """The file at a URL that ``path`` holds once it is fetched."""

    def fetch(self) -> Path:
        """The path, fetched where it is at a URL. Raises DataError when it cannot be."""
        return self.path if self.remote is None else self.remote.fetch()

    def open(self) -> FileTable:
        """Opens the rows. Raises DataError when the file is broken or empty."""
        rows = open_file(self.fetch(), self.text_column, self.option)
        return cast("FileTable", self.with_mapping(rows))

    def with_mapping(self, rows: RowTable) -> RowTable:
        """Rows of this file by the names that formats know."""
        if self.mapping is None:
            return rows
        from sfumato.data.files.mapped_rows import MappedRows

        return MappedRows(rows, self.mapping)


def find_row_files(path: str | Path, text_column: str, option: str, held_out: bool = False) -> list[RowFile]:
    """The files that ``open_rows`` opens, in order; files at URLs are listed, and fetched when they are opened.

    Raises DataError when a file is missing, given twice, or of another kind.
    """
    return [
        RowFile(file, text_column, option, part.mapping, part.remote.get(file))
        for part in find_sources(path, option, held_out)
        for file in part.files
    ]


def join_rows(tables: list[FileTable]) -> FileTable:
    """Several tables as one, one after the other."""
    return tables[0] if len(tables) == 1 else JoinedRows(tables)


def open_file(path: Path, text_column: str, option: str) -> FileTable:
    """Opens one of ``find_sources``. Raises DataError when it is broken or empty."""
    ending = data_ending(path)
    if ending == ".txt":
        rows: FileTable = read_text_rows(path, text_column)
    elif ending == ".jsonl" and is_compressed(path):
        rows = read_jsonl_rows(path)
    else:
        rows = KINDS[ending](path)
    if len(rows) == 0:
        raise empty_file(path, option)
    return rows


def empty_file(path: Path, option: str) -> DataError:
    """The error for a file without a row."""
    return DataError(f"{option}: {path} has no rows")


def text_field(row: dict[str, object], key: str, where: str) -> str:
    """A non-empty string column of a row. Raises DataError that names the row and the columns there are."""
    if key not in row:
        raise missing_column_error(key, row, where)
    value = row[key]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: column {key!r} must be a non-empty text, not {value!r}")
    return value


def _locate_row(ends: list[int], index: int) -> tuple[int, int]:
    """The number of the part that holds a row, and the row's index within it; ``ends`` are running totals of rows."""
    number = bisect.bisect_right(ends, index)
    return number, index - (ends[number - 1] if number else 0)


def _json_object(row: object, where: str) -> dict[str, object]:
    """The row, if it is a mapping. Raises DataError otherwise."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: must be a JSON object, not {type(row).__name__}")
    return row
