"""The source code that a run executes: whether all its processes have the same, and whether it is edited meanwhile.

Imports neither torch nor ray, so that a process can say what it has before it loads either.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import socket
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import sfumato
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from sfumato.parallel.mesh import Mesh

PACKAGE = Path(sfumato.__file__).parent

CODE = "source code of sfumato"
"""Name of the digest among the versions."""

PAUSE_S = 60.0
"""Seconds between two looks at the files, which may be on a network file system."""

NAMED = 3
"""Files and machines that a message names; the others are counted."""


@functools.cache
def _package_files() -> tuple[Path, ...]:
    """The library's source files, sorted by name."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


@functools.cache
def code_digest() -> str:
    """Digest of the library's files, with their names, as they were at the first call: 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in _package_files():
        digest.update(path.relative_to(PACKAGE).as_posix().encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def package_versions(*packages: str) -> dict[str, str]:
    """What must be the same in all processes of a run, by name.

    Args:
        packages: installed packages whose versions count besides those of Python and torch.
    """
    python = "{}.{}".format(*sys.version_info)
    of_packages = {name: importlib.metadata.version(name) for name in ("torch", *packages)}
    return {"python": python, "sfumato": sfumato.__version__, **of_packages, CODE: code_digest()}


def describe_difference(versions_there: dict[str, str], versions_here: dict[str, str]) -> str:
    """What differs, with the values of both; empty if nothing does. Other releases may name other things."""
    return ", ".join(
        f"{name} {versions_there.get(name, 'unknown')} ({version} here)"
        for name, version in versions_here.items()
        if versions_there.get(name) != version
    )


def check_same_code(mesh: Mesh) -> None:
    """Checks that the processes of a run have the same versions and source code. Every rank must call it.

    Raises:
        ConfigError: on every rank; names the machines where they differ from the first rank's.
    """
    if mesh.size == 1:
        return
    ranks = mesh.gather((socket.gethostname(), package_versions()), over="world")
    first_host, first_versions = ranks[0]
    different = {host: problem for host, version in ranks if (problem := describe_difference(version, first_versions))}
    if different:
        parts = [f"{host} has {problem}" for host, problem in list(different.items())[:NAMED]]
        more = f"; and {len(different) - NAMED} more machines" if len(different) > NAMED else ""
        raise ConfigError(
            f"the processes of this run do not have what rank 0 on {first_host} has: {'; '.join(parts)}{more}. Install "
            "the same versions on all machines, or let them see one checkout"
        )


class SourceWatch:
    """Notices source files that are edited while a run goes on: the library's, and of what else is imported those that
    are not installed packages. Parts that are loaded later and processes that start anew get the edited code."""

    def __init__(self) -> None:
        self._files = {*_package_files(), *_imported_files()}
        self._stamps = self._read_stamps()
        self._next_look = time.monotonic() + PAUSE_S

    def look(self) -> str:
        """A sentence about the files that were edited since the last look; empty when none was, or it is too early."""
        if time.monotonic() < self._next_look:
            return ""
        self._next_look = time.monotonic() + PAUSE_S
        stamps = self._read_stamps()
        edited = sorted(str(path) for path, stamp in stamps.items() if stamp != self._stamps[path])
        self._stamps = stamps
        if not edited:
            return ""
        more = f" and {len(edited) - NAMED} more" if len(edited) > NAMED else ""
        return (
            f"edited while this run goes on: {', '.join(edited[:NAMED])}{more}. What is loaded from now on, and "
            "processes that start anew, run the edited code"
        )

    def _read_stamps(self) -> dict[Path, tuple[int, int] | None]:
        """Time of the last change and size of each file; None for one that is gone."""
        stamps: dict[Path, tuple[int, int] | None] = {}
        for path in self._files:
            try:
                status = path.stat()
            except OSError:
                stamps[path] = None
            else:
                stamps[path] = status.st_mtime_ns, status.st_size
        return stamps


def _imported_files() -> Iterator[Path]:
    """Files of imported modules that belong neither to Python nor to an installed package."""
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    for module in list(sys.modules.values()):
        # of the module's own dictionary: to ask a module that loads its parts late for an attribute may load something
        file = module.__dict__.get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str) and file.endswith(".py") and not file.startswith(installed):
            path = Path(file)
            if path.is_absolute():  # torch has modules with made-up names
                yield path
