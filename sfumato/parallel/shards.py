"""Tensors that lie in shards on many ranks: this rank's shard, where it lies in the whole, and the whole.

A shard is one or more chunks of the whole: contiguous index ranges in every dimension. They are computed for every
parallelism (weights that are cut twice, fused matrices that are cut in blocks, experts, fsdp1's ranges of flattened
weights), also where DTensor has no placement for it. Tensors that belong to a parameter (averages, optimiser state, a
weight that is sent) are cut as the parameter is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import functional

from sfumato.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.tensor import Shard

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""Parts of parameter names that wrappers insert."""


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, by the names of the plain module."""
    return {name: parameter for name, parameter in all_parameters(module).items() if parameter.requires_grad}


def all_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names of the plain module, as they are between two steps.

    Weights that FSDP has gathered are resharded first: while they are gathered the module has other parameters, and
    changes of the shards would be lost.
    """
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()
        elif isinstance(submodule, FullyShardedDataParallel) and submodule._is_root is not None and submodule._handle:
            # fsdp1's outermost module keeps its weights gathered after a forward pass. ``_is_root`` is None before the
            # first pass, when nothing is gathered yet.
            submodule._handle.reshard(True)
    return {plain_name(name): parameter for name, parameter in module.named_parameters()}


def plain_name(name: str) -> str:
    """A parameter's name without the parts that wrappers insert."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor of any shape and dtype; it shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor of any shape, gathered from all ranks that hold a shard: all of them must call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not any(_cut_twice_in_blocks(tensor, dim) for dim in range(tensor.ndim)):
        return tensor.full_tensor()
    # Each rank puts its shard into zeros, and a sum joins them.
    shard = local_shard(tensor.detach())
    joined = shard.new_zeros(tensor.shape)
    positions = [torch.cat([torch.arange(*span) for span in ranges]) for ranges in ranges_of(tensor)]
    joined[torch.meshgrid(*(places.to(shard.device) for places in positions), indexing="ij")] = shard
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(joined, group=tensor.device_mesh.get_group(axis))
    return joined


def placed_like(shard: Tensor, like: DTensor) -> DTensor:
    """A DTensor with the shape and placements of ``like`` whose shard on this rank is ``shard``."""
    layout = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(shard, like.device_mesh, like.placements, run_check=False, **layout)


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a whole tensor: what ``local_shard(like)`` has when ``gather_whole(like)`` is that tensor.

    Args:
        whole: plain tensor of the shape of ``like``, on any device.
        like: a DTensor, cut evenly or not; of a plain tensor the shard is the whole.

    Returns:
        Plain tensor; it may share memory with ``whole``.
    """
    for dim, ranges in enumerate(ranges_of(like)):
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return whole


def ranges_of(tensor: Tensor) -> list[list[tuple[int, int]]]:
    """Where this rank's shard lies in the whole tensor, of any shape.

    Returns:
        For each dimension one or more ranges ``(start, stop)``; joined in this order they make up the shard.
    """
    if not isinstance(tensor, DTensor):
        return [[(0, size)] for size in tensor.shape]
    ranges_by_dim = []
    for dim, size in enumerate(tensor.shape):
        cuts = _cuts_along(tensor, dim)
        if _cut_twice_in_blocks(tensor, dim):
            # fsdp2's cut stands first in the mesh, but was made last, of the shard that tensor parallelism had left.
            (_, count, rank), *other_cuts = cuts
            cuts = [*other_cuts, (1, count, rank)]
        # Follows the cuts on the indices of the dimension: each takes this rank's chunk of each block.
        positions = torch.arange(size)
        for blocks, count, rank in cuts:
            positions = torch.cat(
                [_split_positions(block, count)[rank] for block in _split_positions(positions, blocks)]
            )
        ranges_by_dim.append(_position_ranges(positions))
    return ranges_by_dim


def _cuts_along(tensor: DTensor, dim: int) -> list[tuple[int, int, int]]:
    """The cuts of a dimension, in the order of the mesh.

    Returns:
        For each cut (equal blocks that are cut in the same way, shards of each block, index of this rank's shard).
    """
    coordinate = cast("list[int]", tensor.device_mesh.get_coordinate())  # None only on ranks outside of the mesh
    axes = zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True)
    return [
        (getattr(placement, "split_factor", 1), count, rank)
        for placement, count, rank in axes
        if not placement.is_replicate() and cast("Shard", placement).dim == dim
    ]


def _cut_twice_in_blocks(tensor: DTensor, dim: int) -> bool:
    """Whether a dimension that tensor parallelism has cut in blocks (a fused matrix) is cut by fsdp2, too.

    DTensor has no placements for that; those that fsdp2 records have another order, and full_tensor mixes up rows.
    """
    return sum(blocks > 1 for blocks, _, _ in _cuts_along(tensor, dim)) > 1


def _split_positions(positions: Tensor, count: int) -> list[Tensor]:
    """Like torch.chunk, with empty shards at the end where it gives fewer."""
    shards = list(positions.chunk(count))
    return shards + [positions[:0]] * (count - len(shards))


def _position_ranges(positions: Tensor) -> list[tuple[int, int]]:
    """Increasing positions as ranges ``(start, stop)``; one empty range where there are no positions."""
    if not len(positions):
        return [(0, 0)]
    runs = positions.tensor_split((positions.diff() != 1).nonzero().flatten() + 1)
    return [(int(run[0]), int(run[-1]) + 1) for run in runs]


