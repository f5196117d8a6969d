"""The envelope of a checkpoint: complete or absent, and no damage goes unnoticed."""

import errno
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from sfumato.errors import CheckpointError
from sfumato.tracking import atomic_folders as envelope
from sfumato.tracking.atomic_folders import (
    MANIFEST,
    begin_checkpoint,
    finish_checkpoint,
    list_checkpoints,
    list_files,
    newest_intact,
    prune_checkpoints,
    verify_checkpoint,
)


def write_files(folder: Path) -> None:
    (folder / "weights.safetensors").write_bytes(random.Random(0).randbytes(1000))
    (folder / "state.json").write_text('{"step": 1}', encoding="utf-8")
    (folder / "part").mkdir()
    (folder / "part" / "empty").write_bytes(b"")


def write_checkpoint(root: Path, step: int, write: Callable[[Path], None]) -> Path:
    building = begin_checkpoint(root, step)
    write(building)
    return finish_checkpoint(building, list_files(building, (path for path in building.rglob("*") if path.is_file())))


def make(root: Path, *steps: int) -> list[Path]:
    return [write_checkpoint(root, step, write_files) for step in steps]


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(content)


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_a_finished_checkpoint_verifies_and_is_named_by_its_step(tmp_path):
    folder = write_checkpoint(tmp_path / "made" / "checkpoints", 12, write_files)
    assert folder == tmp_path / "made" / "checkpoints" / "global_step_12"
    assert names(folder.parent) == {"global_step_12"}
    assert names(folder) == {"weights.safetensors", "state.json", "part", MANIFEST}
    verify_checkpoint(folder)
    listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    assert set(listed) == {"weights.safetensors", "state.json", "part/empty"}


def test_a_write_that_is_not_finished_is_no_checkpoint(tmp_path):
    make(tmp_path, 1)
    write_files(begin_checkpoint(tmp_path, 2))
    assert list(list_checkpoints(tmp_path)) == [1]
    verify_checkpoint(tmp_path / "global_step_1")


def test_files_that_other_nodes_keep_to_themselves_are_named(tmp_path):
    building = begin_checkpoint(tmp_path, 2)
    write_files(building)
    listing = list_files(building, [building / "state.json"])
    listing["__1_0.distcp"] = {"bytes": 3, "sha256": "0"}
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp was written.*file system that all nodes share"):
        finish_checkpoint(building, listing)
    assert list_checkpoints(tmp_path) == {}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["weights.safetensors", "state.json", "part/empty"])
def test_each_file_is_verified_by_one_of_several_ranks(tmp_path, num_ranks, name):
    (folder,) = make(tmp_path, 1)
    (folder / name).write_bytes(b"other")
    noticed = 0
    for rank in range(num_ranks):
        try:
            verify_checkpoint(folder, rank, num_ranks)
        except CheckpointError:
            noticed += 1
    assert noticed == 1


def test_the_old_checkpoint_of_a_step_stands_until_the_new_one_is_written(tmp_path):
    (old,) = make(tmp_path, 3)

    def fail(folder: Path) -> None:
        assert old.is_dir()
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        write_checkpoint(tmp_path, 3, fail)
    verify_checkpoint(old)


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    (folder,) = make(tmp_path, 3)
    flip(folder / "weights.safetensors", 17)
    write_checkpoint(tmp_path, 3, lambda building: (building / "other").write_bytes(b"new"))
    verify_checkpoint(folder)
    assert names(tmp_path) == {"global_step_3"}
    assert names(folder) == {"other", MANIFEST}


def test_the_leftover_of_a_killed_save_is_not_mixed_into_the_next_one(tmp_path):
    leftover = tmp_path / "global_step_5.tmp"
    leftover.mkdir()
    (leftover / "half").write_bytes(b"x")
    (folder,) = make(tmp_path, 5)
    assert "half" not in names(folder)


def test_listing_is_by_number_and_ignores_what_is_not_finished(tmp_path):
    assert list_checkpoints(tmp_path / "absent") == {}
    make(tmp_path, 10, 9, 100)
    for name in ("global_step_200.tmp", "global_step_201.old.tmp", "global_step_x", "xglobal_step_7", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "global_step_300").write_bytes(b"a file")
    assert list(list_checkpoints(tmp_path)) == [9, 10, 100]


def test_pruning_keeps_the_newest_and_removes_leftovers(tmp_path):
    make(tmp_path, 2, 4, 10, 8, 6)
    (tmp_path / "global_step_12.tmp").mkdir()
    (tmp_path / "global_step_1.old.tmp").mkdir()
    (tmp_path / "notes.txt").write_text("not ours", encoding="utf-8")
    prune_checkpoints(tmp_path, 2, 10)
    assert names(tmp_path) == {"global_step_8", "global_step_10", "notes.txt"}
    prune_checkpoints(tmp_path, 5, 10)
    assert list(list_checkpoints(tmp_path)) == [8, 10]


def test_pruning_never_takes_the_checkpoint_that_was_just_written(tmp_path):
    """A run that resumed from step 4 because step 10 was damaged must keep step 5, not step 10."""
    make(tmp_path, 2, 4, 10)
    flip(tmp_path / "global_step_10" / "weights.safetensors", 1)
    make(tmp_path, 5)
    prune_checkpoints(tmp_path, 1, 5)
    assert list(list_checkpoints(tmp_path)) == [5]


