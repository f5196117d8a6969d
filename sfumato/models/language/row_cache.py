"""A cache of keys and values with a row for each sequence that is being generated, for transformers' causal models.

Rows hold different numbers of tokens, begin and end between two forward passes, and hold a token's keys and values in
the column of its position. The cache plugs in at three interfaces of transformers: a ``Cache``, an attention function
and a function that makes masks. Which keys a layer sees (a window, chunks) follows from the mask function that the
model passes. In shapes, R is the number of rows, and n rows take part in a forward pass with q tokens each.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from sfumato.errors import ConfigError
from sfumato.models.language.capped_attention import sum_values
from sfumato.parallel.kernels import CHANGES_SCORES, in_autocast_dtype

ATTENTION = "sfumato_rows"
"""Name in transformers' registries."""

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""What transformers' modules call the cache that they are given: since 5.24 ``cache``."""

COLUMNS = 32
"""The numbers of columns that are computed, attended to and allocated are multiples of this, and a minimal number of
rows takes part in each pass: most CPU kernels then round a row's results the same way whichever rows are beside it."""


def cache_argument(arguments: Container[str]) -> str | None:
    """The name among a module's arguments under which it takes a cache; None where it takes none."""
    return next((name for name in CACHE_ARGUMENTS if name in arguments), None)


def register_row_attention() -> str:
    """Makes the attention known to transformers. Returns its name."""
    AttentionInterface.register(ATTENTION, _row_attention)
    AttentionMaskInterface.register(ATTENTION, _row_mask)
    return ATTENTION


