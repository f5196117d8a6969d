"""The timeline of a run's processes: phases of a step, events, the file that holds them, and how busy the roles were.

Imports nothing heavy: a report is made without torch.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path

from sfumato.errors import DataError
from sfumato.tracking.json_lines import JsonLines, Report, has_run_file


class Phase(StrEnum):
    """The parts of a step that are timed one by one, as ``time/<part>_s``."""

    DATA = "data"
    REFERENCE = "reference"
    GENERATE = "generate"
    WAIT_FOR_REWARDS = "wait_for_rewards"
    UPDATE = "update"
    EVALUATE = "evaluate"
    SAMPLE = "sample"
    SAVE = "save"
    EXPORT = "export"
    REPORT = "report"
    CONTROL = "control"

    @property
    def metric(self) -> str:
        """Its name among the timings."""
        return f"time/{self}_s"

    @property
    def is_training(self) -> bool:
        """Whether the part counts as training: rates are taken over these parts, and the time that no part covers."""
        return self not in (Phase.EVALUATE, Phase.SAMPLE, Phase.SAVE, Phase.EXPORT, Phase.REPORT, Phase.CONTROL)


SYNC = "sync"
"""Kind of the work of sending, taking and applying weights."""

KINDS = ("generate", "score", "update", SYNC, "evaluate", "save", "load")
"""Kinds of work that have colours of their own in the picture; all others share one."""

RUN, STEP = "run", "step"
"""Role and kind of the events that mark the beginning and end of a step."""

_FILE_NAME = "timeline.jsonl"
_REMEMBERED = 200  # events of a process that a late one is compared with, so that no second counts twice
_TAIL_BYTES = 8 * 2**20  # what a report reads of the file, however long the run has been


@dataclass(frozen=True)
class Event:
    """A stretch of work of one process, or one thread, of a role. Waiting is no work: time without an event is idle."""

    role: str
    """"actor", "sampler", "scorer"; a sampler that is the actor is "actor"."""
    rank: int
    """Number of the process or thread within its role."""
    kind: str
    """Kind of the work; see ``KINDS``."""
    start: float
    """Wall-clock seconds (``time.time()``) of the beginning, which processes and machines share."""
    end: float
    """Wall-clock seconds of the end; not before ``start``."""
    step: int
    """The step that the work is for, as metrics.jsonl counts: 1 is the first iteration, 0 the evaluation before it."""
    version: int | None = None
    """Version of the policy that was used, in finished iterations; None where the work uses no policy."""

    def __post_init__(self) -> None:
        if not self.end >= self.start:
            raise ValueError(f"an event of {self.role} {self.rank} ({self.kind}) ends before it starts")


class Timeline:
    """Collects the events of a run, writes them to ``timeline.jsonl``, and computes how busy the roles were in a step.

    It can be used from several threads. The file is made with the first event.
    """

    def __init__(
        self,
        folder: Path,
        keep_until_step: int | None = None,
        report: Report | None = None,
    ) -> None:
        """
        Args:
            folder: of the run.
            keep_until_step: as of ``JsonLines``: a resumed run drops the events of the steps that it repeats.
            report: as of ``JsonLines``.
        """
        self._report = report
        self.path = Path(folder) / _FILE_NAME
        self._keep_until_step = keep_until_step
        self._lock = threading.Lock()
        self._file: JsonLines | None = None
        self._new: list[Event] = []
        self._counted: dict[tuple[str, int], deque[tuple[float, float]]] = {}
        self._carried: dict[tuple[str, int], float] = {}
        self._started = self._step_started = time.time()

    def add(self, events: Iterable[Event]) -> None:
        """Takes events that have ended, in any order."""
        with self._lock:
            for event in events:
                self._write(event)
                self._new.append(event)

    def end_step(self, step: int, now: float | None = None) -> dict[str, float]:
        """Ends a step, which began with the timeline or with the end of the step before.

        An event counts in the step in which its end becomes known. Its seconds in earlier steps are credited to this
        step, and those that exceed the step's length to later steps. So no fraction is above 1, and no second is lost
        or counted twice.

        Args:
            step: finished steps.
            now: its end in wall-clock seconds; None is now.

        Returns:
            ``utilisation/<role>``: seconds that the role's processes worked, divided by the number of processes seen so
            far and the seconds of the step. ``time/sync_s``, where weights travelled: seconds of it, of the process in
            which they were most. Empty before the first event.
        """
        with self._lock:
            now = time.time() if now is None else now
            start = self._step_started
            self._step_started = now
            new = self._new
            self._new = []
            if now <= start or (self._file is None and not new):
                return {}
            self._write(Event(RUN, 0, STEP, start, now, step))
            by_role: dict[str, list[float]] = {}
            for (role, _), seconds in self._busy_seconds(new, now - start).items():
                by_role.setdefault(role, []).append(seconds)
            shares = {
                f"utilisation/{role}": statistics.fmean(by_role[role]) / (now - start) for role in sorted(by_role)
            }
            syncs: dict[tuple[str, int], list[tuple[float, float]]] = {}
            for event in new:
                if event.kind == SYNC:
                    syncs.setdefault((event.role, event.rank), []).append((event.start, event.end))
            return shares | ({"time/sync_s": max(map(union_seconds, syncs.values()))} if syncs else {})

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()

    def _busy_seconds(self, new: Sequence[Event], seconds: float) -> dict[tuple[str, int], float]:
        """Busy seconds of every process seen so far, each at most ``seconds``; the excess is carried to later steps.

        Args:
            new: events that have been added since the last step.
            seconds: length of the step.
        """
        spans: dict[tuple[str, int], list[tuple[float, float]]] = {process: [] for process in self._counted}
        for event in new:
            added = spans.setdefault((event.role, event.rank), [])
            if event.end > self._started:
                added.append((max(event.start, self._started), event.end))
        busy = {}
        for process, added in spans.items():
            counted = self._counted.setdefault(process, deque(maxlen=_REMEMBERED))
            credit = self._carried.get(process, 0.0) + union_seconds([*counted, *added]) - union_seconds(counted)
            busy[process] = min(max(credit, 0.0), seconds)
            self._carried[process] = credit - busy[process]
            counted.extend(added)
        return busy

    def _write(self, event: Event) -> None:
        """Writes an event, in microseconds; opens the file if it is the first."""
        if self._file is None:
            try:
                self._file = JsonLines(self.path, self._keep_until_step, self._report)
            except OSError as error:
                if self._report is None:
                    raise
                self._report(self.path, error)
                return
        record = asdict(event) | {"start": round(event.start, 6), "end": round(event.end, 6)}
        self._file.write({name: value for name, value in record.items() if value is not None})


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds that at least one of the intervals (start, end) covers."""
    total = 0.0
    covered_to = float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered_to))
        covered_to = max(covered_to, end)
    return total


