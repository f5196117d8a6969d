"""Checksums of tensors that lie in shards on many ranks, which add up whatever the layout.

A tensor's bytes are seen as unsigned numbers of four bytes. The checksum is the sum of (number) x (an odd weight that
depends on the number's position in the whole tensor), modulo 2^64; an element of fewer bytes contributes the bits that
it fills in its number. An odd weight has an inverse modulo 2^64, so a change of any single element always changes the
sum; several random changes cancel with a probability near 2^-64 (flips of only the highest bits of two numbers: 2^-33).
Since it is a sum, the checksums of disjoint shards add up to that of the whole tensor: only one number per tensor and
rank is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import prod

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from sfumato.errors import WeightSyncError
from sfumato.parallel.shards import Chunk, Shards, Spec, chunks_of, local_shard, whole_chunk

UNIT = 4
"""Bytes of the numbers that are summed."""

BLOCK_BITS = 12
BLOCK = 1 << BLOCK_BITS
"""The weight of a position is the product of its block's weight and the weight of its place within the block; both are
odd."""

BLOCKS_KEY = 1 << 40
"""Key of the blocks' weights, so that they differ from the weights of places."""

NUM_KNOWN = 1 << 13
"""Blocks whose weights are cached: many tensors are short, and computing weights takes longer than their sums."""

CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Numbers at a time: int64 temporaries that fit into a CPU's cache, or fill a GPU."""

CACHED_BLOCKS = 32
"""Blocks at a time on a CPU: 512 KiB, which are read twice."""

UNSIGNED = {1: torch.uint8, 2: torch.uint16}
"""Dtypes in which elements of one and two bytes are read; larger elements are several numbers of four bytes."""

NAMED = 3
"""Most tensors that an error names; the others are counted."""

MODULUS = 1 << 64

