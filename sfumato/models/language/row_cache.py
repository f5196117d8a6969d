"""Keys and values of sequences that are under way, a row for each, for transformers' causal models as they are.

Rows hold different numbers of tokens, begin and end between two forward passes, and keep a token's keys and values in
the column of its position. It plugs in at transformers' three interfaces: a ``Cache``, an attention function and a
function that makes masks. What a layer sees (a window, chunks) comes from the mask function that the model gives. R
rows are kept, n take part in a forward pass with q tokens each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from sfumato.errors import ConfigError
from sfumato.parallel.kernels import CHANGES_SCORES

ATTENTION = "sfumato_rows"
"""Name in transformers' registries."""

COLUMNS = 32
"""Columns that are computed, looked at, and kept are multiples of it, and some rows take part at least: most kernels of
CPUs then round a row alike whichever rows stand beside it."""


def register_row_attention() -> str:
    """Makes the attention known to transformers. Returns its name."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _mask)
    return ATTENTION


class RowCache(Cache):
    """Keys and values of R rows in each layer, with room for as many rows and columns as ``resize`` was told."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.num_rows, self.num_columns = 0, 0
        self.positions: Tensor | None = None
        """int64 ``[n, q]``: of the tokens of the forward pass."""
        self.place: tuple[Tensor, slice, Tensor | slice] | None = None
        """Rows, heads (all) and columns that their keys and values go to."""
        self.seen: tuple[slice, int] | None = None
        """Rows and number of columns that the tokens look at; None when they look at each other alone."""

    @property
    def bytes_per_token(self) -> int:
        """Of one row's column in all layers; 0 before the first forward pass."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def resize(self, num_rows: int, num_columns: int) -> None:
        """Makes room for exactly so much. What is there and fits stays."""
        for layer in self.layers:
            layer.resize(num_rows, num_columns)
        self.num_rows, self.num_columns = num_rows, num_columns

    def take(self, rows: Tensor, positions: Tensor, first: int | None, seen: tuple[slice, int] | None) -> None:
        """Says where the tokens of the next forward pass belong.

        Args:
            rows: int64 ``[n]``, the row of each sequence.
            positions: int64 ``[n, q]``.
            first: position of all rows' first token, which the others follow; None where there is one token a row, each
                at a position of its own.
            seen: the rows as a slice, and how many columns to look at; None when the tokens are the first of their
                rows, so that they see none but each other.
        """
        self.positions, self.seen = positions, seen
        columns = positions[:, 0] if first is None else slice(first, first + positions.shape[1])
        self.place = (rows, slice(None), columns)

    def copy(self, sources: Tensor, targets: Tensor, num_columns: int) -> None:
        """Copies the first columns of rows into other rows; int64 ``[k]`` each."""
        for layer in self.layers:
            layer.copy(sources, targets, num_columns)

    def clear(self) -> None:
        """Gives all memory back."""
        self.layers.clear()
        self.num_rows = self.num_columns = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **more: Any) -> Any:
        """Stores keys ``[n, H, q, D]`` and values of a layer. Returns those that the queries look at."""
        while len(self.layers) <= layer_idx:
            self.layers.append(_RowLayer(self))
        return self.layers[layer_idx].update(key_states, value_states)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """The positions themselves, which reach the function that makes masks."""
        return self.positions

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Refused: rows differ in length."""
        raise ConfigError("the model asks for one length of all rows: it does not take position_ids")

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that are looked at, and the first of them."""
        return (query_length if self.seen is None else self.seen[1]), 0


class _RowLayer(CacheLayerMixin):
    """One layer's keys and values."""

    is_sliding = False

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self._cache = cache

    @property
    def bytes_per_token(self) -> int:
        return sum(tensor[0, :, 0].nbytes for tensor in self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [] if self.keys is None else [self.keys, self.values]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # zeros: what no token wrote is masked, and must not be NaN all the same, since 0 times NaN is NaN
        self.keys, self.values = (
            states.new_zeros(self._cache.num_rows, states.shape[1], self._cache.num_columns, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def resize(self, num_rows: int, num_columns: int) -> None:
        if self.keys is not None:
            self.keys, self.values = (_resized(tensor, num_rows, num_columns) for tensor in self._tensors())

    def copy(self, sources: Tensor, targets: Tensor, num_columns: int) -> None:
        for tensor in self._tensors():
            tensor[targets, :, :num_columns] = tensor[sources, :, :num_columns]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None:
            self.lazy_initialization(key_states, value_states)
        cache = self._cache
        for tensor, states in zip(self._tensors(), (key_states, value_states), strict=True):
            tensor[cache.place] = states[:, :, 0] if states.shape[2] == 1 else states
        if cache.seen is None:
            return key_states, value_states
        rows, width = cache.seen
        return self.keys[rows, :, :width], self.values[rows, :, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.get_mask_sizes(query_length, 0)

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length()

    def get_max_length(self) -> int:
        return -1


def _resized(tensor: Tensor, num_rows: int, num_columns: int) -> Tensor:
    found = tensor.new_zeros(num_rows, tensor.shape[1], num_columns, tensor.shape[3])
    kept = tensor[:num_rows, :, :num_columns]
    found[: kept.shape[0], :, : kept.shape[2]] = kept
    return found


def _mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    mask_function: Callable[..., Tensor],
    local_size: int | None = None,
    use_vmap: bool = False,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **more: Any,
) -> Tensor | None:
    """transformers' function for masks: what is added to the scores, ``[n, 1, q, K]``; None for plain causal ones."""
    if attention_mask is not None or not isinstance(q_offset, Tensor):
        raise ConfigError("the attention of rows needs its cache of keys and values, and no mask of padding")
    positions = q_offset  # [n, q]
    if q_length == kv_length and not use_vmap and (local_size is None or local_size >= q_length):
        return None  # the first tokens of their rows
    first = torch.arange(positions.shape[0], device=device).view(-1, 1, 1, 1)
    keys = torch.arange(kv_length, device=device).view(1, 1, 1, -1)
    sees = mask_function(first, torch.zeros_like(first), positions[:, None, :, None], keys)
    return torch.zeros_like(sees, dtype=dtype).masked_fill_(~sees, -torch.inf)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Queries ``[n, H, q, D]``, keys ``[n, Hk, K, D]``, values ``[n, Hk, K, Dv]``. Returns ``[n, q, H, Dv]``."""
    wrong = [name for name in CHANGES_SCORES if settings.get(name) is not None] + ["dropout"] * (dropout > 0)
    wrong += ["is_causal=False"] * (is_causal is False or not getattr(module, "is_causal", True))
    if wrong:
        raise ConfigError(f"{type(module).__name__} uses {', '.join(wrong)}, unknown to the attention of rows")
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as torch's own attention does
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    key, value = key.to(query.dtype), value.to(query.dtype)
    mask = None if attention_mask is None else attention_mask.to(query.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    shape, groups = query.shape, query.shape[1] // key.shape[1]
    if softcap is not None or s_aux is not None:
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
        return _attend_plainly(query, key, value, mask, scale, softcap, s_aux).transpose(1, 2).contiguous(), None
    if groups > 1 and shape[2] == 1:
        query = query.reshape(shape[0], key.shape[1], groups, shape[3])
    elif groups > 1:
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    own = value.shape[-1]
    if own < shape[3]:  # with values of another width torch keeps whole score matrices
        value = functional.pad(value, (0, shape[3] - own))
    is_causal = mask is None and shape[2] > 1
    found = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale)
    found = found[..., :own].reshape(shape[0], shape[1], shape[2], own)
    return found.transpose(1, 2).contiguous(), None


def _attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Scores ``cap tanh(score / cap)``, a sink that takes weight and brings no value; whole score matrices, float32."""
    scores = (query @ key.mT).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf) if scores.shape[-2] > 1 else scores
    else:
        scores = scores + mask.float()
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value
