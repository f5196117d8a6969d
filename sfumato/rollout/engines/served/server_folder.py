"""The private folder of a server that a run starts: its temporary files, the modules that it imports, and the record of
the shared memory that it has made.

What is in it goes with the server. Should nobody be left to remove it, the next server that this user starts on this
machine does: it is locked while the run, the owner of the server or the server itself lives.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from sfumato.config.writing import open_lock
from sfumato.errors import ConfigError
from sfumato.rollout.engines.served.owner_process import TEMPORARY, remove_leftovers

PREFIX = "sfumato-"

LOCK = "lock"
"""In the folder: a file that is locked, with the name of the machine that knows the lock."""

MODULES = "modules"
"""In the folder: the modules that the server can import."""

MOST_SOCKET_CHARACTERS = 107
"""Longest path of a socket."""

SOCKET_CHARACTERS = len(f"/{PREFIX}12345678/{TEMPORARY}/") + 36
"""Of the path of a socket in the folder's temporary files, behind the folder's parent: vLLM names them by UUIDs."""


class ServerFolder:
    """A folder that nobody else can read, and its lock."""

    def __init__(self, environment: Mapping[str, str], modules: Mapping[str, Path] | None = None) -> None:
        """Makes the folder, after removing those whose servers, owners and runs are no more.

        Args:
            environment: of the server: the folder lies where that says that temporary files lie, or in /tmp where paths
                of sockets would be too long otherwise.
            modules: Python files that are copied into it, by the names that the server imports them by.

        Raises:
            ConfigError: when it cannot be made.
        """
        parent = Path(environment.get("TMPDIR") or tempfile.gettempdir())
        if len(str(parent)) + SOCKET_CHARACTERS > MOST_SOCKET_CHARACTERS:
            parent = Path("/tmp")
        try:
            remove_abandoned_folders(parent)
            self._make(parent, modules or {})
        except OSError as error:
            raise ConfigError(
                f"{parent}: {error}: an engine that the run starts has its temporary files there; make room, or set "
                "TMPDIR to another folder"
            ) from error

    def _make(self, parent: Path, modules: Mapping[str, Path]) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self.lock = open_lock(self.path / LOCK)
            self.lock.write(socket.gethostname().encode())
            if try_lock(self.lock) and is_at(self.lock, self.path / LOCK):
                break
            self.lock.close()  # another run has taken the folder for an abandoned one before it was locked
            shutil.rmtree(self.path, ignore_errors=True)
        (self.path / TEMPORARY).mkdir()
        (self.path / MODULES).mkdir()
        for name, source in modules.items():
            shutil.copy(source, self.path / MODULES / f"{name}.py")

    def temporary_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment variables that have processes use the folder for temporary files.

        What torch compiles stays where it would lie without them, so that the next server finds it.
        """
        compiled = Path(environment.get("TMPDIR") or tempfile.gettempdir(), f"torchinductor_{user_name()}")
        return {
            "TMPDIR": str(self.path / TEMPORARY),
            "TORCHINDUCTOR_CACHE_DIR": environment.get("TORCHINDUCTOR_CACHE_DIR") or str(compiled),
        }

    def environment_of(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment of a server, with the variables that have it use the folder."""
        paths = [str(self.path / MODULES), *filter(None, [environment.get("PYTHONPATH")])]
        return {**environment, **self.temporary_variables(environment), "PYTHONPATH": os.pathsep.join(paths)}

    def remove(self) -> None:
        """Removes the folder, and the shared memory of its server, which has ended."""
        remove_leftovers(self.path)
        shutil.rmtree(self.path, ignore_errors=True)
        self.lock.close()


def user_name() -> str:
    """The user's name as torch has it in the default name of its folder of compiled code."""
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # a container that has no name for its user
        return f"uid_{os.getuid()}"


def remove_abandoned_folders(parent: Path) -> None:
    """Removes the folders of this user's servers below ``parent`` that nobody has locked, and what those left."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid() or not (folder / LOCK).is_file():
                continue  # another program's, or one that is just being made
            with open_lock(folder / LOCK) as lock:
                if lock.read() == socket.gethostname().encode() and try_lock(lock):
                    remove_leftovers(folder)
                    shutil.rmtree(folder)
        except FileNotFoundError:
            continue  # another run removes it, too


def try_lock(file: IO[bytes]) -> bool:
    """Locks a file, unless somebody else has locked it. Closing it, also by the end of a process, ends the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def is_at(file: IO[bytes], path: Path) -> bool:
    """Whether an open file is the one that a path names."""
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
