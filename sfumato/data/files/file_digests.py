"""Digests of the contents of files, remembered by path, size and times, so that an unchanged file is read once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from sfumato.config.writing import replace_file
from sfumato.data.files.stored import BROKEN_ARRAY
from sfumato.data.media.kinds import File

ENTRY = np.dtype([("path", "V16"), ("size", "<i8"), ("mtime", "<i8"), ("ctime", "<i8"), ("digest", "V16")])
"""An entry of a file: digest of its path, size in bytes, times in nanoseconds, digest of its content."""

BLOCK = 2**20

SETTLED_NS, COARSE_NS = 20_000_000, 2_000_000_000
"""Nanoseconds after a change of a file until a further change is sure to give it other times: a step of the file
system's clock, where it stores nanoseconds and where it stores seconds."""

Stat = tuple[int, int, int]


class FileDigests:
    """Digests of files by path, in memory and in a file.

    A file whose size or times differ from those at its last reading is read again. ctime reveals a change that left
    size and mtime as they were (``rsync -t``, ``touch -d``), on file systems that store it.
    """

    def __init__(self, path: Path | None, digest: Callable[[Path], bytes] | None = None) -> None:
        """Loads the digests that were saved.

        Args:
            path: the file of digests; None keeps them in memory alone. A damaged file counts as missing.
            digest: computes 16 bytes from a file's content; None is blake2b of all of it.
        """
        self._path = path
        self._digest = digest or digest_of_file
        self._is_changed = False
        self._entries: dict[bytes, tuple[Stat, bytes]] = {}
        try:
            entries = np.load(path, allow_pickle=False) if path is not None else np.zeros(0, ENTRY)
        except BROKEN_ARRAY:
            return
        if entries.dtype == ENTRY:
            stats = zip(*(entries[name].tolist() for name in ("size", "mtime", "ctime")), strict=True)
            keys = zip(entries["path"].tolist(), stats, entries["digest"].tolist(), strict=True)
            self._entries = {path: (stat, digest) for path, stat, digest in keys}

    def __getitem__(self, file: File) -> bytes:
        """The digest of a file's content, 16 bytes. Raises OSError when it cannot be read."""
        if isinstance(file, bytes):
            return hashlib.blake2b(file, digest_size=16).digest()
        key = hashlib.blake2b(os.fsencode(file), digest_size=16).digest()
        stat = stat_of(file)
        remembered = self._entries.get(key)
        if remembered is not None and remembered[0] == stat:
            return remembered[1]
        now = time.time_ns()
        digest = self._digest(file)
        # A file that changed a moment ago may change again within the same step of the clock: it is not remembered.
        if stat is not None and is_settled(stat, now):
            self._entries[key] = (stat, digest)
            self._is_changed = True
        return digest

    def save(self) -> None:
        """Writes the digests atomically. Where they cannot be written, files are read again next time."""
        if self._path is None or not self._is_changed:
            return
        rows = [(key, *stat, digest) for key, (stat, digest) in self._entries.items()]
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(self._path) as file:
                np.save(file, np.array(rows, ENTRY))
        self._is_changed = False


def digest_of_file(path: Path) -> bytes:
    """16 bytes of blake2b of a file's content."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.digest()


def stat_of(path: str | Path) -> Stat | None:
    """Size, mtime and ctime of a file; None where there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def is_settled(stat: Stat, at_ns: int) -> bool:
    """Whether the file would have other times if it had changed after a moment.

    Args:
        stat: of the file.
        at_ns: the moment, in nanoseconds.
    """
    step = SETTLED_NS if any(moment % 10**9 for moment in stat[1:]) else COARSE_NS
    return at_ns - max(stat[1:]) > step


def signature_of(paths: Iterable[str], read_from_ns: int = 0) -> tuple[str, bool]:
    """Identifies the files at these paths by their sizes and times.

    Args:
        paths: of files that may be missing.
        read_from_ns: the moment at which reading them began, in nanoseconds.

    Returns:
        The signature, and whether it can be trusted: no file has changed since that moment, or so shortly before it
        that its times might not show it.
    """
    digest = hashlib.blake2b(digest_size=16)
    settled = True
    for path in paths:
        stat = stat_of(path)
        digest.update(f"{path}\0{stat}\0".encode("utf-8", "surrogateescape"))
        settled &= stat is None or is_settled(stat, read_from_ns)
    return digest.hexdigest(), settled
