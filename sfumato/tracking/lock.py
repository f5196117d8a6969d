"""The lock of a run folder: which process holds it, whether that process is alive, and how a dead one's is taken over.

The lock is a file that is made by a hard link, which exactly one process can make, on local and on shared file systems.
Its holder renews the file's time every ``HEARTBEAT_S`` seconds, so that other machines, which cannot see the process,
know that it is alive. Times are those of the file system's clock, so the clocks of the machines need not agree.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from sfumato.config.file_checks import file_problem
from sfumato.config.writing import NEW
from sfumato.errors import FolderError

NAME = "run.lock"

MOST_BYTES = 2**16
"""Most bytes that are read of a lock, which has a few hundred."""

HEARTBEAT_S = 5.0
"""Seconds between two renewals."""

STALE_S = 120.0
"""Seconds without a renewal after which a process on another machine counts as dead."""

SETTLE_S = 0.2
"""Seconds between taking over a lock and reading it again. On file systems that do not lock files, two processes may
take it over at once; only the second's name is then in the file."""


@dataclass(frozen=True)
class Owner:
    """A process that holds a lock."""

    host: str
    pid: int
    born: str
    """When the process started, which tells it from a later one with the same id; empty where it is not known."""
    place: str
    """The boot of the machine, and the namespace of process ids, within which ``pid`` means something."""
    since: str
    """When the lock was taken, for messages."""
    token: str
    """A random text that tells this lock from all others."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @property
    def is_visible(self) -> bool:
        """Whether this machine could see the process."""
        return self.place == _machine_id()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs; only meaningful where it is visible. A zombie counts as dead."""
        return process_birth(self.pid) == self.born if self.born else _is_running(self.pid)

    @property
    def is_self(self) -> bool:
        """Whether it is this process."""
        return self.is_visible and (self.pid, self.born) == (os.getpid(), process_birth(os.getpid()))


class FolderLock:
    """A run folder that this process holds."""

    def __init__(self, folder: Path, owner: Owner, made_folders: list[Path], dead_state: Seen | None = None) -> None:
        """Use ``lock_folder``, which starts the renewals, too.

        Args:
            folder: the run folder.
            owner: this process.
            made_folders: that were made for the lock, outermost first; ``release`` removes them if they are empty.
            dead_state: of the lock of a dead process that was taken over.
        """
        self.folder = folder
        self.owner = owner
        self._made_folders = made_folders
        self._dead_state = dead_state
        self._checked = time.monotonic()
        self._begin_to_beat()
        _held.add(self)

    def check(self, at_most_every_s: float = 0.0) -> None:
        """Checks that this process still holds the lock.

        Args:
            at_most_every_s: does nothing if the last check is no longer ago than this.

        Raises:
            FolderError: when the lock is gone or another process has taken it over: nothing may be written any more.
        """
        now = time.monotonic()
        if now - self._checked < at_most_every_s:
            return
        self._checked = now
        state = read_lock(self.folder / NAME)
        if state is None or state[0] is None or state[0].token != self.owner.token:
            who = "was removed" if state is None else f"is now held by {state[0] or 'another process'}"
            raise FolderError(
                f"{self.folder / NAME} {who}: this run had not renewed it for {STALE_S:.0f} s, or somebody removed it. "
                "It stops, so that two runs do not write into one folder"
            )

    def move_folder(self, new_path: Path) -> None:
        """Renames the folder with its content, and holds a new, empty one in its place.

        Where the folder is a link, what it leads to is renamed, and the link leads to the new one.

        A lock that was taken over from a dead process goes back into the renamed folder, which says how its run ended.

        Args:
            new_path: of the renamed folder.

        Raises:
            FolderError: when it cannot be renamed, or another process took the new folder in that moment.
        """
        # A heartbeat in the middle would renew, or miss, the wrong file.
        self._released.set()
        self._thread.join()
        folder = self.folder.resolve()
        try:
            folder.rename(new_path)
        except OSError as error:
            self._begin_to_beat()
            raise FolderError(f"{self.folder} cannot be moved to {new_path}: {error.strerror}") from error
        _put_back(new_path / NAME, self._dead_state)
        self._dead_state = None
        folder.mkdir(exist_ok=True)
        if not _make_lock(self.folder / NAME, self.owner):
            self.abandon()
            raise FolderError(
                f"another run took {self.folder} while the earlier one was moved to {new_path}: start again"
            )
        self._begin_to_beat()

    def abandon(self) -> None:
        """Stops renewing the lock, and leaves the file as it is."""
        _held.discard(self)
        self._released.set()

    def release(self) -> None:
        """Removes the lock, and folders that were made for it and are still empty."""
        if self not in _held or self.owner.pid != os.getpid():  # a forked child has a copy of its parent's lock
            return
        self.abandon()
        with contextlib.suppress(OSError):  # the disk is gone: others see that the lock is not renewed
            if (state := read_lock(self.folder / NAME)) is not None and state[0] == self.owner:
                (self.folder / NAME).unlink()
            for folder in reversed(self._made_folders):
                folder.rmdir()

    def _begin_to_beat(self) -> None:
        """Starts the thread that renews the lock."""
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew_while_held, name=NAME, daemon=True)
        self._thread.start()

    def _renew_while_held(self) -> None:
        """Renews the time of the lock until it is released, while it is this process's."""
        released = self._released
        while not released.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):  # a file system that is away for a while
                if (state := read_lock(self.folder / NAME)) is not None and state[0] == self.owner:
                    os.utime(self.folder / NAME)


