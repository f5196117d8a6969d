"""The files of ``RUN/control``, by which a run is controlled, as its first rank reads them.

Whoever may write into the run folder may control the run; but what lies there may be half written, huge, or no file at
all, so each file is opened without following links, with a limit, and taken away before anything is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sfumato.config.characters import in_one_line, whole_characters

FOLDER = "control"
"""Name of the folder in the run folder. A run without it is not controlled."""

ANSWERS = "control.jsonl"
"""Name of the file in the run folder that answers are appended to."""

WATCHED = "watched_prompts.txt"
"""Name of the file in the folder with prompts that are drawn with every evaluation: one a line."""

COMMANDS = ("save", "sample", "evaluate", "stop", "pause", "resume")
"""What a request may ask for."""

MOST_BYTES = 2**16
"""Largest file that is read."""

MOST_PROMPTS, MOST_CHARACTERS = 16, 2_000
"""Most watched prompts, and most characters of each."""

MOST_REQUESTS = 64
"""Most requests that are taken after one step; further ones wait for the next."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\.json")
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ControlRequest(NamedTuple):
    """A file that asks for something."""

    id: str
    """Its name without the ending, as far as it may be shown."""
    command: str
    """What it asks for; empty where it cannot be read."""
    problem: str = ""
    """Why it is refused; empty where it can be done as far as the file goes."""


class Watched(NamedTuple):
    """What the file of watched prompts holds now."""

    prompts: list[str]
    problem: str = ""
    """Why it is refused; the prompts of before stay then."""


class ControlFolder:
    """The folder ``control`` of a run."""

    def __init__(self, run_folder: Path) -> None:
        self.path = run_folder / FOLDER
        self._watched_state: tuple[int, ...] | None = None
        self._immovable: set[str] = set()
        """Names that could not be removed: each is answered once."""

    def has_news(self) -> bool:
        """Whether there are requests, or other watched prompts. Costs one ``lstat`` where there is no folder."""
        try:
            if not stat.S_ISDIR(os.lstat(self.path).st_mode):
                return False
        except OSError:
            return False
        return bool(self._request_names()) or self._state_of_watched() != self._watched_state

    def take_requests(self) -> list[ControlRequest]:
        """The requests in the order in which they came, whose files are removed."""
        return [request for name in self._request_names()[:MOST_REQUESTS] if (request := self._take(name)) is not None]

    def read_watched(self) -> Watched | None:
        """The watched prompts where their file has changed since the last call; None where it has not."""
        state = self._state_of_watched()
        if state == self._watched_state:
            return None
        self._watched_state = state
        if state is None:
            return Watched([])
        try:
            text = self._read(WATCHED)
        except ValueError as error:
            return Watched([], f"{FOLDER}/{WATCHED} {error}")
        prompts = [line.strip() for line in text.splitlines()]
        prompts = [prompt for prompt in prompts if prompt and not prompt.startswith("#")]
        if len(prompts) > MOST_PROMPTS:
            return Watched([], f"{FOLDER}/{WATCHED} holds {len(prompts)} prompts, and at most {MOST_PROMPTS} are drawn")
        if any(len(prompt) > MOST_CHARACTERS for prompt in prompts):
            return Watched([], f"{FOLDER}/{WATCHED} holds a prompt of more than {MOST_CHARACTERS} characters")
        return Watched(prompts)

    def _request_names(self) -> list[str]:
        """Names of requests, in the order in which they came. Files under way (``NAME.tmp``) are none."""
        arrivals: list[tuple[int, str]] = []
        with contextlib.suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                if entry.name.endswith(".json") and entry.name not in self._immovable:
                    with contextlib.suppress(OSError):
                        arrivals.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
        return [name for _, name in sorted(arrivals)]

    def _take(self, name: str) -> ControlRequest | None:
        """Reads and removes a file; None where another process has removed it."""
        shown = in_one_line(whole_characters(name.removesuffix(".json")))[:64]
        command = ""
        problem = ""
        try:
            if _NAME.fullmatch(name) is None:
                raise ValueError("has a name of other characters than letters, digits, _ and -, or of more than 64")
            command = _command_of(self._read(name))
        except FileNotFoundError:
            return None
        except ValueError as error:
            problem = f"{FOLDER}/{shown}.json {error}"
        path = self.path / name
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except FileNotFoundError:
            return None
        except OSError as error:
            # what cannot be removed would be done again after each step
            self._immovable.add(name)
            return ControlRequest(shown, command, f"{FOLDER}/{shown}.json cannot be removed: {error.strerror}")
        return ControlRequest(shown, command, problem)

    def _read(self, name: str) -> str:
        """The text of a file of the folder.

        Raises:
            FileNotFoundError: it is not there.
            ValueError: it is no plain file, too large, not readable or not UTF-8; the message goes on after its name.
        """
        with self._open_request(name) as descriptor:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise ValueError("is no plain file")
            if state.st_size > MOST_BYTES:
                raise ValueError(f"has {state.st_size:,} bytes, and at most {MOST_BYTES:,} are read")
            content = os.read(descriptor, MOST_BYTES + 1)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError("is not UTF-8") from error

    @contextlib.contextmanager
    def _open_request(self, name: str) -> Iterator[int]:
        """A descriptor of a file; of a link none."""
        try:
            folder = os.open(self.path, _OPEN | os.O_DIRECTORY)
            try:
                descriptor = os.open(name, _OPEN, dir_fd=folder)
            finally:
                os.close(folder)
        except FileNotFoundError:
            raise
        except OSError as error:
            is_link = (self.path / name).is_symlink()
            raise ValueError("is a link" if is_link else f"cannot be read: {error.strerror}") from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _state_of_watched(self) -> tuple[int, ...] | None:
        """What changes when the file of watched prompts does; None where there is none."""
        try:
            state = os.lstat(self.path / WATCHED)
        except OSError:
            return None
        return state.st_ino, state.st_size, state.st_mtime_ns, state.st_mode


def _command_of(text: str) -> str:
    """The command in a request's text. Raises ValueError; its message goes on after the file's name."""
    try:
        request = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("is no JSON: write NAME.tmp and rename it to NAME.json when it is complete") from error
    command = request.get("command") if isinstance(request, dict) else None
    if not isinstance(command, str):
        raise ValueError('has no text "command"')
    if unknown := [str(name) for name in request if name != "command"]:
        raise ValueError(f"has {in_one_line(whole_characters(unknown[0]))[:40]!r}, which no request has")
    return in_one_line(whole_characters(command))[:40]
