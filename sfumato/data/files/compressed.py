"""Files that are read to their end and held in memory, perhaps compressed as a whole."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from sfumato.config.file_checks import file_problem
from sfumato.errors import DataError

MAX_LOADED = 2 * 2**30
"""Bytes of the largest file that is held in memory as a whole, after decompression."""


def _open_zst(path: Path) -> IO[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise DataError(
            f"{path} is compressed with Zstandard, which the package zstandard reads: install it (pip install "
            "zstandard), or decompress the file"
        ) from error
    return zstandard.open(path, "rb")  # the others open in this mode by default


OPENERS: dict[str, Callable[[Path], IO[bytes]]] = {
    ".gz": gzip.GzipFile,  # pyright: ignore[reportAssignmentType]  # typeshed does not call these classes IO[bytes]
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _open_zst,
}
"""Functions that open compressed files, by the last ending, such as that of ``rows.jsonl.gz``."""


def is_compressed(path: Path) -> bool:
    """Whether the ending says that the file is compressed."""
    return path.suffix.lower() in OPENERS


def read_whole(path: Path, most_bytes: int = MAX_LOADED) -> bytes:
    """The content of a file, decompressed where its ending says so.

    Raises:
        DataError: when a compressed file is damaged, or holds more than ``most_bytes``.
    """
    if not is_compressed(path):
        return path.read_bytes()
    try:
        with OPENERS[path.suffix.lower()](path) as file:
            content = file.read(most_bytes + 1)  # a small file may expand to more than there is memory
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} cannot be decompressed: {error}") from error
    except Exception as error:  # zstandard has an error class of its own, which need not be installed
        if isinstance(error, DataError) or type(error).__module__.partition(".")[0] != "zstandard":
            raise
        raise DataError(f"{path} cannot be decompressed: {error}") from error
    if len(content) > most_bytes:
        raise DataError(
            f"{path} holds more than the {most_bytes:,} bytes that are read of a compressed file: decompress it, or "
            "write the rows as .parquet"
        )
    return content


def read_text(path: Path, most_bytes: int = MAX_LOADED) -> str:
    """A text file, perhaps compressed. Raises DataError that names it when it is no file, too large, or not UTF-8."""
    if problem := file_problem(path, most_bytes):
        raise DataError(f"{path} {problem}")
    try:
        return read_whole(path, most_bytes).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; save it as UTF-8") from error
