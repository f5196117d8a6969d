"""What happens to rows that cannot be used: named, counted, and at some number the end of the run."""

from __future__ import annotations

from collections.abc import Callable

from sfumato.errors import DataError


class BadRows:
    """Counts rows that were left out, names each once, and stops at the limit."""

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        self.limit, self.say = limit, say
        self.seen: set[int | str] = set()

    def add(self, row: int | str, error: DataError) -> None:
        """Notes a broken row by its number or place. Raises the error when over ``limit`` are, or it is fatal."""
        if row in self.seen:
            return
        if error.fatal:
            raise error
        self.seen.add(row)
        if len(self.seen) > self.limit:
            hint = "data.max_bad_rows leaves such rows out" if self.limit == 0 else f"data.max_bad_rows is {self.limit}"
            raise DataError(f"{error} ({hint})") from error
        self.say(f"row left out ({len(self.seen)} of at most {self.limit}): {error}")