def test_no_checkpoint_at_all_is_none(tmp_path):
    assert newest_intact(list_checkpoints(tmp_path / "absent"), pytest.fail) is None
    (tmp_path / "global_step_1.tmp").mkdir()
    assert newest_intact(list_checkpoints(tmp_path), pytest.fail) is None


def test_the_newest_is_taken_without_a_word_when_it_is_intact(tmp_path):
    make(tmp_path, 9, 10)
    assert newest_intact(list_checkpoints(tmp_path), pytest.fail) == (10, tmp_path / "global_step_10")


def test_a_damaged_newest_is_named_and_passed_over(tmp_path):
    make(tmp_path, 1, 2, 3)
    flip(tmp_path / "global_step_3" / "weights.safetensors", 4000)
    (tmp_path / "global_step_2" / MANIFEST).unlink()
    said = []
    assert newest_intact(list_checkpoints(tmp_path), said.append) == (1, tmp_path / "global_step_1")
    assert len(said) == 2
    assert "global_step_3/weights.safetensors is damaged" in said[0]
    assert "global_step_2 has no manifest.json" in said[1]


def test_a_checkpoint_that_the_disk_cannot_read_is_passed_over(tmp_path, monkeypatch):
    make(tmp_path, 1, 2)
    digest = envelope._hash_file

    def read(path: Path) -> str:
        if path.parent.name == "global_step_2":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return digest(path)

    monkeypatch.setattr(envelope, "_hash_file", read)
    said = []
    assert newest_intact(list_checkpoints(tmp_path), said.append) == (1, tmp_path / "global_step_1")
    assert "Input/output error" in said[0]


def test_all_damaged_is_an_error_and_never_a_fresh_start(tmp_path):
    for folder in make(tmp_path, 1, 2):
        flip(folder / "state.json", 0)
    said = []
    with pytest.raises(CheckpointError, match=r"train\.output_dir"):
        newest_intact(list_checkpoints(tmp_path), said.append)
    assert len(said) == 2


def test_every_flipped_bit_is_detected(tmp_path):
    (folder,) = make(tmp_path, 1)
    path = folder / "weights.safetensors"
    num_bits = 8 * path.stat().st_size
    for bit in {0, num_bits - 1, *random.Random(1).sample(range(num_bits), 300)}:
        flip(path, bit)
        with pytest.raises(CheckpointError, match=r"weights\.safetensors is damaged"):
            verify_checkpoint(folder)
        flip(path, bit)
    verify_checkpoint(folder)


def test_flipped_bits_of_the_manifest_are_detected(tmp_path):
    (folder,) = make(tmp_path, 1)
    manifest = folder / MANIFEST
    listed = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    harmless = 0
    for bit in random.Random(2).sample(range(8 * manifest.stat().st_size), 500):
        flip(manifest, bit)
        try:
            verify_checkpoint(folder)
        except CheckpointError:
            pass
        else:  # a bit of the entry "step", which nothing reads
            assert json.loads(manifest.read_text(encoding="utf-8"))["files"] == listed, bit
            harmless += 1
        flip(manifest, bit)
    assert harmless < 20
    verify_checkpoint(folder)


def truncate(folder: Path) -> None:
    path = folder / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def empty(folder: Path) -> None:
    (folder / "weights.safetensors").write_bytes(b"")


def grow(folder: Path) -> None:
    with (folder / "weights.safetensors").open("ab") as file:
        file.write(b"\0")


def lose_a_file(folder: Path) -> None:
    (folder / "state.json").unlink()


def lose_an_empty_file(folder: Path) -> None:
    (folder / "part" / "empty").unlink()


def swap_a_file_for_a_folder(folder: Path) -> None:
    (folder / "state.json").unlink()
    (folder / "state.json").mkdir()


def lose_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def rewrite_manifest(text: str):
    return lambda folder: (folder / MANIFEST).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"weights\.safetensors has 999 bytes instead of 1000"),
        (empty, r"weights\.safetensors has 0 bytes"),
        (grow, r"weights\.safetensors has 1001 bytes"),
        (lose_a_file, r"state\.json is missing"),
        (lose_an_empty_file, r"part/empty is missing"),
        (swap_a_file_for_a_folder, r"state\.json is a folder, not a file"),
        (lose_the_manifest, r"has no manifest\.json"),
        (rewrite_manifest(""), r"manifest\.json is damaged"),
        (rewrite_manifest('{"step": 1, "fil'), r"manifest\.json is damaged"),
        (rewrite_manifest('{"step": 1}'), r"manifest\.json is damaged"),
        (rewrite_manifest("[]"), r"manifest\.json is damaged"),
        (rewrite_manifest('{"files": []}'), r"manifest\.json is damaged"),
        (rewrite_manifest('{"files": {"state.json": {"bytes": 11}}}'), r"manifest\.json is damaged"),
        (rewrite_manifest('{"files": {"state.json": 11}}'), r"manifest\.json is damaged"),
        (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe{"), r"manifest\.json is damaged"),
    ],
)
def test_every_other_damage_is_detected_and_named(tmp_path, damage, message):
    (folder,) = make(tmp_path, 1)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        verify_checkpoint(folder)
