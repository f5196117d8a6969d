"""Folders that are complete or absent, whenever a process is killed: checkpoints, and exports that replace another.

A checkpoint ``global_step_N`` is written under another name, flushed to disk, listed with SHA-256, then renamed. This
module does not care what writes the files into it, or on how many ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from sfumato.config.file_checks import outside_problem, read_json_object
from sfumato.config.open_mappings import JsonObject
from sfumato.config.writing import make_new_folder, remove, write_atomically
from sfumato.errors import CheckpointError

MANIFEST = "manifest.json"
VALUES = "state.json"
"""The file of everything that is not a tensor."""
_NAME = re.compile(r"^global_step_(\d+)$")

Listing = dict[str, dict[str, int | str]]
"""Size and SHA-256 of files, by their path within the checkpoint."""


def begin_checkpoint(root: Path, step: int) -> Path:
    """Makes the empty folder that the files of a checkpoint are written into, ``global_step_N.tmp``.

    Args:
        root: folder of all checkpoints; made if it is missing.
        step: number in the name.
    """
    make_folder(root)
    return make_new_folder(root / f"global_step_{step}.tmp")


def make_folder(folder: Path) -> None:
    """Makes a folder and its missing parents so that they survive a power failure."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):  # the name of a new folder is on disk once its parent folder is flushed
        flush(path.parent)


def list_files(building: Path, paths: Iterable[Path]) -> Listing:
    """Flushes finished files of a checkpoint to disk, reads them back, and lists their sizes and digests.

    Args:
        building: the folder of the checkpoint.
        paths: of the files.

    Raises:
        OSError: when the disk is full or fails.
    """
    listing: Listing = {}
    for path in sorted(paths):
        flush(path)
        listing[str(path.relative_to(building))] = {"bytes": path.stat().st_size, "sha256": _hash_file(path)}
    return listing


def finish_checkpoint(building: Path, listing: Listing) -> Path:
    """Turns a folder whose files are all written and listed into a checkpoint, atomically.

    Args:
        building: from ``begin_checkpoint``.
        listing: all its files, of all ranks.

    Returns:
        The finished folder, which replaces a checkpoint of the same step.

    Raises:
        CheckpointError: when a listed file cannot be seen by this process.
        OSError: when the disk is full or fails.
    """
    for name, entry in listing.items():
        path = building / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"{path} was written by another process, but cannot be seen here: train.output_dir must lie on a "
                "file system that all nodes share"
            )
    root = building.parent
    final = building.with_suffix("")
    text = json.dumps({"step": int(final.name.rpartition("_")[2]), "files": listing}, indent=1)
    write_atomically(building / MANIFEST, text.encode())
    for path in (building / MANIFEST, building, *(inner for inner in building.rglob("*") if inner.is_dir())):
        flush(path)
    stale = root / f"{final.name}.old.tmp"
    remove(stale)
    if final.exists():  # a damaged checkpoint of the same step, which the resumed run has now made again
        final.rename(stale)
    building.rename(final)
    shutil.rmtree(stale, ignore_errors=True)
    flush(root)
    return final


def list_checkpoints(root: Path) -> dict[int, Path]:
    """Finished checkpoints by step, ascending. Leftovers of a killed save do not count."""
    if not root.is_dir():
        return {}
    folder_of_step = {
        int(match[1]): folder for folder in root.iterdir() if (match := _NAME.match(folder.name)) and folder.is_dir()
    }
    return dict(sorted(folder_of_step.items()))


def read_values(folder: Path) -> JsonObject:
    """The values of a checkpoint besides tensors; empty when they cannot be read, which its verification reports."""
    return read_mapping(folder / VALUES)


def read_mapping(path: Path) -> dict[str, object]:
    """The mapping in a JSON file; empty when the file is missing, damaged or holds no mapping."""
    try:
        return read_json_object(path)
    except (OSError, ValueError):
        return {}


def read_run_id(folder: Path) -> str | None:
    """The id of the run that wrote a checkpoint; None when the checkpoint does not hold it."""
    return read_values(folder).get("run_id")


def verify_checkpoint(folder: Path, rank: int = 0, num_ranks: int = 1) -> None:
    """Compares files with the manifest.

    Args:
        folder: a checkpoint.
        rank: of this process among those that share the work; each verifies some of the files.
        num_ranks: how many processes share the work.

    Raises:
        CheckpointError: names the first file that differs.
    """
    if (problem := outside_problem(folder, MANIFEST)) not in (None, "does not exist"):
        raise CheckpointError(f"{folder / MANIFEST} {problem}")
    try:
        files = read_json_object(folder / MANIFEST)["files"]
        expected = [(name, entry["bytes"], entry["sha256"]) for name, entry in files.items()]
        if outside := [name for name, _, _ in expected if Path(name).is_absolute() or ".." in Path(name).parts]:
            raise ValueError(f"it lists {outside[0]!r}, which is no file of the checkpoint")
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {MANIFEST}: not a finished checkpoint") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error}") from error
    for name, num_bytes, sha256 in expected[rank::num_ranks]:
        path = folder / name
        if problem := outside_problem(folder, name):
            raise CheckpointError(f"{path} {'is missing' if problem == 'does not exist' else problem}")
        if path.stat().st_size != num_bytes:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes instead of {num_bytes}")
        if _hash_file(path) != sha256:
            raise CheckpointError(f"{path} is damaged: its SHA-256 differs from the manifest")


