"""What a model's processor makes of images, videos and audio, kept on disk: made once, read back to the bit.

An entry belongs to the media of one document, by a digest of what their files hold; the folder belongs to the
processor, its limits and the versions of the libraries that decode and scale. So a file that was replaced, another
limit or another version finds nothing, and is opened as without a cache.
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
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.config.writing import open_new, write_atomically
from sfumato.data.files.rows import RowTable
from sfumato.data.files.stored import BROKEN_ARRAY, close_on_disk, digest_of, make_cache_folder, open_cache_lock
from sfumato.data.media.kinds import AudioFile, DrawnFile, Medium, VideoFile
from sfumato.data.media.pictures import VERSION as PICTURES
from sfumato.data.media.vision import ImageReader, Images, Tensors
from sfumato.data.text.token_store import MediaPlace, TokenStore, Watch, find_images, in_workers
from sfumato.errors import DataError

VERSION = 1
"""Raise it when entries are written in another way, or the same files become other tensors."""

LIBRARIES = ("transformers", "numpy", "pillow", "opencv-python-headless", "opencv-python", "soundfile", "soxr")
"""Of whose versions tensors may depend."""

SAMPLES = 64
"""Samples whose media are written into one shard."""

ENTRY = np.dtype([("key", "V16"), ("start", "<i8"), ("size", "<i8"), ("checksum", "<u4")])
"""Index of a shard: digest of the media, place and bytes in the shard, and CRC-32 of these."""

ALIGNED = 64
FEW, MANY = 2**8, 2**16
"""Distinct values of a float tensor that codes of one byte, or of two, tell apart."""


class MediaCache:
    """The entries of a folder, as they are when it is opened."""

    def __init__(self, folder: Path, reader: ImageReader, say: Callable[[str], None] | None = None) -> None:
        """Reads the indices. ``say`` is told once when media are not there. Raises DataError for a damaged index."""
        self.folder = folder
        self.reader = reader
        self._say = say
        shards = sorted(folder.glob("*.npy"))
        indices = [_read_index(path) for path in shards]
        entries = np.concatenate([np.zeros(0, ENTRY), *indices])
        numbers = np.repeat(np.arange(len(shards)), [len(index) for index in indices])
        heads = _head(entries["key"])
        order = np.argsort(heads, kind="stable")
        self._shards = [path.with_suffix(".bin") for path in shards]
        self._heads = heads[order]
        self._entries = entries[order]
        self._numbers = numbers[order]

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return self._find(key) is not None

    def tensors(self, images: Images) -> Tensors:
        """As ``ImageReader.tensors``, and what it raises; also DataError for a damaged shard."""
        media = images.find()
        key = key_of(media, images.where)
        place = None if key is None else self._find(key)
        if place is None:
            if key is not None and self._say is not None:
                self._say(f"{images.where}: its media are not in {self.folder}: they are opened as without the cache")
                self._say = None
            return self.reader.tensors(replace(images, find=lambda: media))
        shapes, tensors = unpack(self._read(place))
        self.reader.check_shapes(shapes, images)
        return tensors

    def _find(self, key: bytes) -> int | None:
        position = int(np.searchsorted(self._heads, (head := _head(np.frombuffer(key, "V16")))[0]))
        while position < len(self._heads) and self._heads[position] == head[0]:
            if self._entries["key"][position].tobytes() == key:
                return position
            position += 1
        return None

    def _read(self, place: int) -> bytearray:
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
    transform: Any,
    folder: Path,
    num_workers: int,
    say: Callable[[str], None],
    watch: Watch | None = None,
) -> MediaCache:
    """Opens the cache of a processor, after adding what it has not of the media of a store's documents.

    A process that finds another one at it waits. Shards are complete or absent, so that one that was stopped is gone on
    with.

    Args:
        store: the tokens; ``rows`` and ``transform`` are what they were made of.
        folder: of all caches; that of these tokens' processor is inside.
        num_workers: processes that open media.
        say, watch: see ``build_token_store``.

    Raises:
        DataError: when a medium is broken, has another size than its tokens say, or there is no room.
    """
    reader: ImageReader = transform.reader
    cache_folder = folder / f"media_{fingerprint_of_media(reader)}"
    make_cache_folder(cache_folder)
    complete_mark = cache_folder / f"complete_{digest_of([store.folder.name, store.fingerprint])}"
    with open_cache_lock(cache_folder / "lock") as lock:  # the system opens the lock when a process is killed
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete_mark.exists():
            _remove_parts(cache_folder)
            places = [store.media(index) for index in range(len(store))]
            jobs = [places[start : start + SAMPLES] for start in range(0, len(places), SAMPLES)]
            jobs = [found for job in jobs if (found := [place for sample in job for place in sample])]
            _cached_keys.cache_clear()
            work = in_workers(rows, transform, partial(_write, cache_folder), jobs, num_workers)
            with closing(work) as parts:
                size = sum(watch(parts, len(jobs)) if watch else parts)
            write_atomically(complete_mark, b"")
            say(f"media: {size / 2**30:.2f} GiB were added to {cache_folder}")
    return MediaCache(cache_folder, reader, say)


def fingerprint_of_media(reader: ImageReader) -> str:
    """Identifies how files become tensors on this machine."""
    versions = [[name, _version(name)] for name in LIBRARIES]
    return digest_of([VERSION, PICTURES, reader.fingerprint, reader.arguments, versions, platform.machine()])


def key_of(media: Sequence[Medium], where: str) -> bytes | None:
    """Identifies the media of a document by what their files hold; None where some are drawn.

    Raises DataError when a file cannot be read.
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
    """Tensors and ``Images.shapes`` as bytes: of float tensors with few distinct values codes of one byte, or two."""
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
    header = header.ljust(-(-(len(header) + 8) // ALIGNED) * ALIGNED - 8)
    return b"".join([len(header).to_bytes(8, "little"), header, *parts])


def unpack(content: bytearray) -> tuple[np.ndarray, Tensors]:
    """Shapes and tensors of ``pack``, to the bit."""
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
    """The array flat and no table, or where it has few values, their numbers and their table; compared as bits."""
    flat = array.reshape(-1)
    if array.dtype == np.float32 and array.size > MANY:
        values = np.unique(bits := flat.view(np.uint32))
        if len(values) <= MANY:
            return np.searchsorted(values, bits).astype("u1" if len(values) <= FEW else "<u2"), values.view(np.float32)
    return flat, np.zeros(0, array.dtype)


def _decode(codes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """``table[codes]``; of codes of one byte two at a time, which takes half as long."""
    if codes.dtype.itemsize > 1 or len(codes) % 2:
        return table[codes]
    filled = np.zeros(FEW, np.uint32)
    filled[: len(table)] = table.view(np.uint32)
    pairs = filled.astype(np.uint64)[None, :] | filled.astype(np.uint64)[:, None] << np.uint64(32)
    return pairs.reshape(-1)[codes.view("<u2")].view(np.float32)


def _write(folder: Path, rows: list[RowTable], transform: Any, places: list[MediaPlace]) -> int:
    """Writes a shard with what the cache has not of these documents' media. Returns its bytes; runs in any process."""
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
                media = images.find()
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
    """The keys in a folder as this process found it, and those that it adds."""
    return {key.tobytes() for path in folder.glob("*.npy") for key in _read_index(path)["key"]}


def _read_index(path: Path) -> np.ndarray:
    try:
        index = np.load(path, allow_pickle=False)
    except BROKEN_ARRAY as error:
        raise DataError(f"damaged media cache: {path}: {error}; delete its folder") from error
    if index.dtype != ENTRY or index.ndim != 1:
        raise DataError(f"damaged media cache: {path} is no index; delete its folder")
    return index


def _head(keys: np.ndarray) -> np.ndarray:
    """The first eight bytes of each key, by which they are sorted."""
    return np.frombuffer(np.ascontiguousarray(keys).tobytes(), "<u8")[0::2]


def _remove_parts(folder: Path) -> None:
    """Removes what a process left that was killed."""
    for path in folder.iterdir():
        unfinished = path.suffix == ".bin" and not path.with_suffix(".npy").exists()
        if path.suffix == ".part" or unfinished:
            path.unlink()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
