"""Tensors that belong to parameters (averages, optimiser state): whole for a checkpoint, in pieces for this rank."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import all_parameters, local, plain_name, shard_of, trainable_parameters


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
            whole = DTensor.from_local(
                piece,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            return whole.full_tensor()
        if self.group is None:
            return piece
        longest = max(self.numels[name])
        padded = [piece.new_zeros(longest) for _ in self.numels[name]]
        mine = piece.new_zeros(longest)
        mine[: piece.numel()] = piece.reshape(-1)
        dist.all_gather(padded, mine, group=self.group)
        parts = [each[:numel] for each, numel in zip(padded, self.numels[name], strict=True)]
        return torch.cat(parts).view(self.shapes[name])

    def piece(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a whole tensor, a plain tensor."""
        parameter = self.parameters[name]
        if isinstance(parameter, DTensor):
            return shard_of(whole, parameter)
        if self.group is None:
            return whole
        starts = [0, *accumulate(self.numels[name])]
        return whole.reshape(-1)[starts[self.rank] : starts[self.rank + 1]]


def whole_state(module: nn.Module, mesh: Mesh) -> dict[str, torch.Tensor]:
    """A parallel module's state dict as the plain module would have it: a whole copy on the CPU of rank 0.

    Every rank must call it; the others get an empty dict.
    """
    pieces = Pieces(module, mesh, all_parameters(module))
    found = {}
    for name, parameter in pieces.parameters.items():
        whole = pieces.whole(name, local(parameter.detach()))
        if mesh.is_first:
            found[name] = whole.to("cpu", copy=True)
    if mesh.is_first:
        for prefix, each in module.named_modules():
            for name, buffer in each.named_buffers(recurse=False):
                if name not in each._non_persistent_buffers_set:
                    found[plain_name(f"{prefix}.{name}" if prefix else name)] = buffer.to("cpu", copy=True)
    return found
