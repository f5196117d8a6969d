"""The process that starts sandboxes: small and with nothing to hide, so that starting one is a matter of milliseconds.

A request comes over a socket with the descriptors that the program gets. Per request there are four processes:

    launcher ── R, writes who is who in the new user namespace
                 └ C, creates the namespaces
                    └ I, process 1 within: mounts, gives up all privileges, watches time and memory, reaps
                       └ P, the program

When I ends, the kernel ends everything in its process namespace. Nobody within can signal it or look into it.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import NoReturn, TypedDict, final

from sfumato.sandbox import kernel

USER = 1000
"""User and group of the program within."""
OUTSIDE_USER = 65534
"""Who that is outside when the sandbox is started by root; otherwise it is who started it."""
WORK_FOLDER = "/tmp"
MOST_DESCRIPTORS = 16
_POLL_S = 0.02
_NEW_ROOT = "/tmp"  # a folder that every system has; what is mounted on it is seen within alone
_DEVICES = ("null", "zero", "full", "random", "urandom")


@final
class ProgramRequest(TypedDict):
    """A program and its limits."""

    command: list[str]
    environment: dict[str, str]
    readable: list[str]
    files: dict[str, str]
    """Contents by path within the working folder, in base64."""
    wall_s: float
    memory_mib: float
    disk_mib: int
    rlimits: dict[str, int]
    """By what follows ``RLIMIT_`` in the name of the resource."""


@final
class Report(TypedDict):
    """How a program ended."""

    code: int | None
    """Exit code; None when it was killed."""
    why: str
    """What it was killed for; "" when it ended by itself."""
    wall_s: float
    cpu_s: float
    """CPU seconds of all processes that were waited for."""
    resident_mib: float
    """The largest resident memory of one process."""


@final
class StartFailure(TypedDict):
    """Why a program was not started."""

    error: str
    errno: int


def main(descriptor: int) -> None:
    """Starts a sandbox for each request until the other end of the socket is closed.

    Args:
        descriptor: of the socket. A request is the length of JSON in 8 bytes, with the descriptors that the program
            gets (the first one takes the report), and the JSON.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # R is reaped by the kernel
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: who started this ends it
    requests = socket.socket(fileno=descriptor)
    while True:
        header, descriptors, _, _ = socket.recv_fds(requests, 8, MOST_DESCRIPTORS)
        if not header:
            return
        header += _read(requests, 8 - len(header))  # a socket may deliver less than was asked for
        request: ProgramRequest = json.loads(_read(requests, struct.unpack("Q", header)[0]))
        if not os.fork():
            requests.close()
            _run_guarded(_start, request, descriptors)
        for received in descriptors:
            os.close(received)