_held: set[FolderLock] = set()
"""The locks that this process holds."""


def lock_folder(folder: Path, say: Callable[[str], None]) -> FolderLock:
    """Takes the lock of a run folder, which is made if it is missing.

    The lock of a dead process is taken over, with a message: at once on the machine where the process ran, elsewhere
    after waiting until it has not been renewed for ``STALE_S`` seconds.

    Args:
        folder: the run folder.
        say: takes a line for the person who watches.

    Raises:
        FolderError: when a living run holds the folder, or it cannot be written.
    """
    try:
        made_folders = make_with_parents(folder)
    except OSError as error:
        links = [path for path in (folder, *folder.parents) if os.path.islink(path) and not os.path.exists(path)]
        reason = f"{links[0]} is a link to {os.readlink(links[0])}, which is not there" if links else error.strerror
        raise FolderError(f"train.output_dir {folder} cannot be made: {reason}") from error
    owner = Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        born=process_birth(os.getpid()),
        place=_machine_id(),
        since=datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        token=secrets.token_hex(8),
    )
    path = folder / NAME
    dead_state = None
    try:
        while not _make_lock(path, owner):
            dead_state = _take_over(path, owner, say)
            if (state := read_lock(path)) is not None and state[0] == owner:
                break
    except OSError as error:
        raise FolderError(f"train.output_dir {folder} cannot be written: {error.strerror}") from error
    return FolderLock(folder, owner, made_folders, dead_state)


def read_owner(folder: Path) -> Owner | None:
    """The process that holds a run folder; None where nobody does, or the lock cannot be read. Takes nothing."""
    try:
        seen = read_lock(folder / NAME)
    except (OSError, FolderError):
        return None
    return None if seen is None else seen[0]


def refuse_held(folder: Path) -> None:
    """Raises FolderError where a run seems to hold a folder. Takes nothing, and waits for no sign of life."""
    owner, renewed = read_lock(folder / NAME) or (None, 0.0)
    if owner is not None and (owner.is_alive if owner.is_visible else time.time() - renewed <= STALE_S):
        raise _held_error(folder, owner)


def release_locks() -> None:
    """Gives back every folder that this process holds."""
    for lock in list(_held):
        lock.release()


Seen = tuple["Owner | None", float]
"""The state of a lock: its holder, None where the file does not name one (yet), and the time of its last renewal."""


def _take_over(path: Path, owner: Owner, say: Callable[[str], None]) -> Seen | None:
    """Replaces the lock of a dead process. Does nothing when there is another lock by then, or none.

    Args:
        path: of the lock.
        owner: this process.
        say: takes a line for the person who watches.

    Returns:
        The state of the lock that was replaced; None where it was none, or of an earlier run of this process.

    Raises:
        FolderError: when its holder is alive.
    """
    dead_state, reason = _wait_for_death(path, say)
    if dead_state is None:
        return None
    with _hold_exclusively(path) as state:
        if state != dead_state:
            return None
        # A lock that an earlier run of this process left: its thread must not go on renewing the file.
        for lock in [lock for lock in _held if lock.owner == dead_state[0]]:
            lock.abandon()
        os.replace(_write_beside(path, owner), path)
    is_other = not dead_state[0] or not dead_state[0].is_self
    if is_other:
        time.sleep(SETTLE_S)
    if (new_state := read_lock(path)) is not None and new_state[0] == owner and reason:
        say(reason)
    return dead_state if is_other else None


def _put_back(path: Path, dead_state: Seen | None) -> None:
    """Replaces this process's lock in a folder that was moved aside by that of the run in it, if that one is dead."""
    if dead_state is not None and (dead_owner := dead_state[0]) is not None:
        with contextlib.suppress(OSError):  # a full disk: the folder then has no lock, as that of a run that ended
            beside = _write_beside(path, dead_owner)
            os.utime(beside, (dead_state[1], dead_state[1]))
            os.replace(beside, path)
            return
    path.unlink()


