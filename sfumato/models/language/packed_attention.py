"""Causal attention of packed rows: within each document only, so that a row of many costs what they cost alone.

It plugs in at transformers' attention interface. Where documents begin follows from the position ids, which models
hand down to their attention. A document whose first position p is not 0 is a branch: it goes on after the first p
tokens of the last document of its row that does begin at 0, and sees these, so that answers to a prompt share it. A
layer's window, chunks or other pattern comes from the function that transformers would make a mask of; soft caps (Gemma
2, arXiv 2408.00118) and attention sinks (gpt-oss, arXiv 2508.10925) are arguments of the call. No mask over a whole row
is made. On CUDA in half precision it is one call of torch's flash kernel for sequences of different lengths, elsewhere
torch's attention for each run of documents of one length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from sfumato.algorithms.device import on_host, to_device
from sfumato.errors import ConfigError
from sfumato.parallel.kernels import packed_causal
from sfumato.parallel.positions import document_bounds, lengths_between

ATTENTION = "sfumato_packed"
"""Name in transformers' registries."""

OTHERS = "set model.attention to sdpa"


def register_packed_attention() -> str:
    """Makes the attention known to transformers. Returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    known = ("softcap", "s_aux")
    AttentionInterface.register(ATTENTION, packed_causal(_attention, "the attention of packed rows", OTHERS, known))
    AttentionMaskInterface.register(ATTENTION, torch.compiler.disable(_noted_pattern))
    return ATTENTION


class MaskWatch:
    """Which masks a model asks transformers for. Plain causal ones need not be asked for.

    To make any mask, transformers looks at the position ids, for which a device is waited. A model asks for the same
    kinds of masks in each pass: where all of a first one are plain, the mask function is taken out of transformers'
    registry during the others, so that none is made.
    """

    def __init__(self) -> None:
        self._are_plain: bool | None = None
        self._patterns: list[Pattern | None] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass of packed rows."""
        global _watching
        from transformers import AttentionMaskInterface

        if self._are_plain:
            function = AttentionMaskInterface._global_mapping.pop(ATTENTION)
            try:
                yield
            finally:
                AttentionMaskInterface._global_mapping[ATTENTION] = function
            return
        before, _watching, self._patterns = _watching, self, []
        try:
            yield
        finally:
            _watching = before
        if self._are_plain is None and self._patterns:
            self._are_plain = not any(self._patterns)

    def note(self, pattern: Pattern | None) -> None:
        """A mask was asked for."""
        self._patterns.append(pattern)


_watching: MaskWatch | None = None


def _noted_pattern(*, q_length: int, **kwargs: Any) -> Pattern | None:
    """``_pattern``, of which a watch is told. Of a row of one token nothing follows."""
    found = _pattern(q_length=q_length, **kwargs)
    if _watching is not None and q_length > 1:
        _watching.note(found)
    return found


class Pattern:
    """Which tokens of its document a token sees, where that is not simply all up to itself."""

    def __init__(self, sees: Callable[..., Tensor], local_size: int | None) -> None:
        """
        Args:
            sees: transformers' mask function of (row, head, query, key), indices within packed rows, to bool; they
                broadcast.
            local_size: documents of at most so many tokens are plainly causal; None when it is not known.
        """
        self.sees, self.local_size = sees, local_size

    def is_causal_for(self, length: int) -> bool:
        """Whether a document of this length is too short to notice the pattern."""
        return self.local_size is not None and length <= self.local_size

    def mask(self, documents: _Run) -> Tensor:
        """Who sees whom in documents of one length L: bool ``[1 or count, 1, L, L]``."""
        places = torch.arange(documents.length, device=documents.device)
        # a local pattern is the same in each document
        found = [
            _ask(self.sees, row, start + places[:, None], start + places[None])
            for row, start in (documents.places if self.local_size is None else documents.places[:1])
        ]
        return torch.stack(found)[:, None]

    def first_seen(self, documents: _Run) -> int:
        """Of a document longer than ``local_size``, the first token that its token number ``local_size`` sees: 1 for a
        window, ``local_size`` for chunks."""
        row, start = documents.places[0]
        places = torch.arange(documents.length, device=_device_of(self.sees, documents.device))
        return int(_ask(self.sees, row, start + places[self.local_size], start + places).int().argmax())