def _read(source: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size and (part := source.recv(min(size - len(parts), 1 << 20))):
        parts += part
    return bytes(parts)


def _run_guarded(
    function: Callable[..., None], request: ProgramRequest, descriptors: list[int], *more: object
) -> NoReturn:
    """Runs the function of a forked process and ends the process; an error is reported to whoever sent the request."""
    try:
        function(request, descriptors, *more)
    except BaseException as error:
        doing = getattr(error, "doing", f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError):
            _send_report(descriptors[0], {"error": doing, "errno": getattr(error, "errno", None) or 0})
    os._exit(0)


def _send_report(status: int, report: Report | StartFailure) -> None:
    os.write(status, json.dumps(report).encode() + b"\n")


def _start(request: ProgramRequest, descriptors: list[int]) -> None:
    """R: starts C, and maps the program's user to one outside."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    near_end, far_end = socket.socketpair()
    child = os.fork()
    if not child:
        near_end.close()
        _run_guarded(_enter_namespaces, request, descriptors, far_end)
    far_end.close()
    if near_end.recv(1) == b"u":  # C has unshared; it waits for the "m" of mapped
        is_root = os.geteuid() == 0
        if is_root and not _has_user(OUTSIDE_USER):  # root itself is exempt from the limit of processes
            raise kernel.CallError(f"finding user {OUTSIDE_USER} in the user namespace of this root", errno.EPERM)
        for name, outside_id in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
            if name == "gid_map":  # without privileges the kernel takes one only where setgroups is denied
                _write(f"/proc/{child}/setgroups", "deny")
            _write(f"/proc/{child}/{name}", f"{USER} {OUTSIDE_USER if is_root else outside_id} 1\n")
        near_end.send(b"m")
    for inherited in descriptors:
        os.close(inherited)
    os.waitpid(child, 0)
    os._exit(0)


def _has_user(number: int) -> bool:
    with open("/proc/self/uid_map", encoding="ascii") as file:
        ranges = [[int(field) for field in line.split()] for line in file]
    return any(first <= number < first + count for first, _, count in ranges)


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        raise kernel.CallError(f"writing {os.path.basename(path)} of the user namespace", error.errno or 0) from error


def _enter_namespaces(request: ProgramRequest, descriptors: list[int], mapper: socket.socket) -> None:
    """C: creates the namespaces, and starts I in them."""
    os.setsid()
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):  # within a user namespace that forbids it; they give no rights there
            os.setgroups([])
    kernel.unshare(kernel.ALL_NAMESPACES)
    mapper.send(b"u")
    if mapper.recv(1) != b"m":
        os._exit(0)  # R has told why
    mapper.close()
    # opened in the new mount namespace, and still as root where it was root, who reaches what others do not
    sources = {path: os.open(path, os.O_PATH) for path in request["readable"] if os.path.exists(path)}
    sources |= {f"/dev/{name}": os.open(f"/dev/{name}", os.O_PATH) for name in _DEVICES}
    links = {path: os.readlink(path) for path in request["readable"] if os.path.islink(path)}
    kernel.keep_capabilities()
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    kernel.set_dumpable(True)  # its files in /proc belong to root otherwise
    child = os.fork()
    if not child:
        _run_guarded(_be_first, request, descriptors, sources, links)
    for inherited in descriptors:
        os.close(inherited)
    os.waitpid(child, 0)
    os._exit(0)


def _be_first(request: ProgramRequest, descriptors: list[int], sources: dict[str, int], links: dict[str, str]) -> None:
    """I: builds the file system, gives up all privileges, starts P and watches it."""
    _build_root(sources, links, request["disk_mib"])
    for name, content in request["files"].items():
        path = os.path.join(WORK_FOLDER, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))
    socket.sethostname("sandbox")
    kernel.drop_privileges()
    kernel.set_dumpable(False)
    kernel.refuse_calls()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 gets no signal from within that it has no handler for
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    status = descriptors[0]
    began = time.monotonic()
    error_reader, error_writer = os.pipe()
    child = os.fork()
    if not child:
        _become_program(request, descriptors, error_writer)
    os.close(error_writer)
    for inherited in descriptors[1:]:
        os.close(inherited)
    if reason := os.read(error_reader, 1000):
        raise OSError(0, f"the program could not be started: {reason.decode()}")
    _send_report(status, _watch(child, request, status, began))


def _build_root(sources: dict[str, int], links: dict[str, str], disk_mib: int) -> None:
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    plain = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", _NEW_ROOT, "tmpfs", plain, "size=1m,nr_inodes=1024,mode=755")
    for name in ("proc", "tmp", "dev"):
        os.makedirs(f"{_NEW_ROOT}/{name}")
    kernel.mount("tmpfs", f"{_NEW_ROOT}/tmp", "tmpfs", plain, f"size={disk_mib}m,nr_inodes=16384,mode=1777")
    for path, descriptor in sources.items():
        target = _NEW_ROOT + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if path in links:
            os.symlink(links[path], target)
            continue
        source = f"/proc/self/fd/{descriptor}"
        if os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
        if not path.startswith("/dev/"):
            kernel.restrict_mount(target)
        os.close(descriptor)
    kernel.mount("proc", f"{_NEW_ROOT}/proc", "proc", plain | kernel.MS_NOEXEC)
    kernel.restrict_mount(f"{_NEW_ROOT}/proc", can_execute=False)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{_NEW_ROOT}/dev/{name}")
    os.symlink("/tmp", f"{_NEW_ROOT}/dev/shm")
    kernel.enter_root(_NEW_ROOT)
    kernel.mount(None, "/", None, kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | plain)


def _become_program(request: ProgramRequest, descriptors: list[int], error: int) -> NoReturn:
    """P: takes its descriptors (0, 1, 2 and on), its limits, and becomes the program."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        # first out of the way of 0, 1, 2 and on, then to these numbers
        copies = [os.dup2(copied, 200 + place, False) for place, copied in enumerate(descriptors[1:])]
        error = os.dup2(error, 200 + len(copies), False)
        for place, copied in enumerate(copies):
            os.dup2(copied, place, True)
        os.closerange(len(copies), error)
        os.closerange(error + 1, 4096)
        os.chdir(WORK_FOLDER)
        for name, value in request["rlimits"].items():
            kind = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        os.set_inheritable(error, False)  # execve closes it, which tells I that the program has started
        os.execve(request["command"][0], request["command"], request["environment"])
    except BaseException as problem:
        os.write(error, str(problem).encode()[:1000])
    os._exit(127)


def _watch(child: int, request: ProgramRequest, status: int, began: float) -> Report:
    """Waits until the program ends, its end is asked for, or it exceeds its time or memory; then kills all."""
    end_request = select.poll()
    why = ""
    code = None
    end_request.register(status, select.POLLIN)  # readable also once the other end is shut or gone
    while not why:
        signal.sigtimedwait({signal.SIGCHLD}, _POLL_S)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
        if code is not None:
            break
        if time.monotonic() - began > request["wall_s"]:
            why = "time"
        elif end_request.poll(0):
            why = "asked"
        elif _resident_mib() > request["memory_mib"]:
            why = "memory"
    seconds = time.monotonic() - began
    _kill_all()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"code": code, "why": why, "wall_s": seconds, "cpu_s": used.ru_utime + used.ru_stime,
            "resident_mib": used.ru_maxrss / 1024}  # fmt: skip


def _kill_all() -> None:
    with contextlib.suppress(ProcessLookupError):
        while True:  # until there is nobody but this process
            os.kill(-1, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.0005)


def _resident_mib() -> float:
    """Resident memory of all processes within but this one, in MiB; memory that several share counts for each."""
    total = 0.0
    processes = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    for name in processes:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/statm", "rb") as file:
            total += int(file.read().split()[1]) * resource.getpagesize() / 2**20
    return total


if __name__ == "__main__":
    main(int(sys.argv[1]))
