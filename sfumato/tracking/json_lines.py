"""Files of JSON lines in a run's folder, which hold all its numbers, and the values that they may have."""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from sfumato.config.characters import whole_characters
from sfumato.config.file_checks import outside_problem
from sfumato.config.open_mappings import JsonObject
from sfumato.config.writing import open_to_append, write_atomically
from sfumato.errors import DataError
from sfumato.tracking.atomic_folders import flush

Report = Callable[[Path, Exception | None], None]
"""Is told that a file could not be written, with the error, or with None that it could."""
MOST_BYTES = 2**32
"""Size of the largest file of lines that is read."""
MOST_STEPS = 2**53
"""A step is below this, so that a float, by which curves are drawn, holds it exactly."""
Series = dict[str, dict[int, float | None]]
"""Metric name -> step -> value; None is a value that was not finite."""
SeriesView = Mapping[str, Mapping[int, float | None]]
"""The same for functions that only read, and perhaps only some of the metrics."""


class JsonLines:
    """Appends JSON objects, one per line, to a file that survives crashes and resumes.

    Args:
        path: the file; its folder is made if absent.
        keep_until_step: a resumed run passes the step k that it resumes from: the file is rewritten atomically with
            only the lines whose ``step`` is at most k (a torn last line is dropped), and writing goes on after them.
            None starts an empty file.
        report: is told when lines cannot be written, with the error, and with None when they could; without it the
            error is raised. Either way the lines are kept, and written before the next ones as soon as there is room.

    Raises:
        DataError: with ``keep_until_step``, a line other than the last is broken or a line has no ``step``.
    """

    def __init__(self, path: Path, keep_until_step: int | None = None, report: Report | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept_lines: list[bytes] = []
        if keep_until_step is not None and self.path.exists():
            for number, (line, record) in enumerate(_parse_lines(self.path), start=1):
                if not isinstance(record.get("step"), int):
                    raise DataError(f'{self.path}: record {number} has no integer "step"')
                if record["step"] <= keep_until_step:
                    kept_lines.append(line + b"\n")
        write_atomically(self.path, b"".join(kept_lines))
        self._file = open_to_append(self.path)
        self._report = report
        self._waiting: list[bytes] = []
        self._torn_at: int | None = None

    def write(self, record: Mapping[str, object]) -> None:
        """Writes one line and hands it to the operating system.

        Floats keep every digit (the shortest text that reads back as the same float), non-finite floats become
        null, keys are sorted. Raises ValueError for a record without an integer ``step``.
        """
        if not isinstance(record.get("step"), numbers.Integral):
            raise ValueError(f'a record for {self.path} needs an integer "step", not {record.get("step")!r}')
        self._waiting.append(strict_json(record).encode() + b"\n")
        if self._has_written() and self._report is not None:
            self._report(self.path, None)

    def _has_written(self) -> bool:
        """Writes the waiting lines. Returns whether it could; the error is reported, or raised without ``report``."""
        try:
            self._write_waiting()
        except OSError as error:
            if self._report is None:
                raise
            self._report(self.path, error)
            return False
        return True

    def _write_waiting(self) -> None:
        """Writes all waiting lines or none, in one call, so that a crash can tear the last line only."""
        if self._torn_at is not None:
            os.ftruncate(self._file.fileno(), self._torn_at)
            self._torn_at = None
        content = b"".join(self._waiting)
        size = os.fstat(self._file.fileno()).st_size
        written = 0
        try:
            while written < len(content):  # a disk that fills up takes a part and refuses the rest
                written += self._file.write(content[written:]) or 0
        except OSError:
            self._torn_at = size
            with contextlib.suppress(OSError):  # if that fails, too, it is tried again before the next write
                os.ftruncate(self._file.fileno(), size)
                self._torn_at = None
            raise
        self._waiting.clear()

    def sync(self) -> None:
        """Flushes the lines to disk, so that they survive a power failure.

        Raises:
            OSError: when they cannot be written; it names the file.
        """
        try:
            self._write_waiting()
            os.fsync(self._file.fileno())
            flush(self.path.parent)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Writes the waiting lines, if that is possible now, and closes the file."""
        with self._file:
            if self._waiting:
                self._has_written()

    @property
    def num_waiting(self) -> int:
        """Lines that could not be written yet."""
        return len(self._waiting)


def read_jsonl(path: Path) -> list[JsonObject]:
    """Reads a file of JSON objects, one per line; an absent file is an empty list.

    A broken last line is what a crash leaves behind and is dropped. Raises DataError, naming file and line, for a
    broken line elsewhere.
    """
    return [record for _, record in _parse_lines(Path(path))]


def series_of(records: Sequence[JsonObject]) -> Series:
    """The metrics of records, by name and step; of several records of a step the last counts."""
    series: Series = {}
    for record in records:
        for name, value in record.items():
            if name == "step" or not is_step(record.get("step")):
                continue
            if value is None or (is_number(value) and math.isfinite(value)):
                series.setdefault(name, {})[record["step"]] = value
            elif is_number(value):  # JSON has no NaN, but Python reads it
                series.setdefault(name, {})[record["step"]] = None
    return {name: dict(sorted(points.items())) for name, points in sorted(series.items())}


def is_step(value: object) -> TypeGuard[int]:
    """Whether a value can be the number of a step."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_STEPS


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) < 2**1000


