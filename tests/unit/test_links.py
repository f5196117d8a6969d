"""Links, pipes and files elsewhere in the place of what a run writes or reads of its own folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sfumato.config.writing import make_new_folder, open_lock, remove
from sfumato.data.files.row_store import RowStore, RowWriter
from sfumato.data.files.stored import open_cache_lock
from sfumato.errors import CheckpointError, DataError
from sfumato.tracking.atomic_folders import (
    MANIFEST,
    begin_checkpoint,
    finish_checkpoint,
    list_checkpoints,
    list_files,
    prune_checkpoints,
    replace_folder,
    verify_checkpoint,
)
from sfumato.tracking.samples import SampleRecord, save_samples_and_grids


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A folder of the person who runs, with a file; a stranger's links lead there."""
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "key").write_text("secret")
    return folder


def is_untouched(private: Path) -> bool:
    return [path.name for path in private.iterdir()] == ["key"] and (private / "key").read_text() == "secret"


def test_new_folders_replace_links_and_do_not_follow_them(tmp_path: Path, private: Path) -> None:
    (tmp_path / "new").symlink_to(private)
    (make_new_folder(tmp_path / "new") / "x").write_text("x")
    assert is_untouched(private) and not (tmp_path / "new").is_symlink()
    (tmp_path / "link").symlink_to(private)
    remove(tmp_path / "link")
    remove(tmp_path / "absent")
    remove(tmp_path / "new")
    assert is_untouched(private) and [path.name for path in tmp_path.iterdir()] == ["private"]


@pytest.mark.parametrize("make", [lambda path, key: path.symlink_to(key), lambda path, _: os.mkfifo(path)])
def test_locks_that_are_links_or_pipes_are_refused(
    tmp_path: Path, private: Path, make: Callable[[Path, Path], None]
) -> None:
    """The lock of a cache was opened with "w", which emptied what a link of its name led to."""
    make(tmp_path / "lock", private / "key")
    with pytest.raises(OSError):
        open_lock(tmp_path / "lock")
    with pytest.raises(DataError, match=r"lock: .*remove it"):
        open_cache_lock(tmp_path / "lock")
    assert is_untouched(private)


def checkpoint(root: Path, step: int) -> Path:
    building = begin_checkpoint(root, step)
    (building / "weights").write_bytes(b"w" * 9)
    return finish_checkpoint(building, list_files(building, [building / "weights"]))


def test_links_in_the_places_of_a_checkpoint_do_not_stop_it(tmp_path: Path, private: Path) -> None:
    root = tmp_path / "checkpoints"
    checkpoint(root, 1)
    for name in ("global_step_1.tmp", "global_step_1.old.tmp", "global_step_9.tmp"):
        (root / name).symlink_to(private)
    folder = checkpoint(root, 1)
    prune_checkpoints(root, 1, 1)
    verify_checkpoint(folder)
    assert is_untouched(private) and [path.name for path in root.iterdir()] == ["global_step_1"]


def test_a_checkpoint_that_is_the_persons_own_link_is_let_go_and_not_emptied(tmp_path: Path) -> None:
    root, disk = tmp_path / "checkpoints", tmp_path / "disk"
    os.replace(checkpoint(root, 1), disk)
    (root / "global_step_1").symlink_to(disk)
    verify_checkpoint(root / "global_step_1")
    checkpoint(root, 2)
    prune_checkpoints(root, 1, 2)
    assert list(list_checkpoints(root)) == [2] and (disk / "weights").is_file()


@pytest.mark.parametrize("name", ["weights", MANIFEST])
def test_files_of_a_checkpoint_lie_within_it(tmp_path: Path, name: str) -> None:
    folder = checkpoint(tmp_path / "checkpoints", 1)
    os.replace(folder / name, tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match="lies outside"):
        verify_checkpoint(folder)


def test_a_manifest_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoints", 1)
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)
    with pytest.raises(CheckpointError, match="pipe"):
        verify_checkpoint(folder)


@pytest.mark.parametrize("name", [".out.being_written", ".out.being_replaced"])
def test_links_beside_an_export_are_removed(tmp_path: Path, private: Path, name: str) -> None:
    for text in ("first", "second"):
        (tmp_path / name).symlink_to(private)
        replace_folder(tmp_path / "out", lambda folder, text=text: (folder / "a").write_text(text))
        assert (tmp_path / "out" / "a").read_text() == text and not (tmp_path / "out").is_symlink()
    assert is_untouched(private) and not (tmp_path / name).is_symlink()


@pytest.mark.parametrize("name", ["step_000001.tmp", "step_000001.old"])
def test_links_beside_samples_are_removed(tmp_path: Path, private: Path, name: str) -> None:
    record = SampleRecord(np.zeros((8, 8, 3), np.uint8), kind="eval", sample_id=0, prompt="a", seed=1)
    save_samples_and_grids(tmp_path, 1, [record])
    (tmp_path / "samples" / name).symlink_to(private)
    save_samples_and_grids(tmp_path, 1, [record])
    assert is_untouched(private) and [path.name for path in (tmp_path / "samples").iterdir()] == ["step_000001"]


def test_rows_of_a_cache_are_not_cut_or_written_through_a_link(tmp_path: Path, private: Path) -> None:
    """``index.bin`` as a link: the file that it led to was cut off at the end of the last row."""
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "tensors.json").write_text('{"latent": {"shape": [2], "dtype": "float32"}}')
    (folder / "latent.bin").touch()
    (folder / "index.bin").symlink_to(private / "key")
    with pytest.raises(DataError, match="is a link; remove it"):
        RowWriter(RowStore(folder, "cache"))
    assert is_untouched(private)
