"""Causal attention of packed rows: within each document only, so that a row costs what its documents cost alone.

It plugs in at transformers' attention interface. Where documents begin follows from the position ids, which models
hand down to their attention. A document whose first position p is not 0 is a branch: it continues the first p tokens
(its stem) of the last document of its row that begins at 0, and sees these, so that several answers share one prompt. A
layer's window, chunks or other pattern is read from the mask function that the layer gives transformers; soft caps
(Gemma 2, arXiv 2408.00118) and attention sinks (gpt-oss, arXiv 2508.10925) are arguments of the call. No mask over a
whole row is made. On CUDA in half precision one call of torch's flash kernel for sequences of different lengths
computes all documents; elsewhere torch's attention computes each run of neighbouring documents of equal length as a
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from sfumato.algorithms.device import on_host, to_device
from sfumato.errors import ConfigError
from sfumato.models.language.capped_attention import attend_capped
from sfumato.parallel.kernels import attend_segments, in_autocast_dtype, packed_causal, pad_width
from sfumato.parallel.positions import document_bounds, lengths_between

ATTENTION = "sfumato_packed"
"""Name in transformers' registries."""

WIDTHS = {"cuda": 8}
"""The number by which kernels of a type of device want the widths of heads to be divisible; of others any will do."""

OTHERS = "set model.attention to sdpa"
"""The remedy in messages about what this attention does not compute."""


def register_packed_attention() -> str:
    """Makes the attention known to transformers. Returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    score_arguments = ("softcap", "s_aux")
    AttentionInterface.register(
        ATTENTION, packed_causal(_pattern_attention, "the attention of packed rows", OTHERS, score_arguments)
    )
    AttentionMaskInterface.register(ATTENTION, torch.compiler.disable(_noted_pattern))
    return ATTENTION


class MaskWatch:
    """Spares a model the masks that it asks transformers for, where all of them are plainly causal.

    To make any mask, transformers looks at the position ids, and the host waits for the device. A model asks for the
    same kinds of masks in each forward pass: where those of the first pass are all plain, the mask function is taken
    out of transformers' registry during later passes, so that none is made.
    """

    def __init__(self) -> None:
        self._are_plain: bool | None = None  # not known before the first forward pass that asks for masks
        self._patterns: list[Pattern | None] = []  # of the current forward pass

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside runs one forward pass of packed rows."""
        global _watching
        from transformers import AttentionMaskInterface

        if self._are_plain:
            function = AttentionMaskInterface._global_mapping.pop(ATTENTION)  # transformers then makes no mask at all
            try:
                yield
            finally:
                AttentionMaskInterface._global_mapping[ATTENTION] = function
            return
        outer_watch = _watching
        _watching = self
        self._patterns = []
        try:
            yield
        finally:
            _watching = outer_watch
        if self._are_plain is None and self._patterns:
            self._are_plain = not any(self._patterns)

    def note(self, pattern: Pattern | None) -> None:
        """Notes a mask that the model has asked for; None is a plainly causal one."""
        self._patterns.append(pattern)


# transformers calls its mask functions without a reference to the model, so that a global has to say whose pass it is
_watching: MaskWatch | None = None


def _noted_pattern(*, q_length: int, **kwargs: Any) -> Pattern | None:
    """``_mask_pattern``, noted by the current watch; a row of one token has no pattern, and tells nothing of others."""
    pattern = _mask_pattern(q_length=q_length, **kwargs)
    if _watching is not None and q_length > 1:
        _watching.note(pattern)
    return pattern


