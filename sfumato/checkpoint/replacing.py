"""A folder that takes another's place, so that there is always one of the two under the name."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from sfumato.checkpoint.envelope import flush

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder beside the one that it then replaces.

    Where the kernel and the file system can exchange two names in one call, the old folder or the new one is there
    whatever is killed when. Elsewhere (NFS, other systems than Linux) there are two renames, and a process that is
    killed between them leaves what ``restore_folder`` puts back.

    Args:
        folder: the name; need not exist.
        write: fills an empty folder.
    """
    restore_folder(folder)
    building, old = _building(folder), _old(folder)
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        write(building)
        for path in (*building.rglob("*"), building):
            flush(path)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)  # on a full disk it would take the room of what comes next
        raise
    if not folder.exists():
        os.replace(building, folder)
    elif exchange(building, folder):
        flush(folder.parent)
        shutil.rmtree(building, ignore_errors=True)
    else:
        os.replace(folder, old)
        os.replace(building, folder)
        shutil.rmtree(old, ignore_errors=True)
    flush(folder.parent)


def restore_folder(folder: Path) -> None:
    """Puts back what a process that was killed between the two renames of ``replace_folder`` left."""
    building, old = _building(folder), _old(folder)
    if not old.exists():
        return
    if folder.exists():  # killed after the second rename
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(building if building.exists() else old, folder)  # what was being written was complete by then
        shutil.rmtree(old, ignore_errors=True)


def exchange(left: Path, right: Path) -> bool:
    """Gives each of two folders the other's name, in one call.

    Returns:
        False where the kernel or the file system does not know how; nothing has happened then.

    Raises:
        OSError: when it knows how and fails.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_HERE, os.fsencode(left), _HERE, os.fsencode(right), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(left), None, str(right))


def _building(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.being_written")


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.being_replaced")
