"""What the page Checkpoints shows."""

from __future__ import annotations

import os
from pathlib import Path

from sfumato.config.file_checks import path_inside
from sfumato.studio.gallery import JSON
from sfumato.studio.runs import RunReader
from sfumato.tracking.atomic_folders import list_checkpoints

MOST_FILES = 10_000


def describe_checkpoints(reader: RunReader) -> JSON:
    """The finished checkpoints of a run with sizes and times, the newest first, whether there is an export, and what a
    playground could ask of them: pictures, texts, or nothing."""
    from sfumato.evaluation.sources import DIFFUSION_TASKS, TEXT_TASKS  # a second that the other pages need not wait

    root = reader.folder / "checkpoints"
    checkpoints = list_checkpoints(root) if path_inside(reader.folder, "checkpoints") == root.resolve() else {}
    listed = []
    for step, folder in reversed(checkpoints.items()):
        try:
            listed.append({"step": step, "bytes": _folder_bytes(folder), "time": folder.stat().st_mtime})
        except OSError:  # removed meanwhile, as a run removes its oldest
            continue
    task = str(reader.environment().get("task", ""))
    answers = "pictures" if task in DIFFUSION_TASKS else "texts" if task in TEXT_TASKS else None
    return {"checkpoints": listed, "has_export": (reader.folder / "hf_ckpt").is_dir(), "answers": answers}


def _folder_bytes(folder: Path) -> int:
    total = count = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            count += 1
            if count > MOST_FILES:
                return total
            total += os.lstat(os.path.join(parent, name)).st_size
    return total
