"""Owner of a server that a run started: ends it, with its children, when the run ends in whatever way, and removes what
they leave in shared memory and in their folder.

It runs as a program, with the server's command as its arguments. Its standard input is a pipe from the run, which is
closed when the run dies; the run writes a byte first when it ends the server itself. On the pipe whose number is its
first argument it says its process id, that of the server and, at the end, the server's exit code. Should it be killed
itself, the run ends the server, which leads a session and a group of processes of its own.

Without a command it starts nothing, and owns the processes of an engine that is a child of the run: those that were
started with the folder as the place of temporary files, and their children.

It is no child of the run: Ray kills the children of a process that it ends, before they could end anything. It imports
nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

GRACE_S = 3.0
"""Seconds that a server has to end by itself after SIGTERM. One that draws does not: vLLM ends its engine first, and
then waits for answers that do not come."""

TRACKER_S = 5.0
"""Seconds that Python's resource trackers have, once all others were killed, to remove what these have left."""

TRACKER = b"multiprocessing.resource_tracker"
"""What the command of a resource tracker contains."""

SHARED_MEMORY = Path("/dev/shm")
"""Where Linux shows segments of shared memory, and semaphores, as files."""

SEGMENTS_FILE = "segments"
"""In a server's folder: inode and name of the segments that its processes have made, one a line."""

TEMPORARY = "tmp"
"""In a server's folder: the folder of its temporary files and sockets."""

NUM_LOOKS = 5
"""How often a new segment is looked for in the memory of the server's processes, and a new process is asked for what
tells that it is the server's; then it is another program's."""

LOOK_S = 0.2
"""Seconds between two looks."""

PR_SET_PDEATHSIG = 1
"""Of Linux' prctl: the signal that a process gets when its parent has ended."""


class SegmentRecord:
    """Which segments of shared memory the processes of a server have made, written down as soon as one is seen.

    Nothing but their memory tells whose a segment is: names are random, and no process is left when all were killed.
    """

    def __init__(self, file: Path) -> None:
        """``file`` is appended to. Segments that exist now are of other programs."""
        self._file = file
        self._settled = list_segments()
        """Inodes and names of those of which it is known whose they are."""
        self._looks: dict[tuple[int, str], int] = {}

    def update(self, list_pids: Callable[[], list[int]]) -> None:
        """Adds the new segments that one of the processes has mapped."""
        segments = list_segments()
        self._settled &= segments
        undecided = segments - self._settled
        self._looks = {segment: self._looks.get(segment, 0) + 1 for segment in undecided}
        if not undecided:
            return
        mapped: set[int] = set()
        for pid in list_pids():
            mapped |= mapped_inodes(pid)
        made = {(inode, name) for inode, name in undecided if inode in mapped}
        if made:
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(f"{inode} {name}\n" for inode, name in sorted(made))
        self._settled |= made | {segment for segment in undecided if self._looks[segment] >= NUM_LOOKS}


def list_segments() -> set[tuple[int, str]]:
    """Inodes and names of all segments of this machine."""
    if not SHARED_MEMORY.is_dir():
        return set()
    with os.scandir(SHARED_MEMORY) as entries:
        return {(entry.inode(), entry.name) for entry in entries}


def mapped_inodes(pid: int) -> set[int]:
    """Inodes of the segments in the memory of a process; none when it has ended.

    Names tell nothing: that of a semaphore is the second one of its file.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    fields = [line.split(maxsplit=5) for line in lines if f"{SHARED_MEMORY}/" in line]
    return {int(parts[4]) for parts in fields if parts[5].startswith(f"{SHARED_MEMORY}/")}


def remove_leftovers(folder: Path) -> None:
    """Removes what a server that has ended has left: the segments of its record, and its temporary files.

    A segment that another process still uses stays, and so does one that has taken the name of another.
    """
    record = folder / SEGMENTS_FILE
    lines = record.read_text(encoding="utf-8").splitlines(keepends=True) if record.is_file() else []
    # A line that was cut off has no end.
    recorded = {line.rstrip("\n").partition(" ")[::2] for line in lines if line.endswith("\n")}
    remaining = {(int(inode), name) for inode, name in recorded} & list_segments()
    used: set[int] = set()
    for pid in list_processes() if remaining else ():
        used |= mapped_inodes(pid)
    for inode, name in remaining:
        if inode not in used:
            (SHARED_MEMORY / name).unlink(missing_ok=True)
    record.unlink(missing_ok=True)
    shutil.rmtree(folder / TEMPORARY, ignore_errors=True)


def list_processes() -> list[int]:
    """Process ids of this machine; none where the system does not show them as Linux does."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()] if sys.platform == "linux" else []


def read_stat(pid: int) -> list[str]:
    """What ``/proc/PID/stat`` says of a process behind its name: state, parent and so on; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def birth_of(pid: int) -> str:
    """When the process with this id has begun, in ticks of the machine's clock; empty if there is none."""
    stat = read_stat(pid)
    return stat[19] if stat else ""


def processes_of_session(session: int) -> list[int]:
    """Process ids of a session, without those that have ended and were not waited for."""
    pids = []
    for pid in list_processes():
        try:
            is_member = os.getsid(pid) == session
        except ProcessLookupError:
            continue
        if is_member and read_stat(pid)[:1] not in ([], ["Z"]):
            pids.append(pid)
    return pids


