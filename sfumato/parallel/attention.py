"""Exact, trainable attention over sequences that are cut over many ranks: Ulysses and ring together.

Ulysses (arXiv 2309.14509) trades tokens for heads within a group; the ring (arXiv 2310.01889) passes keys and values
round, and partial results are joined by their log-sum-exp (arXiv 2205.14135). Together: USP (arXiv 2405.07719).

The pairs of queries and keys that attend are cut into *tiles* without a mask inside: rectangles, and causal squares.
Kernels get neither masks nor padding, and masked pairs are not computed.

B batch, H heads, S tokens, D features of a head; a *block* is what one ring rank holds after Ulysses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from sfumato.config.open_mappings import Keywords
from sfumato.errors import ConfigError
from sfumato.parallel.kernels import attend, attend_backward, in_autocast_dtype
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.packed_rows import head_tail_chunks, shard_sequence


@dataclass(frozen=True, eq=False)
class SequenceGroups:
    """This rank's place among the ranks that share sequences."""

    ring: dist.ProcessGroup
    ring_rank: int
    ring_size: int
    ulysses: dist.ProcessGroup
    ulysses_rank: int
    ulysses_size: int

    @classmethod
    def from_mesh(cls, mesh: Mesh) -> SequenceGroups:
        """The groups of a mesh that has a process group."""
        return cls(
            ring=mesh.group("ring"),
            ring_rank=mesh.rank_in("ring"),
            ring_size=mesh.size_of("ring"),
            ulysses=mesh.group("ulysses"),
            ulysses_rank=mesh.rank_in("ulysses"),
            ulysses_size=mesh.size_of("ulysses"),
        )

    @property
    def rank(self) -> int:
        """Rank among all that share a sequence; Ulysses is the fast axis."""
        return self.ring_rank * self.ulysses_size + self.ulysses_rank

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.ring_size * self.ulysses_size

    def members(self, ring_rank: int) -> range:
        """The ranks whose tokens make the block of a ring rank."""
        return range(ring_rank * self.ulysses_size, (ring_rank + 1) * self.ulysses_size)


class TokenRun(NamedTuple):
    """Neighbouring tokens in the shard of one rank of the Ulysses group."""

    rank: int
    start: int
    length: int


class Tile(NamedTuple):
    """Queries and keys of two blocks that see each other: all of them, or causally (their numbers are equal then)."""

    rows: slice
    query: int
    """First token in the block."""
    key: int
    num_queries: int
    num_keys: int
    causal: bool = False
    repeat: int = 1
    """Number of equal tiles that follow each other along the diagonal; they are computed as rows of a batch."""

    def queries(self, block: Tensor) -> Tensor:
        """The view of this tile's queries in a block [B, H, S, ...]."""
        return block[self.rows, :, self.query : self.query + self.num_queries * self.repeat]

    def keys(self, block: Tensor) -> Tensor:
        """The view of this tile's keys in a block [B, H, S, ...]."""
        return block[self.rows, :, self.key : self.key + self.num_keys * self.repeat]

    def fold(self, tensor: Tensor) -> Tensor:
        """Moves repeats into the batch: [B, H, repeat S, ...] to [B repeat, H, S, ...]."""
        return tensor if self.repeat == 1 else tensor.unflatten(2, (self.repeat, -1)).transpose(1, 2).flatten(0, 1)

    def unfold(self, tensor: Tensor) -> Tensor:
        """The reverse: [B repeat, H, S, ...] to [B, H, repeat S, ...]."""
        return tensor if self.repeat == 1 else tensor.unflatten(0, (-1, self.repeat)).transpose(1, 2).flatten(2, 3)


@dataclass(frozen=True, eq=False)
class Schedule:
    """The order of tokens in blocks and the tiles to compute, for one layout of documents. All layers share it."""

    groups: SequenceGroups
    query_order: tuple[TokenRun, ...]
    """The runs of tokens of the Ulysses group that make up the query block of this ring rank."""
    key_order: tuple[TokenRun, ...]
    """The runs that make up its key block."""
    key_lengths: tuple[int, ...]
    """Tokens in the key block of each ring rank."""
    tiles: tuple[tuple[Tile, ...], ...]
    """The tiles of this rank's queries in the key block of each ring rank."""