def finite_points(points: Mapping[int, float | None]) -> dict[int, float]:
    """The points of a series that have a value: those that were finite."""
    return {step: value for step, value in points.items() if value is not None}


def strict_json(value: object) -> str:
    """JSON text with sorted keys and no NaN or Infinity tokens: non-finite floats become null, and halves of surrogate
    pairs, which UTF-8 does not have, U+FFFD."""
    return whole_characters(_STRICT.encode(_to_plain_numbers(value)))


def has_run_file(path: Path, most_bytes: int | None = None) -> bool:
    """Whether a file of a run folder is there. Raises DataError for a link out of the folder, a pipe, or a file of more
    than ``most_bytes``."""
    problem = outside_problem(path.parent, path.name, most_bytes)
    if problem not in (None, "does not exist"):
        raise DataError(f"{path} {problem}; remove it, or restore the file")
    return problem is None


def _parse_lines(path: Path) -> list[tuple[bytes, JsonObject]]:
    """The lines of a file, each with its parsed record, without blank lines and without a broken last line."""
    if not has_run_file(path, MOST_BYTES):
        return []
    # Only "\n" ends a line: str.splitlines would also cut at U+2028 inside a prompt.
    lines = [(n, line) for n, line in enumerate(path.read_bytes().split(b"\n"), start=1) if line.strip()]
    parsed = []
    for number, line in lines:
        try:
            record = json.loads(line.decode("utf-8"))
            if not isinstance(record, dict):
                raise ValueError("it is no JSON object")
        except (ValueError, RecursionError) as error:
            if number == lines[-1][0]:
                break
            raise DataError(f"{path}:{number} is broken ({error}); delete this line or restore the file") from error
        parsed.append((line, record))
    return parsed


_STRICT = json.JSONEncoder(sort_keys=True, allow_nan=False, ensure_ascii=False)


def _to_plain_numbers(value: Any) -> object:
    """Numbers of numpy and torch as Python numbers, at any depth; non-finite floats as None."""
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else None
    if kind is str or kind is int:
        return value
    if isinstance(value, Mapping):
        return {key: _to_plain_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain_numbers(item) for item in value]
    if not isinstance(value, (bool, int, float)) and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


class BestEffortFiles:
    """Writes files that a run can do without, and remembers which cannot be written, so that each is reported once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._missed: set[Path] = set()
        self._silent: set[Path] = set()

    def report(self, path: Path, error: Exception | None) -> None:
        """Reports that a file could not be written, once until it can be, or with None that it can be again."""
        if error is not None and path not in self._missed:
            self._missed.add(path)
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            self._say(f"{path} cannot be written: {reason}; the run goes on")
        elif error is None and path in self._missed:
            self._missed.discard(path)
            self._say(f"{path} can be written again")

    def append(self, path: Path, lines: Iterable[str]) -> None:
        """Appends lines to the log, to which ``say`` itself writes by this method.

        Reporting a failure would therefore come here again: meanwhile further calls for the file do nothing, and only
        the person who watches sees the report.
        """
        if path in self._silent:
            return
        self._silent.add(path)  # a report of a failure below would come here again
        with self.spare(path), open_to_append(path) as file:
            file.write("".join(f"{line}\n" for line in lines).encode("utf-8", errors="replace"))
        self._silent.discard(path)

    @contextmanager
    def spare(self, path: Path) -> Iterator[None]:
        """Inside, an OSError is reported and not raised."""
        try:
            yield
        except OSError as error:
            self.report(path, error)
        else:
            self.report(path, None)
