"""Weights that lie in pieces on many ranks: this rank's piece, and the whole."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What wrappers put into parameter names."""


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, by the names of the plain module."""
    return {name: parameter for name, parameter in all_parameters(module).items() if parameter.requires_grad}


def all_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names of the plain module, as they are between two steps.

    Weights that fsdp2 has gathered are put away first: while they are out, the module has other parameters.
    """
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()
    return {plain_name(name): parameter for name, parameter in module.named_parameters()}


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece; it shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered from all ranks that hold a piece: every one of them must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a whole tensor: what ``local(like)`` has when ``whole(like)`` is that tensor.

    Args:
        whole: plain tensor of the shape of ``like``, on any device.
        like: a DTensor, cut evenly or not; of a plain tensor the piece is the whole.

    Returns:
        Plain tensor; it may share memory with ``whole``.
    """
    for dim, ranges in enumerate(ranges_of(like)):
        parts = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def ranges_of(tensor: torch.Tensor) -> list[list[tuple[int, int]]]:
    """Where this rank's piece lies in the whole tensor.

    Returns:
        For each dimension one or more ranges ``(start, stop)``; joined in this order they make up the piece.
    """
    if not isinstance(tensor, DTensor):
        return [[(0, size)] for size in tensor.shape]
    coordinate = tensor.device_mesh.get_coordinate()
    positions = [torch.arange(size) for size in tensor.shape]
    for placement, size, rank in zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True):
        if placement.is_replicate():
            continue
        # fsdp2 over tensor parallelism cuts each of split_factor tensor-parallel pieces
        pieces = _chunk(positions[placement.dim], getattr(placement, "split_factor", 1))
        positions[placement.dim] = torch.cat([_chunk(each, size)[rank] for each in pieces])
    return [_ranges(each) for each in positions]


def _chunk(positions: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Like torch.chunk, with empty pieces at the end where it gives fewer."""
    pieces = list(positions.chunk(count))
    return pieces + [positions[:0]] * (count - len(pieces))


def _ranges(positions: torch.Tensor) -> list[tuple[int, int]]:
    """Increasing positions as ranges; one empty range for none."""
    if not len(positions):
        return [(0, 0)]
    last = (positions.diff() != 1).nonzero().flatten()
    starts = positions[torch.cat([torch.zeros(1, dtype=torch.long), last + 1])].tolist()
    stops = positions[torch.cat([last, torch.tensor([len(positions) - 1])])].tolist()
    return [(start, stop + 1) for start, stop in zip(starts, stops, strict=True)]
