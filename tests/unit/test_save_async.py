"""Saving in the background: what is written is the state of its step, and the run waits only when it must."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.parts import StoredCheckpoint
from sfumato.checkpoint.saving import Saving
from sfumato.checkpoint.state import TrainState
from sfumato.config.dit import DitTrainConfig
from sfumato.errors import PreemptedError
from sfumato.optim.ema import Ema
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.runtime.cluster.worker import RoleRun
from sfumato.tracking.atomic_folders import list_checkpoints, verify_checkpoint
from sfumato.tracking.run import Run
from tests.tiny import DEVICE, MESH_DEVICE, Position

TOTAL_STEPS = 20


class Slow:
    """A disk that writes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        write = FileSystemWriter.write_data

        def write_slowly(writer, plan, planner):
            self.begun.set()
            assert self.go.wait(30)
            return write(writer, plan, planner)

        monkeypatch.setattr(FileSystemWriter, "write_data", write_slowly)


@pytest.fixture
def slow(monkeypatch):
    return Slow(monkeypatch)


def test_the_thread_takes_the_gpu_of_its_rank(monkeypatch):
    """A new thread has GPU 0, where copies of other ranks would open contexts."""
    taken = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: taken.append((device, threading.current_thread().name))
    )
    saving = object.__new__(Saving)
    saving.mesh = Mesh(Layout(), torch.device("cuda", 3))
    thread = threading.Thread(target=saving.write, name="checkpoint")
    thread.start()
    thread.join()
    assert taken == [(torch.device("cuda", 3), "checkpoint")]


def make(output_dir: Path, **settings) -> tuple[Checkpointer, TrainState]:
    settings = {"save_steps": 2, "save_async": True, **settings}
    config = DitTrainConfig(output_dir=str(output_dir), max_steps=TOTAL_STEPS, **settings)
    mesh = Mesh(Layout(), MESH_DEVICE)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).to(DEVICE)
    run = Run(output_dir, "test", mesh)
    run.begin(TOTAL_STEPS, 0, [])
    state = TrainState(module, *build_optimizer(module, config, TOTAL_STEPS), Ema(module, 0.9), loader=Position())
    return Checkpointer(config, run, mesh, TOTAL_STEPS), state


def train(state: TrainState) -> None:
    """One step that changes everything, in place."""
    state.model(torch.randn(4, 8).to(DEVICE)).square().mean().backward()
    state.optimizer.step()
    state.schedule.step()
    state.optimizer.zero_grad()
    state.ema.update()
    state.step += 1
    state.loader.values["position"] = state.step


def contents(state: TrainState) -> dict[str, torch.Tensor]:
    names = dict(state.model.named_parameters())
    results = {f"model/{name}": value for name, value in names.items()}
    results |= {f"optimizer/{name}/exp_avg": state.optimizer.state[value]["exp_avg"] for name, value in names.items()}
    results |= {f"optimizer/{name}/step": state.optimizer.state[value]["step"] for name, value in names.items()}
    results |= {f"ema/{name}": average for name, average in state.ema.averages.items()}
    return {name: value.detach().cpu().clone() for name, value in results.items()} | {
        "random/torch": torch.get_rng_state()
    }


def assert_holds(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    verify_checkpoint(folder)
    whole = StoredCheckpoint(folder).read_whole({name: name for name in expected})
    for name, value in expected.items():
        assert torch.equal(whole[name], value), name


def test_training_goes_on_and_the_checkpoint_is_of_its_step(tmp_path, slow):
    checkpointer, state = make(tmp_path)
    train(state)
    train(state)
    expected = contents(state)
    checkpointer.after_step(state)
    assert slow.begun.wait(10)
    train(state)
    checkpointer.after_step(state)  # nothing is due, and the disk has not finished
    assert list_checkpoints(checkpointer.root) == {}
    slow.go.set()
    checkpointer._pending[1].join()
    assert list_checkpoints(checkpointer.root) == {}, "only the next step makes it complete"
    checkpointer.after_step(state)
    assert list(list_checkpoints(checkpointer.root)) == [2]
    assert_holds(checkpointer.root / "global_step_2", expected)
    assert json.loads((checkpointer.root / "global_step_2" / "state.json").read_text())["data"] == {"position": 2}
    assert not torch.equal(state.model[0].weight, expected["model/0.weight"].to(DEVICE))


def test_the_next_save_waits_and_says_for_how_long(tmp_path, slow):
    checkpointer, state = make(tmp_path)
    expected = {}
    for _ in range(4):
        train(state)
        expected[state.step] = contents(state)
        if state.step == 4:
            threading.Timer(0.3, slow.go.set).start()
        checkpointer.after_step(state)
        checkpointer.run.log(state.step, {}, show={})
    assert list(list_checkpoints(checkpointer.root)) == [2]
    train(state)
    train(state)
    checkpointer.after_step(state)
    checkpointer._settle()
    for step in (2, 4):
        assert_holds(checkpointer.root / f"global_step_{step}", expected[step])
    times = [json.loads(line) for line in (tmp_path / "timings.jsonl").read_text().splitlines()]
    assert times[3]["time/save_s"] > 0.25
    assert times[1]["time/save_s"] < 0.25 and "time/save_s" not in times[2]
    assert not any(thread.name == "checkpoint" for thread in threading.enumerate())


@pytest.mark.parametrize("stop", [False, True], ids=["last", "signal"])
def test_the_last_one_and_the_one_before_it_are_waited_for(tmp_path, slow, stop):
    checkpointer, state = make(tmp_path)
    for _ in range(2):
        train(state)
        checkpointer.after_step(state)
    train(state)
    checkpointer.run.stop_requested = stop
    if not stop:
        state.step = TOTAL_STEPS
    expected = contents(state)
    threading.Timer(0.2, slow.go.set).start()
    if stop:
        with pytest.raises(PreemptedError):
            checkpointer.after_step(state)
    else:
        checkpointer.after_step(state)
    assert list(list_checkpoints(checkpointer.root)) == [2, state.step]
    assert_holds(checkpointer.root / f"global_step_{state.step}", expected)
    assert not list(checkpointer.root.glob("*.tmp"))


def test_a_save_that_is_asked_for_waits_and_is_not_made_twice(tmp_path, slow):
    checkpointer, state = make(tmp_path)
    train(state)
    train(state)
    checkpointer.after_step(state)
    threading.Timer(0.1, slow.go.set).start()
    checkpointer.save(state)
    folder = checkpointer.root / "global_step_2"
    made = (folder / "manifest.json").stat().st_mtime_ns
    time.sleep(0.01)
    checkpointer.save(state)
    assert (folder / "manifest.json").stat().st_mtime_ns == made


def test_a_save_that_is_due_for_another_reason(tmp_path):
    checkpointer, state = make(tmp_path, save_async=False, save_steps=0)
    for _ in range(3):
        train(state)
        checkpointer.after_step(state, due=state.step == 2)
    assert list(list_checkpoints(checkpointer.root)) == [2]


def test_a_role_in_a_process_of_its_own_saves_too(tmp_path: Path):
    """There the run is what that process knows of it."""
    checkpointer, state = make(tmp_path)
    checkpointer.run = RoleRun(tmp_path, speaks=True)
    train(state)
    state.step = 1
    checkpointer.save(state)
    assert list(list_checkpoints(tmp_path / "checkpoints")) == [1]
    checkpointer.run.stop_requested = True
    with pytest.raises(PreemptedError):
        checkpointer.after_step(state)
