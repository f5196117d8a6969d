"""Files that a run can do without: when one cannot be written this is said once, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Sparing:
    """Remembers which files cannot be written, so that each is named once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._missed: set[Path] = set()
        self._silent: set[Path] = set()

    def report(self, path: Path, error: Exception | None) -> None:
        """Takes note that a file could not be written, or with None that it could."""
        if error is not None and path not in self._missed:
            self._missed.add(path)
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            self._say(f"{path} cannot be written: {reason}; the run goes on")
        elif error is None and path in self._missed:
            self._missed.discard(path)
            self._say(f"{path} can be written again")

    def append(self, path: Path, lines: Iterable[str]) -> None:
        """Appends lines to a file that ``say`` itself writes to: only the person who watches is told."""
        if path in self._silent:
            return
        self._silent.add(path)  # what is said meanwhile comes here again
        with self.spare(path), path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        self._silent.discard(path)

    @contextmanager
    def spare(self, path: Path, errors: type[Exception] = OSError) -> Iterator[None]:
        """Inside, what cannot be written is reported and not raised."""
        try:
            yield
        except errors as error:
            self.report(path, error)
        else:
            self.report(path, None)