def newest_intact(
    checkpoints: Mapping[int, Path],
    say: Callable[[str], None],
    verify: Callable[[Path], None] = verify_checkpoint,
    remedy: str = "to start anew, give another train.output_dir",
) -> tuple[int, Path] | None:
    """The newest checkpoint that verifies; damaged ones are named and passed over.

    Args:
        checkpoints: from ``list_checkpoints``.
        say: takes a line for the person who watches.
        verify: raises CheckpointError or OSError for a checkpoint that is not intact.
        remedy: what to do when none is intact, for the message.

    Returns:
        Step and folder, or None when there is no checkpoint at all.

    Raises:
        CheckpointError: when there are checkpoints but none is intact; starting anew would lose the run in silence.
    """
    for step, folder in sorted(checkpoints.items(), reverse=True):
        try:
            verify(folder)
        except (CheckpointError, OSError) as error:  # OSError: the disk cannot read it
            say(f"checkpoint passed over: {error}")
            continue
        return step, folder
    if checkpoints:
        root = next(iter(checkpoints.values())).parent
        raise CheckpointError(f"no checkpoint in {root} is intact; {remedy}")
    return None


def prune_checkpoints(root: Path, keep: int, step: int) -> None:
    """Removes all but the newest ``keep`` checkpoints up to a step, and leftovers of saves that were killed.

    Checkpoints of later steps are removed, too: they are damaged, or of a run that was resumed from an earlier step,
    and would otherwise count as the newest ones.

    Args:
        root: folder of all checkpoints.
        keep: how many stay.
        step: of the checkpoint that was just written.
    """
    checkpoints = list_checkpoints(root)
    kept_steps = [saved for saved in checkpoints if saved <= step][-keep:]
    superseded = [checkpoints[saved] for saved in reversed(checkpoints) if saved not in kept_steps]
    for folder in superseded:  # later ones first
        if folder.is_symlink():  # the person's own link to another disk, where nothing is removed
            folder.unlink()
            continue
        doomed = folder.with_name(f"{folder.name}.old.tmp")
        remove(doomed)
        folder.rename(doomed)  # a half-removed folder must not look like a checkpoint
        shutil.rmtree(doomed)
    for leftover in root.glob("global_step_*.tmp"):
        with contextlib.suppress(OSError):
            remove(leftover)


def set_later_aside(root: Path, step: int) -> list[str]:
    """Renames the checkpoints of later steps than one that a run goes back to.

    So ``auto`` does not go on from them where the run is killed before its next save, which removes them.

    Args:
        root: folder of all checkpoints.
        step: of the checkpoint that the run goes back to.

    Returns:
        Their new names; none where the checkpoint of ``step`` itself lies elsewhere, and ``auto`` would start anew.
    """
    aside = []
    checkpoints = list_checkpoints(root)
    for saved, folder in reversed(checkpoints.items()):  # later ones first: a kill leaves no gap
        if saved > step and step in checkpoints:
            target = folder.with_name(f"{folder.name}.later.tmp")
            remove(target)
            folder.rename(target)
            aside.append(target.name)
    if aside:
        flush(root)
    return aside


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Makes sure that a file, or the names in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder under another name, and then replaces the folder of this name by it.

    Where the kernel and the file system can exchange two names in one call, either the old folder or the new one is
    there whenever the process is killed. Elsewhere (NFS, other systems than Linux) there are two renames; after a kill
    between them ``restore_folder`` puts the folder back.

    Args:
        folder: the name; need not exist.
        write: fills an empty folder.
    """
    restore_folder(folder)
    building, old = _working_names(folder)
    make_new_folder(building)
    try:
        write(building)
        for path in (*building.rglob("*"), building):
            flush(path)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)  # on a full disk it would take the room of what comes next
        raise
    if not folder.exists():
        os.replace(building, folder)
    elif exchange(building, folder):
        flush(folder.parent)
        with contextlib.suppress(OSError):
            remove(building)
    else:
        os.replace(folder, old)
        os.replace(building, folder)
        with contextlib.suppress(OSError):
            remove(old)
    flush(folder.parent)


def restore_folder(folder: Path) -> None:
    """Puts a folder back after a process was killed between the two renames of ``replace_folder``."""
    building, old = _working_names(folder)
    if old.is_symlink():  # no run makes one
        old.unlink()
    if not old.exists():
        return
    if building.is_symlink():
        building.unlink()
    if not folder.exists():  # killed before the second rename
        os.replace(building if building.exists() else old, folder)  # the new folder was complete before any rename
    shutil.rmtree(old, ignore_errors=True)


def exchange(first: Path, second: Path) -> bool:
    """Gives each of two folders the other's name, in one call.

    Returns:
        False where the kernel or the file system does not know how; nothing has happened then.

    Raises:
        OSError: when it knows how and fails.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def _working_names(folder: Path) -> tuple[Path, Path]:
    """The name under which a folder's successor is written, and the name that the folder has until it is removed."""
    return folder.with_name(f".{folder.name}.being_written"), folder.with_name(f".{folder.name}.being_replaced")
