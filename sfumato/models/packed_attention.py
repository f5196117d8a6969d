"""Causal attention of packed rows: within each document only, so that a row of many costs what they cost alone.

It plugs in at transformers' attention interface. Where documents begin follows from the position ids, which models
hand down to their attention; no mask is made. On CUDA in half precision it is one call of torch's flash kernel for
sequences of different lengths, elsewhere torch's attention for each run of documents of one length.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from sfumato.errors import ConfigError
from sfumato.parallel.kernels import check_attention

ATTENTION = "sfumato_packed"
"""Name in transformers' registries."""

OTHERS = "set model.attention to sdpa"


def register_packed_attention() -> str:
    """Makes the attention known to transformers. Returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, torch.compiler.disable(_attention))
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    return ATTENTION


class _Rows:
    """The documents of a batch of rows, worked out once for all layers."""

    def __init__(self, position_ids: Tensor) -> None:
        width = position_ids.shape[1]
        starts = (position_ids.diff(dim=1, prepend=position_ids[:, :1]) != 1).cpu()
        bounds = [[*row.nonzero().flatten().tolist(), width] for row in starts]
        rows = [[stop - start for start, stop in pairwise(row_bounds)] for row_bounds in bounds]
        self.whole = all(row == [width] for row in rows)
        """Whether each row is one document."""
        lengths = [length for row in rows for length in row]
        self.runs = [(length, len([*same])) for length, same in groupby(lengths)]
        """Lengths of neighbouring documents over all rows, and how many there are of each."""
        self.longest = max(lengths)
        self.starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.starts = self.starts.to(position_ids.device)


_rows: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, H, S, D] to [B, S, H, Dv]."""
    what = "the attention of packed rows"
    check_attention(module, query, key, attention_mask, dropout, position_ids, kwargs, what, OTHERS, True)
    rows = _rows.get(position_ids)
    if rows is None:
        rows = _rows[position_ids] = _Rows(position_ids)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as torch's own attention does
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    if rows.whole and len(position_ids) == len(query):
        return _attend(query, *_repeated(key, value, query.shape[1]), scale).transpose(1, 2), None
    joined = [tensor.transpose(0, 1).flatten(1, 2) for tensor in (query, key, value)]  # [H, B S, D]
    compute = _flash if _has_flash(query) else _in_turn
    return compute(*joined, rows, scale).view(query.shape[0], query.shape[2], query.shape[1], -1), None


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of [B, H, S, D]. Values as wide as keys: with others torch keeps whole score matrices."""
    own, width = value.shape[-1], query.shape[-1]
    if own == width:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    value = functional.pad(value, (0, width - own))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)[..., :own]


def _in_turn(query: Tensor, key: Tensor, value: Tensor, rows: _Rows, scale: float) -> Tensor:
    """Each run of documents of one length is a batch. Returns [T, H, Dv]."""
    key, value = _repeated(key[None], value[None], len(query))
    sizes = [length * count for length, count in rows.runs]
    # split, whose backward pass is one concatenation: that of slices fills zeros around each
    runs = zip(
        *(tensor.split(sizes, dim=1) if len(sizes) > 1 else [tensor] for tensor in (query, key[0], value[0])),
        strict=True,
    )
    found = []
    for (length, count), parts in zip(rows.runs, runs, strict=True):
        documents = [part.unflatten(1, (count, length)).transpose(0, 1) for part in parts]  # [count, H, length, D]
        found.append(_attend(*documents, scale).transpose(1, 2).flatten(0, 1))
    return torch.cat(found) if len(found) > 1 else found[0]


def _flash(query: Tensor, key: Tensor, value: Tensor, rows: _Rows, scale: float) -> Tensor:
    """All documents in one call of a CUDA kernel. Returns [T, H, Dv]."""
    width, own = max(query.shape[-1], value.shape[-1]), value.shape[-1]
    width += -width % 8
    inputs = [functional.pad(tensor.transpose(0, 1), (0, width - tensor.shape[-1])) for tensor in (query, key, value)]
    longest = rows.longest
    out = torch.ops.aten._flash_attention_forward(
        *inputs, rows.starts, rows.starts, longest, longest, 0.0, True, False, scale=scale
    )
    return out[0][..., :own]


def _has_flash(query: Tensor) -> bool:
    if query.device.type != "cuda" or torch.version.hip is not None:
        return False
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and query.shape[-1] <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _repeated(key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as queries: with fewer, torch's CPU kernel is not taken."""
    count = heads // key.shape[1]
    return (key, value) if count == 1 else (key.repeat_interleave(count, 1), value.repeat_interleave(count, 1))


def _no_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """transformers' mask function: there is no mask, documents follow from position ids."""
    if attention_mask is not None and not attention_mask.all():
        raise ConfigError("packed rows have no padding mask: padding stands at the end of rows, with labels -100")