def _ask(sees: Callable[..., Tensor], row: int, query: Tensor, key: Tensor) -> Tensor:
    row_index, first_head = torch.full((), row, device=query.device), torch.zeros_like(query.flatten()[0])
    return sees(row_index, first_head, query, key)


def _is_plain(sees: Callable[..., Tensor]) -> bool:
    """Whether a mask function of transformers is that of causal attention, nothing else."""
    from transformers.masking_utils import causal_mask_function

    return sees is causal_mask_function


def _device_of(sees: Callable[..., Tensor], device: torch.device | str) -> torch.device | str:
    """Where a mask function can be asked: on the host, which no device is waited for, unless it knows tensors."""
    cells = [cell.cell_contents for cell in getattr(sees, "__closure__", None) or ()]
    inner = [each for cell in cells for each in (cell if isinstance(cell, list | tuple) else [cell])]
    if any(isinstance(each, Tensor) for each in inner):
        return device
    found = {str(_device_of(each, device)) for each in inner if callable(each)}
    return device if found - {"cpu"} else "cpu"


def _pattern(
    *,
    q_length: int,
    mask_function: Callable[..., Tensor],
    local_size: int | None = None,
    use_vmap: bool = False,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Pattern | None:
    """transformers' mask function: None for plain causal attention, else what stands in for a mask."""
    if attention_mask is not None and not attention_mask.all():
        raise ConfigError("packed rows have no padding mask: padding stands at the end of rows, with labels -100")
    if q_length == 1:
        return None
    if use_vmap:  # a function of the model's own
        return Pattern(mask_function, None)
    if _is_plain(mask_function):
        return None if local_size is None else Pattern(mask_function, local_size)
    places = torch.arange(q_length, device=_device_of(mask_function, device))
    if _ask(mask_function, 0, places[:-1], places[1:]).any():
        raise ConfigError("attention to later tokens is unknown to the attention of packed rows")
    return None if local_size is None else Pattern(mask_function, local_size)


@dataclass(frozen=True)
class _Run:
    """Neighbouring documents of one length and first position."""

    length: int
    places: tuple[tuple[int, int], ...]
    """Row and first token of each."""
    device: torch.device
    first: int = 0
    """Tokens that each sees before its own."""
    stems: tuple[tuple[int, int], ...] = ()
    """Where these stand, if there are any: for each document a run, and the first token of the stem within that run."""

    @cached_property
    def seen(self) -> Tensor:
        """Which keys of a branch a token sees, those before it and its own: bool ``[1, 1, L, first + L]``."""
        everything = torch.ones(self.length, self.first + self.length, dtype=torch.bool, device=self.device)
        return everything.tril(self.first)[None, None]


class _Rows:
    """The documents of a batch of rows, worked out once for all layers."""

    def __init__(self, position_ids: Tensor, chunk: int | None = None) -> None:
        width = position_ids.shape[1]
        bounds = document_bounds(position_ids, chunk)  # each chunk is a document of its own
        rows = [lengths_between(row_bounds) for row_bounds in bounds]
        positions = on_host(position_ids)
        self.whole = all(row == [width] for row in rows)
        """Whether each row is one document."""
        lengths = [length for row in rows for length in row]
        places = [(index, start) for index, row_bounds in enumerate(bounds) for start in row_bounds[:-1]]
        firsts = [0 if chunk or self.whole else int(positions[place]) for place in places]
        self.has_branches = any(firsts)
        counts = [(key, len([*same])) for key, same in groupby(zip(lengths, firsts, strict=True))]
        ends = [*accumulate(count for _, count in counts)]
        stems = _stems(places, lengths, firsts, ends) if self.has_branches else [()] * len(places)
        self.runs = [
            _Run(length, tuple(places[end - count : end]), position_ids.device, first, tuple(stems[end - count : end]))
            for ((length, first), count), end in zip(counts, ends, strict=True)
        ]
        """Neighbouring documents of one length and first position, over all rows."""
        self.longest = max(lengths)
        self._lengths, self._device = lengths, position_ids.device

    @cached_property
    def starts(self) -> Tensor:
        """The first token of each document in all rows together, and the number of tokens: int32."""
        starts = torch.tensor([0, *self._lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return to_device(starts, self._device)


def _stems(
    places: list[tuple[int, int]], lengths: list[int], firsts: list[int], ends: list[int]
) -> list[tuple[int, int]]:
    """For each document the run and the place in it of the last one before it in its row that begins at position 0."""
    found: list[tuple[int, int]] = []
    run, begins, stem = 0, 0, 0
    for number, (length, first) in enumerate(zip(lengths, firsts, strict=True)):
        if number == ends[run]:
            run, begins = run + 1, number
        if first == 0:
            stem = number
            found.append((run, (number - begins) * length))
        elif firsts[stem] or places[stem][0] != places[number][0] or lengths[stem] < first:
            raise ConfigError(f"a packed row has a document from position {first} on that goes on after no other")
        else:
            found.append(found[stem])
    return found


class _Scoring(NamedTuple):
    """What becomes of the products of queries and keys before they are weights."""

    scale: float
    pattern: Pattern | None = None
    window: int | None = None
    """Tokens that a token sees, itself among them, where that is the pattern."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """``[H]``: a score that takes weight from all others and brings no value."""


_rows: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _rows_of(position_ids: Tensor, chunk: int | None = None) -> _Rows:
    known = _rows.setdefault(position_ids, {})
    if chunk not in known:
        known[chunk] = _Rows(position_ids, chunk)
    return known[chunk]


def _attention(
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
    """Attention of all rows, see ``packed_causal``."""
    rows, scoring = _rows_of(position_ids), _Scoring(scale, softcap=softcap, sinks=s_aux)
    long = [] if pattern is None else [run for run in rows.runs if not pattern.is_causal_for(run.first + run.length)]
    if long and rows.has_branches:
        raise ConfigError(
            "documents that share a prompt need plainly causal attention: set train.share_prompts to false"
        )
    if long:
        size = pattern.local_size
        first_seen = None if size is None else pattern.first_seen(long[0])
        if size is not None and first_seen == size:
            rows = _rows_of(position_ids, size)
        else:
            scoring = scoring._replace(pattern=pattern, window=size if first_seen == 1 else None)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as torch's own attention does
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    if rows.whole:  # one row of position ids may stand for all
        if scoring.pattern is not None or not _has_flash(query, scoring):  # which groups heads itself
            key, value = _repeated(key, value, query.shape[1])
        return _attend(query, key, value, scoring, rows.runs[0]).transpose(1, 2)
    joined = [tensor.transpose(0, 1).flatten(1, 2) for tensor in (query, key, value)]  # [H, B S, D]
    compute = _flash if _has_flash(query, scoring) and not rows.has_branches else _in_turn
    return compute(*joined, rows, scoring).view(query.shape[0], query.shape[2], query.shape[1], -1)


def _attend(query: Tensor, key: Tensor, value: Tensor, scoring: _Scoring, documents: _Run) -> Tensor:
    """Attention within documents [count, H, L, D]. Values as wide as keys: with others torch keeps whole score
    matrices."""
    pattern, mask = scoring.pattern, None
    if documents.first:
        mask = documents.seen
    elif pattern is not None and not pattern.is_causal_for(documents.length):
        mask = pattern.mask(documents)
    if scoring.softcap is not None or scoring.sinks is not None:
        length = documents.length
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril() if mask is None else mask
    if scoring.softcap is not None:
        return _attend_capped(query, key, value, mask, scoring)
    if scoring.sinks is not None:
        query, key, value, mask = _with_sinks(query, key, value, mask, scoring)
    own, width = value.shape[-1], query.shape[-1]
    is_grouped = key.shape[1] != query.shape[1]
    out = functional.scaled_dot_product_attention(
        query, key, _widened(value, width), mask, is_causal=mask is None, scale=scoring.scale, enable_gqa=is_grouped
    )
    return out[..., :own] if own != width else out


def _attend_capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: _Scoring) -> Tensor:
    """Scores are ``cap tanh(score / cap)``; keeps whole score matrices, in float32."""
    scores = scoring.softcap * torch.tanh((query @ key.mT).float() * (scoring.scale / scoring.softcap))
    scores = scores.masked_fill(~mask, -torch.inf)
    if scoring.sinks is not None:
        scores = torch.cat([scores, scoring.sinks.float().view(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: _Scoring
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One more key that all see, whose score is the sink's: a feature that is 1 in queries and 0 in all other keys."""
    sink = (scoring.sinks / scoring.scale).to(key.dtype).view(-1, 1, 1).expand(*key.shape[:2], 1, 1)
    key = functional.pad(key, (0, 1))
    last = torch.cat([key.new_zeros(*key.shape[:2], 1, key.shape[-1] - 1), sink], -1)
    query = torch.cat([query, torch.ones_like(query[..., :1])], -1)
    return (
        query,
        torch.cat([key, last], 2),
        functional.pad(value, (0, 0, 0, 1)),
        functional.pad(mask, (0, 1), value=True),
    )


def _in_turn(query: Tensor, key: Tensor, value: Tensor, rows: _Rows, scoring: _Scoring) -> Tensor:
    """Each run of documents of one length is a batch. Returns [T, H, Dv]."""
    key, value = _repeated(key[None], value[None], len(query))
    sizes = [run.length * len(run.places) for run in rows.runs]
    # split, whose backward pass is one concatenation: that of slices fills zeros around each
    runs = [tensor.split(sizes, dim=1) if len(sizes) > 1 else [tensor] for tensor in (query, key[0], value[0])]
    found = []
    for run, *parts in zip(rows.runs, *runs, strict=True):
        # [count, H, length, D]
        documents = [part.unflatten(1, (len(run.places), run.length)).transpose(0, 1) for part in parts]
        if run.first:
            for which in (1, 2):
                stems = [runs[which][number][:, start : start + run.first] for number, start in run.stems]
                documents[which] = torch.cat([torch.stack(stems), documents[which]], 2)
        found.append(_attend(*documents, scoring, run).transpose(1, 2).flatten(0, 1))
    return torch.cat(found) if len(found) > 1 else found[0]


def _flash(query: Tensor, key: Tensor, value: Tensor, rows: _Rows, scoring: _Scoring) -> Tensor:
    """All documents in one call of a CUDA kernel. Returns [T, H, Dv]."""
    width, own = max(query.shape[-1], value.shape[-1]), value.shape[-1]
    width += -width % 8
    inputs = [_widened(tensor.transpose(0, 1), width) for tensor in (query, key, value)]
    longest = rows.longest
    window = {} if scoring.window is None else {"window_size_left": scoring.window - 1, "window_size_right": 0}
    out = torch.ops.aten._flash_attention_forward(
        *inputs, rows.starts, rows.starts, longest, longest, 0.0, True, False, scale=scoring.scale, **window
    )
    return out[0][..., :own]


def _has_flash(query: Tensor, scoring: _Scoring) -> bool:
    if query.device.type != "cuda" or torch.version.hip is not None:
        return False
    if scoring.softcap is not None or scoring.sinks is not None or (scoring.pattern and scoring.window is None):
        return False
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and query.shape[-1] <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _widened(tensor: Tensor, width: int) -> Tensor:
    """Zeros beside what is narrower; padding by nothing would copy."""
    return tensor if tensor.shape[-1] == width else functional.pad(tensor, (0, width - tensor.shape[-1]))


def _repeated(key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as queries: with fewer, torch's CPU kernel is not taken."""
    count = heads // key.shape[1]
    return (key, value) if count == 1 else (key.repeat_interleave(count, 1), value.repeat_interleave(count, 1))