Area = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Offsets and sizes of the chunks of a whole tensor that a rank holds; empty if it holds nothing."""

Checksums = dict[str, tuple[Area, int]]
"""Of one rank, by tensor: the area that it holds, and the checksum of that."""


def shard_checksum(shape: Sequence[int], shard: torch.Tensor, chunks: Iterable[Chunk]) -> torch.Tensor:
    """The part of a whole tensor's checksum that one shard contributes.

    Args:
        shape: of the whole tensor.
        shard: plain tensor.
        chunks: where the shard's parts lie in the whole; from ``chunks_of``.

    Returns:
        int64 scalar on the shard's device.
    """
    total = torch.zeros((), dtype=torch.int64, device=shard.device)
    for chunk in chunks:
        if 0 in chunk.sizes:
            continue
        total += _chunk_checksum(_merge_dimensions(shape, chunk.offsets, chunk.sizes), shard.detach()[chunk.place])
    return total


@torch.no_grad()
def local_checksums(
    shards: Shards,
    device: torch.device,
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, torch.Tensor] | None = None,
    specs: Mapping[str, Spec] | None = None,
) -> Checksums:
    """Checksums of this rank's shards. It asks no other rank.

    Args:
        shards: how the module's parameters are divided.
        device: of the process, where the sums are put together.
        parameters: some of the module's, by plain name.
        buffers: tensors that every rank holds whole.
        specs: dtypes that the tensors are cast to before; None keeps their own.
    """
    held = {
        name: (tuple(shards.shapes[name]), local_shard(tensor), chunks_of(shards, name))
        for name, tensor in parameters.items()
    }
    held |= {
        name: (tuple(tensor.shape), tensor, [whole_chunk(tensor.shape)]) for name, tensor in (buffers or {}).items()
    }
    # All sums are read from the device at once below: each read waits for it.
    sums = []
    for name, (shape, shard, chunks) in held.items():
        cast_shard = shard.detach().to(specs[name].dtype) if specs else shard
        sums.append(shard_checksum(shape, cast_shard, chunks).to(device))
    values = torch.stack(sums).tolist() if sums else []
    return {
        name: (tuple((chunk.offsets, chunk.sizes) for chunk in chunks), value % MODULUS)
        for (name, (_, _, chunks)), value in zip(held.items(), values, strict=True)
    }


def add_up(ranks: Sequence[Checksums], shapes: Mapping[str, Sequence[int]], where: str) -> dict[str, int]:
    """Checksums of whole tensors from those of all ranks of a role.

    Raises:
        WeightSyncError: when ranks that hold the same area have different values, or no rank holds some part of a
            tensor.
    """
    totals: dict[str, int] = {}
    wrong: list[tuple[str, list[int], str]] = []
    for name, shape in shapes.items():
        by_area = _by_area(ranks, name)
        differing = [
            sorted(rank for ranks_of_value in ranks_by_value.values() for rank in ranks_of_value)
            for ranks_by_value in by_area.values()
            if len(ranks_by_value) > 1
        ]
        if differing:
            wrong.append((name, differing[0], "differs between ranks that hold the same part of it"))
        elif sum(_count_elements(area) for area in by_area) != prod(shape):
            wrong.append((name, list(range(len(ranks))), "is not there as a whole"))
        totals[name] = sum(value for ranks_by_value in by_area.values() for value in ranks_by_value) % MODULUS
    _raise_if(wrong, where, "Send it again after the role was started anew")
    return totals


def compare(
    ranks: Sequence[Checksums],
    expected: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    where: str,
    remedy: str = "The transport has damaged them: try another runtime.weight_sync",
) -> None:
    """Compares the tensors of all ranks of a receiving role with what was sent.

    Args:
        ranks: checksums by rank; every rank is given the same, so that all raise.
        expected: checksums of the whole tensors.
        shapes: of the whole tensors.
        where: role and version, for the error message.
        remedy: what to do, for the error message.

    Raises:
        WeightSyncError: names the tensors that differ, and the ranks that hold them.
    """
    wrong = []
    for name, value in expected.items():
        by_area = _by_area(ranks, name)
        total = sum(next(iter(ranks_by_value)) for ranks_by_value in by_area.values()) % MODULUS
        agree = all(len(ranks_by_value) == 1 for ranks_by_value in by_area.values())
        if agree and total == value and sum(_count_elements(area) for area in by_area) == prod(shapes[name]):
            continue
        wrong.append((name, _suspect_ranks(by_area, value), "is not what was sent"))
    _raise_if(wrong, where, remedy)


def _suspect_ranks(by_area: Mapping[Area, Mapping[int, list[int]]], expected: int) -> list[int]:
    """Ranks that may hold a wrong part of a tensor.

    If copies of a single area differ, only the ranks whose copies do not add up to ``expected`` are suspects.

    Args:
        by_area: for each area the values of its copies, with the ranks that have each.
        expected: checksum of the whole tensor.
    """
    if len(by_area) == 1:
        (ranks_by_value,) = by_area.values()
        return sorted(rank for value, ranks in ranks_by_value.items() if value != expected for rank in ranks)
    split = [ranks_by_value for ranks_by_value in by_area.values() if len(ranks_by_value) > 1]
    if len(split) == 1:
        rest = sum(next(iter(ranks_by_value)) for ranks_by_value in by_area.values() if len(ranks_by_value) == 1)
        wrong = [ranks for value, ranks in split[0].items() if (value + rest - expected) % MODULUS]
        if len(wrong) < len(split[0]):
            return sorted(rank for ranks in wrong for rank in ranks)
    suspected = split or by_area.values()
    return sorted(rank for ranks_by_value in suspected for ranks in ranks_by_value.values() for rank in ranks)


def _by_area(ranks: Sequence[Checksums], name: str) -> dict[Area, dict[int, list[int]]]:
    """For each area of a tensor that ranks hold: the checksums of its copies, and the ranks that have each."""
    by_area: dict[Area, dict[int, list[int]]] = {}
    for rank, checksums in enumerate(ranks):
        area, value = checksums[name]
        if area:
            by_area.setdefault(area, {}).setdefault(value, []).append(rank)
    return by_area


def _count_elements(area: Area) -> int:
    """Elements of an area."""
    return sum(prod(sizes) for _, sizes in area)


def _raise_if(wrong: Sequence[tuple[str, list[int], str]], where: str, remedy: str) -> None:
    """Raises WeightSyncError if there are wrong tensors, given as (name, ranks, what is wrong)."""
    if not wrong:
        return
    named = "; ".join(f"{name} (rank {', '.join(map(str, ranks))}) {problem}" for name, ranks, problem in wrong[:NAMED])
    more = f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    raise WeightSyncError(f"{where}: {named}{more}. {remedy}.")


def _merge_dimensions(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """A chunk in as few dimensions as possible: neighbouring ones are merged where that keeps positions contiguous.

    Returns:
        For each dimension (size of the whole tensor, offset, size of the chunk).
    """
    dims: list[tuple[int, int, int]] = []
    for whole, offset, size in zip(shape, offsets, sizes, strict=True):
        if dims and (size == whole or dims[-1][2] == 1):
            outer, start, count = dims[-1]
            dims[-1] = (outer * whole, start * whole + offset, count * size)
        else:
            dims.append((whole, offset, size))
    return dims or [(1, 0, 1)]


def _chunk_checksum(dims: Sequence[tuple[int, int, int]], part: torch.Tensor) -> torch.Tensor:
    """Checksum of a chunk, int64 scalar. ``dims`` as of ``_merge_dimensions``."""
    if len(dims) == 1:
        ((_, offset, size),) = dims
        return _run_checksum(part.reshape(size).contiguous(), offset)
    # Several dimensions are not contiguous in the whole tensor: the position of each element is computed.
    device = part.device
    size = part.element_size()
    units = max(1, size // UNIT)  # elements of eight bytes and more are several numbers
    part = part.reshape([size for _, _, size in dims])
    strides = [prod(whole for whole, _, _ in dims[index + 1 :]) * units for index in range(len(dims))]
    inner = torch.arange(units, device=device)
    for (_, offset, count), stride in reversed(list(zip(dims[1:], strides[1:], strict=True))):
        inner = ((torch.arange(count, device=device) + offset) * stride)[:, None].add(inner).flatten()
    (_, offset, count) = dims[0]
    stride = strides[0]
    per_block = BLOCK * max(1, UNIT // size)  # elements in a block; of large elements, their numbers
    step = max(1, CHUNK.get(device.type, CHUNK["cpu"]) // inner.numel())
    total = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, count, step):
        rows = part[start : start + step]
        outer = torch.arange(offset + start, offset + start + len(rows), device=device) * stride
        index = outer[:, None].add(inner).flatten()
        numbers = rows.reshape(-1).contiguous().view(UNSIGNED.get(size, torch.uint32)).to(torch.int64)
        if size < UNIT:
            numbers.bitwise_left_shift_((index * (8 * size)).bitwise_and_(8 * UNIT - 1))
            index.bitwise_right_shift_(UNIT // size // 2)  # two or four elements are a number
        numbers.mul_(_place_weights(device).index_select(0, index & (BLOCK - 1)))
        first = (offset + start) * stride // per_block
        last = (offset + start + len(rows)) * stride // per_block
        blocks = _block_weights(first, last + 1 - first, device)
        total += numbers.mul_(blocks.index_select(0, index.bitwise_right_shift_(BLOCK_BITS).sub_(first))).sum()
    return total


def _run_checksum(run: torch.Tensor, start: int) -> torch.Tensor:
    """Checksum of contiguous elements, of which the first has the position ``start`` in the whole tensor.

    The run may begin and end within a number of four bytes; bytes outside of it count as zeros.
    """
    data = run.view(torch.uint8)
    begin = start * run.element_size()
    end = begin + data.numel()
    first, last = -(-begin // UNIT), end // UNIT  # the numbers that lie wholly in the run
    if first > last or (first == last and begin % UNIT):  # a part of a single number
        return _numbers_checksum(functional.pad(data, (begin % UNIT, -end % UNIT)), begin // UNIT)
    total = _numbers_checksum(data[first * UNIT - begin : last * UNIT - begin], first)
    if begin % UNIT:
        total += _numbers_checksum(functional.pad(data[: first * UNIT - begin], (begin % UNIT, 0)), begin // UNIT)
    if end % UNIT:
        total += _numbers_checksum(functional.pad(data[last * UNIT - begin :], (0, -end % UNIT)), last)
    return total


def _numbers_checksum(data: torch.Tensor, position: int) -> torch.Tensor:
    """Checksum of numbers, given as bytes, from a position on.

    Sums within blocks come first; then each block's sum is multiplied by the block's weight.
    """
    if not data.numel():
        return torch.zeros((), dtype=torch.int64, device=data.device)
    aligned = data if data.storage_offset() % UNIT == 0 else data.clone()  # ``view`` needs a multiple of UNIT
    numbers = aligned.view(torch.uint32)
    head = min(-position % BLOCK, len(numbers))
    tail = (len(numbers) - head) // BLOCK * BLOCK + head
    sums = [
        _part_of_block(numbers[:head], position % BLOCK),
        _whole_blocks(numbers[head:tail]),
        _part_of_block(numbers[tail:], 0),
    ]
    block_sums = torch.cat([part for part in sums if part is not None])
    return block_sums.mul_(_block_weights(position // BLOCK, len(block_sums), data.device)).sum()


def _part_of_block(numbers: torch.Tensor, place: int) -> torch.Tensor | None:
    """Weighted sum, int64 ``[1]``, of numbers that lie in one block from ``place`` on; None without numbers."""
    if not len(numbers):
        return None
    weights = _place_weights(numbers.device)[place : place + len(numbers)]
    return numbers.to(torch.int64).mul_(weights).sum(dim=0, keepdim=True)


def _whole_blocks(numbers: torch.Tensor) -> torch.Tensor | None:
    """Weighted sums of whole blocks, int64 ``[B]``; None without numbers."""
    if not len(numbers):
        return None
    return blocks_by_words(numbers) if numbers.device.type == "cpu" else blocks_by_numbers(numbers)


def blocks_by_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Weighted sums of blocks, on any device.

    Args:
        numbers: uint32 ``[B * BLOCK]``.

    Returns:
        int64 ``[B]``.
    """
    # Summed as int64, whose sums and products wrap around modulo 2^64: the same bits as unsigned ones.
    parts = numbers.split(CHUNK.get(numbers.device.type, CHUNK["cpu"]))
    weights = _place_weights(numbers.device)
    return torch.cat([part.to(torch.int64).view(-1, BLOCK).mul_(weights).sum(dim=1) for part in parts])


