"""Digests of the content of data, wherever it lies: data with equal digests makes the same samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.data.media.kinds import File

if TYPE_CHECKING:
    from sfumato.config.sections import TaskConfig

BLOCK, BLOCKS = 1 << 20, 64
"""Size in bytes and number of the pieces of a large file that are read, at even distances. Smaller files are read
whole."""

MODEL_BLOCKS = 16
"""Number of the pieces that are read of a large file of a model."""

SAMPLE, READERS = 2**14, 16
"""Bytes of each of the four parts of a media file that are read, and how many files are read at a time."""


def content_of_media(config: TaskConfig, files: Iterable[File], field: str) -> dict[str, str]:
    """The digest of media files in their order, under the name ``field``; empty where no medium is in a file.

    The digest of each file is kept in the run folder with its path, size and times, so that a resume reads only files
    that have changed.
    """
    paths = [file for file in files if isinstance(file, Path)]
    if not paths:
        return {}
    from sfumato.data.files.file_digests import FileDigests

    digests = FileDigests(Path(config.train.output_dir) / "files.npy", sampled_digest)

    def digest(path: Path) -> bytes:
        try:
            return digests[path]
        except OSError:  # a row with this file is broken, and is reported when it is read
            return b""

    with ThreadPoolExecutor(READERS) as pool:
        content = b"".join(pool.map(digest, paths))
    digests.save()
    return {field: hashlib.blake2b(content, digest_size=20).hexdigest()}


def sampled_digest(path: Path) -> bytes:
    """A digest of 16 bytes of a file's size and bytes; above ``4 * SAMPLE`` bytes, of four parts at even distances."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=16)
    digest.update(str(size).encode())
    with path.open("rb") as file:
        for number in range(4):
            file.seek(max(size - SAMPLE, 0) * number // 3 if size > 4 * SAMPLE else SAMPLE * number)
            digest.update(file.read(SAMPLE))
    return digest.digest()


def content_of_file(path: Path, blocks: int | None = None) -> str:
    """The digest of a file's size and bytes; of a large file, of ``blocks`` pieces (``BLOCKS`` if not given) of it."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=20)
    blocks = blocks or BLOCKS
    digest.update(str(size).encode())
    with path.open("rb") as file:
        if size <= BLOCK * blocks:
            digest.update(file.read())
        else:
            for number in range(blocks):
                file.seek((size - BLOCK) * number // max(blocks - 1, 1))
                digest.update(file.read(BLOCK))
    return digest.hexdigest()


def content_of_model_file(path: Path) -> str:
    """The digest of a file of a model; fewer pieces are enough, since training changes every part of its weights."""
    return content_of_file(path, MODEL_BLOCKS)


def digest_value(value: object) -> str:
    """The digest of the JSON of a value; what JSON cannot hold counts by its ``repr``."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()
