"""What the GPU suite writes: one JSON object a line, each with where its figures come from.

A line is a cell of a stage: ``stage``, ``cell``, ``status``, ``seconds``, the figures in ``values``, what their bounds
say of them in ``judged``, why there are none in ``reason``; and of the run ``run``, ``commit``, ``date``, ``device``,
``torch``, ``tiny``, ``command``. A line is written at once when its cell has ended, so that a crash, or a machine that
is taken away, costs no earlier one.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = "results.jsonl"

MEASURED, EXCEEDED = "measured", "exceeded"
"""Statuses with figures: all within their bounds, or not."""
FAILED, CRASHED, LATE = "failed", "crashed", "out of time"
"""Statuses without: an exception; the process died; it was ended at its stage's limit."""
NOT_HERE, LEFT_OUT = "not here", "left out"
"""This machine lacks something that the cell needs; there was no time."""
BEGUN, LISTED = "begun", "listed"
"""Between the start and the end of a cell, and what remains of one whose process died; the names of a stage's cells."""
WITH_FIGURES = (MEASURED, EXCEEDED)
BROKEN = (FAILED, CRASHED, LATE, EXCEEDED)
"""With one of these the suite ends with exit code 1."""


@dataclass(frozen=True)
class Writer:
    """Appends lines that share what is known of the run."""

    path: Path
    about: dict[str, Any]

    def write(self, stage: str, cell: str, status: str, **more: Any) -> None:
        """Appends a line in one write, so that two processes do not mix theirs."""
        line = {"stage": stage, "cell": cell, "status": status, **rounded(more), **self.about}
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


def rounded(value: Any) -> Any:
    """Numbers to five digits, which is more than a measurement has; those that are not finite as text."""
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    return value


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The lines of some files, or of the file in some folders.

    Raises:
        SystemExit: a file is missing, or a line is no JSON object; names file and line. A last line that was cut off
            is none.
    """
    results = []
    for path in paths:
        path = path / FILE if path.is_dir() else path
        if not path.is_file():
            raise SystemExit(f"error: {path} does not exist: give {FILE} of the GPU suite, or its folder")
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            try:
                results.append(json.loads(line))
            except json.JSONDecodeError as error:
                if number == len(lines) and not line.endswith("\n"):
                    continue
                raise SystemExit(f"error: {path}, line {number}: {error}") from error
    return results


def last_of_each(lines: Iterable[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The last line of each cell; one with figures is not replaced by one without."""
    last: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        key = line["stage"], line["cell"]
        if line["status"] == LISTED:
            continue
        if line["status"] in WITH_FIGURES or last.get(key, {}).get("status") not in WITH_FIGURES:
            last[key] = line
    return last


def is_settled(line: dict[str, Any], commit: str) -> bool:
    """Whether a line of an earlier call says that its cell need not be begun again: it has figures, this machine cannot
    measure it, or it broke and nothing has changed since."""
    if line["status"] in (*WITH_FIGURES, NOT_HERE):
        return True
    return line["status"] in (FAILED, CRASHED) and line["commit"] == commit


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Cells with their status; below each its figures, those with bounds first, and what to do. What broke, or is
    beyond a bound, stands last."""
    text = []
    for (stage, cell), line in sorted(last_of_each(lines).items(), key=lambda entry: entry[1]["status"] in BROKEN):
        values = line.get("values") or {}
        reason = (line.get("reason", "").splitlines() or [""])[0][:300]
        text.append(f"{line['status']:<11} {line.get('seconds', 0):6.1f} s  {stage}: {cell}  {reason}".rstrip())
        for judged in line.get("judged", ()):
            verdict = "" if judged["met"] else f"  EXCEEDED: {judged['remedy']}"
            text.append(f"    {judged['figure']} {values[judged['figure']]}, bound {judged['bound']}{verdict}")
        judged_names = {judged["figure"] for judged in line.get("judged", ())}
        others = {name: value for name, value in values.items() if name not in judged_names}
        shown = ", ".join(f"{name} {value}" for name, value in others.items() if isinstance(value, int | float | str))
        text += [f"    {shown[:300]}"] if shown else []
    return "\n".join(text)


def commit_of(name: str | None) -> str:
    """The commit that is measured: what was given, what git says, or "unknown"; with a mark when files have changed."""
    if name:
        return name
    try:
        head = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + (" and changes" if changed.stdout.strip() else "")


def command_of() -> str:
    """The command of this process as a person would give it."""
    return " ".join(["python", "-m", "benchmarks.gpu.run", *sys.argv[1:]])
