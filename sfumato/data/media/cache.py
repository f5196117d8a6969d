"""A cache on disk of the tensors that a model's processor makes of images, videos and audio, exact to the bit.

An entry holds the tensors of all media of one document; its key is a digest of the content of their files. A folder
holds the entries of one processor with its limits, and of one set of versions of the libraries that decode and scale.
A file that was replaced, another limit or another version therefore finds no entry, and the media are opened as without
a cache.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import json
import platform
import uuid
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from sfumato.config.writing import open_new, write_atomically
from sfumato.data.files.row_table import RowTable
from sfumato.data.files.stored import BROKEN_ARRAY, close_on_disk, digest_of, make_cache_folder, open_cache_lock
from sfumato.data.media.document_media import MediaRefs, Tensors
from sfumato.data.media.kinds import VERSION as PICTURES
from sfumato.data.media.kinds import AudioFile, DrawnFile, Medium, VideoFile
from sfumato.data.media.vision import MediaProcessor
from sfumato.data.text.token_store import MediaPlace, TokenStore, Watch, find_images, in_workers
from sfumato.errors import DataError

if TYPE_CHECKING:
    from sfumato.data.text.format import MediaTransform

VERSION = 1
"""Raise it when entries are written in another way, or the same files become other tensors."""

LIBRARIES = ("transformers", "numpy", "pillow", "opencv-python-headless", "opencv-python", "soundfile", "soxr")
"""Packages whose versions may change the tensors; they are part of the folder's name."""

SAMPLES = 64
"""Samples whose media are written into one shard, by one job of a worker process."""

ENTRY = np.dtype([("key", "V16"), ("start", "<i8"), ("size", "<i8"), ("checksum", "<u4")])
"""An entry of a shard's index: digest of the media, first byte and number of bytes in the shard, and their CRC-32."""

ALIGNED = 64
"""Arrays begin at multiples of this within an entry, so that ``np.frombuffer`` gives aligned arrays."""

FEW, MANY = 2**8, 2**16
"""Distinct values of a float tensor that codes of one byte, or of two bytes, tell apart."""


