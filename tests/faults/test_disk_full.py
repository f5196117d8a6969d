"""A disk that is full while a checkpoint is written: a periodic save is reported and passed over, the last is not."""

import errno
import subprocess
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from sfumato.checkpoint import state as state_module
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.envelope import list_checkpoints, verify_checkpoint
from sfumato.checkpoint.state import TrainState
from sfumato.config.dit import DitTrainConfig
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.run import Run
from tests.tiny import load_task, run_task_here, tiny_dit_config

TOTAL_STEPS = 10


def make(output_dir: Path, num_rows: int = 8, **settings) -> tuple[Checkpointer, TrainState]:
    config = DitTrainConfig(output_dir=str(output_dir), max_steps=TOTAL_STEPS, save_steps=1, **settings)
    output_dir.mkdir(parents=True, exist_ok=True)
    mesh = Mesh(Layout(), torch.device("cpu"))
    module = nn.Linear(64, num_rows)
    state = TrainState(module, *build_optimizer(module, config, TOTAL_STEPS), step=1)
    return Checkpointer(config, Run(output_dir, "test", mesh), mesh, TOTAL_STEPS), state


def break_saving(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Lets the second file of a checkpoint fail after the first has been written."""
    save = safetensors.torch.save_file

    def fail(tensors, path):
        if Path(path).name != "model.safetensors":
            raise error
        save(tensors, path)

    monkeypatch.setattr(state_module, "save_file", fail)


FAILURES = [
    OSError(errno.ENOSPC, "No space left on device"),
    safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda each: type(each).__name__)
def test_a_periodic_save_that_fails_is_reported_and_the_next_one_works(tmp_path, monkeypatch, error):
    checkpointer, state = make(tmp_path)
    checkpointer.after_step(state)
    with monkeypatch.context() as broken:
        break_saving(broken, error)
        state.step = 2
        checkpointer.after_step(state)
    said = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert "checkpoint of step 2 could not be written" in said
    assert "No space left on device" in said
    assert "the newest is of step 1" in said
    assert [each.name for each in checkpointer.root.iterdir()] == ["global_step_1"]
    verify_checkpoint(checkpointer.root / "global_step_1")

    state.step = 3
    checkpointer.after_step(state)
    assert list(list_checkpoints(checkpointer.root)) == [1, 3]


@pytest.mark.parametrize("error", FAILURES, ids=lambda each: type(each).__name__)
def test_the_last_save_must_succeed(tmp_path, monkeypatch, error):
    checkpointer, state = make(tmp_path)
    checkpointer.after_step(state)
    break_saving(monkeypatch, error)
    state.step = TOTAL_STEPS
    with pytest.raises(OSError, match="No space left on device"):
        checkpointer.after_step(state)
    assert [each.name for each in checkpointer.root.iterdir()] == ["global_step_1"]
    verify_checkpoint(checkpointer.root / "global_step_1")


def test_the_save_after_a_signal_must_succeed(tmp_path, monkeypatch):
    checkpointer, state = make(tmp_path)
    break_saving(monkeypatch, FAILURES[0])
    checkpointer.run.stop_requested = True
    with pytest.raises(OSError, match="No space left on device"):  # and not "the state is saved"
        checkpointer.after_step(state)


def test_a_run_goes_on_when_periodic_saves_fail(tmp_path, monkeypatch):
    config = tiny_dit_config(tmp_path, train={"max_steps": 3, "save_steps": 1})
    save_state = state_module.save_state
    task = load_task("train_dit")

    def fail_at_step_2(gathered, folder):
        save_state(gathered, folder)
        _, values = gathered
        if values["step"] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sfumato.checkpoint.checkpointer.save_state", fail_at_step_2)
    output_dir = run_task_here(task, config)
    assert list(list_checkpoints(output_dir / "checkpoints")) == [1, 3]
    assert "checkpoint of step 2 could not be written" in (output_dir / "log.txt").read_text(encoding="utf-8")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mount.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_is_really_full(small_disk):
    """The first checkpoint (1.5 MB with AdamW's averages) fits, a second one beside it does not."""
    checkpointer, state = make(small_disk / "run", num_rows=2000)
    state.model(torch.ones(1, 64)).sum().backward()
    state.optimizer.step()
    checkpointer.after_step(state)
    state.step = 2
    checkpointer.after_step(state)
    assert "checkpoint of step 2 could not be written" in (small_disk / "run" / "log.txt").read_text(encoding="utf-8")
    assert [each.name for each in checkpointer.root.iterdir()] == ["global_step_1"]
    verify_checkpoint(checkpointer.root / "global_step_1")
    state.step = TOTAL_STEPS
    with pytest.raises(OSError, match="No space left on device"):
        checkpointer.after_step(state)
    assert [each.name for each in checkpointer.root.iterdir()] == ["global_step_1"]
