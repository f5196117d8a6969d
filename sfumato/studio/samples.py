"""The samples of a run: an index of all steps, made bit by bit, and the rows of a step, read when asked for."""

from __future__ import annotations

import bisect
import itertools
import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sfumato.config.file_checks import path_inside
from sfumato.studio.tail import LineTail, Record
from sfumato.tracking.json_lines import is_number
from sfumato.tracking.samples import find_wrong_field, step_folder

STEP_FOLDER = re.compile(r"step_([0-9]{1,15})")
STEPS_IN_MEMORY = 64
"""Steps whose rows are held; others are read again."""
MOST_ROWS = 20_000
"""Rows that are read of one step."""
SNIPPET = 160
"""Characters of an answer in a cell of the gallery."""
LOOK_AGAIN_S = 30.0
"""Least time between two looks at all steps. Until then a step whose folder has the number of before counts as the same
one; a file system may give the number of a removed folder to the next."""
LOOK_AGAIN_SHARE = 0.01
"""Most of the time that these looks may take: on a file system that is far away 10,000 of them take seconds."""
FIRST_STEPS = 8
"""Steps at the beginning that are looked at before the others."""
MOST_AROUND = 200
"""Steps that are looked at, at most, for the one before or after a sample's."""
NEWEST_STEPS = 8
"""Steps that are always looked at, since a run may still write to them."""
FILE_FIELDS = ("file", "source", "sound")
"""Fields of a row that name a file beside it."""

IN_MATRIX = ("eval", "watched")
"""Kinds of samples that are drawn again with the same prompt and seed: of evaluations, and of watched prompts."""

Stamp = tuple[int, int]
"""Number and time of a step's samples.jsonl: a resumed run makes another one of that name."""

Key = tuple[str, int, str, int]
"""What these samples keep over training: kind, sample_id, prompt and seed."""


@dataclass(frozen=True)
class Cell:
    """What the gallery needs of a sample.

    Attributes:
        key: its number in ``SampleIndex.keys``.
        file: of its picture, or empty.
        total: its reward, NaN where it has none.
        text: the beginning of its answer, or what damaged it.
        sound: file of its sound, or empty.
    """

    key: int
    file: str
    total: float
    text: str
    sound: str

    def as_json(self) -> list[object]:
        """The cell as a page gets it."""
        return [self.key, self.file, self.total if math.isfinite(self.total) else None, self.text]


@dataclass(frozen=True)
class StepEntry:
    """What the index holds of a step.

    Attributes:
        version: changes when the files may have changed; part of their addresses.
        repeated: cells of the evaluation's samples, and of watched prompts.
        num_train: number of training samples.
    """

    version: str
    repeated: tuple[Cell, ...]
    num_train: int