def full_schedule(groups: SequenceGroups, query_lengths: Sequence[int], key_lengths: Sequence[int]) -> Schedule:
    """Every query sees every key; the order of tokens does not matter.

    ``query_lengths`` and ``key_lengths`` are those of all ranks that share the sequence; any numbers, also 0.
    """
    members = groups.members(groups.ring_rank)
    queries, keys = (
        tuple(TokenRun(index, 0, lengths[rank]) for index, rank in enumerate(members))
        for lengths in (query_lengths, key_lengths)
    )
    num_queries = sum(run.length for run in queries)
    blocks = tuple(
        sum(key_lengths[rank] for rank in groups.members(ring_rank)) for ring_rank in range(groups.ring_size)
    )
    tiles = tuple(
        (Tile(slice(None), 0, 0, num_queries, num_keys),) if num_queries and num_keys else () for num_keys in blocks
    )
    return Schedule(groups, queries, keys, blocks, tiles)


def causal_schedule(groups: SequenceGroups, documents: Sequence[Sequence[int]]) -> Schedule:
    """Every token sees itself and the tokens before it in its document. Shards are those of ``head_tail_chunks``.

    ``documents`` are the lengths of the documents in each row; a single list holds for all rows.
    """
    chunks = head_tail_chunks(sum(documents[0]), groups.size)
    chunk_pairs = [
        [(chunks[member], chunks[-1 - member]) for member in groups.members(rank)] for rank in range(groups.ring_size)
    ]
    numbered_chunks = list(enumerate(chunk_pairs[groups.ring_rank]))
    runs = [TokenRun(index, 0, len(head)) for index, (head, _) in numbered_chunks]
    runs += [TokenRun(index, len(head), len(tail)) for index, (head, tail) in reversed(numbered_chunks)]
    # the heads of a block's members are neighbours, and so are their tails, in reverse order
    blocks = [
        (range(members[0][0].start, members[-1][0].stop), range(members[-1][1].start, members[0][1].stop))
        for members in chunk_pairs
    ]
    tiles = [_cut_into_tiles(documents, blocks[groups.ring_rank], keys) for keys in blocks]
    return Schedule(groups, tuple(runs), tuple(runs), tuple(sum(map(len, block)) for block in blocks), tuple(tiles))


def shard_embeddings(inputs: Keywords, mesh: Mesh) -> Keywords:
    """This rank's part of the inputs of the language model inside a multimodal model, cut as by ``shard_sequence``.

    Args:
        inputs: ``inputs_embeds`` [B, S, C]; ``position_ids`` [B, S] or [axes, B, S]; optionally ``visual_pos_masks``
            [B, S], which marks the N tokens of images, and ``deepstack_visual_embeds``, a list of features [N, C] that
            the first layers add to these tokens.
        mesh: the ranks.

    Returns:
        The inputs by the same names.
    """
    # ``shard_sequence`` cuts dimension 1, where position ids with several axes have the batch.
    tensors = {"inputs_embeds": inputs["inputs_embeds"], "position_ids": inputs["position_ids"].movedim(-1, 1)}
    image_mask = inputs.get("visual_pos_masks")
    if image_mask is not None:
        # The k-th image token of all rows belongs to row k of each of the features, so its number is cut along with it.
        tensors |= {"seen": image_mask, "number": image_mask.flatten().cumsum(0).view_as(image_mask) - 1}
    shard = shard_sequence(tensors, mesh)
    sharded: Keywords = {"inputs_embeds": shard["inputs_embeds"]}
    sharded["position_ids"] = shard["position_ids"].movedim(1, -1)
    if image_mask is not None:
        image_numbers = shard["number"][shard["seen"]]
        sharded["visual_pos_masks"] = shard["seen"]
        sharded["deepstack_visual_embeds"] = [layer[image_numbers] for layer in inputs["deepstack_visual_embeds"]]
    return sharded


