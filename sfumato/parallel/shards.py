"""Weights that lie in pieces on many ranks: this rank's piece, and the whole."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What wrappers put into parameter names."""


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, by the names of the plain module."""
    return {name: parameter for name, parameter in all_parameters(module).items() if parameter.requires_grad}


def all_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names of the plain module, as they are between two steps.

    Weights that FSDP has gathered are put away first: while they are out, the module has other parameters, and changes
    of these pieces would not be seen.
    """
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()
        elif isinstance(each, FullyShardedDataParallel) and each._is_root is not None and each._handle is not None:
            each._handle.reshard(free_unsharded_flat_param=True)  # the outermost keeps its own after a forward pass
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
    if not isinstance(tensor, DTensor):
        return tensor
    if not any(_cut_twice_in_blocks(tensor, dim) for dim in range(tensor.ndim)):
        return tensor.full_tensor()
    piece = local(tensor.detach())
    found = piece.new_zeros(tensor.shape)
    positions = [torch.cat([torch.arange(*each) for each in ranges]) for ranges in ranges_of(tensor)]
    found[torch.meshgrid(*(each.to(piece.device) for each in positions), indexing="ij")] = piece
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(found, group=tensor.device_mesh.get_group(axis))
    return found


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
    found = []
    for dim, size in enumerate(tensor.shape):
        cuts = _cuts(tensor, dim)
        if _cut_twice_in_blocks(tensor, dim):
            (_, count, rank), *others = cuts
            cuts = [*others, (1, count, rank)]
        positions = torch.arange(size)
        for blocks, count, rank in cuts:
            positions = torch.cat([_chunk(each, count)[rank] for each in _chunk(positions, blocks)])
        found.append(_ranges(positions))
    return found


def _cuts(tensor: DTensor, dim: int) -> list[tuple[int, int, int]]:
    """How a dimension is cut, in the order of the mesh: blocks cut alike, pieces of each, and which is this rank's."""
    axes = zip(tensor.placements, tensor.device_mesh.shape, tensor.device_mesh.get_coordinate(), strict=True)
    return [
        (getattr(placement, "split_factor", 1), count, rank)
        for placement, count, rank in axes
        if not placement.is_replicate() and placement.dim == dim
    ]


def _cut_twice_in_blocks(tensor: DTensor, dim: int) -> bool:
    """Whether fsdp2 has cut what tensor parallelism had cut in blocks (a fused matrix) along the same dimension.

    DTensor has no placements for that; those that fsdp2 notes are of another order, and full_tensor mixes up rows.
    """
    return sum(blocks > 1 for blocks, _, _ in _cuts(tensor, dim)) > 1


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
