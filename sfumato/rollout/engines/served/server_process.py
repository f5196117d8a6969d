"""The process of a server that a run starts, waits for, ends and starts again."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from sfumato.config.trust import refuse_code
from sfumato.config.writing import open_to_append
from sfumato.errors import ConfigError
from sfumato.rollout.engines.base import EngineError
from sfumato.rollout.engines.served import owner_process
from sfumato.rollout.engines.served.server_folder import ServerFolder

LOGGER = logging.getLogger(__name__)

SHOWN_LINES = 15
"""Last lines of a server's log that an error message contains."""

SHOWN_CHARACTERS = 300
"""Most characters of each of these lines."""

LOOK_S = 0.25
"""Seconds between two checks of a server that starts."""

KILLED_S = 5.0
"""Longest wait for processes that were killed."""

TOLD_S = 60.0
"""Seconds between two lines of progress."""


def free_port() -> int:
    """A port of this machine that nothing listens at now; another process may take it before it is used."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


class ProcessGroup:
    """The processes of a server, by the one that leads their group."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._born = owner_process.birth_of(pid)

    def _is_there(self) -> bool:
        """Whether the id may belong to the group, as long as one of it lives, and is not that of a later process."""
        return owner_process.birth_of(self.pid) in ("", self._born)

    def kill(self) -> None:
        """Kills them, and waits until they have gone."""
        if self._is_there():
            owner_process.kill_session(self.pid)
        deadline = time.monotonic() + KILLED_S
        while self._is_there() and time.monotonic() < deadline:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            time.sleep(0.02)


