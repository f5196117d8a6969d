"""Files of JSON lines that grow while they are read: only what is new is read, and only whole lines."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pydantic_core import from_json

CHUNK_BYTES = 2**24
"""How much is read at once, so that a file of gigabytes needs no gigabytes of memory."""

LONGEST_LINE = 2**24
"""Bytes of the longest line; a longer one is no line that a run writes, and is counted as broken."""

LINES_AT_ONCE = 256
"""Lines that are handed on together: numbers of many lines are put away faster, and few lines take little memory."""

READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Record = dict[str, object]


@dataclass
class LineTail:
    """The place up to which a file of JSON lines has been read.

    A resumed run replaces the file by a shorter one, one that was moved aside leaves another in its place: another
    inode, or fewer bytes than were read, is a reset.

    Attributes:
        path: of the file, which may be missing.
        generation: number of resets; what was read before the last one does not count any more.
        num_broken: lines since the last reset that were no JSON object.
        problem: why the file cannot be read; empty where it can, or is missing.
    """

    path: Path
    generation: int = 0
    num_broken: int = 0
    problem: str = ""
    _offset: int = field(default=0, repr=False)
    _inode: int = field(default=0, repr=False)
    _begin: bytes = field(default=b"", repr=False)

    def read_new(self, on_reset: Callable[[], None], on_records: Callable[[list[Record]], None]) -> bool:
        """Reads the whole lines that have been added since the last call.

        Args:
            on_reset: is called first where the file is another one than before.
            on_records: is called with the objects of some lines, in their order, until all have been read.

        Returns:
            Whether anything has changed.
        """
        try:
            file = open_regular(self.path)
            self.problem = ""
        except FileNotFoundError:
            self.problem = ""
            return self._reset(on_reset) if self._inode else False
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror}"
            return False
        if file is None:
            self.problem = f"{self.path.name} is no file"
            return self._reset(on_reset) if self._inode else False
        with file:
            status = os.fstat(file.fileno())
            changed = False
            # a file that was written over in place keeps its inode, and may have grown: its first bytes tell
            is_same = status.st_ino == self._inode and status.st_size >= self._offset
            if not is_same or file.read(len(self._begin)) != self._begin:
                changed = self._reset(on_reset)
                self._inode = status.st_ino
            if status.st_size == self._offset:
                return changed
            file.seek(self._offset)
            return self._read_lines(file, on_records) or changed

    def _read_lines(self, file: IO[bytes], on_records: Callable[[list[Record]], None]) -> bool:
        pending = b""
        start = self._offset
        while chunk := file.read(CHUNK_BYTES):
            pending += chunk
            *lines, pending = pending.split(b"\n")
            for first in range(0, len(lines), LINES_AT_ONCE):
                some = lines[first : first + LINES_AT_ONCE]
                self._offset += sum(map(len, some)) + len(some)
                on_records(self._parse(some))
            if len(pending) > LONGEST_LINE:
                self.num_broken += 1
                self._offset += len(pending)
                pending = b""
        if not self._begin and self._offset:
            file.seek(0)
            self._begin = file.read(min(self._offset, 256))
        return self._offset > start

    def _parse(self, lines: list[bytes]) -> list[Record]:
        records: list[Record] = []
        for line in lines:
            record = _parse_json(line)
            if isinstance(record, dict):
                records.append(record)
            elif line.strip():
                self.num_broken += 1
        return records

    def _reset(self, on_reset: Callable[[], None]) -> bool:
        was_read = bool(self._inode)
        self._inode = self._offset = self.num_broken = 0
        self._begin = b""
        if was_read:
            self.generation += 1
            on_reset()
        return was_read


def _parse_json(line: bytes) -> object:
    """The value of a line; None for one that is no JSON."""
    with contextlib.suppress(ValueError):  # json takes some lines that it does not, such as half a surrogate pair
        return from_json(line)  # a long run has millions of numbers, and json takes three times as long
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def open_regular(path: Path) -> IO[bytes] | None:
    """A file to read; None where a folder, a pipe or a device has its name.

    Raises OSError where it is missing, may not be read, or is a link.
    """
    descriptor = os.open(path, READING)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "rb")
