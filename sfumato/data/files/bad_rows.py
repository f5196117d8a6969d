"""Rows that cannot be used: JSON that is broken or nested too deep, and what happens to such rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence

from sfumato.errors import DataError

MAX_DEPTH = 100
"""Most levels of lists and mappings in a row: functions that walk through more would reach Python's recursion limit."""


MOST_KINDS, MOST_LETTERS = 5, 160
"""Kinds of reasons that a summary lists, and the letters that it shows of each."""


def parse_json(content: str | bytes, where: str) -> object:
    """Parses JSON.

    Args:
        content: the JSON; bytes are UTF-8, with or without a byte order mark.
        where: file and row, for messages.

    Raises:
        DataError: when it is not UTF-8, not JSON, nested deeper than ``MAX_DEPTH``, or holds half of a character.
    """
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text: {error}; save it as UTF-8") from error
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise DataError(f"{where}: nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:  # not JSON, or a number of thousands of digits
        raise DataError(f"{where}: not valid JSON: {error}") from error
    # Walking through the value costs time: it is needed only where the text could be nested too deep or hold an escape
    # of half a character.
    if text.count("[") + text.count("{") > MAX_DEPTH or "\\u" in text:
        check_value(value, where)
    return value


def check_text(text: str, where: str) -> None:
    """Raises DataError for half of a surrogate pair, which can neither be written to a file nor tokenised."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise DataError(f"{where}: {half} is half of a character, of which the other half is missing") from error


def check_value(value: object, where: str) -> None:
    """Raises DataError for a value of JSON that is nested deeper than ``MAX_DEPTH`` or holds half of a character."""
    level = [value]  # level by level and not by recursion, which a deep value would exhaust
    for _ in range(MAX_DEPTH + 1):
        deeper: list[object] = []
        for child in level:
            if isinstance(child, dict):
                deeper += [*child.keys(), *child.values()]
            elif isinstance(child, list):
                deeper += child
            elif isinstance(child, str):
                check_text(child, where)
        if not deeper:
            return
        level = deeper
    raise DataError(f"{where}: nested deeper than {MAX_DEPTH} levels")


def bad_row_limit(max_bad_rows: int | float, num_rows: int) -> int:
    """How many rows may be left out: ``data.max_bad_rows`` itself, or where it is a share, its part of ``num_rows``."""
    return max_bad_rows if isinstance(max_bad_rows, int) else int(max_bad_rows * num_rows)


def describe_bad_rows(reasons: Sequence[str]) -> str:
    """How many rows were left out for which kinds of reasons; ``reasons`` are the messages of the errors."""
    return _describe_kinds(Counter(map(_kind_of, reasons)))


def _describe_kinds(kinds: Counter[str]) -> str:
    listed = "; ".join(f"{count} x {kind}" for kind, count in kinds.most_common(MOST_KINDS))
    unlisted = "" if len(kinds) <= MOST_KINDS else f"; and {len(kinds) - MOST_KINDS} other kinds"
    count = kinds.total()
    return f"{count} row{'s' if count > 1 else ''} left out: {listed}{unlisted}"


def _kind_of(reason: str) -> str:
    """A reason without the file, the row, and quoted texts and numbers, so that like reasons are counted together."""
    without_place = re.sub(r"^.*?(line|row) \d+(, \w+)?: ", "", reason)
    return re.sub(r"'[^']*'|\d[\d,]*", "_", without_place)[:MOST_LETTERS]


class BadRows:
    """Counts rows that were left out, names each once, and stops at the limit."""

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        self.limit = limit
        self.say = say
        self.seen: set[int | str] = set()
        self._kinds: Counter[str] = Counter()
        self._num_summed_up = 0

    def add(self, row: int | str, error: DataError) -> None:
        """Counts a broken row, once.

        Args:
            row: its number, or its place as text.
            error: that it raised.

        Raises:
            DataError: when more than ``limit`` rows are broken, or the error is fatal.
        """
        if row in self.seen:
            return
        if error.fatal:
            raise error
        self.seen.add(row)
        if len(self.seen) > self.limit:
            hint = "data.max_bad_rows leaves such rows out" if self.limit == 0 else f"data.max_bad_rows is {self.limit}"
            raise DataError(f"{error} ({hint})") from error
        self._kinds[_kind_of(str(error))] += 1
        self.say(f"row left out ({len(self.seen)} of at most {self.limit}): {error}")

    def sum_up(self) -> None:
        """Says how many rows were left out for which kinds of reasons, if there are new ones since the last call."""
        if len(self.seen) > self._num_summed_up:
            self._num_summed_up = len(self.seen)
            self.say(f"{_describe_kinds(self._kinds)}, since this process began")