class OwnerProcess:
    """A process of ``owner_process``, which owns a server, and the pipes to and from it."""

    def __init__(
        self,
        command: Sequence[str],
        folder: ServerFolder,
        leftovers: Sequence[str],
        log: IO[bytes] | None,
        environment: Mapping[str, str],
    ) -> None:
        """Starts the server, without waiting for it.

        Args:
            command: of the server; empty for an engine that this process starts itself.
            folder: of the server.
            leftovers: folders that are removed if this process dies.
            log: takes the output of both; None: that of this process.
            environment: variables of both.
        """
        told, pipe = os.pipe()
        lock = folder.lock.fileno()
        arguments = [str(pipe), str(lock), str(folder.path), *leftovers]
        self._told = os.fdopen(told, "rb")
        try:
            first = subprocess.Popen(
                [sys.executable, owner_process.__file__, *arguments, "--", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                pass_fds=[pipe, lock],
            )
        finally:
            # While this process has it open, too, ``_told`` would not end with the owner.
            os.close(pipe)
        assert first.stdin is not None
        self._stdin = first.stdin
        first.wait()  # it has left the server to a process that is not this one's child
        self.pid = int(self._told.readline() or 0)
        server = int(self._told.readline() or 0)
        self._group = ProcessGroup(server) if server else None
        self._code: int | None = None
        self._has_ended = threading.Event()
        threading.Thread(target=self._await_code, name="server's owner", daemon=True).start()

    def _await_code(self) -> None:
        """Reads the server's exit code. Should the owner be killed, it kills the server at once: one that ends by
        SIGTERM waits for its connections, and those for answers that do not come."""
        with self._told:
            line = self._told.readline()
        if not line and self._group is not None:
            self._group.kill()
        self._code = int(line or -signal.SIGKILL)
        self._has_ended.set()

    def exit_code(self, within_s: float) -> int | None:
        """The server's exit code, which this waits for; None while it runs, -9 when its owner was killed."""
        self._has_ended.wait(within_s)
        return self._code

    def end(self) -> None:
        """Ends the server, and waits for it."""
        try:
            self._stdin.write(b"e")  # so that it is not taken for the end of this process
            self._stdin.close()
        except BrokenPipeError:
            LOGGER.debug("its owner has ended already")
        self.exit_code(owner_process.GRACE_S + 30)


class ServerProcess:
    """Owns a server's process. It ends with its children when ``stop`` is called or this process ends in any way."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        start_timeout_s: float,
        leftovers: Sequence[Path] = (),
        modules: Mapping[str, Path] | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            name: what messages call it.
            command: program and arguments.
            environment: all of its variables, see ``engine_environment``.
            log: file that its output is appended to.
            start_timeout_s: how long it may take to become ready.
            leftovers: folders of this process that are removed with the server if this process dies.
            modules: Python files that the server can import, by the names of their modules.
        """
        self.name = name
        self.command = list(command)
        self.log = log
        self.start_timeout_s = start_timeout_s
        self.environment = dict(environment)
        self.leftovers = [str(folder.absolute()) for folder in leftovers]
        self.modules = dict(modules or {})
        self._owner: OwnerProcess | None = None
        self._folder: ServerFolder | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """Process id of the server's parent (``owner_process``); None while there is none."""
        return None if self._owner is None else self._owner.pid

    def start(
        self, is_ready: Callable[[], bool], arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        """Starts the server and waits until it is ready.

        Args:
            is_ready: asks the server whether it answers.
            arguments: of this start alone, such as its port; they follow those of ``command``.
            variables: environment variables of this start alone.

        Raises:
            ConfigError: when the program does not exist.
            EngineError: when it ends, or is not ready in time; the message contains the end of its log.
        """
        refuse_code(f"program {self.command[0]} of {self.name}")
        self.stop()
        if not Path(self.command[0]).is_file():
            raise ConfigError(f"{self.name}: {self.command[0]} is not there, so the server cannot be started")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            opened = open_to_append(self.log)
        except OSError as error:
            raise ConfigError(
                f"{self.log}: {error.strerror}: {self.name} writes its log there, and through no link; remove it"
            ) from error
        with opened as log:
            self._log_start = log.tell()
            self._folder = ServerFolder(self.environment, self.modules)
            environment = self._folder.environment_of(self.environment | dict(variables or {}))
            self._owner = OwnerProcess([*self.command, *arguments], self._folder, self.leftovers, log, environment)
        LOGGER.info("starting %s, whose log is %s", self.name, self.log)
        started = told = time.monotonic()
        try:
            while not is_ready():
                now = time.monotonic()
                if problem := self.problem():
                    raise EngineError(problem)
                if now - started > self.start_timeout_s:
                    raise EngineError(
                        f"{self.name} was not ready after {self.start_timeout_s:g} s: raise start_timeout_s, or see "
                        f"{self.log}{self._read_last_lines()}"
                    )
                if now - told > TOLD_S:
                    LOGGER.info("waiting for %s: %.0f s", self.name, now - started)
                    told = now
                time.sleep(LOOK_S)
        except BaseException:
            self.stop()
            raise
        LOGGER.info("%s is ready after %.0f s", self.name, time.monotonic() - started)

    def problem(self, within_s: float = 0.0) -> str:
        """Why the server does not run, with the end of its log; empty while it runs.

        Args:
            within_s: how long this waits for the process to end.
        """
        if self._owner is None:
            return f"{self.name} was ended"
        code = self._owner.exit_code(within_s)
        return "" if code is None else f"{self.name} ended with code {code}{self._read_last_lines()}"

    def stop(self) -> None:
        """Ends the server with its children, and removes what these left. A second call does nothing."""
        owner, folder = self._owner, self._folder
        self._owner = self._folder = None
        if owner is not None:
            owner.end()
        if folder is not None:
            folder.remove()

    def _read_last_lines(self) -> str:
        """The last lines of the log since this start, for a message; empty if there are none."""
        with self.log.open("rb") as file:
            file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - SHOWN_LINES * SHOWN_CHARACTERS))
            text = file.read().decode(errors="replace")
        lines = [line[:SHOWN_CHARACTERS] for line in text.splitlines() if line.strip()][-SHOWN_LINES:]
        return f"; the last lines of {self.log}:\n  " + "\n  ".join(lines) if lines else ""
