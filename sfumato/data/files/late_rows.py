"""Rows of files that another rank has opened: here each file is opened when one of its rows is first read."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.data.files.rows import RowFile

if TYPE_CHECKING:
    from sfumato.data.files.row_table import FileTable


class LateRows:
    """A table of several files, one after the other, of which the numbers of rows are known.

    To open a file can mean to read it, as of .jsonl files, whose lines are found; were every rank of a large run to
    open all of them, a start would read the data once for each rank.
    """

    def __init__(self, files: Sequence[RowFile], lengths: Sequence[int], fingerprint: str) -> None:
        """Opens nothing.

        Args:
            files: the files.
            lengths: rows of each.
            fingerprint: that of the table on the rank that has opened them.
        """
        self._files = files
        self._ends = list(itertools.accumulate(lengths))
        self._fingerprint = fingerprint
        self._opened: dict[int, FileTable] = {}

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, object]:
        table, offset = self._place(index)
        return table[offset]

    def describe(self, index: int) -> str:
        """File and row number, for messages."""
        table, offset = self._place(index)
        return table.describe(offset)

    def folder(self, index: int) -> Path:
        """The folder of the row's file."""
        table, offset = self._place(index)
        return table.folder(offset)

    def fingerprint(self) -> str:
        """The files with their sizes and times, as the other rank saw them."""
        return self._fingerprint

    def _place(self, index: int) -> tuple[FileTable, int]:
        number = bisect.bisect_right(self._ends, index)
        if number not in self._opened:
            self._opened[number] = self._files[number].open()
        return self._opened[number], index - (self._ends[number - 1] if number else 0)