def whole_shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Shapes of the whole parameters by plain name, also where this rank has a shard only."""
    if isinstance(module, FullyShardedDataParallel):
        return cast("dict[str, torch.Size]", module.whole_shapes)
    return {plain_name(name): parameter.shape for name, parameter in module.named_parameters()}


class Shards:
    """Joins and cuts this rank's shards of a module's parameters, and of tensors of their shapes."""

    def __init__(self, module: nn.Module, mesh: Mesh, parameters: dict[str, nn.Parameter] | None = None) -> None:
        """Every rank must construct one at the same time.

        Args:
            module: as ``parallelize`` returned it.
            mesh: the ranks.
            parameters: its parameters by plain name; None takes the trainable ones.
        """
        self.parameters = trainable_parameters(module) if parameters is None else parameters
        self.shapes = whole_shapes(module)
        self.group: dist.ProcessGroup | None = None
        """The ranks with ranges of flattened weights under fsdp1; None where shards are DTensors or whole."""
        if isinstance(module, FullyShardedDataParallel) and mesh.layout.fsdp > 1:
            self.group = mesh.group("fsdp")
            self.rank = mesh.rank_in("fsdp")
            numels = mesh.gather({name: parameter.numel() for name, parameter in self.parameters.items()}, over="fsdp")
            self.numels = {name: [counts[name] for counts in numels] for name in self.parameters}

    def whole(self, name: str, shard: Tensor) -> Tensor:
        """The whole tensor, gathered from ``shard`` of every rank; all of them must call it, in the same order.

        Args:
            name: the parameter that the tensor belongs to.
            shard: a plain tensor of the shape of this rank's shard of that parameter.
        """
        parameter = self.parameters[name]
        if isinstance(parameter, DTensor):
            return gather_whole(placed_like(shard, parameter))
        if self.group is None:
            return shard
        padded_shard = functional.pad(shard.reshape(-1), (0, max(self.numels[name]) - shard.numel()))
        gathered = [torch.empty_like(padded_shard) for _ in self.numels[name]]
        dist.all_gather(gathered, padded_shard, group=self.group)
        parts = [flat[:numel] for flat, numel in zip(gathered, self.numels[name], strict=True)]
        return torch.cat(parts).view(self.shapes[name])

    def shard(self, name: str, full: Tensor) -> Tensor:
        """This rank's shard, a plain tensor, of a whole tensor of the shape of the parameter."""
        parameter = self.parameters[name]
        if isinstance(parameter, DTensor):
            return shard_of(full, parameter)
        if self.group is None:
            return full
        starts = [0, *accumulate(self.numels[name])]
        return full.reshape(-1)[starts[self.rank] : starts[self.rank + 1]]


@dataclass(frozen=True)
class Spec:
    """Shape of a whole tensor, and the dtype that its receiver wants."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Chunk:
    """A contiguous part of this rank's shard: where it lies in the whole tensor and in the shard."""

    offsets: tuple[int, ...]
    """Start of the chunk in each dimension of the whole tensor."""
    sizes: tuple[int, ...]
    """Size of the chunk in each dimension of the whole tensor."""
    place: tuple[slice, ...]
    """Slices of the chunk in the shard, which fsdp1 has flattened."""


def chunks_of(shards: Shards, name: str) -> list[Chunk]:
    """The chunks that make up this rank's shard of a parameter; none where the shard is empty."""
    shape = shards.shapes[name]
    if shards.group is not None:  # fsdp1: a range of the flattened tensor
        start = sum(shards.numels[name][: shards.rank])
        range_chunks = []
        position = 0
        for offsets, sizes in chunks_of_range(shape, start, start + shards.numels[name][shards.rank]):
            range_chunks.append(Chunk(offsets, sizes, (slice(position, position + prod(sizes)),)))
            position += prod(sizes)
        return range_chunks
    spans_by_dim = []
    for ranges in ranges_of(shards.parameters[name]):
        position = 0
        spans = []
        for start, stop in ranges:
            spans.append((start, stop - start, slice(position, position + stop - start)))
            position += stop - start
        spans_by_dim.append(spans)
    chunks = [
        Chunk(tuple(span[0] for span in spans), tuple(span[1] for span in spans), tuple(span[2] for span in spans))
        for spans in product(*spans_by_dim)
    ]
    return [chunk for chunk in chunks if 0 not in chunk.sizes or 0 in shape]


def chunks_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields offsets and sizes of the chunks that make up a range of a flattened tensor, in order.

    Args:
        shape: of the whole tensor.
        start: first element.
        stop: end of the range.
    """
    if start == stop:
        return
    if len(shape) < 2:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = prod(shape[1:])
    # Whole rows of the first dimension form one chunk; of a row that is cut, its part is split along the others.
    while start < stop:
        index, offset = divmod(start, row)
        num_rows = 0 if offset else (stop - start) // row
        if num_rows:
            yield (index, *(0 for _ in shape[1:])), (num_rows, *shape[1:])
            start += num_rows * row
        else:
            end = min(stop, (index + 1) * row)
            for offsets, sizes in chunks_of_range(shape[1:], offset, end - index * row):
                yield (index, *offsets), (1, *sizes)
            start = end


def whole_chunk(shape: Sequence[int]) -> Chunk:
    """The chunk of a tensor that is not cut."""
    return Chunk((0,) * len(shape), tuple(shape), tuple(slice(0, size) for size in shape))


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that are saved with the weights, by the names of the plain module. They are whole on every rank."""
    return {
        plain_name(f"{prefix}.{name}" if prefix else name): buffer
        for prefix, owner in module.named_modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name not in owner._non_persistent_buffers_set
    }


def num_weights(module: nn.Module) -> int:
    """Numbers in a module's parameters, of which tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


@torch.no_grad()
def copy_into(target: Tensor, shard: Tensor) -> None:
    """Copies a shard into this rank's shard of a weight."""
    place = local_shard(target.detach())
    place.copy_(shard.view(place.shape))
