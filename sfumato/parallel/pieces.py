"""Tensors that belong to parameters (averages, optimiser state): whole for a checkpoint, in pieces for this rank."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import plain_name, shard_of, trainable_parameters, whole


def whole_shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Shapes of the whole parameters by plain name, also where this rank has a piece only."""
    if isinstance(module, FullyShardedDataParallel):
        return module.whole_shapes
    return {plain_name(name): each.shape for name, each in module.named_parameters()}


class Pieces:
    """How this rank's pieces of a module's parameters, and of what has their shape, make up wholes."""

    def __init__(self, module: nn.Module, mesh: Mesh, parameters: dict[str, nn.Parameter] | None = None) -> None:
        """Every rank makes one at the same time; ``parameters`` are the trainable ones if not given."""
        self.parameters = trainable_parameters(module) if parameters is None else parameters
        self.shapes = whole_shapes(module)
        self.group = None
        if isinstance(module, FullyShardedDataParallel) and mesh.layout.fsdp > 1:
            self.group, self.rank = mesh.group("fsdp"), mesh.rank_in("fsdp")
            numels = mesh.gather({name: each.numel() for name, each in self.parameters.items()}, over="fsdp")
            self.numels = {name: [each[name] for each in numels] for name in self.parameters}

    def whole(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """The whole tensor of which this rank has ``piece``; every rank must call it, in the same order.

        Args:
            name: the parameter that the tensor belongs to.
            piece: a plain tensor of the shape of this rank's piece of that parameter.
        """
        parameter = self.parameters[name]
        if isinstance(parameter, DTensor):
            placed = DTensor.from_local(
                piece,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            return whole(placed)
        if self.group is None:
            return piece
        longest = max(self.numels[name])
        padded = [piece.new_zeros(longest) for _ in self.numels[name]]
        mine = piece.new_zeros(longest)
        mine[: piece.numel()] = piece.reshape(-1)
        dist.all_gather(padded, mine, group=self.group)
        parts = [each[:numel] for each, numel in zip(padded, self.numels[name], strict=True)]
        return torch.cat(parts).view(self.shapes[name])

    def piece(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a whole tensor, a plain tensor."""
        parameter = self.parameters[name]
        if isinstance(parameter, DTensor):
            return shard_of(full, parameter)
        if self.group is None:
            return full
        starts = [0, *accumulate(self.numels[name])]
        return full.reshape(-1)[starts[self.rank] : starts[self.rank + 1]]
