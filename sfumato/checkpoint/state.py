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
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.pieces import Pieces
from sfumato.parallel.shards import all_parameters, local


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


Files = dict[str, dict[str, torch.Tensor]]
"""Tensors by the name of the file that they go to."""


def gather_state(state: TrainState, mesh: Mesh) -> tuple[Files, dict[str, Any]]:
    """Collects whole tensors from all ranks, and the numbers beside them. Every rank must call it.

    Returns:
        What ``save_state`` writes; on ranks other than the first the tensors are left out.
    """
    pieces = Pieces(state.model, mesh)
    files: Files = {}

    def add(file: str, key: str, tensor: torch.Tensor) -> None:
        if mesh.is_first:
            files.setdefault(file, {})[key] = tensor.detach().cpu()

    for name, parameter in pieces.parameters.items():
        add("model", name, pieces.whole(name, local(parameter.detach())))
    files.setdefault("optimizer", {})
    for name, parameter in pieces.parameters.items():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            add("optimizer", f"{name}/{key}", value if value.ndim == 0 else pieces.whole(name, local(value)))
    if state.ema is not None:
        for name, average in state.ema.averages.items():
            add("ema", name, pieces.whole(name, average))
    if state.reference is not None:
        frozen = Pieces(state.reference, mesh, all_parameters(state.reference))
        for name, parameter in frozen.parameters.items():
            add("reference", name, frozen.whole(name, local(parameter.detach())))
    rng_tensors, rng_values = _random_state()
    files["random"] = rng_tensors
    values = {
        "step": state.step,
        "ema_updates": None if state.ema is None else state.ema.num_updates,
        "schedule_steps": state.schedule.last_epoch,
        "random": rng_values,
    }
    return files, values


def save_state(gathered: tuple[Files, dict[str, Any]], folder: Path) -> None:
    """Writes tensors as safetensors and everything else as JSON; nothing is pickled.

    Raises:
        OSError: when the disk is full or fails.
    """
    files, values = gathered
    for name, tensors in files.items():
        try:
            save_file({key: each.contiguous() for key, each in tensors.items()}, folder / f"{name}.safetensors")
        except SafetensorError as error:  # what safetensors makes of a full disk
            raise OSError(f"{folder / name}.safetensors: {error}") from error
    (folder / "state.json").write_text(json.dumps(values), encoding="utf-8")


def load_state(state: TrainState, folder: Path, mesh: Mesh) -> None:
    """Puts a saved state in place, whatever the ranks and the parallelism that saved it. Every rank must call it.

    Raises:
        CheckpointError: when names or shapes differ from the run's, naming the first that does.
    """
    values = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    pieces = Pieces(state.model, mesh)
    weights = {name: local(each.detach()) for name, each in pieces.parameters.items()}
    _copy_into(weights, folder / "model.safetensors", pieces)
    _restore_optimizer(state.optimizer, load_file(folder / "optimizer.safetensors"), folder, pieces)
    _restore_schedule(state.schedule, values["schedule_steps"])
    for present, name in ((state.ema is not None, "ema"), (state.reference is not None, "reference")):
        if present != (folder / f"{name}.safetensors").is_file():
            has, wants = ("no", "one") if present else ("one", "none")
            raise CheckpointError(f"{folder} has {has} {name} weights, but the configuration wants {wants}")
    if state.ema is not None:
        _copy_into(state.ema.averages, folder / "ema.safetensors", pieces)
        state.ema.num_updates = values["ema_updates"]
    if state.reference is not None:
        frozen = Pieces(state.reference, mesh, all_parameters(state.reference))
        weights = {name: local(each.detach()) for name, each in frozen.parameters.items()}
        _copy_into(weights, folder / "reference.safetensors", frozen)
    _restore_random(load_file(folder / "random.safetensors"), values["random"])
    state.step = values["step"]


@torch.no_grad()
def _copy_into(targets: dict[str, torch.Tensor], path: Path, pieces: Pieces) -> None:
    loaded = load_file(path)
    for name in sorted(set(targets) ^ set(loaded)):
        where = "is not in the checkpoint" if name in targets else "is not trained by this configuration"
        raise CheckpointError(f"{path}: tensor {name!r} {where}")
    for name, target in targets.items():
        shape = pieces.shapes[name]
        if shape != loaded[name].shape:
            raise CheckpointError(
                f"{path}: tensor {name!r} has shape {tuple(loaded[name].shape)}, the model has {tuple(shape)}"
            )
        target.copy_(pieces.piece(name, loaded[name]).view(target.shape))


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor], folder: Path, pieces: Pieces
) -> None:
    """Per-parameter tensors stand as ``parameter/key``. Rates and betas are not state: the configuration has them."""
    optimizer.state.clear()
    for full_name, value in tensors.items():
        name, key = full_name.rsplit("/", 1)
        if name not in pieces.parameters:
            raise CheckpointError(f"{folder}: optimizer state of {name!r}, which this configuration does not train")
        parameter = pieces.parameters[name]
        if value.ndim > 0:
            restored = torch.empty_like(parameter, dtype=value.dtype)
            local(restored).copy_(pieces.piece(name, value).view(local(restored).shape))
            value = restored
        elif parameter.is_cuda:
            value = value.to(parameter.device)
        optimizer.state[parameter][key] = value


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
