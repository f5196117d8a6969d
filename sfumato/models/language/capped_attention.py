"""Attention whose scores are capped (Gemma 2, arXiv 2408.00118), a number of queries at a time.

torch's kernels know no caps. The scores of a block of queries are made, used, and made again in the backward pass, so
that no matrix of a document's scores is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

QUERIES_AT_ONCE = 1024
"""Queries of a document whose scores are there at a time; those of shorter documents are kept."""


class _Cap(NamedTuple):
    scale: float
    softcap: float


def attend_capped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sees: Callable[[range], Tensor],
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """Attention with scores ``softcap tanh(score / softcap)``, in float32.

    Args:
        query: ``[count, H, L, D]``.
        key, value: ``[count, H, K, D]`` and ``[count, H, K, Dv]``; K - L keys stand before the first query's.
        sees: takes queries, and returns which keys up to that of the last they see: bool ``[1 or count, 1, n, keys]``.
        sinks: ``[H]``: the score of a sink, or None.
        scale: of the scores, before the cap.
        softcap: the cap.

    Returns:
        ``[count, H, L, Dv]``, dtype of ``value``.
    """
    length = query.shape[2]
    if length <= QUERIES_AT_ONCE:
        return _attend_block(query, key, value, sees(range(length)), sinks, _Cap(scale, softcap))
    return _InBlocks.apply(query, key, value, sinks, sees, _Cap(scale, softcap))


def _attend_block(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None, cap: _Cap) -> Tensor:
    scores = cap.softcap * torch.tanh((query @ key.mT).float() * (cap.scale / cap.softcap))
    scores = scores.masked_fill(~mask, -torch.inf)
    return sum_values(scores, value, sinks)


def sum_values(scores: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
    """Values ``[n, H, K, Dv]``, weighted by scores, ``[n, H, L, K]`` in float32. A sink, whose score ``sinks`` ``[H]``
    gives, takes a share of the weight and adds no value."""
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : value.shape[2]].to(value.dtype) @ value


class _InBlocks(torch.autograd.Function):
    """``_attend_block`` of one block of queries after the other, with the keys up to its last."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        sees: Callable[[range], Tensor],
        cap: _Cap,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.sees = sees
        ctx.cap = cap
        outputs = [
            _attend_block(query[:, :, rows], key[:, :, :end], value[:, :, :end], sees(queries), sinks, cap)
            for queries, rows, end in _query_blocks(query, key)
        ]
        return torch.cat(outputs, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, sinks = ctx.saved_tensors
        inputs = [query, key, value] if sinks is None else [query, key, value, sinks]
        # gradients of keys add up over blocks, in float32 at least
        sums = [torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)) for tensor in inputs]
        for queries, rows, end in _query_blocks(query, key):
            places = [(slice(None), slice(None), part) for part in (rows, slice(end), slice(end))]
            parts = [tensor[place] for tensor, place in zip(inputs, places, strict=False)] + inputs[3:]
            parts = [part.detach().requires_grad_() for part in parts]
            with torch.enable_grad():
                block_query, block_key, block_value, *block_sinks = parts
                block_sink = block_sinks[0] if block_sinks else None
                mask = ctx.sees(queries)
                output = _attend_block(block_query, block_key, block_value, mask, block_sink, ctx.cap)
            gradients = torch.autograd.grad(output, parts, gradient[:, :, rows])
            totals = [total[place] for total, place in zip(sums, places, strict=False)] + sums[3:]
            for total, part_gradient in zip(totals, gradients, strict=True):
                total += part_gradient
        result = [total.to(tensor.dtype) for total, tensor in zip(sums, inputs, strict=True)]
        return *result[:3], None if sinks is None else result[3], None, None


def _query_blocks(query: Tensor, key: Tensor) -> list[tuple[range, slice, int]]:
    """Blocks of queries: as a range, as rows, and the number of keys up to the last query's."""
    length = query.shape[2]
    before = key.shape[2] - length
    ranges = [range(start, min(start + QUERIES_AT_ONCE, length)) for start in range(0, length, QUERIES_AT_ONCE)]
    return [(queries, slice(queries.start, queries.stop), before + queries.stop) for queries in ranges]
