"""The runs below a folder, and what of each is held in memory while somebody looks at it."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sfumato.config.characters import whole_characters
from sfumato.config.file_checks import file_problem, path_inside
from sfumato.config.yaml_text import parse_yaml
from sfumato.errors import ConfigError, DataError
from sfumato.studio.samples import SampleIndex
from sfumato.studio.series import Curve, MetricTable
from sfumato.studio.states import Pause, RunState, find_pause, find_state
from sfumato.studio.tail import LineTail, open_regular
from sfumato.tracking.control_files import ANSWERS

MARKS = ("metrics.jsonl", "environment.json", "run.lock")
"""Files one of which a run folder has, beside config.yaml."""
INSIDE = frozenset({"samples", "checkpoints", "hf_ckpt", "tensorboard", "rollouts", "tokens", "control", "cache"})
"""Folders within a run that hold no other runs."""
MOST_RUNS, MOST_FOLDERS, DEEPEST = 2000, 20_000, 6
SHARED_S = 2.0
"""How long an answer is shared while nothing new is to be seen; some of it, such as how long a run is silent, ages."""
READ_AGAIN_S = 0.5
"""Seconds after which the files of a run are looked at again."""
FOUND_AGAIN_S = 3.0
"""How long a list of runs counts as new."""
MOST_TEXT_BYTES = 2**24
VALUES_IN_MEMORY = 2**24
"""Numbers of all runs that are held, 16 bytes each. Runs that nobody looked at for longest are forgotten first, and
read again when they are asked for; the one that is looked at is always held."""
RECENT_STEPS = 20
"""Steps whose median time predicts when a run ends."""


@dataclass(frozen=True)
class Cursor:
    """What of a run a page has seen; another cursor means that there is something new."""

    generation: int
    step: int
    samples: str
    state: str
    log_bytes: int
    extra: str = ""

    def __str__(self) -> str:
        parts = (self.generation, self.step, self.samples, self.state.replace(" ", "-"), self.log_bytes, self.extra)
        return ".".join(map(str, parts))


class RunReader:
    """A run folder and what has been read of it. Used by several threads."""

    def __init__(self, name: str, folder: Path) -> None:
        """
        Args:
            name: the path below the studio's folder, with slashes.
            folder: of the run.
        """
        self.name = name
        self.folder = folder
        self.metrics = MetricTable()
        self.timings = MetricTable()
        self.samples = SampleIndex(folder)
        self._tails = (
            (LineTail(folder / "metrics.jsonl"), self.metrics),
            (LineTail(folder / "timings.jsonl"), self.timings),
        )
        self._lock = threading.Lock()
        self._read_at = 0.0
        self._listed_at = 0.0
        self._parsed: dict[str, tuple[tuple[int, int, int], object]] = {}
        self._shared: dict[str, tuple[tuple[Cursor, str], float, dict[str, object]]] = {}
        self._sharing = threading.Lock()

    def refresh(self, with_samples: bool = True) -> None:
        """Reads what the run has written since the last call, unless that was less than ``READ_AGAIN_S`` ago.

        Args:
            with_samples: whether new steps are looked for, too, which takes longest on a file system that is far away.
        """
        with self._lock:
            if time.monotonic() - self._read_at >= READ_AGAIN_S:
                for tail, table in self._tails:
                    tail.read_new(table.clear, table.add)
                self._read_at = time.monotonic()
            if with_samples and time.monotonic() - self._listed_at >= READ_AGAIN_S:
                self.samples.refresh()
                self._listed_at = time.monotonic()

    @property
    def problems(self) -> list[str]:
        """What could not be read, in words."""
        said = [tail.problem for tail, _ in self._tails if tail.problem]
        said += [
            f"{tail.path.name}: {tail.num_broken} broken lines are left out"
            for tail, _ in self._tails
            if tail.num_broken
        ]
        said += [f"samples of step {step}: {problem}" for step, problem in list(self.samples.problems.items())[:5]]
        if self.metrics.num_left_out:
            said.append(f"metrics.jsonl: {self.metrics.num_left_out:,} values of too many metrics are left out")
        return said

    @property
    def curves(self) -> MetricTable:
        """Metrics and timings together."""
        table = MetricTable()
        table.curves = {**self.timings.curves, **self.metrics.curves}
        return table

    def curve(self, name: str) -> Curve | None:
        """A metric or a timing; None where the run has none of that name."""
        return self.metrics.curves.get(name) or self.timings.curves.get(name)

    @property
    def num_values(self) -> int:
        """Numbers in memory."""
        tables = (self.metrics, self.timings)
        return sum(len(curve.values) for table in tables for curve in list(table.curves.values()))

    def config(self) -> object:
        """The parsed configuration, of whatever shape; None where there is none that can be read."""
        return self._parse("config.yaml", lambda text: parse_yaml(text, "config.yaml"))

    def environment(self) -> dict[str, object]:
        """The content of environment.json; empty where it is missing or is being written."""
        value = self._parse("environment.json", json.loads)
        return value if isinstance(value, dict) else {}

    def _parse(self, name: str, parse: Callable[[str], object]) -> object:
        """The content of a small file, read again when the file is another one; None where it cannot be read."""
        stamp = _file_stamp(self.folder / name)
        before = self._parsed.get(name)
        if before is not None and before[0] == stamp:
            return before[1]
        try:
            parsed = parse(read_text(self.folder, name))
        except (ConfigError, DataError, ValueError, RecursionError):
            parsed = None
        self._parsed[name] = (stamp, parsed)
        return parsed

    def share(self, describe: Callable[[RunReader], dict[str, object]]) -> dict[str, object]:
        """What ``describe`` says of the run as it stands: pages that ask for the same thing share one answer."""
        with self._sharing:
            stamp = (self.cursor(), self.state(self.environment()).text)
            name = describe.__name__
            before = self._shared.get(name)
            if before is not None and before[0] == stamp and time.monotonic() - before[1] < SHARED_S:
                return before[2]
            description = describe(self)
            self._shared[name] = (stamp, time.monotonic(), description)
            return description

    def total_steps(self, environment: dict[str, object]) -> int | None:
        """Steps of the whole run; None where neither the run nor its configuration says."""
        config = self.config()
        train = config.get("train") if isinstance(config, dict) else None
        for steps in (environment.get("total_steps"), train.get("max_steps") if isinstance(train, dict) else None):
            if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0:
                return steps
        return None

    @property
    def step_s(self) -> float | None:
        """The typical time of one of the last steps, with everything that was done between them."""
        curve = self.timings.curves.get("time/step_s")
        values = list(curve.values[-RECENT_STEPS:]) if curve is not None else []
        values = [value for value in values if value == value]
        return statistics.median(values) if values else None

    def state(self, environment: dict[str, object]) -> RunState:
        """What the run is doing."""
        pause = self._parse(ANSWERS, find_pause)
        return find_state(
            self.folder,
            bool(environment.get("finished")),
            self.metrics.last_step,
            self.step_s,
            pause if isinstance(pause, Pause) else None,
        )

    def cursor(self) -> Cursor:
        """What there is to see now."""
        self.refresh()
        samples = f"{self.samples.generation}-{len(self.samples.steps)}-{max(self.samples.steps, default=0)}"
        generation = sum(tail.generation for tail, _ in self._tails)
        return Cursor(
            generation,
            max(self.metrics.last_step, self.timings.last_step),
            samples,
            self.state(self.environment()).state,
            _file_bytes(self.folder / "log.txt"),
            str(_file_bytes(self.folder / "control.jsonl")),
        )


class RunsFolder:
    """The runs below a folder. A page names a run by its path; only paths of runs that were found are looked up."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.was_cut = False
        """Whether there are more runs than are shown."""
        self.problem = ""
        """Why the folder itself cannot be read; empty where it can."""
        self._described: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {}
        self._readers: dict[str, RunReader] = {}
        self._used: dict[str, float] = {}
        self._folders: dict[str, Path] = {}
        self._found_at = -FOUND_AGAIN_S
        self._lock = threading.Lock()

    def names(self, at_most_every_s: float = FOUND_AGAIN_S) -> list[str]:
        """Names of the runs, those that have written most recently first."""
        with self._lock:
            if time.monotonic() - self._found_at >= at_most_every_s:
                self._find()
                self._found_at = time.monotonic()
            return list(self._folders)

    def reader(self, name: str) -> RunReader | None:
        """The reader of a run; None where there is none of that name."""
        folder = self._folders.get(name)
        if folder is None or not (folder / "config.yaml").is_file():  # new, or moved aside
            self.names(at_most_every_s=1.0)
        with self._lock:
            folder = self._folders.get(name)
            if folder is None:
                return None
            reader = self._readers.get(name)
            if reader is None:
                reader = self._readers[name] = RunReader(name, folder)
            self._used[name] = time.monotonic()
            self._forget_oldest(name)
            return reader

    def described(
        self, name: str, describe: Callable[[RunReader], dict[str, object]], may_read: bool = True
    ) -> dict[str, object] | None:
        """What ``describe`` says of a run; that of before where no file has changed that it may depend on.

        A run that is alive is described anew each time. None where there is no run of that name any more.

        Args:
            name: of the run.
            describe: makes a description.
            may_read: whether a run that nobody has looked at may be read, which takes a second for a long one; where
                not, its name is given with ``is_pending``.
        """
        folder = self._folders.get(name)
        if folder is None:
            return None
        stamp = tuple(_file_stamp(folder / file) for file in (*MARKS, "config.yaml", "timings.jsonl"))
        before = self._described.get(name)
        is_alive = before is not None and before[1].get("state") in ("running", "standing still")
        if before is not None and before[0] == stamp and not is_alive:
            return before[1]
        if not may_read and before is None and name not in self._readers:
            return {"run": name, "is_pending": True}
        reader = self.reader(name)
        if reader is None:
            return None
        reader.refresh(with_samples=False)
        description = describe(reader)
        self._described[name] = (stamp, description)
        return description

    def stamp(self) -> str:
        """A text that is another one when the list of runs, or what it says of one, may have changed."""
        names = self.names()
        stamps = [
            (name, [_file_stamp(self._folders[name] / file) for file in MARKS])
            for name in names
            if name in self._folders
        ]
        return hashlib.blake2b(repr(stamps).encode(), digest_size=8).hexdigest()

    def _forget_oldest(self, needed: str) -> None:
        """Forgets runs until the numbers of the others fit into memory."""
        held = {name: reader.num_values for name, reader in self._readers.items()}
        for name in sorted(held, key=lambda other: self._used[other]):
            if sum(held.values()) <= VALUES_IN_MEMORY:
                break
            if name != needed:
                del self._readers[name], held[name]

    def _find(self) -> None:
        folders: list[tuple[float, str, Path]] = []
        pending = [(self.root, 0)]
        num_looked_at = 0
        self.was_cut = False
        self.problem = ""
        while pending:
            folder, depth = pending.pop()
            num_looked_at += 1
            if num_looked_at > MOST_FOLDERS or len(folders) >= MOST_RUNS:
                self.was_cut = True
                break
            try:
                with os.scandir(folder) as entries:
                    listed = list(entries)
            except OSError as error:  # removed meanwhile, or not ours to read: nothing in it can be shown
                if folder == self.root:
                    self.problem = f"{self.root.name} cannot be read: {error.strerror}"
                continue
            files = {entry.name for entry in listed if entry.is_file(follow_symlinks=False)}
            is_run = "config.yaml" in files and any(mark in files for mark in MARKS)
            if is_run:
                path = folder.relative_to(self.root).as_posix() if folder != self.root else folder.name
                name = whole_characters(path)  # a name that is no UTF-8 comes back from a page as it was shown
                times = [entry.stat().st_mtime for entry in listed if entry.name in ("metrics.jsonl", "config.yaml")]
                folders.append((max(times, default=0.0), name, folder))
            if depth < DEEPEST:
                pending += [
                    (Path(entry.path), depth + 1)
                    for entry in listed
                    if entry.is_dir(follow_symlinks=False)
                    and not entry.name.startswith(".")
                    and not (is_run and entry.name in INSIDE)
                ]
        self._folders = {name: folder for _, name, folder in sorted(folders, key=lambda run: (-run[0], run[1]))}
        for name in [name for name, reader in self._readers.items() if self._folders.get(name) != reader.folder]:
            del self._readers[name]


def read_text(folder: Path, name: str) -> str:
    """The text of a file in a run folder, its first ``MOST_TEXT_BYTES``; empty where it is missing.

    Raises DataError for a link out of the folder, a pipe, a device or a file that may not be read.
    """
    return read_part(folder, name, 0, MOST_TEXT_BYTES).decode("utf-8", errors="replace")


def read_part(folder: Path, name: str, first: int, most_bytes: int) -> bytes:
    """Bytes of a file in a run folder, from one on; raises as ``read_text``."""
    path = path_inside(folder, name)
    problem = "lies outside of its folder" if path is None else file_problem(path)
    if problem == "does not exist":
        return b""
    try:
        file = None if problem or path is None else open_regular(path)
        if file is None:
            raise DataError(f"{name} {problem or 'is no file'}")
        with file:
            file.seek(first)
            return file.read(most_bytes)
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}") from error


def _file_stamp(path: Path) -> tuple[int, int, int]:
    """What changes when a file does."""
    try:
        status = path.stat()
    except OSError:  # not written yet
        return (0, 0, 0)
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # not written yet
        return 0
