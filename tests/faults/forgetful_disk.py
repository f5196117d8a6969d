"""A disk that forgets what was not flushed when the power fails.

POSIX promises that much and no more: the bytes of a file that ``fsync`` was called for, and the names in a folder that
it was called for. ``ForgetfulDisk`` notes both whenever the process flushes something, and makes the folder anew as a
machine may find it after the power has failed at that moment.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

OUTCOMES = ("forgotten", "names kept", "upper names kept")
"""What became of names that were not flushed: all are forgotten; all had reached the disk by themselves; those in
folders that were there from the start had, those below had not. Bytes that were not flushed are always lost."""

MOMENTS = ("fsync", "rename", "replace", "unlink", "rmdir")
"""Calls of ``os`` before each of which the power may fail."""


class ForgetfulDisk:
    """What a folder holds durably. All that lies in it at the start does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._open: dict[int, int] = {}
        for folder, _, files in os.walk(root):
            for path in (Path(folder), *(Path(folder) / name for name in files)):
                descriptor = os.open(path, os.O_RDONLY)
                self._note(descriptor)
                os.close(descriptor)
        self._first_folders = set(self._names)

    @contextmanager
    def watching(self, before_each: list[dict[str, dict[str, bytes]]]) -> Iterator[None]:
        """Notes what is flushed inside the block, and appends what would be left before each call of ``MOMENTS``."""
        real = {name: getattr(os, name) for name in MOMENTS}

        def watched(name: str):
            def call(*args, **kwargs):
                before_each.append(self.left())
                result = real[name](*args, **kwargs)
                if name == "fsync":
                    self._note(args[0])
                return result

            return call

        with mock.patch.multiple(os, **{name: watched(name) for name in MOMENTS}):
            yield

    def left(self) -> dict[str, dict[str, bytes]]:
        """By outcome: the files after the power fails now, by path below the root."""
        return {outcome: dict(self._files(self.root, outcome)) for outcome in OUTCOMES}

    def close(self) -> None:
        """Lets go of the files."""
        for descriptor in self._open.values():
            os.close(descriptor)

    def _note(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if status.st_ino not in self._open:
            self._open[status.st_ino] = os.dup(descriptor)  # while it is open, no other file gets its number
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = {entry.name: entry.inode() for entry in os.scandir(descriptor)}
        else:
            self._bytes[status.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def _files(self, folder: Path, outcome: str) -> Iterator[tuple[str, bytes]]:
        yield from self._below(folder.stat().st_ino, folder, "", outcome)

    def _below(self, inode: int, folder: Path | None, prefix: str, outcome: str) -> Iterator[tuple[str, bytes]]:
        """Files of a folder whose durable names are those of an inode, and whose present path is known or not."""
        names = self._names.get(inode, {})
        if folder is not None and (
            outcome == "names kept" or (outcome == "upper names kept" and inode in self._first_folders)
        ):
            names = {entry.name: entry.inode() for entry in os.scandir(folder)}
        for name, number in sorted(names.items()):
            path = self._path_of(number)
            if number in self._names or (path is not None and path.is_dir()):
                yield from self._below(number, path, f"{prefix}{name}/", outcome)
            else:
                yield prefix + name, self._bytes.get(number, b"")

    def _path_of(self, inode: int) -> Path | None:
        """Where a file or folder is now."""
        for folder, folders, files in os.walk(self.root):
            for name in (*folders, *files):
                path = Path(folder) / name
                if path.lstat().st_ino == inode:
                    return path
        return None


def write_out(files: dict[str, bytes], folder: Path) -> Path:
    """Makes a folder that holds these files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder
