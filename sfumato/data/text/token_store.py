"""Token stores: the tokens of a whole data set, made once, kept on disk as plain arrays and read by memory mapping."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pickle
import secrets
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import connection, get_context, parent_process
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from sfumato.config.file_checks import read_json
from sfumato.config.writing import make_new_folder, open_new, write_atomically
from sfumato.data.files.bad_rows import BadRows, describe_bad_rows
from sfumato.data.files.file_digests import signature_of
from sfumato.data.files.row_table import RowTable, read_row_with_folder
from sfumato.data.files.sources import Sources
from sfumato.data.files.stored import (
    MANIFEST,
    check_file,
    close_on_disk,
    digest_of,
    make_cache_folder,
    open_cache_lock,
    read_manifest,
)
from sfumato.data.media.document_media import MediaRefs
from sfumato.data.media.kinds import VERSION as PICTURES
from sfumato.data.media.kinds import DrawnFile, Medium
from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.format import MediaTransform, TextTransform, has_media
from sfumato.data.text.row_samples import samples_of
from sfumato.errors import DataError, RoleLostError

MEDIA = "media.json"
"""File of a store whose documents may have media: the version of the code that reads pictures, a signature of the sizes
and times of the media files, and their paths."""

CHUNK_ROWS = 256
"""Rows that a process tokenises at a time."""

COLUMNS = {"tokens": "<i4", "learned": "|u1", "document_lengths": "<i8", "source_of": "<i2"}
"""Files of a store and their dtypes: one value per token (``tokens``, and the loss mask as ``learned``), per document
and per sample."""

NUMBERS = {"numbers": "<f4"}
"""A further file where the format gives tokens numbers: one value per token."""

IMAGES = {"row_of": "<i8", "image_counts": "<i4", "image_shapes": "<i4"}
"""Further files where documents may have media: one value per sample, per document, and three per medium. The media
themselves are not copied."""

Item = TypeVar("Item")


class Watch(Protocol):
    """Wraps a loop, given its items and their number, such as for a progress bar."""

    def __call__(self, items: Iterable[Item], total: int, /) -> Iterable[Item]: ...


class TokenStore:
    """The samples of a dataset, in the order of sources and rows."""

    def __init__(self, folder: Path, sources: Sources, transform: TextTransform) -> None:
        """Opens a finished store of these sources, made by this transform.

        Raises:
            DataError: when a file is missing, damaged or of the wrong size.
        """
        manifest = read_manifest(folder)
        kinds = COLUMNS | (NUMBERS if "numbers" in manifest else {}) | (IMAGES if "row_of" in manifest else {})
        columns = {name: _map(folder / f"{name}.bin", dtype, manifest[name]) for name, dtype in kinds.items()}
        self.folder = folder
        self.names = list(sources.names)
        """Names of the sources."""
        self.documents_per_sample: int = manifest["documents_per_sample"]
        """1, or 2 for pairs of a better and a worse answer."""
        self.fingerprint: str = manifest["fingerprint"]
        """Identifies the samples and their order, wherever the files lie."""
        self.bad_rows: list[str] = manifest["bad_rows"]
        """Messages about the rows that were left out, one for each."""
        self.source_of: np.ndarray = columns["source_of"]
        """Number of the source of each sample: int16 ``[N]``."""
        self.document_lengths = columns["document_lengths"].reshape(-1, self.documents_per_sample)
        """Tokens of each document: int64 ``[N, documents_per_sample]``."""
        self.lengths: np.ndarray = self.document_lengths.sum(axis=1)
        """Tokens of each sample: int64 ``[N]``."""
        self._tokens = columns["tokens"]
        self._loss_mask = columns["learned"]
        self._numbers = columns.get("numbers")
        self._ends = np.cumsum(columns["document_lengths"])
        """Where each document ends in the files of tokens."""
        self._rows = sources.rows
        self._transform = transform
        self._row_of: np.ndarray | None = columns.get("row_of")
        if self._row_of is not None:
            self._image_ends = np.cumsum(columns["image_counts"], dtype=np.int64)
            self._image_shapes = columns["image_shapes"].reshape(-1, 3)

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, index: int) -> TextSample:
        """A sample, whose arrays are views of the mapped files."""
        first = index * self.documents_per_sample
        documents = []
        for number in range(first, first + self.documents_per_sample):
            stop = int(self._ends[number])
            start = int(self._ends[number - 1]) if number else 0
            numbers = None if self._numbers is None else self._numbers[start:stop]
            parts = (self._tokens[start:stop], self._loss_mask[start:stop].view(bool), numbers)
            documents.append(Document(*parts, self._media_of_sample(index, number)))
        return TextSample(tuple(documents))

    def image_shapes(self, index: int) -> list[np.ndarray]:
        """``MediaRefs.shapes`` of those documents of a sample that have images. Opens no media file."""
        first = index * self.documents_per_sample
        document_shapes = [self._media_shapes(number) for number in range(first, first + self.documents_per_sample)]
        return [shapes for shapes in document_shapes if len(shapes)]

    def _media_shapes(self, number: int) -> np.ndarray:
        if self._row_of is None:
            return np.zeros((0, 3), np.int32)
        return self._image_shapes[int(self._image_ends[number - 1]) if number else 0 : int(self._image_ends[number])]

    def media(self, index: int) -> list[MediaPlace]:
        """Where to find the media of those documents of a sample that have any. Opens no media file."""
        place = (int(self.source_of[index]), int(self._row_of[index])) if self._row_of is not None else (0, 0)
        return [MediaPlace(*place, shapes) for shapes in self.image_shapes(index)]

    def _media_of_sample(self, index: int, number: int) -> MediaRefs | None:
        shapes = self._media_shapes(number)
        if not len(shapes):
            return None
        place = MediaPlace(int(self.source_of[index]), int(cast(np.ndarray, self._row_of)[index]), shapes)
        assert has_media(self._transform)  # its documents have media here
        return find_images(self._rows, self._transform, place)


class MediaPlace(NamedTuple):
    """Where to find the media of a document: number of the source, row in it, and their ``MediaRefs.shapes``."""

    source: int
    row: int
    shapes: np.ndarray


def find_images(rows: list[RowTable], transform: MediaTransform, place: MediaPlace) -> MediaRefs:
    """The media of a document, which are opened when a batch needs them.

    Args:
        rows: the rows of each source.
        transform: made the document; its ``files`` returns the media of a row.
        place: which row, and how many media of it.
    """
    table = rows[place.source]
    row = place.row
    shapes = place.shapes
    return MediaRefs(shapes, partial(_find_images, table, row, transform, shapes), table.describe(row))


def _find_images(rows: RowTable, index: int, transform: MediaTransform, shapes: np.ndarray) -> Sequence[Medium]:
    """The media of a row that its document holds: the first of those that are read and the first that are drawn.

    There are as many as shapes of each kind; (0, 0, 0) is the shape of a drawn image.
    """
    media = transform.files(read_row_with_folder(rows, index), rows.describe(index))
    drawn = [medium for medium in media if isinstance(medium, DrawnFile)]
    read = [medium for medium in media if not isinstance(medium, DrawnFile)]
    num_drawn = int((shapes.sum(1) == 0).sum())
    return [*read[: len(shapes) - num_drawn], *drawn[:num_drawn]]


def find_token_store(sources: Sources, transform: TextTransform, folder: Path) -> TokenStore | None:
    """Opens the store of some data and a transform if it has been made; arguments as in ``build_token_store``."""
    place = folder / _folder_name(sources, transform)
    return TokenStore(place, sources, transform) if _is_whole(place, transform) else None


def _is_whole(place: Path, transform: TextTransform) -> bool:
    """Whether a store is complete, and the media files that its documents refer to have not changed since."""
    if not (place / MANIFEST).is_file():
        return False
    if not has_media(transform):
        return True
    try:
        version, signature, paths = read_json(place / MEDIA)
    except (OSError, ValueError, TypeError):
        return False
    return version == PICTURES and signature == signature_of(paths)[0]


def build_token_store(
    sources: Sources,
    transform: TextTransform,
    folder: Path,
    num_workers: int,
    max_bad_rows: int,
    say: Callable[[str], None],
    watch: Watch | None = None,
) -> TokenStore:
    """Opens the store of some data and a transform, and makes it first if it does not exist.

    While another process makes it, this one waits. A store is either complete or absent.

    Args:
        sources: the data.
        transform: what makes samples of rows; runs in other processes when ``num_workers`` is above 1.
        folder: of all stores; each pair of data and transform has a folder of its own inside, so that a stale store is
            never used.
        num_workers: processes that tokenise.
        max_bad_rows: how many rows may be left out, each with a message.
        say: takes messages.
        watch: wraps the loop over chunks of rows, for a progress bar.

    Raises:
        DataError: when more rows than ``max_bad_rows`` cannot be used, now or when the store was made; or when a source
            has no row that can be used.
    """
    place = folder / _folder_name(sources, transform)
    make_cache_folder(folder)
    with open_cache_lock(place.with_suffix(".lock")) as lock:  # the system releases the lock of a killed process
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_whole(place, transform):
            for leftover in folder.glob(f"{place.name}.*tmp"):  # of a process that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            # Written beside and renamed at the end, so that no other process can take it for complete before.
            building = make_new_folder(place.with_suffix(f".{secrets.token_hex(8)}.tmp"))
            try:
                _build(building, sources, transform, num_workers, BadRows(max_bad_rows, say), watch)
            except BaseException:
                shutil.rmtree(building)
                raise
            shutil.rmtree(place, ignore_errors=True)
            building.rename(place)
            store = TokenStore(place, sources, transform)
            if len(store.bad_rows) > 1:
                say(describe_bad_rows(store.bad_rows))
            return store
    store = TokenStore(place, sources, transform)
    bad = store.bad_rows
    if len(bad) > max_bad_rows:
        raise DataError(
            f"{bad[max_bad_rows]} ({len(bad)} rows were left out when {place} was made, but data.max_bad_rows is "
            f"{max_bad_rows})"
        )
    if bad:
        say(f"{describe_bad_rows(bad)} (the last: {bad[-1]})")
    return store


@dataclass
class _TokenisedRows:
    """The samples of a chunk of rows, and the errors of rows that have none."""

    documents: list[Document] = field(default_factory=list)
    """Of all samples, in order."""
    rows: list[int] = field(default_factory=list)
    """The row of each sample."""
    shapes: list[np.ndarray] = field(default_factory=list)
    """``MediaRefs.shapes`` of each document; the documents themselves have no images here."""
    bad: list[tuple[int, DataError]] = field(default_factory=list)
    """Row and reason."""
    media: list[str] = field(default_factory=list)
    """Paths of the media files of the documents."""


def _build(
    folder: Path,
    sources: Sources,
    transform: TextTransform,
    num_workers: int,
    bad_rows: BadRows,
    watch: Watch | None,
) -> None:
    """Tokenises all rows and writes the files of a store, the manifest last, which makes it complete."""
    chunks = [
        (source, range(start, min(start + CHUNK_ROWS, len(rows))))
        for source, rows in enumerate(sources.rows)
        for start in range(0, len(rows), CHUNK_ROWS)
    ]
    first_rows = np.cumsum([0, *map(len, sources.rows)])
    started_ns = time.time_ns()
    kinds = COLUMNS | (NUMBERS if getattr(transform, "has_numbers", False) else {})
    kinds |= IMAGES if has_media(transform) else {}
    columns = {name: _Column(folder / f"{name}.bin", dtype) for name, dtype in kinds.items()}
    broken: list[str] = []
    num_samples = [0] * len(sources.rows)
    media = list[str]()
    with closing(in_workers(sources.rows, transform, _tokenise, chunks, num_workers)) as parts:
        watched = watch(parts, len(chunks)) if watch else parts
        for (source, _), part in zip(chunks, watched, strict=True):
            for row, error in part.bad:
                bad_rows.add(int(first_rows[source]) + row, error)  # rows are numbered over all sources
                broken.append(str(error))
            num_samples[source] += len(part.rows)
            media += part.media
            if part.documents:
                columns["tokens"].add(np.concatenate([document.input_ids for document in part.documents]))
                columns["learned"].add(np.concatenate([document.loss_mask for document in part.documents]))
                if "numbers" in columns:
                    columns["numbers"].add(
                        np.concatenate([cast(np.ndarray, document.numbers) for document in part.documents])
                    )
            columns["document_lengths"].add([len(document.input_ids) for document in part.documents])
            columns["source_of"].add([source] * len(part.rows))
            if "row_of" in columns and part.documents:
                columns["row_of"].add(part.rows)
                columns["image_counts"].add([len(shapes) for shapes in part.shapes])
                columns["image_shapes"].add(np.concatenate(part.shapes).reshape(-1))
    if 0 in num_samples:
        name = sources.names[num_samples.index(0)]
        raise DataError(f"source {name!r} has no row that can be used; the last reason: {broken[-1]}")
    digests = {name: column.close() for name, column in columns.items()}
    manifest = {
        "fingerprint": digest_of([list(sources.names), transform.documents_per_sample, digests]),
        "documents_per_sample": transform.documents_per_sample,
        "bad_rows": broken,
        **{name: column.size for name, column in columns.items()},
    }
    if "row_of" in columns:
        signature, is_settled = signature_of(media, started_ns)
        # Files that changed a moment ago could change again unnoticed: such a store is made anew by the next run.
        media_record = json.dumps([PICTURES, signature if is_settled else "", media])
        write_atomically(folder / MEDIA, media_record.encode())
    write_atomically(folder / MANIFEST, json.dumps(manifest).encode())


class _Column:
    """Appends numbers of one type to a file."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.size = 0
        self._dtype = dtype
        self._file = open_new(path)
        self._hash = hashlib.blake2b(digest_size=20)

    def add(self, values: np.ndarray | list[int]) -> None:
        data = np.ascontiguousarray(values, self._dtype)
        self.size += len(data)
        self._file.write(data)  # pyright: ignore[reportArgumentType, reportCallIssue]  # arrays are buffers
        self._hash.update(data)  # pyright: ignore[reportArgumentType]

    def close(self) -> str:
        """Flushes the file to disk and closes it. Returns a digest of its content."""
        close_on_disk(cast(BinaryIO, self._file))
        return self._hash.hexdigest()


