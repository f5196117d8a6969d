"""Whether a run is at work: by its lock, by what it has written, and by when."""

from __future__ import annotations

import datetime
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sfumato.errors import FolderError
from sfumato.tracking.lock import NAME, STALE_S, Owner, read_lock

State = Literal["running", "standing still", "died", "finished", "stopped", "empty"]

STILL_STEPS, STILL_S = 10, 600.0
"""A run that is alive stands still after ten times the typical time of a step without a new one, and ten minutes."""


@dataclass(frozen=True)
class RunState:
    """What a run is doing.

    Attributes:
        state: "running", "standing still" (alive without a new step for long), "died" (its lock stands, its process is
            gone), "finished", "stopped" (ended before its last step), or "empty" (nothing was computed yet).
        text: a sentence for a person; empty where the state says it all.
    """

    state: State
    text: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether a process is at work."""
        return self.state in ("running", "standing still")


@dataclass(frozen=True)
class Pause:
    """That a run was paused on request, and has not been resumed.

    Attributes:
        step: finished steps.
        time: in seconds since 1970.
    """

    step: int
    time: float


def find_pause(answers: str) -> Pause | None:
    """The pause that the lines of ``control.jsonl`` end with; None where they end with none.

    Raises ValueError for a line that is no JSON, as the last one is while it is written.
    """
    pause = None
    for line in filter(None, answers.split("\n")):
        match json.loads(line):
            case {"command": "pause", "result": "done", "step": int(step), "time": float(when)}:
                pause = Pause(step, when)
            case {"command": "resume", "result": "done"}:
                pause = None
    return pause


def find_state(
    folder: Path, is_finished: bool, last_step: int, step_s: float | None, pause: Pause | None = None
) -> RunState:
    """What a run is doing.

    Args:
        folder: of the run.
        is_finished: whether its ``environment.json`` says so.
        last_step: with metrics.
        step_s: typical seconds of a step; None where it is not known.
        pause: the one that was asked for last, of this process or of one before it.
    """
    try:
        lock = read_lock(folder / NAME)
    except (FolderError, OSError) as error:
        return RunState("stopped", str(error))
    if lock is None:
        if is_finished:
            return RunState("finished")
        return RunState("stopped" if last_step else "empty")
    owner, renewed = lock
    age_s = time.time() - renewed
    if owner is not None and owner.is_visible and not owner.is_alive:
        return RunState("died", f"its process ({owner}) is gone without having ended the run")
    if age_s > STALE_S and (owner is None or not owner.is_visible):
        return RunState("died", f"its lock ({owner or 'of an unknown process'}) was not renewed for {age_s:.0f} s")
    if pause is not None and _has_begun_before(owner, pause.time):
        return RunState("running", f"paused on request after step {pause.step}")
    newest = _newest_write(folder)
    silent_s = time.time() - newest if newest is not None else 0.0
    if step_s is not None and silent_s > max(STILL_STEPS * step_s, STILL_S):
        return RunState("standing still", f"no new step for {silent_s / 60:.0f} minutes; a step takes {step_s:.3g} s")
    return RunState("running")


def _has_begun_before(owner: Owner | None, moment: float) -> bool:
    """Whether the process that holds the folder is the one that was at work then."""
    try:
        return owner is not None and datetime.datetime.fromisoformat(owner.since).timestamp() <= moment
    except (ValueError, OverflowError):  # a lock that no run has written
        return False


def _newest_write(folder: Path) -> float | None:
    """When the run has last written numbers or messages; None before it has."""
    times = []
    for name in ("metrics.jsonl", "log.txt", "timings.jsonl"):
        try:
            times.append(os.stat(folder / name).st_mtime)
        except OSError:  # not written yet
            continue
    return max(times, default=None)