class MediaCache:
    """The entries of a folder that were there when it was opened; entries that are added later are not seen."""

    def __init__(self, folder: Path, reader: MediaProcessor, say: Callable[[str], None] | None = None) -> None:
        """Reads the indices of all shards.

        Args:
            folder: the shards of one processor.
            reader: makes the tensors of media that have no entry.
            say: is told once when media have no entry.

        Raises:
            DataError: for a damaged index.
        """
        self.folder = folder
        self.reader = reader
        self._say = say
        shards = sorted(folder.glob("*.npy"))
        indices = [_read_index(path) for path in shards]
        entries = np.concatenate([np.zeros(0, ENTRY), *indices])
        numbers = np.repeat(np.arange(len(shards)), [len(index) for index in indices])
        heads = _sort_keys(entries["key"])
        order = np.argsort(heads, kind="stable")
        self._shards = [path.with_suffix(".bin") for path in shards]
        self._heads = heads[order]
        self._entries = entries[order]
        self._numbers = numbers[order]
        """The shard of each entry; entries are sorted by the head of their key, for a binary search."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return self._find(key) is not None

    def tensors(self, images: MediaRefs) -> Tensors:
        """What ``MediaProcessor.tensors`` gives, from the cache where it has an entry.

        Raises:
            DataError: as ``MediaProcessor.tensors``, and for a damaged shard.
        """
        media = cast("Sequence[Medium]", images.find())  # documents of a data set name files, and nothing opened
        key = key_of(media, images.where)
        place = None if key is None else self._find(key)
        if place is None:
            if key is not None and self._say is not None:
                self._say(f"{images.where}: its media are not in {self.folder}: they are opened as without the cache")
                self._say = None
            # The files were looked up above; looking them up again would read the row of the table again.
            return self.reader.tensors(replace(images, find=lambda: media))
        shapes, tensors = unpack(self._read(place))
        self.reader.check_shapes(shapes, images)
        return tensors

    def _find(self, key: bytes) -> int | None:
        """The position of the entry of a key; None when there is none."""
        head = _sort_keys(np.frombuffer(key, "V16"))
        position = int(np.searchsorted(self._heads, head[0]))
        # Keys of 16 bytes are found by their first 8 as an integer; keys that share these stand one after the other.
        while position < len(self._heads) and self._heads[position] == head[0]:
            if self._entries["key"][position].tobytes() == key:
                return position
            position += 1
        return None

    def _read(self, place: int) -> bytearray:
        """The bytes of an entry. Raises DataError when they cannot be read or differ from what was written."""
        entry = self._entries[place]
        shard = self._shards[self._numbers[place]]
        content = bytearray(int(entry["size"]))
        try:
            with shard.open("rb", buffering=0) as file:
                file.seek(int(entry["start"]))
                view = memoryview(content)
                done = 0
                while done < len(view) and (count := file.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise DataError(f"damaged media cache: {shard}: {error}; delete its folder") from error
        if done < len(content) or zlib.crc32(content) != entry["checksum"]:
            raise DataError(f"damaged media cache: {shard} is not what was written; delete its folder")
        return content


def build_media_cache(
    store: TokenStore,
    rows: list[RowTable],
    transform: MediaTransform,
    folder: Path,
    num_workers: int,
    say: Callable[[str], None],
    watch: Watch | None = None,
) -> MediaCache:
    """Opens the cache of a processor, after adding the media of a store's documents that have no entry yet.

    A lock lets one process at a time add entries; the others wait for it. Shards are complete or absent, so a process
    that was stopped leaves whole shards, and the next one adds the rest.

    Args:
        store: the tokens of the documents.
        rows: the table of each source that the tokens were made from.
        transform: what made the tokens.
        folder: of all caches; the folder of this processor is made inside.
        num_workers: processes that open media.
        say: takes a line for the person who watches.
        watch: shows progress over the jobs; see ``build_token_store``.

    Raises:
        DataError: when a medium is broken, has another size than its tokens say, or there is no room.
    """
    reader = transform.reader
    cache_folder = folder / f"media_{fingerprint_of_media(reader)}"
    make_cache_folder(cache_folder)
    complete_mark = cache_folder / f"complete_{digest_of([store.folder.name, store.fingerprint])}"
    with open_cache_lock(cache_folder / "lock") as lock:  # the system opens the lock when a process is killed
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete_mark.exists():
            _remove_parts(cache_folder)
            places = [store.media(index) for index in range(len(store))]
            jobs = [places[start : start + SAMPLES] for start in range(0, len(places), SAMPLES)]
            jobs = [media_places for job in jobs if (media_places := [place for sample in job for place in sample])]
            # This process may have written to the folder before: another process may have added shards since then.
            _cached_keys.cache_clear()
            work = in_workers(rows, transform, partial(_write, cache_folder), jobs, num_workers)
            with closing(cast("Generator[int]", work)) as parts:  # so that an error here ends the worker processes
                size = sum(watch(parts, len(jobs)) if watch else parts)
            write_atomically(complete_mark, b"")
            say(f"media: {size / 2**30:.2f} GiB were added to {cache_folder}")
    return MediaCache(cache_folder, reader, say)


def fingerprint_of_media(reader: MediaProcessor) -> str:
    """Identifies how files become tensors on this machine; kernels of another CPU may round otherwise."""
    versions = [[name, _package_version(name)] for name in LIBRARIES]
    return digest_of([VERSION, PICTURES, reader.fingerprint, reader.arguments, versions, platform.machine()])


def key_of(media: Sequence[Medium], where: str) -> bytes | None:
    """The key of a document's media, from the kinds and contents of their files: 16 bytes.

    Args:
        media: the files, in the document's order.
        where: file and row, for messages.

    Returns:
        None where the document has images that are drawn: their latents are not cached here.

    Raises:
        DataError: when a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for medium in media:
        if isinstance(medium, DrawnFile):
            return None
        file = medium.file if isinstance(medium, VideoFile | AudioFile) else medium
        try:
            content = file if isinstance(file, bytes) else file.read_bytes()
        except OSError as error:
            raise DataError(f"{where}: {file}: {error.strerror}") from error
        digest.update(f"{type(medium).__name__ if file is not medium else 'image'} {len(content)} ".encode())
        digest.update(content)
    return digest.digest()