def _wait_for_death(path: Path, say: Callable[[str], None]) -> tuple[Seen | None, str]:
    """Waits until it is clear whether the holder of a lock is dead.

    Returns:
        The state of the dead process's lock, None when there is no lock any more; and why it may be taken over, empty
        where no message is needed.

    Raises:
        FolderError: when its holder is alive.
    """
    first = None
    began = time.monotonic()
    while (state := read_lock(path)) is not None:
        holder, renewed = state
        if holder is not None and holder.is_self:
            return state, ""  # a run of this process that ended with an error
        if holder is not None and holder.is_visible:
            if holder.is_alive:
                raise _held_error(path.parent, holder)
            return state, f"{path}: its run ({holder}) is gone without having released it; it is taken over"
        if first is not None and renewed != first:
            raise _held_error(path.parent, holder)
        # A file system's clock that was set back leaves a lock of the future, whose silence is measured from here on.
        silent_s = max(_now_of(path.parent) - renewed, time.monotonic() - began)
        if silent_s > STALE_S:
            who = holder or "a process that did not write its name"
            return state, f"{path}: its run ({who}) has not renewed it for {silent_s:.0f} s; it is taken over"
        if first is None:
            say(
                f"{path} is held by {holder or 'another process'} and was renewed {silent_s:.0f} s ago: "
                f"waiting for its next sign of life, for {STALE_S:.0f} s at most"
            )
            first = renewed
        time.sleep(min(HEARTBEAT_S / 5, 1.0))
    return None, ""


def _held_error(folder: Path, holder: Owner | None) -> FolderError:
    return FolderError(
        f"{folder} is in use by another run ({holder or 'another process'}): wait for it to end or stop it, or give "
        f"another train.output_dir. If this is a copy of that run's folder, remove {NAME} from it"
    )


def read_lock(path: Path) -> Seen | None:
    """The state of a lock; None when there is none. Raises FolderError for what is no lock."""
    try:
        with _open_lock(path, os.O_RDONLY) as file:  # opening it has NFS look at the server
            text = file.read(MOST_BYTES)
            renewed = os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None
    try:
        owner = Owner(**json.loads(text.decode("utf-8")))
    except (ValueError, TypeError, RecursionError):
        return None, renewed
    texts = (owner.host, owner.born, owner.place, owner.since, owner.token)
    is_right = all(isinstance(part, str) for part in texts) and type(owner.pid) is int and 0 < owner.pid < 2**31
    return (owner if is_right else None), renewed


def _open_lock(path: Path, flags: int) -> IO[bytes]:
    """Opens a lock, without following links and without waiting for a pipe.

    Raises:
        FileNotFoundError: there is none.
        FolderError: it is a link, a pipe or a device, which no run has made.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        if path.is_symlink() or not path.is_file():
            raise _not_a_lock(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_a_lock(path)
    return os.fdopen(descriptor, "rb" if flags == os.O_RDONLY else "r+b", buffering=0)


def _not_a_lock(path: Path) -> FolderError:
    """The error for something else in the place of the lock."""
    kind = "is a link" if path.is_symlink() else file_problem(path) or "is no file"
    return FolderError(f"{path} {kind}, which no run has made: remove it")


def _make_lock(path: Path, owner: Owner) -> bool:
    """Makes the lock if there is none. Returns whether it was made."""
    own_file = _write_beside(path, owner)
    try:
        os.link(own_file, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        os.write(descriptor, own_file.read_bytes())
        os.close(descriptor)
        return True
    finally:
        # NFS may lose the answer to a link that was made, and then report an error: the number of links tells.
        was_linked = own_file.stat().st_nlink == 2
        own_file.unlink()
    return was_linked


def _write_beside(path: Path, owner: Owner) -> Path:
    """Writes a file with the owner beside the lock, to be linked or renamed to it."""
    own_file = path.with_name(f"{path.name}.{owner.token}")
    with os.fdopen(os.open(own_file, NEW, 0o666), "wb") as file:
        file.write(json.dumps(asdict(owner)).encode())
    return own_file


@contextmanager
def _hold_exclusively(path: Path) -> Iterator[Seen | None]:
    """Lets one process at a time inside. Yields the state of the lock; None when it was replaced or removed before."""
    try:
        file = _open_lock(path, os.O_RDWR)
    except FileNotFoundError:
        yield None
        return
    with file:
        with contextlib.suppress(OSError):  # a file system that does not lock files: looked at again afterwards
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            is_same = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
        except FileNotFoundError:
            is_same = False
        yield read_lock(path) if is_same else None


def _now_of(folder: Path) -> float:
    """The time by the clock of the folder's file system, which may be a server's."""
    path = folder / f"{NAME}.{secrets.token_hex(8)}"
    path.touch(exist_ok=False)
    try:
        return path.stat().st_mtime
    finally:
        path.unlink()


def make_with_parents(folder: Path) -> list[Path]:
    """Makes a folder with its parents. Returns the folders that were made, outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _machine_id() -> str:
    """The boot of this machine and the namespace of process ids; elsewhere than on Linux the host's name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def process_birth(pid: int) -> str:
    """Clock ticks from the machine's boot to the start of a process; empty when none runs, or it cannot be known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]  # zombie, dead; starttime is field 22 of proc_pid_stat(5)


def _is_running(pid: int) -> bool:
    """Whether a process of this id runs, of whatever user."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