def _document_ranges(lengths: Sequence[int]) -> list[range]:
    """Token ranges of documents with these lengths, one after the other."""
    return [range(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]


def _cut_into_tiles(
    documents: Sequence[Sequence[int]], query_runs: tuple[range, range], key_runs: tuple[range, range]
) -> tuple[Tile, ...]:
    """Tiles of a query and a key block, each of two runs of neighbouring tokens; rows with equal documents share them.

    A run is equal to, wholly before, or wholly after each other run, so a pair of runs is a causal square, a rectangle,
    or not computed.
    """
    run_pairs = tuple(
        (queries, keys, query_base, key_base)
        for queries, query_base in zip(query_runs, (0, len(query_runs[0])), strict=True)
        for keys, key_base in zip(key_runs, (0, len(key_runs[0])), strict=True)
    )
    tiles: list[Tile] = []
    for lengths, group in groupby(range(len(documents)), key=lambda row: tuple(documents[row])):
        rows_alike = list(group)
        spans = _document_ranges(lengths)
        rows = slice(None) if len(rows_alike) == len(documents) else slice(rows_alike[0], rows_alike[-1] + 1)
        for queries, keys, query_base, key_base in run_pairs:
            if queries == keys:
                tiles += _causal_squares(rows, spans, queries, query_base)
            elif queries and keys and keys.start < queries.start:
                # Only the document of the first query can reach back to tokens before the run.
                span = next(span for span in spans if queries.start in span)
                first, last = max(keys.start, span.start), min(queries.stop, span.stop)
                if first < keys.stop:
                    first_key = key_base + first - keys.start
                    tiles.append(Tile(rows, query_base, first_key, last - queries.start, keys.stop - first))
    return tuple(tiles)


def _causal_squares(rows: slice, spans: list[range], run: range, start: int) -> Iterator[Tile]:
    """Causal squares of the documents within a run of tokens; neighbours of equal size become one tile."""
    clipped = (range(max(span.start, run.start), min(span.stop, run.stop)) for span in spans)
    for length, same_length in groupby(len(document) for document in clipped if document):
        repeat = len(list(same_length))
        yield Tile(rows, start, start, length, length, causal=True, repeat=repeat)
        start += length * repeat


def sequence_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    schedule: Schedule,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    score_factors: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Softmax attention of this rank's queries over the keys and values of all ranks that share the sequence.

    All of these ranks must call it, and run the backward pass: gradients of a rank's loss flow to the keys and values
    of all ranks.

    Args:
        query: this rank's part, [B, H, S, D], of any floating dtype; partial results are joined in float32.
        key: [B, Hk, Sk, D]; Hk divides H (grouped queries).
        value: [B, Hk, Sk, Dv].
        schedule: order of tokens and tiles.
        scale: of the scores; None is 1 / sqrt(D).
        key_mask: [B or 1, Sk] bool, false for keys of this rank that no query attends to.
        score_factors: of this rank's queries [B or 1, S] and keys [B or 1, Sk]; their products are added to the scores,
            after ``scale``.

    Returns:
        [B, H, S, Dv], in the dtype of the query (under autocast, in that of autocast).

    Raises:
        ConfigError: when heads do not divide.
    """
    groups = schedule.groups
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    query, key, value = in_autocast_dtype(query, key, value)
    check_heads("this attention", query.shape[1], groups.ulysses_size)
    if key_mask is not None:
        low = max(-1e30, torch.finfo(key.dtype).min)  # a weight of exactly 0, a finite log-sum-exp
        query, key = _with_bias(query, key, torch.ones_like(query[:1, 0, :, 0]), torch.where(key_mask, 0.0, low))
    if score_factors is not None:
        query, key = _with_bias(query, key, score_factors[0] / scale, score_factors[1])
    if groups.ulysses_size == 1:
        return _RingAttention.apply(query, key, value, schedule, scale)
    key, value = (_repeat_heads(tensor, query.shape[1], groups.ulysses_size) for tensor in (key, value))
    query = _Trade.apply(query, schedule.query_order, groups.ulysses, False)
    key = _Trade.apply(key, schedule.key_order, groups.ulysses, False)
    value = _Trade.apply(value, schedule.key_order, groups.ulysses, False)
    out = _RingAttention.apply(query, key, value, schedule, scale)
    return _Trade.apply(out, schedule.query_order, groups.ulysses, True)


def attention_of_rows(
    attend_rows: Callable[[Tensor, Tensor, Tensor, slice], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    schedule: Schedule,
) -> Tensor:
    """Any attention of whole rows, where only Ulysses shares the sequence: each rank computes it for some heads.

    Args:
        attend_rows: from query, key and value of some heads and all tokens, in the order of the row, and the slice of
            these heads to the result [B, H / ranks, S of all ranks, Dv].
        query, key, value, schedule: as in ``sequence_attention``; the ring has one rank.

    Returns:
        [B, H, S, Dv].
    """
    groups = schedule.groups
    heads = query.shape[1]
    check_heads("this attention", heads, groups.ulysses_size)
    query, key, value = in_autocast_dtype(query, key, value)
    key, value = (_repeat_heads(tensor, heads, groups.ulysses_size) for tensor in (key, value))
    query, key, value = (
        _Trade.apply(tensor, schedule.key_order, groups.ulysses, False) for tensor in (query, key, value)
    )
    share = heads // groups.ulysses_size
    head_slice = slice(groups.ulysses_rank * share, (groups.ulysses_rank + 1) * share)
    return _Trade.apply(attend_rows(query, key, value, head_slice), schedule.query_order, groups.ulysses, True)


def check_heads(owner: str, num_heads: int, ulysses_size: int) -> None:
    """Raises ConfigError, with the arithmetic, when heads cannot be shared. ``owner`` names the layer or model."""
    if num_heads % ulysses_size:
        raise ConfigError(
            f"{owner}: {num_heads} query heads / train.ulysses_parallel_size {ulysses_size} is not whole; take a "
            f"divisor of {num_heads}, and train.context_parallel_size, which cuts no heads, for the rest"
        )


def _repeat_heads(tensor: Tensor, num_heads: int, ulysses_size: int) -> Tensor:
    """Repeats key heads so that each rank gets those that its query heads use, as few times as possible, often once."""
    share = num_heads // tensor.shape[1]
    repeat = share // math.gcd(share, num_heads // ulysses_size)
    return tensor.repeat_interleave(repeat, dim=1) if repeat > 1 else tensor


def _with_bias(query: Tensor, key: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Adds a bias to the scores by one more feature, numbers of the queries [B or 1, S] and of the keys [B or 1, Sk].

    It travels with the key, and needs no kernel with masks.
    """

    def append(tensor: Tensor, feature: Tensor) -> Tensor:
        return torch.cat([tensor, feature.to(tensor.dtype)[:, None, :, None].expand(*tensor.shape[:-1], 1)], dim=-1)

    return append(query, queries), append(key, keys)


class _TradeContext(FunctionCtx):
    """What ``_Trade`` keeps for its backward pass."""

    runs: tuple[TokenRun, ...]
    group: dist.ProcessGroup
    back: bool


class _Trade(torch.autograd.Function):
    """Exchange in a Ulysses group: from a rank's tokens with all heads to the block with a rank's heads, or back."""

    @staticmethod
    def forward(
        ctx: _TradeContext, tensor: Tensor, runs: tuple[TokenRun, ...], group: dist.ProcessGroup, back: bool
    ) -> Tensor:
        ctx.runs = runs
        ctx.group = group
        ctx.back = back
        return _to_part(tensor, runs, group) if back else _to_block(tensor, runs, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: _TradeContext, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (_to_block if ctx.back else _to_part)(grad, ctx.runs, ctx.group), None, None, None


def _to_block(tensor: Tensor, runs: tuple[TokenRun, ...], group: dist.ProcessGroup) -> Tensor:
    """[B, H, S of this rank, D] to [B, H / ranks, S of all ranks, D], in the order of ``runs``."""
    rows, heads, _, width = tensor.shape
    lengths = [sum(run.length for run in runs if run.rank == rank) for rank in range(group.size())]
    shapes = [(rows, heads // len(lengths), length, width) for length in lengths]
    parts = _exchange(tensor.chunk(len(lengths), dim=1), shapes, group)
    return torch.cat([parts[run.rank].narrow(2, run.start, run.length) for run in runs], dim=2)


def _to_part(tensor: Tensor, runs: tuple[TokenRun, ...], group: dist.ProcessGroup) -> Tensor:
    """The reverse of ``_to_block``."""
    cut = zip(runs, tensor.split([run.length for run in runs], dim=2), strict=True)
    ordered = sorted(cut, key=lambda pair: pair[0].start)  # a rank's runs in the order of its own tokens
    parts = [torch.cat([part for run, part in ordered if run.rank == rank], dim=2) for rank in range(group.size())]
    return torch.cat(_exchange(parts, [parts[group.rank()].shape] * len(parts), group), dim=1)


def _exchange(parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup) -> list[Tensor]:
    """Sends the i-th tensor to rank i of a group and returns what each rank sent to this one, of these shapes."""
    sizes = [math.prod(shape) for shape in shapes]
    received = parts[0].new_empty(sum(sizes))
    dist.all_to_all_single(received, _pack(parts), sizes, [part.numel() for part in parts], group=group)
    return _unpack(received, shapes)


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unpack(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


class _RingContext(FunctionCtx):
    """What ``_RingAttention`` keeps for its backward pass."""

    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    """Query, key, value, output and log-sum-exp."""
    schedule: Schedule
    scale: float


class _RingAttention(torch.autograd.Function):
    """Attention of this ring rank's block of queries; keys and values, later their gradients, travel round the ring."""

    @staticmethod
    def forward(
        ctx: _RingContext, query: Tensor, key: Tensor, value: Tensor, schedule: Schedule, scale: float
    ) -> Tensor:
        dtype = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=dtype)
        # Nothing is seen yet: -inf is a weight of 0 where results are joined.
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
        for owner, keys, values, _ in _pass_round(key, value, schedule):
            for tile in schedule.tiles[owner]:
                tile_query = tile.fold(tile.queries(query))
                tile_key = tile.fold(tile.keys(keys))
                tile_value = tile.fold(tile.keys(values))
                result = attend(tile_query, tile_key, tile_value, scale, tile.causal)
                tile_out, tile_lse = (tile.unfold(tensor) for tensor in result)
                # Both results are normalised over their own keys; the log-sum-exp of each gives its weight in the
                # result over all keys so far. ``total`` and ``total_lse`` are views: ``out`` and ``lse`` are updated.
                total, total_lse = tile.queries(out), tile.queries(lse)
                joined = torch.logaddexp(total_lse, tile_lse)
                total.mul_(torch.exp(total_lse - joined)[..., None])
                total.add_(tile_out * torch.exp(tile_lse - joined)[..., None])
                total_lse.copy_(joined)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.schedule = schedule
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _RingContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, lse = ctx.saved_tensors
        schedule = ctx.schedule
        grad = grad.contiguous()
        query_grad = torch.zeros_like(query, dtype=lse.dtype)
        # Gradients of a block follow its keys and values round the ring, one step behind: each rank adds its own share
        # to the sum that arrives and sends it on. The last hop brings the sum of this rank's own block home.
        hop: _Hop | None = None
        for owner, keys, values, num_following in _pass_round(key, value, schedule):
            gradients = lse.new_zeros(keys.numel() + values.numel())
            key_grad, value_grad = _unpack(gradients, [keys.shape, values.shape])
            for tile in schedule.tiles[owner]:
                tile_grad, tile_query, tile_out, tile_lse = (
                    tile.fold(tile.queries(tensor)) for tensor in (grad, query, out, lse)
                )
                inputs = (tile_query, tile.fold(tile.keys(keys)), tile.fold(tile.keys(values)))
                tile_grads = attend_backward(tile_grad, inputs, (tile_out, tile_lse), ctx.scale, tile.causal)
                accumulators = tile.queries(query_grad), tile.keys(key_grad), tile.keys(value_grad)
                for accumulator, tensor in zip(accumulators, tile_grads, strict=True):
                    accumulator += tile.unfold(tensor)
            if hop is not None:
                gradients += hop.wait()
            hop = _Hop(gradients, num_following, schedule.groups)
        assert hop is not None  # a ring has at least one rank
        key_grad, value_grad = _unpack(hop.wait(), [key.shape, value.shape])
        return query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype), None, None


class _Hop:
    """A tensor sent to the next ring rank while another comes from the one before."""

    def __init__(self, sent: Tensor, num_received: int, groups: SequenceGroups) -> None:
        size = groups.ring_size
        rank = groups.ring_rank
        self._sent = sent  # must live until the transfer is over
        self._received = sent  # with one rank nothing travels
        self._works: list[dist.Work] = []
        if size > 1:
            self._received = sent.new_empty(num_received)
            send = dist.P2POp(dist.isend, sent, group=groups.ring, group_peer=(rank + 1) % size)
            receive = dist.P2POp(dist.irecv, self._received, group=groups.ring, group_peer=(rank - 1) % size)
            # Together: if all ranks sent first, each could wait for a receiver.
            self._works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """Waits for the transfer and returns the tensor that was received."""
        for work in self._works:
            work.wait()
        return self._received


def _pass_round(key: Tensor, value: Tensor, schedule: Schedule) -> Iterator[tuple[int, Tensor, Tensor, int]]:
    """Yields the keys and values of each ring rank, this one's first; the next ones travel meanwhile.

    Yields:
        Ring rank, its keys, its values, and the number of elements of the keys and values that come next.
    """
    groups = schedule.groups
    block = _pack([key, value])
    for step in range(groups.ring_size):
        owner = (groups.ring_rank - step) % groups.ring_size
        shapes, following = (
            [(*tensor.shape[:2], schedule.key_lengths[rank], tensor.shape[3]) for tensor in (key, value)]
            for rank in (owner, owner - 1)
        )
        num_following = sum(map(math.prod, following))
        hop = _Hop(block, num_following, groups) if step + 1 < groups.ring_size else None
        yield owner, *cast("tuple[Tensor, Tensor]", _unpack(block, shapes)), num_following
        if hop is not None:
            block = hop.wait()
