"""Makes samples of rows, whose texts are tokenised together. A row's samples do not depend on the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, cast

from sfumato.data.background import Calls
from sfumato.data.files.row_table import RowTable, read_row_with_folder
from sfumato.data.text.document import TextSample
from sfumato.data.text.format import TextTransform, has_media
from sfumato.data.text.tokenise import Asking, Tokens
from sfumato.errors import DataError, OverlongError

if TYPE_CHECKING:

    class _AskingTransform(TextTransform, Protocol):
        def asks(self, row: dict[str, object], where: str) -> Asking[list[TextSample]]: ...

        def encode(self, texts: list[str]) -> list[Tokens]: ...


BATCH_ROWS = 64
"""Most rows whose texts are encoded together."""

BATCH_CHARACTERS = 2**18
"""A batch takes no more rows once so many characters wait to be encoded: encodings take about 100 bytes per token."""


SHARED_ROWS = 64
"""Rows that each of several ranks transforms before they exchange their samples."""


def samples_of(
    transform: TextTransform, rows: RowTable, indices: Iterable[int]
) -> Iterator[tuple[int, list[TextSample] | DataError]]:
    """Yields the index of each row with its samples, or with the DataError of a row that has none, in order.

    Where the transform has ``asks`` and ``encode`` (see ``TextTransform``), up to a batch of rows is read ahead. Any
    other transform is called with one row at a time, when its samples are asked for.

    Raises:
        Exception: any other error of reading or transforming a row, when the row's turn comes.
    """
    read = read_row_with_folder if has_media(transform) else (lambda rows, index: rows[index])
    if not _may_be_asked(transform):
        for index in indices:
            try:
                result: Any = transform(read(rows, index), rows.describe(index))
            except DataError as error:
                result = error
            yield index, result
        return

    def work(index: int) -> Asking[list[TextSample]]:
        return (yield from cast("_AskingTransform", transform).asks(read(rows, index), rows.describe(index)))

    remaining = iter(indices)
    # Errors wait in the batch until the row's turn, so that rows before it are still given.
    while batch := _Batch(cast("_AskingTransform", transform).encode):
        for index in islice(remaining, BATCH_ROWS):
            batch.add(index, work(index))
            if batch.num_characters >= BATCH_CHARACTERS:
                break
        if not batch.results:
            return
        batch.finish()
        for index, result in batch.results:
            if isinstance(result, Exception) and not isinstance(result, DataError):
                raise result
            yield index, result


@dataclass(frozen=True)
class SharedWork:
    """Ranks that make the samples of different rows, and give them to each other."""

    rank: int
    num_ranks: int
    calls: Calls
    """Of the thread that reads rows."""
    gather: Callable[[list[_RowResult]], list[list[_RowResult]]]
    """Exchanges the results of all ranks, in rank order; every rank calls it with those of its rows."""

    def samples_of(
        self, transform: TextTransform, rows: RowTable, indices: Iterable[int]
    ) -> Iterator[tuple[int, list[TextSample] | DataError]]:
        """``samples_of``, of which this rank does its share. Every rank must go through the same rows.

        Raises:
            Exception: on the rank that did a row, what that raised; on the others a DataError that says so.
        """
        remaining = iter(indices)
        chunk = list(islice(remaining, SHARED_ROWS * self.num_ranks))
        results = self._do_share(transform, rows, chunk)
        while chunk:
            exchanged = self.calls.submit(self.gather, [result.sent() for result in results])
            following = list(islice(remaining, SHARED_ROWS * self.num_ranks))
            own_results, results = results, self._do_share(transform, rows, following)
            for rank, received in enumerate(self.calls.wait(exchanged)):
                for result in own_results if rank == self.rank else received:
                    if result.error is not None:
                        raise result.error
                    if result.failure:
                        raise DataError(f"rank {rank}: {result.failure}")
                    yield result.index, result.samples if result.problem is None else result.data_error()
            chunk = following

    def _do_share(self, transform: TextTransform, rows: RowTable, chunk: list[int]) -> list[_RowResult]:
        """The results of this rank's part of some rows; after an unexpected error no more."""
        share = chunk[slice(*_rank_range(len(chunk), self.rank, self.num_ranks))]
        results: list[_RowResult] = []
        try:
            for index, samples in samples_of(transform, rows, share):
                results.append(_RowResult.from_samples(index, samples))
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            results.append(_RowResult(share[len(results)], failure=failure, error=error))
        return results


def _rank_range(count: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """First and last position, exclusive, of a rank's part of so many rows."""
    return count * rank // num_ranks, count * (rank + 1) // num_ranks


@dataclass(frozen=True)
class _RowResult:
    """What a row has given, as a value that ranks may exchange."""

    index: int
    samples: list[TextSample] = field(default_factory=list)
    problem: str | None = None
    """The message of its DataError."""
    is_fatal: bool = False
    failure: str = ""
    """An unexpected error, in words."""
    error: Exception | None = None
    """The same, on the rank that had it."""

    @classmethod
    def from_samples(cls, index: int, result: list[TextSample] | DataError) -> _RowResult:
        """The result of ``samples_of`` for a row."""
        if isinstance(result, DataError):
            return cls(index, problem=str(result), is_fatal=result.fatal)
        return cls(index, result)

    def data_error(self) -> DataError:
        """The DataError of a row that has no samples."""
        return (OverlongError if self.is_fatal else DataError)(self.problem)

    def sent(self) -> _RowResult:
        """The part that other ranks get."""
        return replace(self, error=None)


class _Batch:
    """Rows that are transformed together.

    The work on each row is a generator that asks for the tokens of texts; all texts that wait are encoded in one call.
    """

    def __init__(self, encode: Callable[[list[str]], list[Tokens]]) -> None:
        self.results: list[tuple[int, object]] = []
        """Index of each row, and what its work returned or the exception that ended it."""
        self.num_characters = 0
        self._encode = encode
        self._waiting: list[tuple[int, Asking[list[TextSample]], list[str]]] = []

    def add(self, index: int, asking: Asking[list[TextSample]]) -> None:
        """Starts the work on a row, up to the texts that it asks for first."""
        self.results.append((index, None))
        self._advance(len(self.results) - 1, asking, lambda: next(asking))

    def finish(self) -> None:
        """Encodes the texts that are asked for, until the work on every row has ended."""
        while self._waiting:
            pending = self._waiting
            self._waiting = []
            try:
                encoded = iter(self._encode([text for _, _, texts in pending for text in texts]))
                answers: list[list[Tokens] | None] = [list(islice(encoded, len(texts))) for _, _, texts in pending]
            except Exception:  # one text cannot be encoded: encoding row by row gives the error to its own row
                answers = [None] * len(pending)
            for (place, asking, texts), answer in zip(pending, answers, strict=True):
                # The default arguments bind the values of this iteration.
                self._advance(
                    place,
                    asking,
                    lambda asking=asking, texts=texts, answer=answer: asking.send(
                        self._encode(texts) if answer is None else answer
                    ),
                )

    def _advance(self, place: int, asking: Asking[list[TextSample]], advance: Callable[[], list[str]]) -> None:
        """Runs the work on a row until it asks for texts again, returns or raises."""
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


def _may_be_asked(transform: TextTransform) -> bool:
    """Whether a transform may be asked through ``asks``.

    A subclass that overrides ``__call__`` without ``asks`` would be bypassed by the ``asks`` that it inherits.
    """
    for kind in type(transform).__mro__:
        if "asks" in vars(kind):
            return True
        if "__call__" in vars(kind):
            return False
    return False
