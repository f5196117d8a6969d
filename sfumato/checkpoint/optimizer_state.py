"""The state of an optimiser, by parameter and field."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from sfumato.checkpoint.parts import Parts, Stored, parts_of, whole_part
from sfumato.errors import CheckpointError, ConfigError
from sfumato.optim.optimizer import saved_piece
from sfumato.parallel.shards import Shards, boxes_of, local


def _is_whole(shards: Shards, name: str) -> bool:
    """Whether this rank holds all of a parameter."""
    return shards.group is None and local(shards.parameters[name]).shape == shards.shapes[name]


def optimizer_state(optimizer: torch.optim.Optimizer, shards: Shards) -> tuple[Parts, dict[str, Any]]:
    """What this rank holds of the tensors, and numbers by ``parameter/field``.

    Rates and betas are not state: the configuration has them.

    Raises:
        ConfigError: when a tensor has neither its parameter's shape nor a parameter that is whole on each rank.
    """
    parts: Parts = {}
    numbers: dict[str, Any] = {}
    boxes = cache(lambda name: boxes_of(shards, name))
    for name, parameter in shards.parameters.items():
        for field_name, value in optimizer.state.get(parameter, {}).items():
            key = f"optimizer/{name}/{field_name}"
            if not isinstance(value, torch.Tensor):
                numbers[f"{name}/{field_name}"] = value
                continue
            shard = saved_piece(value)
            if shard.ndim and shard.shape == local(parameter).shape:
                parts |= parts_of(key, shards.shapes[name], shard, boxes(name))
            elif shard.ndim == 0 or _is_whole(shards, name):
                parts |= whole_part(key, shard)
            else:
                raise ConfigError(
                    f"{field_name} of {name} in the optimiser's state has shape {tuple(value.shape)}, not that of the "
                    "parameter, so that it cannot be saved in shards: take another train.optimizer, or ddp"
                )
    return parts, numbers


def new_optimizer_state(
    optimizer: torch.optim.Optimizer, shards: Shards, stored: Stored
) -> tuple[dict[nn.Parameter, dict[str, Any]], Parts]:
    """The state that an optimiser is to have, its tensors still empty, and the parts to be read into them.

    Raises:
        CheckpointError: when a tensor that is not of its parameter's shape belongs to a parameter that is cut here.
    """
    fields: dict[nn.Parameter, dict[str, Any]] = {}
    parts: Parts = {}
    boxes = cache(lambda name: boxes_of(shards, name))
    on_device = {
        id(each): g.get("fused") or g.get("capturable") for g in optimizer.param_groups for each in g["params"]
    }
    for key in stored.optimizer_keys():
        name, field_name = key.rsplit("/", 1)
        if name not in shards.parameters:
            continue  # another pipeline stage has it
        parameter = shards.parameters[name]
        if key in stored.values["optimizer"]:
            value = stored.values["optimizer"][key]
        else:
            shape, dtype = stored.tensors[f"optimizer/{key}"]
            if shape == shards.shapes[name]:
                value = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                parts |= parts_of(f"optimizer/{key}", shape, local(value), boxes(name))
            elif shape and not _is_whole(shards, name):
                raise CheckpointError(f"{stored.folder}: {key} of the optimiser cannot be cut; load it with ddp")
            else:
                is_step = field_name == "step" and not on_device.get(id(parameter))
                value = torch.empty(shape, dtype=dtype, device="cpu" if is_step else parameter.device)
                parts |= whole_part(f"optimizer/{key}", value)
        fields.setdefault(parameter, {})[field_name] = value
    return fields, parts