class RowCache(Cache):
    """Keys and values of R rows in each layer, with room for as many rows and columns as ``resize`` was told."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.num_rows = 0
        self.num_columns = 0
        self.positions: Tensor | None = None
        """int64 ``[n, q]``: positions of the tokens of the forward pass."""
        self.place: tuple[Tensor, slice, Tensor | slice] | None = None
        """Rows, heads (all) and columns at which the keys and values of these tokens are stored."""
        self.seen: tuple[slice, int] | None = None
        """Rows and number of columns that the tokens attend to; None when they attend to each other alone."""

    @property
    def _row_layers(self) -> list[_RowLayer]:
        """``layers``, to which nothing but ``update`` adds any."""
        return cast("list[_RowLayer]", self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers; 0 before the first forward pass."""
        return sum(layer.bytes_per_token for layer in self._row_layers)

    def resize(self, num_rows: int, num_columns: int) -> None:
        """Allocates exactly so many rows and columns. Keys and values that still fit are copied."""
        for layer in self._row_layers:
            layer.resize(num_rows, num_columns)
        self.num_rows = num_rows
        self.num_columns = num_columns

    def set_positions(self, rows: Tensor, positions: Tensor, first: int | None, seen: tuple[slice, int] | None) -> None:
        """Sets where the tokens of the next forward pass are stored, and what they attend to.

        Args:
            rows: int64 ``[n]``, the row of each sequence.
            positions: int64 ``[n, q]``.
            first: position of the first token of all rows, which the others follow without gaps; None where each row
                has one token at a position of its own.
            seen: the rows as a slice, and how many of their columns to attend to; None when the tokens are the first of
                their rows, so that they attend to each other alone.
        """
        self.positions = positions
        self.seen = seen
        columns = positions[:, 0] if first is None else slice(first, first + positions.shape[1])
        self.place = (rows, slice(None), columns)

    def copy(self, sources: Tensor, targets: Tensor, num_columns: int) -> None:
        """Copies the first columns of rows ``sources`` into rows ``targets``, int64 ``[k]`` each."""
        for layer in self._row_layers:
            layer.copy(sources, targets, num_columns)

    def clear(self) -> None:
        """Frees all memory."""
        self.layers.clear()
        self.num_rows = self.num_columns = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores keys ``[n, H, q, D]`` and values of a layer. Returns those that the queries attend to."""
        # layers are made in the first forward pass, which shows how many there are
        while len(self.layers) <= layer_idx:
            self.layers.append(_RowLayer(self))
        return self._row_layers[layer_idx].update(key_states, value_states)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """The positions ``[n, q]`` instead of transformers' number: they differ by row, and ``_row_mask`` gets what
        this returns."""
        return self.positions

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Refused with a ConfigError, since rows differ in length."""
        raise ConfigError("the model asks for one length of all rows: it does not take position_ids")

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The number of columns that are attended to, and the first of them."""
        return (query_length if self.seen is None else self.seen[1]), 0


class _RowLayer(CacheLayerMixin):
    """One layer's keys and values, ``[R, H, columns, D]``, allocated in the first forward pass."""

    is_sliding = False

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self._cache = cache

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in this layer; 0 before the first forward pass."""
        return sum(tensor[0, :, 0].nbytes for tensor in self._allocated_tensors())

    def _allocated_tensors(self) -> list[Tensor]:
        """Keys and values, once they are allocated."""
        if self.keys is None:
            return []
        assert self.values is not None
        return [self.keys, self.values]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates keys and values for all rows, with the heads, width, dtype and device of these."""
        # zeros: columns without a token are masked, but must not hold NaN all the same, since 0 times NaN is NaN
        self.keys, self.values = (
            states.new_zeros(self._cache.num_rows, states.shape[1], self._cache.num_columns, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def resize(self, num_rows: int, num_columns: int) -> None:
        """See ``RowCache.resize``."""
        if self.keys is not None:
            self.keys, self.values = (
                _resize_rows(tensor, num_rows, num_columns) for tensor in self._allocated_tensors()
            )

    def copy(self, sources: Tensor, targets: Tensor, num_columns: int) -> None:
        """See ``RowCache.copy``."""
        for tensor in self._allocated_tensors():
            tensor[targets, :, :num_columns] = tensor[sources, :, :num_columns]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """See ``RowCache.update``."""
        if self.keys is None:
            self.lazy_initialization(key_states, value_states)
        cache = self._cache
        for tensor, states in zip(self._allocated_tensors(), (key_states, value_states), strict=True):
            # with one token a row, rows and columns are index tensors, which take the dimension of tokens away
            tensor[cache.place] = states[:, :, 0] if states.shape[2] == 1 else states
        if cache.seen is None:
            return key_states, value_states
        rows, width = cache.seen
        keys, values = self._allocated_tensors()
        return keys[rows, :, :width], values[rows, :, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See ``RowCache.get_mask_sizes``."""
        return self._cache.get_mask_sizes(query_length, 0)

    def get_seq_length(self) -> int:
        """Refused with a ConfigError, see ``RowCache.get_seq_length``."""
        return self._cache.get_seq_length()

    def get_max_length(self) -> int:
        """-1, which means to transformers that there is no limit."""
        return -1


def _resize_rows(tensor: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """A copy of ``[R, H, columns, D]`` with other numbers of rows and columns; new ones are zeros."""
    resized = tensor.new_zeros(num_rows, tensor.shape[1], num_columns, tensor.shape[3])
    overlap = tensor[:num_rows, :, :num_columns]
    resized[: overlap.shape[0], :, : overlap.shape[2]] = overlap
    return resized


def _row_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Tensor | int,
    mask_function: Callable[..., Tensor],
    local_size: int | None = None,
    use_vmap: bool = False,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **kwargs: object,
) -> Tensor | None:
    """Registered as transformers' function that makes a mask, see ``packed_attention._mask_pattern`` for training.

    Returns:
        The mask that is added to the scores, ``[n, 1, q, K]``; None for plainly causal attention among the q tokens.

    Raises:
        ConfigError: for a mask of padding, or without a ``RowCache``.
    """
    if attention_mask is not None or not isinstance(q_offset, Tensor):
        raise ConfigError("the attention of rows needs its cache of keys and values, and no mask of padding")
    positions = q_offset  # [n, q]
    # the first tokens of their rows, which see each other alone: torch's attention needs no mask for that
    if q_length == kv_length and not use_vmap and (local_size is None or local_size >= q_length):
        return None
    # a key's position is its column, so that the mask function compares positions with columns
    first = torch.arange(positions.shape[0], device=device).view(-1, 1, 1, 1)
    keys = torch.arange(kv_length, device=device).view(1, 1, 1, -1)
    sees = mask_function(first, torch.zeros_like(first), positions[:, None, :, None], keys)
    return torch.zeros_like(sees, dtype=dtype).masked_fill_(~sees, -torch.inf)


def _row_attention(
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
    **settings: object,
) -> tuple[Tensor, None]:
    """Attention of queries ``[n, H, q, D]`` to keys ``[n, Hk, K, D]`` and values ``[n, Hk, K, Dv]``.

    Returns:
        ``[n, q, H, Dv]``, and None in the place of attention weights.

    Raises:
        ConfigError: when the layer needs something that is not computed here.
    """
    # softcap and s_aux are parameters of this function, so that ``settings`` holds neither
    wrong = [name for name in CHANGES_SCORES if settings.get(name) is not None] + ["dropout"] * (dropout > 0)
    wrong += ["is_causal=False"] * (is_causal is False or not getattr(module, "is_causal", True))
    if wrong:
        raise ConfigError(f"{type(module).__name__} uses {', '.join(wrong)}, unknown to the attention of rows")
    query, key, value = in_autocast_dtype(query, key, value)
    key, value = key.to(query.dtype), value.to(query.dtype)
    mask = None if attention_mask is None else attention_mask.to(query.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    shape = query.shape
    groups = shape[1] // key.shape[1]
    if softcap is not None or s_aux is not None:
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
        return _attend_plainly(query, key, value, mask, scale, softcap, s_aux).transpose(1, 2).contiguous(), None
    # each key head serves a group of query heads: with one token a row, the group takes the place of the tokens, and
    # keys need not be repeated
    if groups > 1 and shape[2] == 1:
        query = query.reshape(shape[0], key.shape[1], groups, shape[3])
    elif groups > 1:
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    value_width = value.shape[-1]
    if value_width < shape[3]:  # with values of another width torch keeps whole score matrices
        value = functional.pad(value, (0, shape[3] - value_width))
    is_causal = mask is None and shape[2] > 1
    output = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale)
    output = output[..., :value_width].reshape(shape[0], shape[1], shape[2], value_width)
    return output.transpose(1, 2).contiguous(), None


def _attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with soft-capped scores, ``cap tanh(score / cap)``, and with a sink, which takes a share of the weight
    and adds no value. It keeps whole score matrices, in float32."""
    scores = (query @ key.mT).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf) if scores.shape[-2] > 1 else scores
    else:
        scores = scores + mask.float()
    return sum_values(scores, value, sinks)