def blocks_by_words(numbers: torch.Tensor) -> torch.Tensor:
    """As ``blocks_by_numbers``, but on a CPU only, and several times as fast.

    Two neighbouring numbers are read as one word of eight bytes, so that nothing is converted. A word's weight applies
    to its first number, and times 2^32 to its second. Two products of a matrix with a vector make the sums, one over
    the words that begin at even places and one over those at odd places. See ``_place_weights``. The second reads what
    the first has brought into the CPU's cache; numpy's product takes less time than torch's.
    """
    count = len(numbers) // BLOCK
    block_rows = numbers.numpy().reshape(count, BLOCK)
    words = block_rows.view(np.uint64)
    between = block_rows[:, 1:-1].view(np.uint64)
    even, odd, last = (weights.numpy().view(np.uint64) for weights in _word_weights())
    sums = block_rows[:, -1] * last
    for start in range(0, count, CACHED_BLOCKS):
        rows = slice(start, start + CACHED_BLOCKS)
        sums[rows] += np.einsum("ij,j->i", words[rows], even)
        sums[rows] += np.einsum("ij,j->i", between[rows], odd)
    return torch.from_numpy(sums.view(np.int64))


@cache
def _place_weights(device: torch.device) -> torch.Tensor:
    """Weights of the places of a block, int64 ``[BLOCK]``.

    They are those that sums over words of eight bytes (``blocks_by_words``) give: each number counts as the first of
    the word at its place and, times 2^32, as the second of the word before.
    """
    odd_numbers = _odd_numbers(torch.arange(BLOCK, device=device), 0)
    weights = odd_numbers.clone()
    weights[1:] += odd_numbers[:-1] << 32
    return weights


