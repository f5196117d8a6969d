"""Samples of rows whose texts are tokenised together; each row's samples stay what they are alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from sfumato.data.files.rows import RowTable
from sfumato.data.text.format import TextSample, TextTransform
from sfumato.data.text.tokenise import Asking, Tokens
from sfumato.errors import DataError

BATCH_ROWS = 64
"""Most rows whose texts are encoded together."""

BATCH_CHARACTERS = 2**18
"""Characters of waiting texts from which on no row is added to a batch: encodings take some 100 bytes a token."""


class FiledRow(dict[str, Any]):
    """A row that knows the folder that its paths are relative to; that of rows made in code is the working folder."""

    folder = Path()


def filed_row(rows: RowTable, index: int) -> FiledRow:
    """A row for a transform with images. Raises DataError as the table does."""
    row = FiledRow(rows[index])
    if hasattr(rows, "folder"):
        row.folder = rows.folder(index)
    return row


def samples_of(
    transform: TextTransform, rows: RowTable, indices: Iterable[int]
) -> Iterator[tuple[int, list[TextSample] | DataError]]:
    """The samples of rows, or why a row has none, in order.

    Rows are read ahead, up to a batch, where the transform says what texts it needs: it has ``asks`` and ``encode``
    (see ``TextTransform``). Any other is called with one row at a time, when its samples are wanted.

    Raises:
        Exception: what reading or transforming a row raises that is no DataError, when the row's turn comes.
    """
    read = filed_row if getattr(transform, "has_images", False) else (lambda rows, index: rows[index])
    if not _asks(transform):
        for index in indices:
            try:
                found: Any = transform(read(rows, index), rows.describe(index))
            except DataError as error:
                found = error
            yield index, found
        return

    def work(index: int) -> Asking[list[TextSample]]:
        return (yield from transform.asks(read(rows, index), rows.describe(index)))

    remaining = iter(indices)
    while batch := _Batch(transform.encode):
        for index in islice(remaining, BATCH_ROWS):
            batch.add(index, work(index))
            if batch.num_characters >= BATCH_CHARACTERS:
                break
        if not batch.results:
            return
        batch.finish()
        for index, found in batch.results:
            if isinstance(found, Exception) and not isinstance(found, DataError):
                raise found
            yield index, found


class _Batch:
    """Rows that are worked on together, and what came of each: what it returned, or the error that ended it."""

    def __init__(self, encode: Callable[[list[str]], list[Tokens]]) -> None:
        self.results: list[tuple[int, Any]] = []
        self.num_characters = 0
        self._encode = encode
        self._waiting: list[tuple[int, Asking[Any], list[str]]] = []

    def add(self, index: int, asking: Asking[Any]) -> None:
        """Begins the work on a row."""
        self.results.append((index, None))
        self._advance(len(self.results) - 1, asking, lambda: next(asking))

    def finish(self) -> None:
        """Encodes what is asked for until no work asks for more."""
        while self._waiting:
            asked = self._waiting
            self._waiting = []
            try:
                encoded = iter(self._encode([text for _, _, texts in asked for text in texts]))
                answers = [list(islice(encoded, len(texts))) for _, _, texts in asked]
            except Exception:  # of which text is found out one row at a time
                answers = [None] * len(asked)
            for (place, asking, texts), answer in zip(asked, answers, strict=True):
                self._advance(
                    place,
                    asking,
                    lambda asking=asking, texts=texts, answer=answer: asking.send(
                        self._encode(texts) if answer is None else answer
                    ),
                )

    def _advance(self, place: int, asking: Asking[Any], advance: Callable[[], list[str]]) -> None:
        index = self.results[place][0]
        try:
            texts = advance()
        except StopIteration as end:
            self.results[place] = index, end.value
        except Exception as error:
            self.results[place] = index, error
        else:
            self._waiting.append((place, asking, texts))
            self.num_characters += sum(map(len, texts))


def _asks(transform: Any) -> bool:
    """Whether ``asks`` is as new as ``__call__``, which a class may have changed without it."""
    for kind in type(transform).__mro__:
        if "asks" in vars(kind):
            return True
        if "__call__" in vars(kind):
            return False
    return False
