"""A disk that is full while something other than a checkpoint is written: it is named once, and the run goes on."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from sfumato.checkpoint.saving import Saving
from sfumato.config.load import merge
from sfumato.errors import CheckpointError
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.runtime import evaluate
from sfumato.tracking.atomic_folders import list_checkpoints
from sfumato.tracking.folder import read_environment
from sfumato.tracking.json_lines import JsonLines, read_jsonl
from sfumato.tracking.run import Run
from sfumato.tracking.samples import read_samples
from sfumato.tracking.trackers import Trackers
from tests.tiny import load_task, run_task_here, tiny_dit_config, tiny_text_rl_config, weights_in


def fill(disk: Path) -> None:
    """Takes all room that is left."""
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                assert os.statvfs(disk).f_bavail == 0 or size > 1


def empty(disk: Path) -> None:
    (disk / "filler").unlink()


def test_lines_wait_until_there_is_room_and_none_is_torn(small_disk):
    said = []
    lines = JsonLines(
        small_disk / "a.jsonl", report=lambda path, error: said.append((path.name, error and error.errno))
    )
    lines.write({"step": 1, "text": "y" * 5000})  # leaves room in its last page
    fill(small_disk)
    for step in (2, 3):
        lines.write({"step": step, "text": "z" * 5000})
    assert said == [("a.jsonl", None), *[("a.jsonl", errno.ENOSPC)] * 2] and lines.num_waiting == 2
    content = (small_disk / "a.jsonl").read_bytes()
    assert content.endswith(b"}\n") and len(content.splitlines()) == 1
    with pytest.raises(OSError, match=r"a\.jsonl"):
        lines.sync()
    empty(small_disk)
    lines.write({"step": 4})
    assert said[-1] == ("a.jsonl", None)
    assert [entry["step"] for entry in read_jsonl(small_disk / "a.jsonl")] == [1, 2, 3, 4]
    lines.close()


class Refusing:
    """A file that takes a part of what is written, and refuses the rest, for a reason that this machine cannot make."""

    def __init__(self, file, number: int) -> None:
        self.file, self.number, self.calls = file, number, 0

    def write(self, content: bytes) -> int:
        self.calls += 1
        if self.calls % 2:
            return self.file.write(content[:3])
        raise OSError(self.number, os.strerror(self.number))

    def fileno(self) -> int:
        return self.file.fileno()


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EROFS, errno.EIO])
def test_whatever_the_reason_no_line_is_torn(tmp_path, number):
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.write({"step": 1})
    file, lines._file = lines._file, Refusing(lines._file, number)
    for step in (2, 3):
        with pytest.raises(OSError, match=os.strerror(number)):
            lines.write({"step": step})
    assert (tmp_path / "a.jsonl").read_bytes() == b'{"step": 1}\n'
    lines._file = file
    lines.close()
    assert [entry["step"] for entry in read_jsonl(tmp_path / "a.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("small_disk", ["16m"], indirect=True)
def test_a_run_on_a_disk_that_is_full_for_a_while(small_disk, tmp_path):
    settings = {"train": {"max_steps": 6, "lr_warmup_steps": 0}, "sample": {"every_steps": 1}}
    config = tiny_dit_config(tmp_path, **settings)
    undisturbed = run_task_here("train_dit", merge(config, {"train": {"output_dir": str(tmp_path / "undisturbed")}}))
    task = load_task("train_dit")
    losses_of, done = task.denoising_losses, []

    def with_little_room(model, batch, flow, seed, step):
        if step not in done:
            done.append(step)
            if step == 2:
                fill(small_disk)
            if step == 4:
                assert (small_disk / "run/metrics.jsonl").read_bytes().endswith(b"}\n")
                empty(small_disk)
        return losses_of(model, batch, flow, seed, step)

    task.denoising_losses = with_little_room
    changes = {
        "train": {"output_dir": str(small_disk / "run"), "export_steps": 3, "save_steps": 3, "max_checkpoints": 1}
    }
    output_dir = run_task_here(task, merge(config, changes))
    assert (output_dir / "metrics.jsonl").read_bytes() == (undisturbed / "metrics.jsonl").read_bytes()
    assert [entry["step"] for entry in read_jsonl(output_dir / "timings.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert weights_in(output_dir / "hf_ckpt") == weights_in(undisturbed / "hf_ckpt")
    assert list(list_checkpoints(output_dir / "checkpoints")) == [6]
    assert {path.name for path in (output_dir / "samples").iterdir()} == {f"step_{step:06d}" for step in (1, 2, 5, 6)}
    said = (output_dir / "log.txt").read_text(encoding="utf-8").splitlines()
    assert any("samples can be written again" in line for line in said)
    assert not [path for path in output_dir.rglob("*") if ".tmp" in path.name or ".being" in path.name]


def test_rl_goes_on_without_samples(tmp_path, monkeypatch):
    save = evaluate.save_samples_and_grids

    def with_little_room(folder, step, records, *, add):
        if step == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(folder, step, records, add=add)

    monkeypatch.setattr(evaluate, "save_samples_and_grids", with_little_room)
    output_dir = run_task_here("rl_text", tiny_text_rl_config(tmp_path, train={"max_steps": 1}))
    said = (output_dir / "log.txt").read_text(encoding="utf-8")
    assert f"{output_dir / 'samples'} cannot be written: No space left on device; the run goes on" in said
    assert "samples can be written again" in said
    assert sorted(read_samples(output_dir)) == [1]


def test_each_file_is_named_once(small_disk, capsys):
    run = Run(small_disk / "run", "test", Mesh(Layout(), torch.device("cpu")))
    (small_disk / "run").mkdir()
    run.begin(10, 0, [])
    fill(small_disk)
    for step in range(1, 60):
        run.log(step, {"loss": 0.1 * step}, show={})
        run.write_report()
        run.say("x" * 200)
    said = capsys.readouterr().err
    for name in ("metrics.jsonl", "timings.jsonl", "report.html", "log.txt"):
        assert (
            said.count(f"{small_disk / 'run' / name} cannot be written: No space left on device; the run goes on") == 1
        )
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl lacks \d+ lines: No space left"):
        run.finish()
    empty(small_disk)
    run.finish()
    assert [entry["step"] for entry in read_jsonl(small_disk / "run/metrics.jsonl")] == list(range(1, 60))


def test_an_export_that_fits_is_made_though_the_last_checkpoint_does_not(tmp_path, monkeypatch):
    write = Saving.write

    def full_at_the_end(saving):
        write(saving)
        if saving.step == 4:
            saving._error = OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Saving, "write", full_at_the_end)
    config = tiny_dit_config(tmp_path, train={"max_steps": 4, "save_steps": 2})
    with pytest.raises(CheckpointError, match=r"step 4 could not be written.*No space left.*of step 2$") as error:
        run_task_here("train_dit", config, with_report=True)
    assert error.value.exit_code == 3
    assert weights_in(tmp_path / "run" / "hf_ckpt") and (tmp_path / "run" / "report.html").is_file()
    assert list(list_checkpoints(tmp_path / "run" / "checkpoints")) == [2]
    monkeypatch.setattr(Saving, "write", write)  # somebody has made room
    run_task_here("train_dit", merge(config, {"train": {"load_checkpoint_path": "auto"}}))
    assert list(list_checkpoints(tmp_path / "run" / "checkpoints")) == [2, 4]
    assert read_environment(tmp_path / "run")


class Failing:
    """A tracker that fails as wandb does without a network."""

    def __init__(self) -> None:
        self.calls = 0

    def log(self, step, metrics) -> None:
        self.calls += 1
        raise ConnectionError("no route")


def test_a_tracker_that_fails_is_left_out_and_named_once():
    said, failing = [], Failing()
    trackers = Trackers([failing], said.append)
    for step in range(3):
        trackers.log(step, {"loss": 1.0})
    assert failing.calls == 1 and len(said) == 1
    assert said[0].startswith("tracker failing failed and is told nothing more (ConnectionError: no route)")


def test_a_folder_that_became_a_file_is_named(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    run = Run(tmp_path / "run", "test", Mesh(Layout(), torch.device("cpu")))
    run.begin(10, 0, [])
    (tmp_path / "run" / "report.html").mkdir()
    for _ in range(2):
        run.write_report()
    assert capsys.readouterr().err.count("report.html cannot be written: Is a directory; the run goes on") == 1
    run.log(1, {"loss": 0.5}, show={})
    run.finish()
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text()) == {"loss": 0.5, "step": 1}
