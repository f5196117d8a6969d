"""Files of a run folder, which somebody else may have made: written without following a link that lies there."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import IO

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file so that a reader, or a crash, sees the old content or the new, never a part.

    What is written until then is a file that did not exist, of a name that nobody can guess. A link of the file's name
    is replaced, not followed.
    """
    building = path.with_name(f"{path.name[:200]}.{secrets.token_hex(8)}.tmp")
    try:
        with os.fdopen(os.open(building, NEW, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(building, path)
    except OSError:
        with contextlib.suppress(OSError):
            building.unlink(missing_ok=True)  # a full disk needs the room
        raise


def open_to_append(path: Path) -> IO[bytes]:
    """A file to append to, without a buffer; it is made if absent.

    Raises:
        OSError: also when it is a link, or a pipe that nobody reads.
    """
    return os.fdopen(os.open(path, APPENDING, 0o666), "ab", buffering=0)
