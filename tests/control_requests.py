"""Requests that are written into a run's folder at chosen steps of it, while it is at work."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.run import Run

Script = Mapping[int, Sequence[str]]
"""Commands by the number of finished steps after which they are written."""


def write_request(run_folder: Path, name: str, command: str) -> None:
    """Writes a request as the studio does: complete or absent."""
    folder = run_folder / "control"
    folder.mkdir(exist_ok=True)
    building = folder / f"{name}.tmp"
    building.write_text(json.dumps({"command": command}), encoding="utf-8")
    building.rename(folder / f"{name}.json")


def write_all(run_folder: Path, step: int, commands: Sequence[str]) -> None:
    """Writes the requests of a step; "pause" is followed by "resume" half a second later."""
    for number, command in enumerate(commands):
        write_request(run_folder, f"s{step}-{number}-{command}", command)
        if command == "pause":
            later = threading.Timer(0.5, write_request, (run_folder, f"s{step}-{number}-resume", "resume"))
            later.start()


def scripted(script: Script) -> Any:
    """Inside, runs of this process find these requests after their steps."""
    log = Run.log

    def log_and_ask(self: Run, step: int, *args: Any, **kwargs: Any) -> None:
        log(self, step, *args, **kwargs)
        if self.mesh.is_first:
            write_all(self.output_dir, step, script.get(step, ()))

    return mock.patch.object(Run, "log", log_and_ask)


def answers(run_folder: Path) -> list[tuple[int, str, str]]:
    """Step, command and result of each answer."""
    path = run_folder / "control.jsonl"
    lines = read_jsonl(path) if path.exists() else []
    return [(line["step"], line["command"], line["result"]) for line in lines]
