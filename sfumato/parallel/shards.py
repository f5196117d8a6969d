"""Tensors that lie in shards on many ranks: this rank's shard, where it lies in the whole, and the whole.

A shard is one or more chunks of the whole: contiguous index ranges in every dimension. They are known for every
parallelism (weights that are cut twice, fused matrices that are cut in blocks, experts, fsdp1's ranges of flattened
weights), also where DTensor has no placement for it. What belongs to a parameter (averages, optimiser state, a weight
on its way) lies as the parameter does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import functional

from sfumato.parallel.mesh import Mesh

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What wrappers put into parameter names."""


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, by the names of the plain module."""
    return {name: parameter for name, parameter in all_parameters(module).items() if parameter.requires_grad}


def all_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names of the plain module, as they are between two steps.

    Weights that FSDP has gathered are put away first: while they are out, the module has other parameters, and changes
    of these shards would not be seen.
    """
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()
        elif isinstance(submodule, FullyShardedDataParallel) and submodule._is_root is not None and submodule._handle:
            submodule._handle.reshard(True)  # the outermost keeps its own after a forward pass
    return {plain_name(name): parameter for name, parameter in module.named_parameters()}


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor of any shape and dtype; it shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor of any shape, gathered from all ranks that hold a shard: all of them must call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not any(_cut_twice_in_blocks(tensor, dim) for dim in range(tensor.ndim)):
        return tensor.full_tensor()
    shard = local(tensor.detach())
    joined = shard.new_zeros(tensor.shape)
    positions = [torch.cat([torch.arange(*span) for span in ranges]) for ranges in ranges_of(tensor)]
    joined[torch.meshgrid(*(places.to(shard.device) for places in positions), indexing="ij")] = shard
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(joined, group=tensor.device_mesh.get_group(axis))
    return joined


def placed_like(shard: Tensor, like: DTensor) -> DTensor:
    """A DTensor of the shape and placements of ``like``, of which this rank has ``shard``, of the shape of its own."""
    layout = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(shard, like.device_mesh, like.placements, run_check=False, **layout)


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a whole tensor: what ``local(like)`` has when ``whole(like)`` is that tensor.

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
            (_, count, rank), *other_cuts = cuts
            cuts = [*other_cuts, (1, count, rank)]
        positions = torch.arange(size)
        for blocks, count, rank in cuts:
            positions = torch.cat([_chunk(block, count)[rank] for block in _chunk(positions, blocks)])
        ranges_by_dim.append(_ranges(positions))
    return ranges_by_dim


def _cuts_along(tensor: DTensor, dim: int) -> list[tuple[int, int, int]]:
    """How a dimension is cut, in the order of the mesh: blocks cut alike, shards of each, and which is this rank's."""
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
    return sum(blocks > 1 for blocks, _, _ in _cuts_along(tensor, dim)) > 1


def _chunk(positions: Tensor, count: int) -> list[Tensor]:
    """Like torch.chunk, with empty shards at the end where it gives fewer."""
    shards = list(positions.chunk(count))
    return shards + [positions[:0]] * (count - len(shards))


def _ranges(positions: Tensor) -> list[tuple[int, int]]:
    """Increasing positions as ranges; one empty range for none."""
    if not len(positions):
        return [(0, 0)]
    runs = positions.tensor_split((positions.diff() != 1).nonzero().flatten() + 1)
    return [(int(run[0]), int(run[-1]) + 1) for run in runs]


def whole_shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Shapes of the whole parameters by plain name, also where this rank has a shard only."""
    if isinstance(module, FullyShardedDataParallel):
        return module.whole_shapes
    return {plain_name(name): parameter.shape for name, parameter in module.named_parameters()}


class Shards:
    """How this rank's shards of a module's parameters, and of what has their shape, make up wholes."""

    def __init__(self, module: nn.Module, mesh: Mesh, parameters: dict[str, nn.Parameter] | None = None) -> None:
        """Every rank makes one at the same time; ``parameters`` are the trainable ones if not given."""
        self.parameters = trainable_parameters(module) if parameters is None else parameters
        self.shapes = whole_shapes(module)
        self.group = None
        if isinstance(module, FullyShardedDataParallel) and mesh.layout.fsdp > 1:
            self.group = mesh.group("fsdp")
            self.rank = mesh.rank_in("fsdp")
            numels = mesh.gather({name: parameter.numel() for name, parameter in self.parameters.items()}, over="fsdp")
            self.numels = {name: [counts[name] for counts in numels] for name in self.parameters}

    def whole(self, name: str, shard: Tensor) -> Tensor:
        """The whole tensor of which this rank has ``shard``; every rank must call it, in the same order.

        Args:
            name: the parameter that the tensor belongs to.
            shard: a plain tensor of the shape of this rank's shard of that parameter.
        """
        parameter = self.parameters[name]
        if isinstance(parameter, DTensor):
            return whole(placed_like(shard, parameter))
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
    """Shape of a whole tensor, and the dtype that whoever is sent it wants."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Chunk:
    """Where a part of this rank's shard lies."""

    offsets: tuple[int, ...]
    """Offsets of the chunk in the whole tensor."""
    sizes: tuple[int, ...]
    place: tuple[slice, ...]
    """The place of the chunk in the shard."""


def chunks_of(shards: Shards, name: str) -> list[Chunk]:
    """The chunks of this rank's shard of a parameter, and of what has its shape; none if it holds nothing."""
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
    """Offsets and sizes of the chunks that make up a range of a flattened tensor, in order.

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
    """The chunk that is the whole."""
    return Chunk((0,) * len(shape), tuple(shape), tuple(slice(0, size) for size in shape))
