"""Digests of what data holds, wherever it lies: two that are equal make the same samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sfumato.data.files.file_digests import FileDigests
from sfumato.data.files.file_rows import FileRows
from sfumato.data.files.picture_folder import FolderRows
from sfumato.data.files.rows import JoinedRows
from sfumato.data.media.pictures import File

BLOCK, BLOCKS = 1 << 20, 64
"""Bytes and number of the pieces of a large file that are read, at even distances; smaller files are read whole."""

MODEL_BLOCKS = 16
"""Likewise of files of models."""

SAMPLE, READERS = 2**14, 16
"""Bytes of each of four parts of a picture that are read to tell it from others, and files that are read at a time."""


def content_of_media(config: Any, files: Iterable[File], field: str) -> dict[str, str]:
    """The digest of files in their order; of nothing where there are none.

    What is in them is remembered in the run folder, by path, size and times, so that a resume reads none again that
    stayed.
    """
    paths = [file for file in files if isinstance(file, Path)]
    if not paths:
        return {}
    digests = FileDigests(Path(config.train.output_dir) / "files.npy", sampled_digest)

    def digest(path: Path) -> bytes:
        try:
            return digests[path]
        except OSError:  # a broken row, which is named when it is read
            return b""

    with ThreadPoolExecutor(READERS) as pool:
        content = b"".join(pool.map(digest, paths))
    digests.save()
    return {field: hashlib.blake2b(content, digest_size=20).hexdigest()}


def sampled_digest(path: Path) -> bytes:
    """16 bytes for the size of a file and its bytes, of one of more than ``4 * SAMPLE`` a part at even distances."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=16)
    digest.update(str(size).encode())
    with path.open("rb") as file:
        for number in range(4):
            file.seek(max(size - SAMPLE, 0) * number // 3 if size > 4 * SAMPLE else SAMPLE * number)
            digest.update(file.read(SAMPLE))
    return digest.digest()


def content_of_file(path: Path, blocks: int | None = None) -> str:
    """The digest of a file: its size, and its bytes, of a large one ``blocks`` (``BLOCKS``) at even distances."""
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
    """The digest of a file among weights, of which training changes every part."""
    return content_of_file(path, MODEL_BLOCKS)


def digest_rows(rows: Any) -> Any:
    if isinstance(rows, JoinedRows):
        return [digest_rows(part) for part in rows.parts]
    if isinstance(rows, FileRows):
        return content_of_file(rows.path)
    if isinstance(rows, FolderRows):
        return [[str(path.relative_to(rows.root)), path.stat().st_size] for path in rows.files()]
    return "made in code"  # as the configuration says


def digest_value(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()
