"""The envelope of a checkpoint: written beside, flushed to disk, listed with SHA-256, then renamed.

A folder ``global_step_N`` is complete or it is not there, whatever is killed when.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from sfumato.errors import CheckpointError

MANIFEST = "manifest.json"
_NAME = re.compile(r"^global_step_(\d+)$")


def write_checkpoint(root: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Writes a checkpoint folder as one indivisible act.

    Args:
        root: folder of all checkpoints; made if it is missing.
        step: number in the name.
        write: writes the files into the folder it is given.

    Returns:
        The finished folder. One of the same step is replaced.

    Raises:
        OSError: when the disk is full or fails; nothing half-written stays behind.
    """
    final, building = root / f"global_step_{step}", root / f"global_step_{step}.tmp"
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True)
        write(building)
        manifest = {}
        for path in sorted(each for each in building.rglob("*") if each.is_file()):
            _flush(path)
            manifest[str(path.relative_to(building))] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        listing = building / MANIFEST
        listing.write_text(json.dumps({"step": step, "files": manifest}, indent=1), encoding="utf-8")
        _flush(listing)
        for folder in (building, *(each for each in building.rglob("*") if each.is_dir())):
            _flush(folder)
        if final.exists():  # a damaged checkpoint of the same step, which the resumed run has now made again
            stale = root / f"global_step_{step}.old.tmp"
            shutil.rmtree(stale, ignore_errors=True)
            final.rename(stale)
            building.rename(final)
            shutil.rmtree(stale, ignore_errors=True)
        else:
            building.rename(final)
        _flush(root)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return final


def list_checkpoints(root: Path) -> dict[int, Path]:
    """Finished checkpoints by step, ascending. Leftovers of a killed save do not count."""
    if not root.is_dir():
        return {}
    found = {int(match[1]): each for each in root.iterdir() if (match := _NAME.match(each.name)) and each.is_dir()}
    return dict(sorted(found.items()))


def verify_checkpoint(folder: Path) -> None:
    """Compares every file with the manifest. Raises CheckpointError that names the first one that differs."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {MANIFEST}: not a finished checkpoint") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error}") from error
    for name, (num_bytes, sha256) in expected.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != num_bytes:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes instead of {num_bytes}")
        if _sha256(path) != sha256:
            raise CheckpointError(f"{path} is damaged: its SHA-256 differs from the manifest")


def newest_intact(root: Path, say: Callable[[str], None]) -> tuple[int, Path] | None:
    """The newest checkpoint that verifies; damaged ones are named and passed over.

    Returns:
        Step and folder, or None when there is no checkpoint at all.

    Raises:
        CheckpointError: when there are checkpoints but none is intact; starting anew would lose the run in silence.
    """
    found = list_checkpoints(root)
    for step, folder in reversed(found.items()):
        try:
            verify_checkpoint(folder)
        except (CheckpointError, OSError) as error:  # OSError: the disk cannot read it
            say(f"checkpoint passed over: {error}")
            continue
        return step, folder
    if found:
        raise CheckpointError(f"no checkpoint in {root} is intact; to start anew, give another train.output_dir")
    return None


def prune_checkpoints(root: Path, keep: int, step: int) -> None:
    """Removes all but the newest ``keep`` checkpoints up to a step, and what killed saves left.

    Later ones go as well: they are damaged, or of a run that was resumed from an earlier step, and would otherwise
    take the places of sound ones.

    Args:
        root: folder of all checkpoints.
        keep: how many stay.
        step: of the checkpoint that was just written and verified.
    """
    found = list_checkpoints(root)
    kept = [each for each in found if each <= step][-keep:]
    for folder in [found[each] for each in reversed(found) if each not in kept]:  # later ones first
        doomed = folder.with_name(f"{folder.name}.old.tmp")
        folder.rename(doomed)  # a half-removed folder must not look like a checkpoint
        shutil.rmtree(doomed)
    for leftover in root.glob("global_step_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
