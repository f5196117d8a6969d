"""The state of a run: what must be saved so that going on equals never having stopped."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from sfumato.errors import CheckpointError
from sfumato.optim.ema import Ema
from sfumato.parallel.shards import trainable_parameters


@dataclass
class TrainState:
    """Everything that changes while a run goes on. Data order and noise follow from ``step`` and the seed."""

    model: nn.Module
    """Its trainable parameters are saved; the rest comes from the model folder again."""
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    ema: Ema | None = None
    reference: nn.Module | None = None
    """A frozen copy that a KL penalty compares with."""
    step: int = 0
    """Steps that are finished."""


def save_state(state: TrainState, folder: Path) -> None:
    """Writes tensors as safetensors and everything else as JSON; nothing is pickled.

    Raises:
        OSError: when the disk is full or fails.
    """
    tensors = {name: each.detach() for name, each in trainable_parameters(state.model).items()}
    _save(tensors, folder / "model.safetensors")
    _save(_flatten_optimizer(state), folder / "optimizer.safetensors")
    if state.ema is not None:
        _save(state.ema.averages, folder / "ema.safetensors")
    if state.reference is not None:
        _save(dict(state.reference.named_parameters()), folder / "reference.safetensors")
    rng_tensors, rng_values = _random_state()
    _save(rng_tensors, folder / "random.safetensors")
    values = {
        "step": state.step,
        "ema_updates": None if state.ema is None else state.ema.num_updates,
        "schedule_steps": state.schedule.last_epoch,
        "random": rng_values,
    }
    (folder / "state.json").write_text(json.dumps(values), encoding="utf-8")


def load_state(state: TrainState, folder: Path) -> None:
    """Puts a saved state in place.

    Raises:
        CheckpointError: when names or shapes differ from the run's, naming the first that does.
    """
    values = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    _copy_into(trainable_parameters(state.model), folder / "model.safetensors")
    _restore_optimizer(state, load_file(folder / "optimizer.safetensors"), folder)
    _restore_schedule(state.schedule, values["schedule_steps"])
    for present, name in ((state.ema is not None, "ema"), (state.reference is not None, "reference")):
        if present != (folder / f"{name}.safetensors").is_file():
            has, wants = ("no", "one") if present else ("one", "none")
            raise CheckpointError(f"{folder} has {has} {name} weights, but the configuration wants {wants}")
    if state.ema is not None:
        _copy_into(state.ema.averages, folder / "ema.safetensors")
        state.ema.num_updates = values["ema_updates"]
    if state.reference is not None:
        _copy_into(dict(state.reference.named_parameters()), folder / "reference.safetensors")
    _restore_random(load_file(folder / "random.safetensors"), values["random"])
    state.step = values["step"]


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file({name: each.detach().contiguous().cpu() for name, each in tensors.items()}, path)
    except SafetensorError as error:  # what safetensors makes of a full disk
        raise OSError(f"{path}: {error}") from error


@torch.no_grad()
def _copy_into(targets: dict[str, Any], path: Path) -> None:
    loaded = load_file(path)
    for name in sorted(set(targets) ^ set(loaded)):
        where = "is not in the checkpoint" if name in targets else "is not trained by this configuration"
        raise CheckpointError(f"{path}: tensor {name!r} {where}")
    for name, target in targets.items():
        if target.shape != loaded[name].shape:
            raise CheckpointError(
                f"{path}: tensor {name!r} has shape {tuple(loaded[name].shape)}, the model has {tuple(target.shape)}"
            )
        target.copy_(loaded[name])


def _flatten_optimizer(state: TrainState) -> dict[str, torch.Tensor]:
    """Per-parameter tensors as ``parameter/key``. Rates and betas are not state: the configuration has them."""
    name_of = {parameter: name for name, parameter in trainable_parameters(state.model).items()}
    return {
        f"{name_of[parameter]}/{key}": value
        for parameter, entries in state.optimizer.state.items()
        for key, value in entries.items()
    }


def _restore_optimizer(state: TrainState, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    parameters = trainable_parameters(state.model)
    state.optimizer.state.clear()
    for full_name, value in tensors.items():
        name, key = full_name.rsplit("/", 1)
        if name not in parameters:
            raise CheckpointError(f"{folder}: optimizer state of {name!r}, which this configuration does not train")
        on_device = value if key == "step" and not parameters[name].is_cuda else value.to(parameters[name].device)
        state.optimizer.state[parameters[name]][key] = on_device


def _restore_schedule(schedule: LambdaLR, steps: int) -> None:
    """Moves the schedule to a position; the rates there are those of this run's configuration."""
    rates = [base * factor(steps) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    position = {"last_epoch": steps, "_step_count": steps + 1, "_last_lr": rates}
    schedule.load_state_dict({**schedule.state_dict(), **position})
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _random_state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    numpy_state = np.random.get_state(legacy=False)
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(numpy_state["state"]["key"].copy())}
    if torch.cuda.is_available():
        tensors |= {f"cuda{index}": each for index, each in enumerate(torch.cuda.get_rng_state_all())}
    numbers = {
        "pos": int(numpy_state["state"]["pos"]),
        "has_gauss": int(numpy_state["has_gauss"]),
        "gauss": float(numpy_state["gauss"]),
    }
    return tensors, {"python": random.getstate(), "numpy": numbers}


def _restore_random(tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    torch.set_rng_state(tensors["torch"])
    cuda = [tensors[f"cuda{index}"] for index in range(len(tensors)) if f"cuda{index}" in tensors]
    if cuda and torch.cuda.device_count() == len(cuda):
        torch.cuda.set_rng_state_all(cuda)
    version, internal, gauss = values["python"]
    random.setstate((version, tuple(internal), gauss))
    numbers = values["numpy"]
    np.random.set_state(("MT19937", tensors["numpy"].numpy(), numbers["pos"], numbers["has_gauss"], numbers["gauss"]))
