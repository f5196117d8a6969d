"""Takes away what macOS lacks: Python imports this file by itself where its folder is in ``PYTHONPATH``.

Packages go on reading ``/proc``, since elsewhere they would not; for the library and the tasks it is not there.
"""

import ctypes
import fcntl
import os
import signal
import socket
import sys
from typing import Any

LACKING: dict[Any, tuple[str, ...]] = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "eventfd", "pipe2", "getrandom"),
        *("copy_file_range", "posix_fadvise", "posix_fallocate", "fdatasync", "getxattr", "setxattr", "O_TMPFILE"),
        *("O_DIRECT", "O_PATH"),
    ),
    signal: ("SIGPWR", "SIGSTKFLT", "SIGRTMIN", "sigtimedwait", "sigwaitinfo"),
    fcntl: ("F_OFD_SETLK", "F_SETPIPE_SZ", "F_ADD_SEALS"),
    socket: ("SO_PEERCRED", "SOCK_CLOEXEC", "TCP_USER_TIMEOUT"),
}
LINUX = ("/proc/", "/sys/", "/dev/shm")
FUNCTIONS = ("renameat2", "memfd_create")
"""Of the C library."""


def refuse_linux_files(path: object) -> None:
    """Raises FileNotFoundError for a path of Linux where a line of the library or of a task has asked for it."""
    if not isinstance(path, (str, os.PathLike)) or not str(os.fspath(path)).startswith(LINUX):
        return
    frame = sys._getframe(2)
    while frame is not None and "site-packages" not in frame.f_code.co_filename:
        if "/sfumato/" in frame.f_code.co_filename or "/tasks/" in frame.f_code.co_filename:
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        frame = frame.f_back


class WithoutLinux(ctypes.CDLL):
    """A library of C, of which the process's own lacks what only Linux has."""

    def __init__(self, name: Any = None, *arguments: Any, **named: Any) -> None:
        super().__init__(name, *arguments, **named)
        self.is_own = name is None

    def __getattr__(self, name: str) -> Any:
        if name in FUNCTIONS and self.__dict__.get("is_own"):
            raise AttributeError(name)
        return super().__getattr__(name)


for module, names in LACKING.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
ctypes.CDLL = WithoutLinux
sys.addaudithook(lambda event, values: refuse_linux_files(values[0]) if event in ("open", "os.listdir") else None)
