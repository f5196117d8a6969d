"""The power fails at any moment of a save: what the disk has not been told to keep is gone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sfumato.config.writing import write_atomically
from sfumato.tracking.atomic_folders import (
    begin_checkpoint,
    finish_checkpoint,
    list_checkpoints,
    list_files,
    newest_intact,
    prune_checkpoints,
)
from sfumato.tracking.json_lines import JsonLines, read_jsonl
from tests.faults.forgetful_disk import OUTCOMES, ForgetfulDisk, write_out
from tests.tiny import run_task_here, tiny_text_config


@pytest.fixture
def disk(tmp_path):
    """An empty folder on a disk that forgets."""
    folder = tmp_path / "disk"
    folder.mkdir()
    disk = ForgetfulDisk(folder)
    yield disk
    disk.close()


def save(root: Path, step: int) -> None:
    building = begin_checkpoint(root, step)
    (building / "weights").write_bytes(bytes([step]) * 5000)
    (building / "part").mkdir()
    (building / "part" / "state.json").write_text(f'{{"step": {step}}}', encoding="utf-8")
    finish_checkpoint(building, list_files(building, [building / "weights", building / "part" / "state.json"]))
    prune_checkpoints(root, keep=2, step=step)


def resumed_step(files: dict[str, bytes], folder: Path) -> int | None:
    """The step that a run goes on from; its checkpoint is whole."""
    root = write_out(files, folder) / "run" / "checkpoints"
    result = newest_intact(list_checkpoints(root), lambda text: None)
    if result is None:
        return None
    step, checkpoint = result
    assert (checkpoint / "weights").read_bytes() == bytes([step]) * 5000
    assert json.loads((checkpoint / "part" / "state.json").read_text(encoding="utf-8")) == {"step": step}
    return step


def test_a_checkpoint_whose_save_has_returned_survives_and_the_one_before_it_until_then(disk, tmp_path):
    moments: list[dict[str, dict[str, bytes]]] = []
    root = disk.root / "run" / "checkpoints"
    number = 0
    with disk.watching(moments):
        for step in (1, 2, 3, 4):
            save(root, step)
            moments.append(disk.left())  # after it has returned
            for remains in moments:
                for outcome in OUTCOMES:
                    number += 1
                    result = resumed_step(remains[outcome], tmp_path / str(number))
                    is_before = remains is not moments[-1]
                    assert result == step or (is_before and result == (step - 1 or None)), (step, outcome)
            assert len(moments) > 5
            moments.clear()


def test_a_damaged_checkpoint_that_is_made_again_never_takes_a_whole_one_with_it(disk, tmp_path):
    root = disk.root / "run" / "checkpoints"
    moments: list[dict[str, dict[str, bytes]]] = []
    with disk.watching([]):
        save(root, 1)
        save(root, 2)
        (root / "global_step_2" / "weights").write_bytes(b"damaged")
    with disk.watching(moments):
        save(root, 2)
    for number, remains in enumerate([*moments, disk.left()]):
        for outcome in OUTCOMES:
            result = resumed_step(remains[outcome], tmp_path / f"{number} {outcome}")
            assert result == 2 or (number < len(moments) and result == 1)


def test_a_file_that_is_replaced_is_the_old_one_or_the_new_one(disk, tmp_path):
    path = disk.root / "report"
    moments: list[dict[str, dict[str, bytes]]] = []
    with disk.watching(moments):
        write_atomically(path, b"old")
        moments.clear()
        write_atomically(path, b"new")
    for remains in [*moments, disk.left()]:
        assert remains["names kept"]["report"] in (b"old", b"new")
    assert disk.left()["names kept"]["report"] == b"new"


def test_metrics_of_saved_steps_survive(disk, tmp_path):
    with disk.watching([]):
        lines = JsonLines(disk.root / "metrics.jsonl")
        for step in (1, 2):
            lines.write({"step": step, "loss": 0.5})
        lines.sync()
        lines.write({"step": 3, "loss": 0.5})
        remains = disk.left()
        lines.close()
    for outcome in OUTCOMES:
        folder = write_out(remains[outcome], tmp_path / outcome)
        assert [record["step"] for record in read_jsonl(folder / "metrics.jsonl")] == [1, 2]


def test_a_checkpoint_of_a_run_never_outlives_the_metrics_of_its_steps(disk, tmp_path):
    config = tiny_text_config(tmp_path, train={"output_dir": str(disk.root / "run"), "max_steps": 3, "save_steps": 1})
    moments: list[dict[str, dict[str, bytes]]] = []
    with disk.watching(moments):
        run_task_here("train_text", config)
    newest = set()
    for number, remains in enumerate([*moments, disk.left()]):
        for outcome in OUTCOMES:
            folder = write_out(remains[outcome], tmp_path / "left" / f"{number} {outcome}") / "run"
            result = newest_intact(list_checkpoints(folder / "checkpoints"), lambda text: None)
            step = result[0] if result else 0
            newest.add(step)
            logged = [record["step"] for record in read_jsonl(folder / "metrics.jsonl") if record["step"] > 0]
            assert logged[:step] == list(range(1, step + 1)), f"after {number} calls, {outcome}"
    assert newest == {0, 1, 2, 3}