def _map(path: Path, dtype: str, size: int) -> np.ndarray:
    """Maps a file of ``size`` values. Raises DataError when it has another size."""
    expected = size * np.dtype(dtype).itemsize
    check_file(path, expected)
    if not size:  # no medium in any row; an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r", shape=(size,)).view(np.ndarray)


def _tokenise(rows: list[RowTable], transform: TextTransform, chunk: tuple[int, range]) -> _TokenisedRows:
    """Tokenises a chunk: the number of a source, and the indices of some of its rows."""
    part = _TokenisedRows()
    source, indices = chunk
    for index, result in samples_of(transform, rows[source], indices):
        if isinstance(result, DataError):
            part.bad.append((index, result))
            continue
        for sample in result:
            part.media += _media_of(sample)
            part.documents += [replace(document, images=None) for document in sample.documents]
            part.shapes += [_shapes_of(document) for document in sample.documents]
            part.rows.append(index)
    return part


def _media_of(sample: TextSample) -> list[str]:
    """Paths of the media files of a sample, each once; media whose bytes stand in the row have none."""
    media = [medium for document in sample.documents if document.images for medium in document.images.find()]
    files = [getattr(medium, "file", medium) for medium in media]
    return list(dict.fromkeys(str(file) for file in files if isinstance(file, Path)))


