"""Saved and loaded state: going on from it equals never having stopped, and a state that does not fit is refused."""

import copy
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sfumato.checkpoint import state as state_module
from sfumato.checkpoint.state import TrainState
from sfumato.config.dit import DitTrainConfig
from sfumato.errors import CheckpointError
from sfumato.optim.ema import Ema
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh

TOTAL_STEPS = 9
ALONE = Mesh(Layout(), torch.device("cpu"))


def save_state(state: TrainState, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    state_module.save_state(state_module.gather_state(state, ALONE), folder)


def load_state(state: TrainState, folder: Path) -> None:
    state_module.load_state(state, folder, ALONE)


def make(seed: int = 0, width: int = 8, ema: bool = True, reference: bool = True, bias: bool = True) -> TrainState:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    module = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, 2, bias=bias))
    module[0].bias.requires_grad_(False)
    config = DitTrainConfig(
        output_dir="unused", lr=0.01, lr_warmup_steps=2, lr_decay_style="cosine", lr_min=0.001, weight_decay=0.1
    )
    optimizer, schedule = build_optimizer(module, config, TOTAL_STEPS)
    frozen = copy.deepcopy(module).requires_grad_(False) if reference else None
    return TrainState(module, optimizer, schedule, Ema(module, 0.9, interval=2) if ema else None, frozen)


def train(state: TrainState, num_steps: int) -> list[float]:
    """Steps that draw from the global generators of torch, numpy and Python, and both the loss and the draws."""
    losses = []
    for _ in range(num_steps):
        inputs = torch.randn(5, 4) + float(np.random.standard_normal()) + random.gauss(0, 1)
        outputs = state.model(inputs)
        target = 0.0 if state.reference is None else state.reference(inputs)
        loss = ((outputs - target) ** 2).mean() + outputs.mean()
        loss.backward()
        state.optimizer.step()
        state.schedule.step()
        state.optimizer.zero_grad()
        if state.ema is not None:
            state.ema.update()
        state.step += 1
        losses += [float(loss.detach()), state.schedule.get_last_lr()[0]]
    return losses


def everything(state: TrainState) -> dict[str, torch.Tensor]:
    """All tensors of a state, the optimizer's included."""
    found = {f"model/{name}": each for name, each in state.model.named_parameters()}
    for index, (_, entries) in enumerate(sorted(state.optimizer.state_dict()["state"].items())):
        found |= {f"optimizer/{index}/{key}": value for key, value in entries.items()}
    if state.ema is not None:
        found |= {f"ema/{name}": each for name, each in state.ema.averages.items()}
    if state.reference is not None:
        found |= {f"reference/{name}": each for name, each in state.reference.named_parameters()}
    return {name: each.detach().clone() for name, each in found.items()}


def assert_identical(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert sorted(left) == sorted(right)
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("stop", range(TOTAL_STEPS))
def test_stopping_and_resuming_changes_no_bit(tmp_path, stop):
    undisturbed = make()
    losses = train(undisturbed, TOTAL_STEPS)

    first = make()
    begin = train(first, stop)
    save_state(first, tmp_path)
    saved = everything(first)

    resumed = make(seed=99)
    load_state(resumed, tmp_path)
    assert resumed.step == stop
    assert_identical(everything(resumed) | {"model/0.bias": saved["model/0.bias"]}, saved)
    resumed.model[0].bias.copy_(first.model[0].bias)  # frozen: comes from the model folder, not from the checkpoint
    assert begin + train(resumed, TOTAL_STEPS - stop) == losses
    assert_identical(everything(resumed), everything(undisturbed))
    assert resumed.ema.num_updates == TOTAL_STEPS
    assert resumed.optimizer.state_dict()["param_groups"] == undisturbed.optimizer.state_dict()["param_groups"]
    assert resumed.schedule.state_dict() == undisturbed.schedule.state_dict()


def test_every_generator_goes_on_where_it_stood(tmp_path):
    state = make()
    random.gauss(0, 1)  # gauss makes two values and keeps one, in Python and in numpy
    np.random.standard_normal()
    torch.randn(3)
    save_state(state, tmp_path)

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), *np.random.standard_normal(2), *torch.randn(2).tolist()]

    expected = draw()
    other = make(seed=5)
    load_state(other, tmp_path)
    assert draw() == expected