def step_windows(events: Iterable[Event]) -> dict[int, tuple[float, float]]:
    """Start and end of each step in the events, by step in ascending order; of a repeated step the last counts."""
    windows = {event.step: (event.start, event.end) for event in events if event.role == RUN and event.kind == STEP}
    return dict(sorted(windows.items()))


def read_events(folder: Path, tail_bytes: int | None = _TAIL_BYTES) -> list[Event]:
    """Reads the newest events of a run folder; an absent file is an empty list.

    Args:
        folder: of the run.
        tail_bytes: how much to read from the end of the file; None reads all of it.

    Raises:
        DataError: for a line that is no event, other than a last one that a crash tore.
    """
    path = Path(folder) / _FILE_NAME
    if not has_run_file(path):
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        from_byte = max(0, size - tail_bytes) if tail_bytes is not None else 0
        file.seek(from_byte)
        lines = file.read().split(b"\n")
    if from_byte:
        lines = lines[1:]  # the first may be cut
    events = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            events.append(_parse(json.loads(line.decode("utf-8"))))
        except (ValueError, TypeError, RecursionError) as error:
            if number == len(lines):  # no newline after it: a crash tore it
                break
            shown = line[:80].decode("utf-8", errors="replace")
            raise DataError(f"{path}: {shown!r} is no event ({error}); delete this line or the file") from error
    return events


_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "int | None": (int,)}


def _parse(record: object) -> Event:
    """The event of a line. Raises ValueError or TypeError for a record that no run has written."""
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")
    for field in fields(Event):
        value = record.get(field.name)
        if field.name == "version" and value is None:
            continue
        if not isinstance(value, _TYPES[str(field.type)]) or isinstance(value, bool):
            raise ValueError(f"{field.name} is {value!r}"[:200])
        if isinstance(value, (int, float)) and not abs(value) < 2**53:
            raise ValueError(f"{field.name} is no number that a run can have written")
    return Event(**record)