def _shapes_of(document: Document) -> np.ndarray:
    return np.zeros((0, 3), np.int32) if document.images is None else document.images.shapes


Transform = TypeVar("Transform", bound=TextTransform)
Job = TypeVar("Job")
Done = TypeVar("Done")


def in_workers(
    rows: list[RowTable],
    transform: Transform,
    work: Callable[[list[RowTable], Transform, Job], Done],
    jobs: Sequence[Job],
    num_workers: int,
) -> Generator[Done, None, None]:
    """Yields ``work(rows, transform, job)`` of each job, in order.

    With ``num_workers`` above 1 other processes do the work.

    Raises:
        RoleLostError: when one of them dies.
    """
    num_workers = min(num_workers, len(jobs))
    if num_workers <= 1:
        yield from (work(rows, transform, job) for job in jobs)
        return
    # They get rows and transform in a file: the pipe of a spawned process is full after 64 KiB, and the writer waits
    # for ever where that process dies before it has read.
    with NamedTemporaryFile(prefix="sfumato_rows_") as inputs:
        inputs.write(ForkingPickler.dumps((rows, transform)))
        inputs.flush()
        # Processes are spawned, since a fork of a process with threads, a process group or a GPU may hang.
        pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _begin_worker, (inputs.name,))
        waiting: deque[Future[Done]] = deque()
        try:
            for job in jobs:
                waiting.append(pool.submit(_work_in_worker, work, job))
                if len(waiting) > 2 * num_workers:  # bounds the results that wait in memory
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            time.sleep(0.3)  # what ended it may be a signal to all processes of the run, which this one obeys
            reason = (
                "a process that reads rows died, as the system ends one when memory runs out: set it to less than "
                f"{num_workers}; with 1 the run reads the rows itself, and a crash shows where it was"
            )
            raise RoleLostError("data.num_workers", (), reason) from error
        finally:
            pool.shutdown(cancel_futures=True)


_in_worker: tuple[list[RowTable], TextTransform] | None = None
"""The rows and the transform that a process of the pool works with, sent to it once."""


def _begin_worker(inputs: str) -> None:
    global _in_worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too, which ends the pool
    _in_worker = pickle.loads(Path(inputs).read_bytes())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends a worker whose parent was killed, which would wait for work for ever."""
    connection.wait([parent_process().sentinel])  # pyright: ignore[reportOptionalMemberAccess]
    os._exit(1)


def _work_in_worker(work: Callable[..., Done], job: object) -> Done:
    return work(*cast(tuple[list[RowTable], TextTransform], _in_worker), job)


def _folder_name(sources: Sources, transform: TextTransform) -> str:
    """The name of the folder of a store: a digest of what its samples depend on."""
    parts = [transform.fingerprint, str(transform.documents_per_sample)]
    for name, rows in zip(sources.names, sources.rows, strict=True):
        parts += [name, str(len(rows)), rows.fingerprint()]
    return digest_of(parts)