def _block_weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Weights of ``count`` blocks from ``first`` on, int64 ``[count]``."""
    if first + count <= NUM_KNOWN:
        return _cached_block_weights(device)[first : first + count]
    return _odd_numbers(torch.arange(first, first + count, device=device), BLOCKS_KEY)


@cache
def _cached_block_weights(device: torch.device) -> torch.Tensor:
    """Weights of the first blocks, int64 ``[NUM_KNOWN]``."""
    return _odd_numbers(torch.arange(NUM_KNOWN, device=device), BLOCKS_KEY)


@cache
def _word_weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights of the words that begin at even places, at odd ones, and of the last number, which begins no word."""
    odd_numbers = _odd_numbers(torch.arange(BLOCK), 0)
    return odd_numbers[::2].contiguous(), odd_numbers[1:-1:2].contiguous(), odd_numbers[-1:]


def _odd_numbers(numbers: torch.Tensor, key: int) -> torch.Tensor:
    """Turns each index, in place, into an odd number: the mixing of splitmix64, shortened. Products wrap around."""
    # 0x9E3779B97F4A7C15, and below 0xBF58476D1CE4E5B9, as signed numbers: torch multiplies no uint64.
    numbers.add_(key).mul_(-7046029254386353131)
    # A shift of int64 copies the sign; the mask makes it the shift of an unsigned number.
    numbers.bitwise_xor_((numbers >> 32).bitwise_and_(0xFFFFFFFF))
    return numbers.mul_(-4658895280553007687).bitwise_or_(1)