def pack(tensors: Tensors, shapes: np.ndarray) -> bytes:
    """Tensors and ``MediaRefs.shapes`` as the bytes of an entry; ``unpack`` reads them.

    Pixels of 8 bits become floats of at most 256 values for each channel. A float32 tensor with few distinct values is
    written as codes of one byte or two, and a table of the values.
    """
    arrays = {"": np.ascontiguousarray(shapes, "<i4")} | {name: value.numpy() for name, value in tensors.items()}
    columns = []
    parts = []
    end = 0
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        codes, table = _encode(array)
        description = [name, array.dtype.str, list(array.shape), codes.dtype.str, len(table)]
        for part in (table, codes):
            columns.append([*description, end, part.nbytes])
            parts.append(part.tobytes().ljust(-(-part.nbytes // ALIGNED) * ALIGNED, b"\0"))
            end += len(parts[-1])
    header = json.dumps(columns).encode()
    # Padded with blanks, which JSON allows, so that the first array begins at a multiple of ALIGNED after the 8 bytes.
    header = header.ljust(-(-(len(header) + 8) // ALIGNED) * ALIGNED - 8)
    return b"".join([len(header).to_bytes(8, "little"), header, *parts])


def unpack(content: bytearray) -> tuple[np.ndarray, Tensors]:
    """The shapes and tensors that ``pack`` was given, exact to the bit. The tensors share the memory of ``content``."""
    begin = 8 + int.from_bytes(content[:8], "little")
    columns = json.loads(content[8:begin])
    arrays = {}
    for (name, dtype, shape, _, _, start, size), second in zip(columns[0::2], columns[1::2], strict=True):
        codes = np.frombuffer(content, second[3], second[6] // np.dtype(second[3]).itemsize, begin + second[5])
        table = np.frombuffer(content, dtype, size // np.dtype(dtype).itemsize, begin + start)
        arrays[name] = (codes if not len(table) else _decode(codes, table)).reshape(shape)
    shapes = arrays.pop("")
    return shapes, {name: torch.from_numpy(array) for name, array in arrays.items()}


def _encode(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and table of an array, both flat.

    Of a large float32 array with few distinct values the codes are positions in the table; any other array is its own
    codes, and its table is empty. Values are compared as bits, so that -0.0 and NaN come back as they were.
    """
    flat = array.reshape(-1)
    if array.dtype == np.float32 and array.size > MANY:
        values = np.unique(bits := flat.view(np.uint32))
        if len(values) <= MANY:
            return np.searchsorted(values, bits).astype("u1" if len(values) <= FEW else "<u2"), values.view(np.float32)
    return flat, np.zeros(0, array.dtype)


def _decode(codes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """``table[codes]``; codes of one byte are looked up two at a time, which takes half as long."""
    if codes.dtype.itemsize > 1 or len(codes) % 2:
        return table[codes]
    filled = np.zeros(FEW, np.uint32)
    filled[: len(table)] = table.view(np.uint32)
    pairs = filled.astype(np.uint64)[None, :] | filled.astype(np.uint64)[:, None] << np.uint64(32)
    return pairs.reshape(-1)[codes.view("<u2")].view(np.float32)


def _write(folder: Path, rows: list[RowTable], transform: MediaTransform, places: list[MediaPlace]) -> int:
    """Writes a shard with the media of these documents that have no entry yet. Runs in worker processes.

    The tensors are renamed into place before the index: without its ``.npy`` a ``.bin`` does not count.

    Returns:
        Bytes of the shard.
    """
    cached_keys = _cached_keys(folder)
    reader = transform.reader
    entries = []
    name = uuid.uuid4().hex
    part = folder / f"{name}.part"
    num_bytes = 0
    new_keys = set()
    try:
        with open_new(part) as file:
            for place in places:
                images = find_images(rows, transform, place)
                media = cast("Sequence[Medium]", images.find())
                key = key_of(media, images.where)
                if key is None or key in cached_keys or key in new_keys:
                    continue
                content = pack(reader.tensors(replace(images, find=lambda media=media: media)), images.shapes)
                file.write(content)
                new_keys.add(key)
                entries.append((key, num_bytes, len(content), zlib.crc32(content)))
                num_bytes += len(content)
            close_on_disk(file)
        if entries:
            part.rename(part.with_suffix(".bin"))
            with open_new(part) as file:
                np.save(file, np.array(entries, ENTRY))
                close_on_disk(file)
            part.rename(part.with_suffix(".npy"))
    except OSError as error:
        raise DataError(
            f"data.cache_media: {folder}: {error.strerror}: what was finished stays, and is gone on with in the next "
            "run: make room, give another data.cache_dir, or leave data.cache_media out"
        ) from error
    finally:
        part.unlink(missing_ok=True)
        if not part.with_suffix(".npy").exists():
            part.with_suffix(".bin").unlink(missing_ok=True)
    cached_keys.update(new_keys)
    return num_bytes


@functools.lru_cache(1)
def _cached_keys(folder: Path) -> set[bytes]:
    """The keys of the entries in a folder when this process first looked, and those that it has added since.

    The caller updates the set: it is the same object at every call for one folder.
    """
    return {key.tobytes() for path in folder.glob("*.npy") for key in _read_index(path)["key"]}


def _read_index(path: Path) -> np.ndarray:
    """The index of a shard, ``ENTRY [n]``. Raises DataError when it is damaged."""
    try:
        index = np.load(path, allow_pickle=False)
    except BROKEN_ARRAY as error:
        raise DataError(f"damaged media cache: {path}: {error}; delete its folder") from error
    if index.dtype != ENTRY or index.ndim != 1:
        raise DataError(f"damaged media cache: {path} is no index; delete its folder")
    return index


def _sort_keys(keys: np.ndarray) -> np.ndarray:
    """The first eight bytes of each key as an integer, by which entries are sorted: uint64 ``[n]``."""
    return np.frombuffer(np.ascontiguousarray(keys).tobytes(), "<u8")[0::2]


def _remove_parts(folder: Path) -> None:
    """Removes unfinished shards that a killed process left."""
    for path in folder.iterdir():
        unfinished = path.suffix == ".bin" and not path.with_suffix(".npy").exists()
        if path.suffix == ".part" or unfinished:
            path.unlink()


def _package_version(name: str) -> str:
    """The version of an installed package; empty where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