class MarkedProcesses:
    """The processes that were started with an environment variable of a value that no other has, and their children.

    They are remembered, since a process may overwrite its environment later, and children lose their parents. Resource
    trackers are none of them: that of the run may have been started with the variable, too.
    """

    def __init__(self, variable: str) -> None:
        """``variable`` is NAME=VALUE."""
        self._variable = variable.encode()
        self._births: dict[int, str] = {}
        self._looks: dict[int, int] = {}

    def list_pids(self) -> list[int]:
        """Those that live."""
        present = list_processes()
        self._births = {pid: birth for pid, birth in self._births.items() if birth_of(pid) == birth}
        self._looks = {pid: self._looks.get(pid, 0) + 1 for pid in present}
        for pid in present:
            if pid not in self._births and self._looks[pid] <= NUM_LOOKS and self._is_marked(pid):
                self._births[pid] = birth_of(pid)
        return [pid for pid in self._births if read_stat(pid)[:1] != ["Z"]]

    def _is_marked(self, pid: int) -> bool:
        stat = read_stat(pid)
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False
        is_child = bool(stat) and int(stat[1]) in self._births
        return (is_child or self._variable in environment) and not is_tracker(pid)


def is_tracker(pid: int) -> bool:
    """Whether a process is a resource tracker of Python's multiprocessing."""
    try:
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def kill_all(list_pids: Callable[[], list[int]]) -> None:
    """Kills processes, but resource trackers: these have a while to remove what the others left, and then end."""
    deadline = time.monotonic() + TRACKER_S
    while (pids := list_pids()) and time.monotonic() < deadline:
        for pid in pids:
            if not is_tracker(pid):
                send(pid, signal.SIGKILL, to=os.kill)
        time.sleep(0.02)


def kill_session(session: int) -> None:
    """Kills all processes of a session, its resource trackers last."""
    kill_all(lambda: processes_of_session(session))
    send(session, signal.SIGKILL)


def run_until_ended(command: list[str], folder: Path, lock: int, on_start: Callable[[int], None]) -> tuple[int, bool]:
    """Runs a command until it ends, or until standard input says so.

    Args:
        command: program and arguments.
        folder: of the server, see ``SEGMENTS_FILE`` and ``TEMPORARY``.
        lock: descriptor of the lock on the folder, which the server holds, too.
        on_start: called with the process id.

    Returns:
        Its exit code, and whether the run is there no more.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: None
    segments = SegmentRecord(folder / SEGMENTS_FILE)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM),  # should this process be killed
        pass_fds=[lock],
    )
    on_start(process.pid)
    waiting = selectors.DefaultSelector()
    waiting.register(sys.stdin.fileno(), selectors.EVENT_READ)
    is_lost = False
    while process.poll() is None:
        segments.update(lambda: processes_of_session(process.pid))
        if waiting.select(timeout=LOOK_S):
            is_lost = not os.read(sys.stdin.fileno(), 1)
            send(process.pid, signal.SIGTERM)
            send(process.pid, signal.SIGCONT)  # a stopped process would not see it
            deadline = time.monotonic() + GRACE_S
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            break
    kill_session(process.pid)  # children may have outlived the server
    code = process.wait()
    remove_leftovers(folder)
    return code, is_lost


def watch(folder: Path) -> bool:
    """Waits until standard input says so, or ends, and kills what is left of the engine that the folder is of.

    Returns:
        Whether the run is there no more.
    """
    processes = MarkedProcesses(f"TMPDIR={folder / TEMPORARY}")
    segments = SegmentRecord(folder / SEGMENTS_FILE)
    waiting = selectors.DefaultSelector()
    waiting.register(sys.stdin.fileno(), selectors.EVENT_READ)
    while not waiting.select(timeout=LOOK_S):
        pids = processes.list_pids()
        segments.update(lambda pids=pids: pids)
    is_lost = not os.read(sys.stdin.fileno(), 1)
    # Nobody is left who would take an answer, and a run that lives has ended its engine before.
    kill_all(processes.list_pids)
    remove_leftovers(folder)
    return is_lost


def send(target: int, number: int, to: Callable[[int, int], None] = os.killpg) -> None:
    """Sends a signal to a group of processes, or to a process, if any of it is left."""
    try:
        to(target, number)
    except ProcessLookupError:
        return


def main(pipe: int, lock: int, folder: Path, leftovers: list[str], command: list[str]) -> None:
    """Runs the command in a process that nobody waits for.

    Args:
        pipe: that the run reads.
        lock: descriptor of the lock on the folder.
        folder: of the server.
        leftovers: folders that are removed when the run died, and so cannot do it.
        command: of the server; empty: the engine is a child of the run.
    """
    if os.fork():
        os._exit(0)  # the run, which waits for this process, is then not the owner's parent
    for ignored_signal in (signal.SIGINT, signal.SIGTERM):
        # The run gets these signals too, and decides when the server ends. SIG_IGN would be inherited by the server.
        signal.signal(ignored_signal, lambda *_: None)
    with os.fdopen(pipe, "w") as told:
        print(os.getpid(), file=told, flush=True)
        if command:
            code, is_lost = run_until_ended(command, folder, lock, lambda pid: print(pid, file=told, flush=True))
        else:
            print(0, file=told, flush=True)
            code, is_lost = 0, watch(folder)
        for leftover in (*leftovers, folder) if is_lost else ():
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            print(code if code >= 0 else 128 - code, file=told, flush=True)
        except BrokenPipeError:  # nobody reads it
            os._exit(0)


if __name__ == "__main__":
    separator = sys.argv.index("--")
    pipe_number, lock_number, server_folder, *removed = sys.argv[1:separator]
    main(int(pipe_number), int(lock_number), Path(server_folder), removed, sys.argv[separator + 1 :])