class Pattern:
    """Which tokens of its document a token sees, where these are not simply all up to itself."""

    def __init__(self, sees: Callable[..., Tensor], local_size: int | None) -> None:
        """
        Args:
            sees: transformers' mask function: takes (row, head, query, key), indices within packed rows that broadcast,
                and returns bool.
            local_size: documents of at most this many tokens are plainly causal; None where no such size is known.
        """
        self.sees = sees
        self.local_size = local_size

    def is_causal_for(self, length: int) -> bool:
        """Whether the pattern is plainly causal in a document of this length."""
        return self.local_size is not None and length <= self.local_size

    def mask(self, documents: _Run, queries: range | None = None) -> Tensor:
        """Whether a query (dim 2) sees a key (dim 3) in documents of length L: bool ``[1 or count, 1, L, L]``.

        Of some queries, the keys are those up to the last of them.
        """
        queries = range(documents.length) if queries is None else queries
        columns = torch.arange(queries.stop, device=documents.device)
        # a local pattern is the same in each document
        masks = [
            _call_mask_function(self.sees, row, start + columns[queries.start :, None], start + columns[None])
            for row, start in (documents.places if self.local_size is None else documents.places[:1])
        ]
        return torch.stack(masks)[:, None]

    def first_seen(self, documents: _Run) -> int:
        """In documents longer than ``local_size``, the index of the first token that token ``local_size`` sees.

        It tells patterns apart: 1 for a sliding window, ``local_size`` for chunks.
        """
        row, start = documents.places[0]
        columns = torch.arange(documents.length, device=_device_of(self.sees, documents.device))
        sees_key = _call_mask_function(self.sees, row, start + columns[self.local_size], start + columns)
        return int(sees_key.int().argmax())


def _call_mask_function(sees: Callable[..., Tensor], row: int, query: Tensor, key: Tensor) -> Tensor:
    """Whether queries see keys, both by index in a packed row; the first head stands for all."""
    row_index = torch.full((), row, device=query.device)
    first_head = torch.zeros_like(query.flatten()[0])
    return sees(row_index, first_head, query, key)


def _is_plain(sees: Callable[..., Tensor]) -> bool:
    """Whether a mask function of transformers is the one of plainly causal attention."""
    from transformers.masking_utils import causal_mask_function

    return sees is causal_mask_function


def _device_of(sees: Callable[..., Tensor], device: torch.device | str) -> torch.device | str:
    """The device on which to call a mask function: the host, so that nothing waits for the device, unless the function
    has tensors in its closure, which are on the device."""
    cells = [cell.cell_contents for cell in getattr(sees, "__closure__", None) or ()]
    captured = [value for cell in cells for value in (cell if isinstance(cell, list | tuple) else [cell])]
    if any(isinstance(value, Tensor) for value in captured):
        return device
    # transformers combines mask functions (and, or) into one, whose closure holds the single ones
    devices = {str(_device_of(cast("Callable[..., Tensor]", value), device)) for value in captured if callable(value)}
    return device if devices - {"cpu"} else "cpu"


def _mask_pattern(
    *,
    q_length: int,
    mask_function: Callable[..., Tensor],
    local_size: int | None = None,
    use_vmap: bool = False,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: object,
) -> Pattern | None:
    """Registered as transformers' function that makes a mask. Returns None for plainly causal attention, else a
    pattern, which transformers hands to the attention in the place of the mask.

    Raises:
        ConfigError: for a mask of padding, or a mask function that lets tokens see later ones.
    """
    if attention_mask is not None and not attention_mask.all():
        raise ConfigError("packed rows have no padding mask: padding stands at the end of rows, with labels -100")
    if q_length == 1:
        return None
    if use_vmap:  # the model adds a mask function of its own, such as one for the tokens of an image
        return Pattern(mask_function, None)
    if _is_plain(mask_function):
        return None if local_size is None else Pattern(mask_function, local_size)
    columns = torch.arange(q_length, device=_device_of(mask_function, device))
    if _call_mask_function(mask_function, 0, columns[:-1], columns[1:]).any():
        raise ConfigError("attention to later tokens is unknown to the attention of packed rows")
    return None if local_size is None else Pattern(mask_function, local_size)


