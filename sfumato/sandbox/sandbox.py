"""Programs that nobody has read, run where they can do nothing but compute: see docs/sandbox.md.

Linux on x86_64 only. What cannot be contained is not started.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import errno
import fcntl
import functools
import json
import math
import os
import platform
import re
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.errors import ConfigError, UserError

if TYPE_CHECKING:
    from sfumato.sandbox.launcher import ProgramRequest, Report, StartFailure

PYTHON = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
"""The interpreter that programs may use: that of this process, outside of its virtual environment."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
                "MALLOC_ARENA_MAX": "2"}  # fmt: skip
_OLDEST_KERNEL = (5, 14)  # the first that counts processes by user namespace
_GRACE_S = 10.0
_REMEDY = (
    "allow user namespaces: sysctl -w kernel.unprivileged_userns_clone=1 (Debian), sysctl -w "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), sysctl -w user.max_user_namespaces=10000; in a container "
    "--security-opt seccomp=unconfined --security-opt systempaths=unconfined, or a privileged one"
)


class SandboxError(UserError):
    """Programs cannot be contained here, or could not be started; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class ProgramLimits:
    """What one program may use. Raises ConfigError for a limit that is not positive."""

    wall_s: float = 10.0
    """Seconds from its start to its end, and of CPU time for each of its processes."""
    memory_mib: int = 1024
    """Resident memory of all its processes together, and address space of each."""
    num_processes: int = 32
    """Processes and threads at the same time."""
    disk_mib: int = 64
    """What it may write to /tmp, which lies in memory too."""
    output_kib: int = 1024
    """What it may write to its standard output, and to its standard error."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} of the sandbox must be a positive number, not {value}")


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a program ended."""

    exit_code: int | None
    """Its exit code, or minus the number of the signal that ended it; None when the sandbox ended it."""
    why: str
    """Which limit it exceeded: time, memory or output; "asked" when it was ended; else ""."""
    stdout: bytes
    """What it wrote, up to the limit."""
    stderr: bytes
    """Likewise."""
    wall_s: float
    """Seconds from its start to its end."""
    cpu_s: float
    """Seconds of CPU time of it and those of its processes that were waited for."""

    @property
    def is_success(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.why

    def describe(self) -> str:
        """How it ended, in words, with the last line of its standard error."""
        return describe_end(self.why, self.exit_code or 0, self.stderr)


def describe_end(why: str, exit_code: int, stderr: bytes) -> str:
    """How a program ended, in words: which limit it exceeded, or its exit code and the last line that it wrote."""
    if why:
        return f"it was ended for {'its ' if why != 'asked' else 'being '}{why}"
    how = f"exit code {exit_code}" if exit_code >= 0 else f"signal {-exit_code}"
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    return f"it ended with {how}{f': {lines[-1][:300]}' if lines else ''}"


class Running:
    """A program at work. ``wait`` for it, and it is cleared up."""

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self._report = bytearray()

    def fileno(self) -> int:
        """Readable when there is more to learn about its end."""
        return self._status.fileno()

    def end(self) -> None:
        """Asks for the end of the program and all that it has started."""
        with contextlib.suppress(OSError):
            self._status.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the connection to the sandbox, which ends the program."""
        self._status.close()

    def poll(self) -> Report | None:
        """Reads from the sandbox once; the report when it is complete, else None.

        Raises:
            SandboxError: the program could not be started, or the sandbox ended without a report.
        """
        part = self._status.recv(65536)
        self._report += part
        if part and not self._report.endswith(b"\n"):
            return None
        self._status.close()
        if not self._report:
            raise SandboxError("the sandbox ended without a word: the system may be out of memory or processes")
        report: Report | StartFailure = json.loads(self._report.splitlines()[0])
        if "error" in report:
            raise SandboxError(_describe_failure(report))
        return report

    def wait(self, timeout_s: float) -> Report:
        """Waits for the end of the program. Raises SandboxError when it is not seen in time, and as ``poll``."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._status.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                if (report := self.poll()) is not None:
                    return report
            except TimeoutError:
                self._status.close()  # which ends what is left of it
                raise SandboxError(f"the sandbox did not end within {timeout_s:g} s: the machine is too busy") from None


class Sandbox:
    """Where programs run.

    Args:
        limits: of each program.
        readable: files and folders that programs may read and run, besides the system's libraries and Python; they
            stand at the same place within.

    Raises:
        SandboxError: this system is not Linux, too old, or no x86_64.
        ConfigError: something in ``readable`` is not there.
    """

    def __init__(self, limits: ProgramLimits | None = None, readable: Sequence[str] = ()) -> None:
        _refuse_other_systems()
        self.limits = limits or ProgramLimits()
        for path in readable:
            if not Path(path).exists():
                raise ConfigError(f"the sandbox is to show {path}, which does not exist")
        system_paths = [*_SYSTEM, *([] if sys.base_prefix.startswith("/usr") else [sys.base_prefix])]
        self._readable = [*system_paths, *(str(Path(path).resolve()) for path in readable)]

    def check(self) -> None:
        """Runs a program that tests its own containment. Raises SandboxError unless it finds itself contained."""
        finished = self.run_python(_CONTAINMENT_TEST)
        if finished.stdout != b"contained\n":
            seen = finished.stdout.decode("utf-8", "replace").strip() or finished.describe()
            raise SandboxError(f"programs would not be contained here: {seen}; {_REMEDY}")

    def run_python(self, source: str, *, files: Mapping[str, bytes] | None = None, stdin: bytes = b"") -> Finished:
        """Runs a program of Python, without installed packages; see ``run`` for its files and standard input."""
        files = {**(files or {}), "main.py": source.encode("utf-8", "surrogatepass")}
        return self.run([PYTHON, "-I", "-S", "-c", _RUN_MAIN], files=files, stdin=stdin)

    def run(self, command: Sequence[str], *, files: Mapping[str, bytes] | None = None, stdin: bytes = b"") -> Finished:
        """Runs a command to its end.

        Args:
            command: the path of a program within, and its arguments.
            files: what lies in /tmp, by name.
            stdin: its standard input.

        Raises:
            SandboxError: it could not be started; never for what the program does.
        """
        child_input = _open_sealed_file(stdin)
        output_reader, child_output = os.pipe()
        error_reader, child_error = os.pipe()
        try:
            running = self.start(command, [child_input, child_output, child_error], files=files)
        except BaseException:
            for descriptor in (output_reader, error_reader):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (child_input, child_output, child_error):
                os.close(descriptor)
        return _collect_output(running, [output_reader, error_reader], self.limits)

    def start(self, command: Sequence[str], descriptors: Sequence[int], files: Mapping[str, bytes] | None) -> Running:
        """Starts a command that gets these descriptors as 0, 1, 2 and on; close them here afterwards."""
        limits = self.limits
        memory = limits.memory_mib * 2**20
        disk = limits.disk_mib * 2**20
        rlimits = {"AS": memory, "FSIZE": disk, "CPU": math.ceil(limits.wall_s) + 1, "NPROC": limits.num_processes + 2,
                   "NOFILE": 128, "CORE": 0, "MSGQUEUE": 0, "MEMLOCK": 0, "SIGPENDING": 256}  # fmt: skip
        request: ProgramRequest = {
            "command": list(command),
            "environment": _ENVIRONMENT,
            "readable": self._readable,
            "files": {name: base64.b64encode(content).decode() for name, content in (files or {}).items()},
            "wall_s": limits.wall_s,
            "memory_mib": limits.memory_mib,
            "disk_mib": limits.disk_mib,
            "rlimits": rlimits,
        }
        # the program ends when near_end is closed, by ``close`` or because this process has died
        near_end, far_end = socket.socketpair()
        try:
            _launcher.request(json.dumps(request).encode(), [far_end.fileno(), *descriptors])
        except BaseException:
            near_end.close()
            raise
        finally:
            far_end.close()
        return Running(near_end)


def _open_sealed_file(content: bytes) -> int:
    """A descriptor to read the content from.

    The file in memory behind it is sealed and opened anew to read: through /proc a program could otherwise open it
    again and write to it.
    """
    writing = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(writing, "wb", closefd=False) as file:
            file.write(content)
        os.fchmod(writing, 0o444)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(writing, fcntl.F_ADD_SEALS, seals)
        return os.open(f"/proc/self/fd/{writing}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writing)


def _collect_output(running: Running, outputs: list[int], limits: ProgramLimits) -> Finished:
    """Reads what a program writes until it has ended, and asks for its end when it writes too much.

    Args:
        running: the program.
        outputs: descriptors of its standard output and standard error; closed here.
        limits: of the program.

    Raises:
        SandboxError: it could not be started, or its end is not seen in time.
    """
    max_bytes = limits.output_kib * 1024
    is_too_much = False
    report = None
    written: dict[int, bytearray] = {output: bytearray() for output in outputs}
    deadline = time.monotonic() + limits.wall_s + _GRACE_S
    with selectors.DefaultSelector() as selector:
        for output in (*outputs, running):
            selector.register(output, selectors.EVENT_READ)
        try:
            while len(selector.get_map()):
                ready = selector.select(max(deadline - time.monotonic(), 0))
                if not ready:
                    raise SandboxError("the sandbox did not end in time: the machine is too busy")
                for key, _ in ready:
                    if key.fileobj is running:
                        selector.unregister(running)  # before poll, which closes it
                        if (report := running.poll()) is None:
                            selector.register(running, selectors.EVENT_READ)
                    elif part := os.read(key.fd, 65536):
                        # a byte more than the limit is kept, which shows that there was more
                        written[key.fd] += part[: max_bytes + 1 - len(written[key.fd])]
                        if len(written[key.fd]) > max_bytes and not is_too_much:
                            is_too_much = True
                            running.end()
                    else:
                        selector.unregister(key.fd)
        finally:
            running.close()
            for output in outputs:
                os.close(output)
    assert report is not None
    stdout, stderr = (bytes(written[output][:max_bytes]) for output in outputs)
    why = "output" if is_too_much else report["why"]
    code = None if why else report["code"]
    wall_s = report["wall_s"]
    return Finished(exit_code=code, why=why, stdout=stdout, stderr=stderr, wall_s=wall_s, cpu_s=report["cpu_s"])


class _Launcher:
    """The process that starts sandboxes, itself started when it is first needed, and again when it was lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def request(self, content: bytes, descriptors: list[int]) -> None:
        with self._lock:
            for is_last in (False, True):  # a launcher that was killed meanwhile is started once more
                if self._process is None or self._process.poll() is not None:
                    self._start_process()
                try:
                    assert self._requests is not None
                    socket.send_fds(self._requests, [struct.pack("Q", len(content))], descriptors)
                    self._requests.sendall(content)
                    return
                except OSError as error:
                    self._end_process()
                    if is_last:
                        raise SandboxError(f"the process that starts sandboxes was lost: {error}") from error

    def _start_process(self) -> None:
        self._end_process()
        near_end, far_end = socket.socketpair()
        library = str(Path(__file__).parents[2])
        program = (
            "import sys; sys.path.append(sys.argv[1])\n"
            "from sfumato.sandbox.launcher import main; main(int(sys.argv[2]))"
        )
        self._process = subprocess.Popen(
            [PYTHON, "-I", "-S", "-c", program, library, str(far_end.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={"PATH": _ENVIRONMENT["PATH"]},
            cwd="/",
            pass_fds=[far_end.fileno()],
        )
        far_end.close()
        self._requests = near_end

    def _end_process(self) -> None:
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            self._process.wait()
        self._requests = self._process = None

    def close(self) -> None:
        """Ends the process; sandboxes that run go on to their limits unless those who wait for them are gone."""
        with self._lock:
            self._end_process()

    def forget(self) -> None:
        """Lets go of the launcher in a process that was forked, since it belongs to the parent."""
        if self._requests is not None:
            self._requests.close()
        self._lock = threading.Lock()
        self._process = None
        self._requests = None


_launcher = _Launcher()
atexit.register(_launcher.close)
os.register_at_fork(after_in_child=_launcher.forget)


@functools.cache
def _refuse_other_systems() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SandboxError(
            f"programs are only contained on Linux on x86_64, not on {platform.system()} on {platform.machine()}: run "
            "what needs the sandbox there, such as a reward server"
        )
    # an older kernel counts a user's processes over all sandboxes, so that one could exhaust those of the others
    release = platform.release()
    version = re.match(r"(\d+)\.(\d+)", release)
    if version is None or tuple(map(int, version.groups())) < _OLDEST_KERNEL:
        raise SandboxError(
            f"the sandbox needs Linux 5.14 or newer, which limits processes by sandbox; this is {release}"
        )


def _describe_failure(report: StartFailure) -> str:
    number = report["errno"]
    text = f"the sandbox cannot be built: {report['error']}{f' ({os.strerror(number)})' if number else ''}"
    if number in (errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EINVAL, errno.ENOSYS):
        return f"{text}; {_REMEDY}"
    return text


_RUN_MAIN = (
    "import site; site.setquit(); del site; __file__ = '/tmp/main.py'; "
    "exec(compile(open(__file__, 'rb').read(), __file__, 'exec'))"
)
"""Runs main.py with ``exit`` and ``quit``, which programs end with, and which Python leaves out with -S."""

_CONTAINMENT_TEST = """
import ctypes, os, socket
wrong = []
state = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
for name, wanted in {"CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"}.items():
    if state[name].strip() != wanted:
        wrong.append(f"{name} is {state[name].strip()}")
if os.getuid() != 1000 or {name for name in os.listdir("/proc") if name.isdigit()} != {"1", str(os.getpid())}:
    wrong.append("it sees users or processes of others")
for path in ("/file", "/usr/file", "/proc/sys/kernel/core_pattern"):
    try:
        open(path, "w")
        wrong.append(f"{path} can be written")
    except OSError:
        pass
try:
    socket.socket()
    wrong.append("there are sockets of the network")
except OSError:
    pass
if sorted(os.listdir("/sys") if os.path.exists("/sys") else []) or os.path.exists("/etc/passwd"):
    wrong.append("files of the system are visible")
if [line.split(":")[0].strip() for line in open("/proc/net/dev").read().splitlines()[2:]] not in ([], ["lo"]):
    wrong.append("there is a network")
print("; ".join(wrong) or "contained")
"""
