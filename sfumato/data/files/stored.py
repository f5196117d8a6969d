"""Cache folders of results that are computed once from the data: how they are made, and how damage is noticed."""

from __future__ import annotations

import hashlib
import json
import os
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO

from sfumato.config.file_checks import read_json_object
from sfumato.config.open_mappings import JsonObject
from sfumato.config.writing import open_lock
from sfumato.errors import DataError

BROKEN_ARRAY = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    SyntaxError,
    OverflowError,
    MemoryError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
"""Errors that numpy raises for files of arrays that are damaged, or made to break it."""

MANIFEST = "manifest.json"
"""The file that is written last: a folder without it is not complete."""


def make_cache_folder(folder: Path) -> None:
    """Makes a folder with its parents. Raises DataError when it cannot be made, such as where a file stands."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be made: {error.strerror}; data.cache_dir names a folder that can be "
            "written"
        ) from error


def open_cache_lock(path: Path) -> IO[bytes]:
    """Opens a file to lock, which is made if absent. Raises DataError when that fails, or it is a link or a pipe."""
    try:
        return open_lock(path)
    except OSError as error:
        reason = "is a link; remove it" if path.is_symlink() else error.strerror
        raise DataError(f"data.cache_dir: {path}: {reason}, and not all is cached") from error


def read_manifest(folder: Path) -> JsonObject:
    """The content of a token store's manifest. Raises DataError when it is damaged."""
    path = folder / MANIFEST
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        raise DataError(f"damaged token store: {path}: {error}; delete its folder") from error


def check_file(path: Path, num_bytes: int) -> None:
    """Raises DataError when a file of a token store is missing or of another size."""
    if not path.is_file() or path.stat().st_size != num_bytes:
        raise DataError(f"damaged token store: {path} is missing or has not {num_bytes} bytes; delete its folder")


def digest_of(value: object) -> str:
    """The digest of a value that JSON can hold."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=10).hexdigest()


def close_on_disk(file: IO[bytes]) -> None:
    """Closes a file, after its content has reached the disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