class SampleIndex:
    """The steps of a run that have samples, and where the samples of evaluations stand in their matrix.

    Used by several threads.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.keys: list[Key] = []
        """Rows of the matrix: prompts with their seeds, in the order in which they were seen."""
        self.generation = 0
        """Changes when steps that were indexed have been replaced or removed."""
        self.problems: dict[int, str] = {}
        """Why a step's samples could not be read."""
        self._key_numbers: dict[Key, int] = {}
        self._entries: dict[int, StepEntry] = {}
        self._folders: dict[int, Stamp] = {}
        self._folder_numbers: dict[int, int] = {}
        self._are_all_looked_at = True
        self._look_again_at = 0.0
        self._seen: tuple[int, int] | None = None
        self._rows: OrderedDict[tuple[int, Stamp], list[Record]] = OrderedDict()
        self._lock = threading.RLock()

    def refresh(self) -> bool:
        """Looks for new, replaced and removed steps; returns whether it had to. Costs a ``stat`` if not."""
        with self._lock:
            folder = self.run_dir / "samples"
            try:
                status = folder.stat()
            except OSError:  # nothing was written yet, or the run was moved away
                status = None
            seen = None if status is None else (status.st_ino, status.st_mtime_ns)
            is_due = time.monotonic() >= self._look_again_at
            if seen == self._seen and (self._are_all_looked_at or not is_due):
                return False
            self._seen = seen
            began = time.monotonic()
            folders = {} if seen is None else self._list_folders(folder, looks_at_all=is_due)
            self._are_all_looked_at = is_due
            if is_due:
                took_s = time.monotonic() - began
                self._look_again_at = time.monotonic() + max(LOOK_AGAIN_S, took_s / LOOK_AGAIN_SHARE)
            replaced = [step for step, stamp in self._folders.items() if folders.get(step) != stamp]
            for step in replaced:
                self._entries.pop(step, None)
                self.problems.pop(step, None)
            self.generation += bool(replaced)
            self._folders = folders
            return True

    def _list_folders(self, folder: Path, looks_at_all: bool) -> dict[int, Stamp]:
        """Steps with what tells their samples from those of before. Links and unfinished folders are left out.

        Args:
            folder: that holds those of the steps.
            looks_at_all: whether steps that were there before are looked at again.
        """
        if path_inside(self.run_dir, folder.absolute()) is None:
            return {}
        numbers = {}
        names = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                match = STEP_FOLDER.fullmatch(entry.name)
                if match is not None and entry.is_dir(follow_symlinks=False):
                    numbers[int(match[1])] = entry.inode()
                    names[int(match[1])] = entry.name
        newest = set(sorted(numbers)[-NEWEST_STEPS:])
        steps = {}
        for step in sorted(numbers):
            stamp = self._folders.get(step)
            if stamp is None or looks_at_all or step in newest or numbers[step] != self._folder_numbers.get(step):
                stamp = _stamp_of(f"{folder}/{names[step]}")
            if stamp is not None:
                steps[step] = stamp
        self._folder_numbers = numbers
        return steps

    @property
    def steps(self) -> list[int]:
        """Steps that have samples, ascending."""
        return list(self._folders)

    @property
    def num_indexed(self) -> int:
        """Steps whose samples have been looked at."""
        return len(self._entries)

    def index(self, budget_s: float) -> bool:
        """Looks at steps that were not looked at; returns whether all of them have been.

        The newest come first, since they are seen first, but for the very first ones: pages that go from the beginning
        to the end must not begin elsewhere each time they ask.

        Args:
            budget_s: stops after so many seconds, so that a page need not wait for a long run.
        """
        deadline = time.monotonic() + budget_s
        with self._lock:
            for step in itertools.chain(itertools.islice(self._folders, FIRST_STEPS), reversed(self._folders)):
                if step not in self._entries:
                    if time.monotonic() > deadline:
                        return False
                    self.entry(step)
            return True

    def look_around(self, step: int, is_train: bool) -> None:
        """Looks at steps before and after one until there is one with samples of that kind on both sides."""
        with self._lock:
            steps = self.steps
            index = bisect.bisect_left(steps, step)
            for others in (reversed(steps[:index]), iter(steps[bisect.bisect_right(steps, step) :])):
                for other in itertools.islice(others, MOST_AROUND):
                    entry = self.entry(other)
                    if entry is not None and (entry.num_train if is_train else entry.repeated):
                        break

    def entry(self, step: int) -> StepEntry | None:
        """What the index holds of a step; None where there is no such step."""
        with self._lock:
            if step in self._folders and step not in self._entries:
                self._entries[step] = self._look_at(step)
            return self._entries.get(step)

    def repeated_steps(self) -> list[int]:
        """Steps among those looked at that have samples of an evaluation or of watched prompts, ascending."""
        with self._lock:
            return sorted(step for step, entry in self._entries.items() if entry.repeated)

    def train_steps(self) -> list[int]:
        """Steps among those looked at that have training samples, ascending."""
        with self._lock:
            return sorted(step for step, entry in self._entries.items() if entry.num_train)

    def _look_at(self, step: int) -> StepEntry:
        _, time_ns = self._folders[step]
        rows = self.rows(step)
        cells = [self._make_cell(row) for row in rows if row.get("kind") in IN_MATRIX]
        return StepEntry(f"{time_ns:x}", tuple(cells), sum(row.get("kind") == "train" for row in rows))

    def _make_cell(self, row: Record) -> Cell:
        names = (text_of(row, "prompt"), whole_number(row.get("seed")))
        key = (text_of(row, "kind"), whole_number(row.get("sample_id")), *names)
        number = self._key_numbers.get(key)
        if number is None:
            number = self._key_numbers[key] = len(self.keys)
            self.keys.append(key)
        total = row.get("total")
        text = row.get("damage") or row.get("text") or ""
        reward = float(total) if is_number(total) else math.nan
        return Cell(number, text_of(row, "file"), reward, str(text)[:SNIPPET], text_of(row, "sound"))

    def rows(self, step: int) -> list[Record]:
        """The rows of a step; empty where there is none, or where they cannot be read, which ``problems`` says."""
        with self._lock:
            if step not in self._folders:
                return []
            stamp = self._folders[step]
            newest = _stamp_of(str(step_folder(self.run_dir, step)))
            if newest is not None and newest != stamp:  # rows that were written anew within the step's folder
                stamp = self._folders[step] = newest
                self._entries.pop(step, None)
                self.generation += 1
            held = self._rows.get((step, stamp))
            if held is not None:
                self._rows.move_to_end((step, stamp))
                return held
            rows = self._read_rows(step)
            self._rows[step, stamp] = rows
            while len(self._rows) > STEPS_IN_MEMORY:
                self._rows.popitem(last=False)
            return rows

    def _read_rows(self, step: int) -> list[Record]:
        rows: list[Record] = []
        num_left_out = 0
        num_wrong = 0

        def add(records: list[Record]) -> None:
            nonlocal num_left_out, num_wrong
            right = [record for record in records if find_wrong_field(record) is None]
            num_wrong += len(records) - len(right)
            taken = right[: MOST_ROWS - len(rows)]
            num_left_out += len(right) - len(taken)
            rows.extend(taken)

        tail = LineTail(step_folder(self.run_dir, step) / "samples.jsonl")
        tail.read_new(rows.clear, add)
        broken = f"{tail.num_broken} broken lines" if tail.num_broken else ""
        left_out = f"{num_left_out} rows beyond the first {MOST_ROWS:,} are left out" if num_left_out else ""
        wrong = f"{num_wrong} rows hold values that no run has written, and are left out" if num_wrong else ""
        if problem := tail.problem or broken or wrong or left_out:
            self.problems[step] = problem
        return rows

    def sample(self, step: int, kind: str, sample_id: int) -> Record | None:
        """The row of one sample; None where there is none."""
        for row in self.rows(step):
            if row.get("kind") == kind and row.get("sample_id") == sample_id:
                return row
        return None

    def path_of_file(self, step: int, name: str) -> Path | None:
        """The path of a file that a row of the step names, within the step's folder; None for any other name."""
        if not any(row.get(field) == name for row in self.rows(step) for field in FILE_FIELDS):
            return None
        folder = step_folder(self.run_dir, step)
        if Path(name).name != name or path_inside(folder, name) != folder.resolve() / name:
            return None
        return folder / name


def _stamp_of(folder: str) -> Stamp | None:
    """What tells the samples of a step's folder from those of before; None for a folder without samples."""
    try:
        # no Path: joining the paths of 10,000 steps takes as long as looking at them
        status = os.stat(f"{folder}/samples.jsonl", follow_symlinks=False)
    except OSError:
        return None
    # a file system gives the number of a removed file to the next one: the time tells them apart
    return (status.st_ino, status.st_mtime_ns)


def text_of(row: Mapping[str, object], name: str) -> str:
    """A field of a row that is a text; empty where it is none."""
    value = row.get(name)
    return value if isinstance(value, str) else ""


def whole_number(value: object) -> int:
    """A field of a row that is a whole number; 0 where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**64 else 0
