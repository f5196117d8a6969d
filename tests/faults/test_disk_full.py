"""A disk that is full while a checkpoint is written: a periodic save is reported and passed over, the last is not."""

import errno
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.saving import Saving
from sfumato.checkpoint.state import TrainState
from sfumato.config.dit import DitTrainConfig
from sfumato.errors import CheckpointError
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.atomic_folders import list_checkpoints, verify_checkpoint
from sfumato.tracking.run import Run
from tests.tiny import run_task_here, tiny_dit_config

TOTAL_STEPS = 10


def make(output_dir: Path, num_rows: int = 8, **settings) -> tuple[Checkpointer, TrainState]:
    config = DitTrainConfig(output_dir=str(output_dir), max_steps=TOTAL_STEPS, save_steps=1, **settings)
    output_dir.mkdir(parents=True, exist_ok=True)
    mesh = Mesh(Layout(), torch.device("cpu"))
    module = nn.Linear(64, num_rows)
    state = TrainState(module, *build_optimizer(module, config, TOTAL_STEPS), step=1)
    return Checkpointer(config, Run(output_dir, "test", mesh), mesh, TOTAL_STEPS), state


def unexpected_position() -> RuntimeError:
    """What torch makes of a write that fails."""
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    error.__context__ = OSError(errno.ENOSPC, "No space left on device")
    return error


FAILURES = [OSError(errno.ENOSPC, "No space left on device"), unexpected_position()]
by_failure = pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
in_background = pytest.mark.parametrize("save_async", [False, True], ids=["waited for", "in the background"])


def break_saving(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Lets a save fail after some of it has been written."""
    write = FileSystemWriter.write_data

    def fail(writer, plan, planner):
        write(writer, plan, planner)
        raise error

    monkeypatch.setattr(FileSystemWriter, "write_data", fail)


@in_background
@by_failure
def test_a_periodic_save_that_fails_is_reported_and_the_next_one_works(tmp_path, monkeypatch, error, save_async):
    checkpointer, state = make(tmp_path, save_async=save_async)
    checkpointer.after_step(state)
    wait_for(checkpointer)
    with monkeypatch.context() as broken:
        break_saving(broken, error)
        state.step = 2
        checkpointer.after_step(state)
        wait_for(checkpointer)
    state.step = 3
    checkpointer.after_step(state)
    said = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert "checkpoint of step 2 could not be written: rank 0: [Errno 28] No space left on device" in said
    assert "the newest is of step 1" in said
    wait_for(checkpointer)
    state.step = TOTAL_STEPS
    checkpointer.after_step(state)
    assert list(list_checkpoints(checkpointer.root)) == [1, 3, TOTAL_STEPS]
    assert not list(checkpointer.root.glob("*.tmp"))
    for folder in list_checkpoints(checkpointer.root).values():
        verify_checkpoint(folder)


def test_a_first_save_that_fails_names_no_other(tmp_path, monkeypatch):
    checkpointer, state = make(tmp_path)
    break_saving(monkeypatch, FAILURES[0])
    checkpointer.after_step(state)
    assert "No space left on device; there is no other yet" in (tmp_path / "log.txt").read_text(encoding="utf-8")


def wait_for(checkpointer: Checkpointer) -> None:
    """Until the thread has written; the checkpoint is complete only after the next step."""
    if checkpointer._pending is not None:
        checkpointer._pending[1].join()


@in_background
@by_failure
def test_the_last_save_must_succeed(tmp_path, monkeypatch, error, save_async):
    checkpointer, state = make(tmp_path, save_async=save_async)
    checkpointer.after_step(state)
    wait_for(checkpointer)
    break_saving(monkeypatch, error)
    state.step = TOTAL_STEPS
    checkpointer.after_step(state)  # what follows may fit
    with pytest.raises(CheckpointError, match=r"step 10 could not be written.*No space left on device.*of step 1$"):
        checkpointer.run.finish()
    assert [path.name for path in checkpointer.root.iterdir()] == ["global_step_1"]
    verify_checkpoint(checkpointer.root / "global_step_1")


def test_the_save_after_a_signal_must_succeed(tmp_path, monkeypatch):
    checkpointer, state = make(tmp_path)
    break_saving(monkeypatch, FAILURES[0])
    checkpointer.run.stop_requested = True
    with pytest.raises(CheckpointError, match="No space left on device"):  # and not "the state is saved"
        checkpointer.after_step(state)


@in_background
def test_an_error_that_is_not_of_the_disk_stops_the_run(tmp_path, monkeypatch, save_async):
    checkpointer, state = make(tmp_path, save_async=save_async)
    break_saving(monkeypatch, KeyError("a mistake"))
    if save_async:
        checkpointer.after_step(state)
        wait_for(checkpointer)
        state.step = 2
    with pytest.raises(KeyError, match="a mistake"):
        checkpointer.after_step(state)
    assert list_checkpoints(checkpointer.root) == {}


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    checkpointer, state = make(tmp_path)
    checkpointer.root.write_text("a file", encoding="utf-8")
    checkpointer.after_step(state)
    assert "checkpoint of step 1 could not be written: [Errno" in (tmp_path / "log.txt").read_text(encoding="utf-8")


@in_background
def test_a_run_goes_on_when_periodic_saves_fail(tmp_path, monkeypatch, save_async):
    config = tiny_dit_config(tmp_path, train={"max_steps": 3, "save_steps": 1, "save_async": save_async})
    write = Saving.write

    def fail_at_step_2(saving):
        write(saving)
        if saving.step == 2:
            saving._error = OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Saving, "write", fail_at_step_2)
    output_dir = run_task_here("train_dit", config)
    assert list(list_checkpoints(output_dir / "checkpoints")) == [1, 3]
    assert "checkpoint of step 2 could not be written" in (output_dir / "log.txt").read_text(encoding="utf-8")


@in_background
def test_a_disk_that_is_really_full(small_disk, save_async):
    """The first checkpoint (1.5 MB with AdamW's averages) fits, a second one beside it does not."""
    checkpointer, state = make(small_disk / "run", num_rows=2000, save_async=save_async)
    state.model(torch.ones(1, 64)).sum().backward()
    state.optimizer.step()
    checkpointer.after_step(state)
    state.step = 2
    checkpointer.after_step(state)
    checkpointer._settle()
    assert "checkpoint of step 2 could not be written" in (small_disk / "run" / "log.txt").read_text(encoding="utf-8")
    assert [path.name for path in checkpointer.root.iterdir()] == ["global_step_1"]
    verify_checkpoint(checkpointer.root / "global_step_1")
    state.step = TOTAL_STEPS
    checkpointer.after_step(state)
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpointer.run.finish()
    assert [path.name for path in checkpointer.root.iterdir()] == ["global_step_1"]
