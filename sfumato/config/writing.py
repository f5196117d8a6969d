"""Files of run folders and caches, which somebody else may have made or may write to: no link that lies there is
followed. ``tests/unit/test_writers.py`` walks all writers."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
LOCKING = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file so that a reader, or a crash, sees the old content or the new, never a part.

    Raises OSError when it cannot be written; the old content stays then.
    """
    with replace_file(path) as file:
        file.write(content)


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a new file that replaces ``path`` at the end of the block, when all of it is on disk.

    Until then it lies beside it under a name that nobody can guess, made anew. A link at ``path`` is replaced, not
    followed. If the block raises, the new file is removed and ``path`` stays as it was.
    """
    building = path.with_name(f"{path.name[:200]}.{secrets.token_hex(8)}.tmp")
    try:
        with os.fdopen(os.open(building, NEW, 0o666), "wb") as file:
            yield file
            # on disk before the name changes, or a crash could leave the new name with no content
            file.flush()
            os.fsync(file.fileno())
        os.replace(building, path)
    except BaseException:
        with contextlib.suppress(OSError):
            building.unlink(missing_ok=True)  # a full disk needs the room
        raise


def open_new(path: Path) -> IO[bytes]:
    """A file that did not exist, to write. Raises FileExistsError also when a link of its name lies there."""
    return os.fdopen(os.open(path, NEW, 0o666), "wb")


def make_new_folder(folder: Path) -> Path:
    """Makes an empty folder, with those above it; what lay there is removed, of a link the link alone.

    Raises:
        OSError: also when somebody makes one of that name meanwhile.
    """
    remove(folder)
    folder.mkdir(parents=True)
    return folder


def remove(path: Path) -> None:
    """Removes a file, a link or a folder with all that is in it; links are not followed. It may be missing."""
    if path.is_dir() and not path.is_symlink():  # is_dir follows links
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def open_lock(path: Path) -> IO[bytes]:
    """A file to take ``flock`` of, made if absent; nothing is written to it.

    Raises:
        OSError: also when it is a link, a pipe or a device.
    """
    file = os.fdopen(os.open(path, LOCKING, 0o666), "r+b", buffering=0)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is no file; remove it", str(path))
    return file


def open_to_append(path: Path) -> IO[bytes]:
    """A file to append to, without a buffer; it is made if absent.

    Raises:
        OSError: also when it is a link, or a pipe that nobody reads.
    """
    return os.fdopen(os.open(path, APPENDING, 0o666), "ab", buffering=0)
