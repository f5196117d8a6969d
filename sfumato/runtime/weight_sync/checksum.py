"""Checksums of tensors that lie in shards on many ranks, which add up whatever the layout.

The checksum of a tensor is the sum over its elements of (bits as an integer) x (an odd weight that depends on the
element's position in the whole tensor), modulo 2^64. An odd weight has an inverse, so a change of any single element
always changes the sum; several random changes cancel with a probability near 2^-64 (flips of only the highest bits
of two elements: 2^-33). Being a sum, those of disjoint shards add
up to that of the whole: nothing is gathered but one number per tensor and rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import nn

from sfumato.errors import WeightSyncError
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Chunk, Shards, chunks_of, local, whole_chunk

BLOCK_BITS = 15
BLOCK = 1 << BLOCK_BITS
"""A position's weight is the product of that of its block and that of its place within the block, both odd."""

BLOCKS_KEY = 1 << 40
"""Keeps the weights of blocks apart from those within them."""

CHUNK = {"cpu": BLOCK, "cuda": 1 << 24}
"""Elements at a time: int64 temporaries that fit into a CPU's cache, or fill a GPU."""

NAMED = 3
"""Tensors that an error names; the others are counted."""

MODULUS = 1 << 64

Area = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Offsets and sizes of the chunks of a whole tensor that a rank holds; empty if it holds nothing."""

Checksums = dict[str, tuple[Area, int]]
"""Of one rank: what it holds of each tensor, and the checksum of that."""


@dataclass(frozen=True)
class Spec:
    """Shape of a whole tensor, and the dtype in which the sampler has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Checksum of a whole plain tensor of any dtype, in 0 .. 2^64 - 1."""
    return int(shard_checksum(tuple(tensor.shape), tensor, [whole_chunk(tensor.shape)])) % MODULUS


def shard_checksum(shape: Sequence[int], shard: torch.Tensor, chunks: Iterable[Chunk]) -> torch.Tensor:
    """What a shard adds to the checksum of the whole.

    Args:
        shape: of the whole tensor.
        shard: plain tensor.
        chunks: where its parts lie; from ``chunks_of``.

    Returns:
        int64 scalar on the shard's device.
    """
    total = torch.zeros((), dtype=torch.int64, device=shard.device)
    for chunk in chunks:
        if 0 in chunk.sizes:
            continue
        total += _chunk_checksum(_merged(shape, chunk.offsets, chunk.sizes), shard.detach()[chunk.place])
    return total


@torch.no_grad()
def local_checksums(
    module: nn.Module,
    mesh: Mesh,
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, torch.Tensor] | None = None,
    specs: Mapping[str, Spec] | None = None,
) -> Checksums:
    """Checksums of this rank's shards. Every rank must call it (fsdp1 asks the others how long theirs are).

    Args:
        module: what ``parallelize`` returned.
        mesh: its ranks.
        parameters: some of the module's, by plain name.
        buffers: tensors that every rank holds whole.
        specs: dtypes in which to see the tensors; None takes their own.
    """
    shards = Shards(module, mesh, dict(parameters))
    held = {
        name: (tuple(shards.shapes[name]), local(tensor), chunks_of(shards, name))
        for name, tensor in parameters.items()
    }
    held |= {
        name: (tuple(tensor.shape), tensor, [whole_chunk(tensor.shape)]) for name, tensor in (buffers or {}).items()
    }
    sums = []
    for name, (shape, shard, chunks) in held.items():
        seen = shard.detach().to(specs[name].dtype) if specs else shard
        sums.append(shard_checksum(shape, seen, chunks).to(mesh.device))
    values = torch.stack(sums).tolist() if sums else []
    return {
        name: (tuple((chunk.offsets, chunk.sizes) for chunk in chunks), value % MODULUS)
        for (name, (_, _, chunks)), value in zip(held.items(), values, strict=True)
    }


def add_up(ranks: Sequence[Checksums], shapes: Mapping[str, Sequence[int]], where: str) -> dict[str, int]:
    """Checksums of whole tensors from those of all ranks of a role.

    Raises:
        WeightSyncError: when ranks that hold the same have different values, or something of a tensor is nowhere.
    """
    totals, wrong = {}, []
    for name, shape in shapes.items():
        values = _by_area(ranks, name)
        differing = [
            sorted(rank for held in found.values() for rank in held) for found in values.values() if len(found) > 1
        ]
        if differing:
            wrong.append((name, differing[0], "differs between ranks that hold the same part of it"))
        elif sum(_numel(area) for area in values) != prod(shape):
            wrong.append((name, list(range(len(ranks))), "is not there as a whole"))
        totals[name] = sum(value for found in values.values() for value in found) % MODULUS
    _raise_if(wrong, where, "Send it again after the role was started anew")
    return totals


def compare(
    ranks: Sequence[Checksums],
    expected: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    where: str,
    remedy: str = "The transport has damaged them: try another runtime.weight_sync",
) -> None:
    """Checks what all ranks of a receiving role hold against what was sent.

    Args:
        ranks: by rank; every rank is given the same, so that all raise.
        expected: checksums of the whole tensors.
        shapes: of the whole tensors.
        where: role and version, for the error.
        remedy: what to do, for the error.

    Raises:
        WeightSyncError: names the tensors that differ, and the ranks that hold them.
    """
    wrong = []
    for name, value in expected.items():
        values = _by_area(ranks, name)
        total = sum(next(iter(found)) for found in values.values()) % MODULUS
        agree = all(len(found) == 1 for found in values.values())
        if agree and total == value and sum(_numel(area) for area in values) == prod(shapes[name]):
            continue
        wrong.append((name, _suspects(values, value), "is not what was sent"))
    _raise_if(wrong, where, remedy)


def _suspects(values: Mapping[Area, Mapping[int, list[int]]], expected: int) -> list[int]:
    """Ranks that may hold what is wrong: where copies differ only those of copies that cannot be right."""
    if len(values) == 1:
        (found,) = values.values()
        return sorted(rank for value, ranks in found.items() if value != expected for rank in ranks)
    split = [found for found in values.values() if len(found) > 1]
    if len(split) == 1:
        rest = sum(next(iter(found)) for found in values.values() if len(found) == 1)
        wrong = [ranks for value, ranks in split[0].items() if (value + rest - expected) % MODULUS]
        if len(wrong) < len(split[0]):
            return sorted(rank for ranks in wrong for rank in ranks)
    return sorted(rank for found in split or values.values() for ranks in found.values() for rank in ranks)


def _by_area(ranks: Sequence[Checksums], name: str) -> dict[Area, dict[int, list[int]]]:
    """By what is held: the values found, and the ranks that have each."""
    found: dict[Area, dict[int, list[int]]] = {}
    for rank, checksums in enumerate(ranks):
        area, value = checksums[name]
        if area:
            found.setdefault(area, {}).setdefault(value, []).append(rank)
    return found


def _numel(area: Area) -> int:
    return sum(prod(sizes) for _, sizes in area)


def _raise_if(wrong: Sequence[tuple[str, list[int], str]], where: str, remedy: str) -> None:
    if not wrong:
        return
    named = "; ".join(f"{name} (rank {', '.join(map(str, ranks))}) {what}" for name, ranks, what in wrong[:NAMED])
    more = f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    raise WeightSyncError(f"{where}: {named}{more}. {remedy}.")


def _merged(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """A chunk in as few dimensions as have the same positions: (size of the whole, offset, size) of each."""
    found: list[tuple[int, int, int]] = []
    for whole, offset, size in zip(shape, offsets, sizes, strict=True):
        if found and (size == whole or found[-1][2] == 1):
            outer, start, count = found[-1]
            found[-1] = (outer * whole, start * whole + offset, count * size)
        else:
            found.append((whole, offset, size))
    return found or [(1, 0, 1)]


def _chunk_checksum(dims: Sequence[tuple[int, int, int]], part: torch.Tensor) -> torch.Tensor:
    units = max(1, part.element_size() // 4)  # elements of eight bytes and more are seen as several of four
    device = part.device
    if len(dims) == 1:
        ((_, offset, size),) = dims
        return _run_checksum(part.reshape(size), offset * units)
    part = part.reshape([size for _, _, size in dims])
    strides = [prod(whole for whole, _, _ in dims[index + 1 :]) * units for index in range(len(dims))]
    inner = torch.arange(units, device=device)
    for (_, offset, size), stride in reversed(list(zip(dims[1:], strides[1:], strict=True))):
        inner = ((torch.arange(size, device=device) + offset) * stride)[:, None].add(inner).flatten()
    (_, offset, count), stride = dims[0], strides[0]
    step = max(1, CHUNK.get(device.type, CHUNK["cpu"]) // inner.numel())
    total = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, count, step):
        rows = part[start : start + step]
        outer = torch.arange(offset + start, offset + start + len(rows), device=device) * stride
        index = outer[:, None].add(inner).flatten()
        bits = _bits(rows).mul_(_within(device).index_select(0, index & (BLOCK - 1)))
        first, last = (offset + start) * stride // BLOCK, (offset + start + len(rows)) * stride // BLOCK
        blocks = _mixed(torch.arange(first, last + 1, device=device), BLOCKS_KEY)
        total += bits.mul_(blocks.index_select(0, index.bitwise_right_shift_(BLOCK_BITS).sub_(first))).sum()
    return total


def _run_checksum(run: torch.Tensor, start: int) -> torch.Tensor:
    """Checksum of contiguous elements from a position on: by blocks, so that weights within them are computed once."""
    device = run.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    units = max(1, run.element_size() // 4)
    stop, within = start + run.numel() * units, _within(device)
    step = CHUNK.get(device.type, CHUNK["cpu"])
    position = start
    while position < stop:
        aligned = position % BLOCK == 0 and stop - position >= BLOCK
        end = min(position + step, stop) // BLOCK * BLOCK if aligned else min((position // BLOCK + 1) * BLOCK, stop)
        bits = _bits(run[(position - start) // units : (end - start) // units])
        blocks = torch.arange(position // BLOCK, -(-end // BLOCK), device=device)
        offset = position % BLOCK
        bits = bits.view(len(blocks), -1).mul_(within[offset : offset + bits.numel() // len(blocks)])
        total += bits.sum(dim=1).mul_(_mixed(blocks, BLOCKS_KEY)).sum()
        position = end
    return total


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Elements as int64, those of more than four bytes as several."""
    kind = {1: torch.int8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
    return tensor.reshape(-1).contiguous().view(kind).to(torch.int64, copy=True)


@cache
def _within(device: torch.device) -> torch.Tensor:
    """Weights of the positions of a block."""
    return _mixed(torch.arange(BLOCK, device=device), 0)


def _mixed(index: torch.Tensor, key: int) -> torch.Tensor:
    """An odd number for each index, in place: the mixing of splitmix64, shortened. Products wrap around."""
    index.add_(key).mul_(-7046029254386353131)
    index.bitwise_xor_((index >> 32).bitwise_and_(0xFFFFFFFF))
    return index.mul_(-4658895280553007687).bitwise_or_(1)