@dataclass(frozen=True)
class _Run:
    """Neighbouring documents of equal length and first position, which attention computes as one batch."""

    length: int
    """Tokens of each document, without its stem."""
    places: tuple[tuple[int, int], ...]
    """Row of each document, and the column of its first token."""
    device: torch.device
    first: int = 0
    """First position of each document: the number of tokens of its stem, 0 without one."""
    stems: tuple[tuple[int, int], ...] = ()
    """Where the stem of each branch stands: the index of a run, and its first token counted within that run."""

    @cached_property
    def seen(self) -> Tensor:
        """Which keys a query of a branch sees, first those of the stem: bool ``[1, 1, L, first + L]``."""
        all_keys = torch.ones(self.length, self.first + self.length, dtype=torch.bool, device=self.device)
        return all_keys.tril(self.first)[None, None]

    def causal_mask(self, queries: range) -> Tensor:
        """Which keys, up to the last of them, these queries see, first those of the stem: bool ``[1, 1, n, keys]``."""
        keys = self.first + queries.stop
        all_keys = torch.ones(len(queries), keys, dtype=torch.bool, device=self.device)
        return all_keys.tril(self.first + queries.start)[None, None]


class _Rows:
    """The documents of a batch of packed rows, worked out once for all layers."""

    def __init__(self, position_ids: Tensor, chunk: int | None = None) -> None:
        """Waits for the device, unless the position ids are remembered on the host.

        Args:
            position_ids: ``[B, T]``.
            chunk: of a layer that sees chunks of so many tokens; each chunk is then a document of its own.

        Raises:
            ConfigError: when a branch continues no document.
        """
        width = position_ids.shape[1]
        bounds = document_bounds(position_ids, chunk)
        rows = [lengths_between(row_bounds) for row_bounds in bounds]
        positions = on_host(position_ids)
        self.whole = all(row == [width] for row in rows)
        """Whether each row is one document."""
        lengths = [length for row in rows for length in row]
        places = [(index, start) for index, row_bounds in enumerate(bounds) for start in row_bounds[:-1]]
        # rows that are whole documents may begin at any position, which makes them no branches
        firsts = [0 if chunk or self.whole else int(positions[place]) for place in places]
        self.has_branches = any(firsts)
        # one entry for each run: (length, first position) of its documents, and their number
        counts = [(key, len([*group])) for key, group in groupby(zip(lengths, firsts, strict=True))]
        ends = [*accumulate(count for _, count in counts)]
        # without branches nothing reads the stems
        no_stems = cast("list[tuple[int, int]]", [()] * len(places))
        stems = _find_stems(places, lengths, firsts, ends) if self.has_branches else no_stems
        self.runs = [
            _Run(length, tuple(places[end - count : end]), position_ids.device, first, tuple(stems[end - count : end]))
            for ((length, first), count), end in zip(counts, ends, strict=True)
        ]
        """Neighbouring documents of equal length and first position, over all rows."""
        self.longest = max(lengths)
        self._lengths = lengths
        self._device = position_ids.device

    @cached_property
    def starts(self) -> Tensor:
        """int32: index of each document's first token in all rows joined, and last the number of all tokens."""
        starts = torch.tensor([0, *self._lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return to_device(starts, self._device)


def _find_stems(
    places: list[tuple[int, int]], lengths: list[int], firsts: list[int], ends: list[int]
) -> list[tuple[int, int]]:
    """Finds the stem of each document: the last document up to it in its row that begins at position 0.

    Args:
        places: row and first column of each document.
        lengths: of each document.
        firsts: first position of each document.
        ends: for each run the index of the first document after it.

    Returns:
        For each document the index of the stem's run, and the stem's first token counted within that run.

    Raises:
        ConfigError: when a branch has no stem in its row, or begins behind the end of it.
    """
    stems: list[tuple[int, int]] = []
    run = 0
    first_of_run = 0
    stem = 0
    for number, (length, first) in enumerate(zip(lengths, firsts, strict=True)):
        if number == ends[run]:
            run += 1
            first_of_run = number
        if first == 0:
            stem = number
            stems.append((run, (number - first_of_run) * length))
        # the stem so far is no document from 0 on, stands in an earlier row, or ends before the branch begins
        elif firsts[stem] or places[stem][0] != places[number][0] or lengths[stem] < first:
            raise ConfigError(f"a packed row has a document from position {first} on that goes on after no other")
        else:
            stems.append(stems[stem])
    return stems


class _Scoring(NamedTuple):
    """How products of queries and keys become attention weights."""

    scale: float
    pattern: Pattern | None = None
    window: int | None = None
    """Where the pattern is a sliding window: the number of tokens that a token sees, itself included."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """``[H]``: the score of a sink, which takes a share of the weight and adds no value."""


# by position ids, which all layers of a forward pass share; an entry goes when its tensor does
_rows: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _rows_of(position_ids: Tensor, chunk: int | None = None) -> _Rows:
    """The documents of rows with these position ids, from the cache of this forward pass."""
    rows_by_chunk = cast("dict[int | None, _Rows]", _rows.setdefault(position_ids, {}))
    if chunk not in rows_by_chunk:
        rows_by_chunk[chunk] = _Rows(position_ids, chunk)
    return rows_by_chunk[chunk]


def _pattern_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_ids: Tensor,
    scale: float,
    pattern: Pattern | None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention of all rows, with the arguments and the result that ``packed_causal`` describes.

    Raises:
        ConfigError: when documents share a stem that is longer than the layer's window or chunks.
    """
    rows = _rows_of(position_ids)
    scoring = _Scoring(scale, softcap=softcap, sinks=s_aux)
    patterned = (
        [] if pattern is None else [run for run in rows.runs if not pattern.is_causal_for(run.first + run.length)]
    )
    if patterned and rows.has_branches:
        raise ConfigError(
            "documents that share a prompt need plainly causal attention: set train.share_prompts to false"
        )
    if patterned:
        assert pattern is not None
        size = pattern.local_size
        first_seen = None if size is None else pattern.first_seen(patterned[0])
        # chunks become documents, which need no mask; a sliding window is an argument of the flash kernel
        if size is not None and first_seen == size:
            rows = _rows_of(position_ids, size)
        else:
            scoring = scoring._replace(pattern=pattern, window=size if first_seen == 1 else None)
    query, key, value = in_autocast_dtype(query, key, value)
    if rows.whole:  # one row of position ids may stand for all
        if scoring.window is not None and _has_flash(query, scoring):
            length = query.shape[2]
            query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
            return attend_segments(query, key, value, None, length, scoring.scale, causal=True, window=scoring.window)
        if scoring.pattern is not None or not _has_flash(query, scoring):  # the flash kernel groups heads itself
            key, value = _repeat_heads(key, value, query.shape[1])
        return _attend(query, key, value, scoring, rows.runs[0]).transpose(1, 2)
    joined_query, joined_key, joined_value = (
        tensor.transpose(0, 1).flatten(1, 2) for tensor in (query, key, value)
    )  # [H, B S, D]
    compute = _attend_by_flash if _has_flash(query, scoring) and not rows.has_branches else _attend_run_by_run
    joined_output = compute(joined_query, joined_key, joined_value, rows, scoring)
    return joined_output.view(query.shape[0], query.shape[2], query.shape[1], -1)


def _attend(query: Tensor, key: Tensor, value: Tensor, scoring: _Scoring, documents: _Run) -> Tensor:
    """Attention within documents of equal length, ``[count, H, L, D]``; returns ``[count, H, L, Dv]``.

    Values are padded to the width of the keys: for another width torch keeps whole score matrices. So it does on CUDA
    for widths that are no multiples of 8.
    """
    pattern = scoring.pattern
    if scoring.softcap is not None:
        is_patterned = pattern is not None and not pattern.is_causal_for(documents.length)
        sees = partial(pattern.mask, documents) if pattern is not None and is_patterned else documents.causal_mask
        return attend_capped(query, key, value, sees, scoring.sinks, scoring.scale, scoring.softcap)
    mask = None
    if documents.first:
        mask = documents.seen
    elif pattern is not None and not pattern.is_causal_for(documents.length):
        mask = pattern.mask(documents)
    value_width = value.shape[-1]
    if scoring.sinks is not None:
        if mask is None:  # with a sink no causal kernel of torch's will do
            length = documents.length
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril()
        query, key, value, mask = _add_sink_key(query, key, value, mask, scoring)
    width = query.shape[-1] + -query.shape[-1] % WIDTHS.get(query.device.type, 1)
    query, key, value = (pad_width(tensor, width) for tensor in (query, key, value))
    is_grouped = key.shape[1] != query.shape[1]
    out = functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scoring.scale, enable_gqa=is_grouped
    )
    return out[..., :value_width] if value_width != width else out


def _add_sink_key(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: _Scoring
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and mask with one more key that all queries see, whose score is the sink's and its value 0.

    One more feature makes the score: it is 1 in all queries, the sink's score (before scaling) in the new key, and 0 in
    all other keys. So torch's attention, which has no argument for sinks, computes them.
    """
    assert scoring.sinks is not None
    sink = (scoring.sinks / scoring.scale).to(key.dtype).view(-1, 1, 1).expand(*key.shape[:2], 1, 1)
    key = functional.pad(key, (0, 1))
    sink_key = torch.cat([key.new_zeros(*key.shape[:2], 1, key.shape[-1] - 1), sink], -1)
    query = torch.cat([query, torch.ones_like(query[..., :1])], -1)
    return (
        query,
        torch.cat([key, sink_key], 2),
        functional.pad(value, (0, 0, 0, 1)),
        functional.pad(mask, (0, 1), value=True),
    )


def _attend_run_by_run(query: Tensor, key: Tensor, value: Tensor, rows: _Rows, scoring: _Scoring) -> Tensor:
    """Attention of all rows joined, ``[H, T, D]``, each run of documents as a batch. Returns ``[T, H, Dv]``."""
    repeated_key, repeated_value = _repeat_heads(key[None], value[None], len(query))
    sizes = [run.length * len(run.places) for run in rows.runs]
    # split, whose backward pass is one concatenation: that of slices fills zeros around each
    runs = [
        tensor.split(sizes, dim=1) if len(sizes) > 1 else [tensor]
        for tensor in (query, repeated_key[0], repeated_value[0])
    ]
    outputs: list[Tensor] = []
    for run, *parts in zip(rows.runs, *runs, strict=True):
        # [count, H, length, D]
        documents = [part.unflatten(1, (len(run.places), run.length)).transpose(0, 1) for part in parts]
        if run.first:
            for key_or_value in (1, 2):
                stems = [runs[key_or_value][number][:, start : start + run.first] for number, start in run.stems]
                documents[key_or_value] = torch.cat([torch.stack(stems), documents[key_or_value]], 2)
        run_query, run_key, run_value = documents
        outputs.append(_attend(run_query, run_key, run_value, scoring, run).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _attend_by_flash(query: Tensor, key: Tensor, value: Tensor, rows: _Rows, scoring: _Scoring) -> Tensor:
    """Attention of all rows joined, ``[H, T, D]``, in one call of a CUDA kernel. Returns ``[T, H, Dv]``."""
    queries, keys, values = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return attend_segments(
        queries, keys, values, rows.starts, rows.longest, scoring.scale, causal=True, window=scoring.window
    )


def _has_flash(query: Tensor, scoring: _Scoring) -> bool:
    """Whether torch's CUDA flash kernel can compute this: half precision, widths up to 256, plain scores."""
    if query.device.type != "cuda" or torch.version.hip is not None:
        return False
    if scoring.softcap is not None or scoring.sinks is not None or (scoring.pattern and scoring.window is None):
        return False
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return is_half and query.shape[-1] <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _repeat_heads(key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, Hk, S, D]`` with as many heads as the queries: with fewer, torch does not take its fast CPU
    kernel."""
    count = heads // key.shape[1]
    return (key, value) if count == 1 else (key.repeat_interleave(count, 1), value.repeat_interleave(count, 1))