def test_saving_draws_no_random_number_and_changes_nothing(tmp_path):
    state, twin = make(), make()
    train(twin, 3)
    twin_next = train(twin, 1)
    state = make()
    train(state, 3)
    before = everything(state)
    save_state(state, tmp_path)
    assert_identical(everything(state), before)
    assert train(state, 1) == twin_next


def test_nothing_is_pickled(tmp_path):
    state = make()
    train(state, 2)
    save_state(state, tmp_path)
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {
        "model.safetensors",
        "optimizer.safetensors",
        "ema.safetensors",
        "reference.safetensors",
        "random.safetensors",
        "state.json",
    }
    json.loads((tmp_path / "state.json").read_text(encoding="utf-8"))
    for each in tmp_path.glob("*.safetensors"):
        load_file(each)


def test_only_what_is_trained_is_saved(tmp_path):
    save_state(make(), tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == {"0.weight", "3.weight", "3.bias"}


def edit(path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("file", ["model", "ema", "reference"])
def test_a_missing_tensor_is_named(tmp_path, file):
    save_state(make(), tmp_path)
    edit(tmp_path / f"{file}.safetensors", lambda tensors: tensors.pop("3.weight"))
    with pytest.raises(CheckpointError, match=rf"{file}\.safetensors.*'3\.weight' is not in the checkpoint"):
        load_state(make(), tmp_path)


@pytest.mark.parametrize("file", ["model", "ema", "reference"])
def test_an_extra_tensor_is_named(tmp_path, file):
    save_state(make(), tmp_path)
    edit(tmp_path / f"{file}.safetensors", lambda tensors: tensors.update(extra=torch.ones(1)))
    with pytest.raises(CheckpointError, match=rf"{file}\.safetensors.*'extra' is not trained by this configuration"):
        load_state(make(), tmp_path)


@pytest.mark.parametrize("file", ["model", "ema", "reference"])
def test_a_tensor_of_another_shape_is_named(tmp_path, file):
    save_state(make(), tmp_path)
    edit(tmp_path / f"{file}.safetensors", lambda tensors: tensors.update({"3.weight": torch.ones(2, 1)}))
    with pytest.raises(CheckpointError, match=rf"{file}\.safetensors.*'3\.weight' has shape \(2, 1\).*\(2, 8\)"):
        load_state(make(), tmp_path)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    save_state(make(width=8), tmp_path)
    with pytest.raises(CheckpointError, match=r"'0\.weight' has shape"):
        load_state(make(width=6), tmp_path)
    with pytest.raises(CheckpointError, match=r"'3\.bias' is not trained"):
        load_state(make(bias=False), tmp_path)


def test_optimizer_state_of_an_unknown_parameter_is_named(tmp_path):
    state = make()
    train(state, 1)
    save_state(state, tmp_path)
    edit(tmp_path / "optimizer.safetensors", lambda tensors: tensors.update({"other/exp_avg": torch.ones(1)}))
    with pytest.raises(CheckpointError, match="'other'"):
        load_state(make(), tmp_path)


@pytest.mark.parametrize("which", ["ema", "reference"])
def test_what_the_checkpoint_has_and_what_the_run_wants_must_agree(tmp_path, which):
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    save_state(make(), tmp_path / "with")
    save_state(make(**{which: False}), tmp_path / "without")
    with pytest.raises(CheckpointError, match=f"without has no {which} weights, but the configuration wants one"):
        load_state(make(), tmp_path / "without")
    with pytest.raises(CheckpointError, match=f"with has one {which} weights, but the configuration wants none"):
        load_state(make(**{which: False}), tmp_path / "with")


def test_rates_and_betas_come_from_the_configuration_of_the_resumed_run(tmp_path):
    first = make()
    train(first, 5)
    save_state(first, tmp_path)
    resumed = make()
    for group in resumed.optimizer.param_groups:
        group["betas"] = (0.5, 0.6)
    resumed.schedule.base_lrs = [0.1] * len(resumed.schedule.base_lrs)
    load_state(resumed, tmp_path)
    assert [group["betas"] for group in resumed.optimizer.param_groups] == [(0.5, 0.6)] * 2
    before = first.schedule.get_last_lr()[0]
    assert resumed.schedule.get_last_lr()[0] == pytest.approx(10 * before)
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(10 * before)
