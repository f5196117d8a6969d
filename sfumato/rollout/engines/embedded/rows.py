"""Ways to the logits of the next token of many sequences, by transformers' module as it is.

``CachedRows`` keeps keys and values of sequences of any lengths in one cache, and computes one token of each in one
forward pass. ``GroupedRows`` keeps a cache of transformers' own for the sequences of each length, for models whose
state is more than keys and values, and ``RecomputedRows`` keeps tokens alone and computes whole sequences again. n rows
take part; V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from sfumato.data.media.document_media import MediaRefs, MultimodalInputs, Tensors
from sfumato.models.language.document_rows import SHORT, WORTH_PADDING
from sfumato.models.language.row_cache import COLUMNS, RowCache, cache_argument, register_row_attention
from sfumato.rollout.engines.embedded.forward import Forward

FEWEST_ROWS = 4
"""Rows that take part in a forward pass at least; see ``COLUMNS``."""

RowNumbers = Sequence[int] | np.ndarray
"""Numbers of rows; as an array int64 ``[k]``."""


class Rows(Protocol):
    """Sequences that are being continued, one in each row. Rows 0 to n - 1 are in use."""

    bytes_per_token: int
    """Bytes of memory for each token that a row has room for."""

    def resize(self, num_rows: int, num_columns: int) -> None:
        """Makes room for exactly so many rows of so many tokens. Contents that still fit stay."""
        ...

    def begin(self, first_row: int, contexts: Sequence[Sequence[int]], images: Sequence[MediaRefs | None]) -> None:
        """Puts sequences into rows from ``first_row`` on. Equal sequences are computed once and copied.

        Args:
            first_row: row of the first sequence.
            contexts: token ids of each sequence, at least one. All but the last are computed; that is left to ``step``.
            images: the images in each sequence, before the last token; equal ones must be one object.
        """
        ...

    def step(self, tokens: Tensor, positions: np.ndarray) -> Tensor:
        """Appends a token to each row.

        Args:
            tokens: int64 ``[n]``.
            positions: int64 ``[n]``, of these tokens.

        Returns:
            Logits of the next tokens, ``[n, V]``.
        """
        ...

    def move(self, sources: RowNumbers, targets: RowNumbers, num_columns: int) -> None:
        """Copies the first ``num_columns`` tokens of some rows into others, which lose what they had."""
        ...

    def clear(self) -> None:
        """Frees all memory."""
        ...


class CachedRows:
    """Keeps keys and values of all rows in one cache."""

    def __init__(self, forward: Forward, max_tokens: int, bytes_per_token: int = 0) -> None:
        """
        Args:
            forward: of the module.
            max_tokens: of prompts, in one forward pass; longer ones are computed in several.
            bytes_per_token: if it is known already.
        """
        self._forward = forward
        self._max_tokens = rounded_up(max_tokens)
        self._cache = RowCache()
        self._attention = register_row_attention()
        self._argument = _cache_argument(forward)
        # For each row the rotary position of a new token minus its column: not 0 after images, whose tokens share
        # positions.
        self._ahead = np.zeros(0)
        self.bytes_per_token = bytes_per_token

    def resize(self, num_rows: int, num_columns: int) -> None:
        """See ``Rows``."""
        num_rows = max(num_rows, FEWEST_ROWS)
        self._cache.resize(num_rows, num_columns)
        # Padded first, since ``np.resize`` fills new rows with repetitions.
        self._ahead = np.resize(np.pad(self._ahead, (0, num_rows)), num_rows)

    def begin(self, first_row: int, contexts: Sequence[Sequence[int]], images: Sequence[MediaRefs | None]) -> None:
        """See ``Rows``."""
        row_of: dict[tuple[tuple[int, ...], int], int] = {}
        copies: dict[int, list[int]] = {}
        # Samples of a group have one prompt: it is computed in the first of their rows and copied into the others.
        for row, (context, media) in enumerate(zip(contexts, images, strict=True), first_row):
            key = tuple(context[:-1]), id(media)
            if key in row_of:
                copies.setdefault(row_of[key], []).append(row)
            elif key[0]:
                row_of[key] = row
            self._ahead[row] = 0
        prefixes = [(tokens, row) for (tokens, _), row in row_of.items()]
        for part in _parts_of_similar_length(prefixes, self._max_tokens):
            self._compute(part, [images[row - first_row] for _, row in part])
        lengths = {row: len(tokens) for tokens, row in prefixes}
        pairs = [(source, target) for source, targets in copies.items() for target in targets]
        if pairs:
            longest = max(lengths[source] for source, _ in pairs)
            self.move(*zip(*pairs, strict=True), longest)  # pyright: ignore[reportCallIssue] (pairs have two members)

    def _compute(self, part: list[tuple[tuple[int, ...], int]], images: Sequence[MediaRefs | None]) -> None:
        """Computes keys and values of whole sequences.

        Args:
            part: token ids and row of each sequence. Only a part of one sequence may be longer than ``max_tokens``: it
                is computed in chunks, unless the model is multimodal, whose image tensors go through one pass.
            images: of each sequence.
        """
        device = self._forward.device
        width = rounded_up(max(len(tokens) for tokens, _ in part))
        chunk = self._max_tokens
        inputs = None
        if self._forward.vision is not None:
            chunk = max(chunk, width)
            media = [self._forward.media_of(media_refs) for media_refs in images]
            inputs = self._forward.vision.multimodal_inputs_of_rows([tokens for tokens, _ in part], media, width)
            self._note_positions(part, inputs)
        input_ids = np.zeros((len(part), width), np.int64)
        for index, (tokens, _) in enumerate(part):
            input_ids[index, : len(tokens)] = tokens
        rows = torch.tensor([row for _, row in part], device=device)
        for start in range(0, width, chunk):
            columns = input_ids[:, start : start + chunk]
            end = start + columns.shape[1]
            positions = torch.arange(start, end, device=device).repeat(len(part), 1)
            cached = None
            if start:
                assert len(part) == 1, "long sequences are computed one at a time"
                cached = slice(part[0][1], part[0][1] + 1), end
            self._cache.set_positions(rows, positions, start, cached)
            self._forward_pass(torch.from_numpy(columns).to(device), inputs)

    def _note_positions(self, part: list[tuple[tuple[int, ...], int]], inputs: MultimodalInputs) -> None:
        """Stores how rotary positions go on: after images a token stands, on all axes, behind the largest position."""
        if inputs.rope_positions is not None:
            for (tokens, row), positions in zip(part, inputs.rope_positions, strict=True):
                self._ahead[row] = float(positions[: len(tokens)].max()) + 1 - len(tokens)

    def step(self, tokens: Tensor, positions: np.ndarray) -> Tensor:
        """See ``Rows``."""
        count = len(positions)
        if count < FEWEST_ROWS:  # padded with rows that nobody has taken, so that kernels round alike (``COLUMNS``)
            tokens = functional.pad(tokens, (0, FEWEST_ROWS - count))
            positions = np.pad(positions, (0, FEWEST_ROWS - count))
        rows = torch.arange(len(positions), device=tokens.device)
        cached = slice(0, len(positions)), rounded_up(int(positions.max()) + 1)
        self._cache.set_positions(rows, torch.from_numpy(positions).to(tokens.device)[:, None], None, cached)
        inputs = None
        if self._forward.vision is not None:
            inputs = self._forward.vision.multimodal_inputs_of_rows([[0]] * len(positions), [{}] * len(positions), 1)
            if inputs.rope_positions is not None:
                numbers = positions + self._ahead[: len(positions)]
                rope_positions = torch.from_numpy(numbers).to(inputs.rope_positions.dtype)
                inputs = replace(inputs, rope_positions=rope_positions[:, None, None].expand(-1, 1, 3))
        return self._forward_pass(tokens[:, None], inputs)[:count, -1]

    def _forward_pass(self, input_ids: Tensor, inputs: MultimodalInputs | None) -> Tensor:
        """Logits of a pass for which ``RowCache.set_positions`` has named rows and positions."""
        cache = self._cache
        assert cache.positions is not None, "RowCache.set_positions comes first"
        arguments = self._forward.last_logits | {"position_ids": cache.positions}
        if inputs is not None:
            arguments |= self._forward.media_arguments(input_ids, cache.positions, inputs)
        logits = self._forward(
            input_ids,
            self._attention,
            use_cache=True,
            **arguments,
            **{self._argument: cache},
        )
        self.bytes_per_token = cache.bytes_per_token
        return logits

    def move(self, sources: RowNumbers, targets: RowNumbers, num_columns: int) -> None:
        """See ``Rows``."""
        device = self._forward.device
        self._ahead[list(targets)] = self._ahead[list(sources)]
        self._cache.copy(torch.tensor(sources, device=device), torch.tensor(targets, device=device), num_columns)

    def clear(self) -> None:
        """See ``Rows``."""
        self._cache.clear()


def _cache_argument(forward: Forward) -> str:
    argument = cache_argument(forward.arguments)
    assert argument is not None, "a module that takes no cache has neither rows nor groups of them"
    return argument


@dataclass(eq=False)
class _Group:
    """Sequences of one length, which share a cache of transformers."""

    cache: DynamicCache | None
    """None before their first token."""
    rows: list[int]
    """Row of each sequence in the cache; -1 for one that has left."""
    length: int = 0
    """Tokens in the cache."""


class GroupedRows:
    """Keeps a cache of transformers for the sequences of each length, which may hold any state of the model."""

    def __init__(
        self,
        forward: Forward,
        max_tokens: int,
        attention: str | None,
        gives_positions: bool,
        bytes_per_token: int = 0,
    ) -> None:
        """
        Args:
            forward: of the module.
            max_tokens: of prompts, in one forward pass, but for one that is longer.
            attention: transformers' name of an attention that supports caches; None for the module's own.
            gives_positions: whether positions are passed: some modules do not derive them from the cache, others count
                them in their own way.
            bytes_per_token: if it is known already.
        """
        self._forward = forward
        self._max_tokens = max_tokens
        self._attention = attention
        self._gives_positions = gives_positions
        self._argument = _cache_argument(forward)
        self._groups: list[_Group] = []
        self.bytes_per_token = bytes_per_token

    def resize(self, num_rows: int, num_columns: int) -> None:
        """See ``Rows``. Caches grow by themselves."""

    def begin(self, first_row: int, contexts: Sequence[Sequence[int]], images: Sequence[MediaRefs | None]) -> None:
        """See ``Rows``; there are no images."""
        assert not any(images), "models that see have no groups"
        self._forget(range(first_row, first_row + len(contexts)))
        members: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for row, context in enumerate(contexts, first_row):
            members.setdefault(len(context) - 1, {}).setdefault(tuple(context[:-1]), []).append(row)
        for length, rows_of in sorted(members.items()):
            texts = list(rows_of)
            size = max(self._max_tokens // max(length, 1), 1)
            for start in range(0, len(texts), size):
                part = texts[start : start + size]
                group = _Group(None, [row for text in part for row in rows_of[text]])
                if length:
                    self._forward_pass(group, torch.tensor(part, device=self._forward.device))
                    copies = [index for index, text in enumerate(part) for _ in rows_of[text]]
                    self._select(group, copies)
                self._groups.append(group)

    def step(self, tokens: Tensor, positions: np.ndarray) -> Tensor:
        """See ``Rows``."""
        self._forget(range(len(positions), 1 + max((row for group in self._groups for row in group.rows), default=0)))
        logits: list[Tensor] = []
        order: list[int] = []
        for group in self._groups:
            alive = [index for index, row in enumerate(group.rows) if row >= 0]
            if len(alive) < len(group.rows):
                self._select(group, alive)
                group.rows = [group.rows[index] for index in alive]
            if group.rows:
                rows = torch.tensor(group.rows, device=tokens.device)
                logits.append(self._forward_pass(group, tokens[rows, None])[:, -1])
                order += group.rows
        self._groups = [group for group in self._groups if group.rows]
        return torch.cat(logits)[torch.tensor(order, device=tokens.device).argsort()]

    def _forward_pass(self, group: _Group, input_ids: Tensor) -> Tensor:
        if group.cache is None:
            # Whole-module configuration: it tells the cache which layers are recurrent or have a window.
            group.cache = DynamicCache(config=self._forward.module.config)
        arguments = dict(self._forward.last_logits)
        first = group.length
        group.length = first + input_ids.shape[1]
        if self._gives_positions:
            positions = torch.arange(first, group.length, device=input_ids.device)
            arguments["position_ids"] = positions.expand(input_ids.shape)
        return self._forward(input_ids, self._attention, use_cache=True, **arguments, **{self._argument: group.cache})

    def _select(self, group: _Group, indices: list[int]) -> None:
        """Makes the cache of a group hold these of its sequences, in this order; one may be named several times."""
        if group.cache is not None and indices:
            group.cache.reorder_cache(cast("torch.LongTensor", torch.tensor(indices, device=self._forward.device)))

    def _forget(self, rows: Sequence[int]) -> None:
        """Marks the sequences of these rows as left; the next step removes them from the caches."""
        gone = {*rows}
        for group in self._groups:
            group.rows = [-1 if row in gone else row for row in group.rows]

    def move(self, sources: RowNumbers, targets: RowNumbers, num_columns: int) -> None:
        """See ``Rows``."""
        # First, or the targets' own sequences would pass for those that move there.
        self._forget([int(target) for target in targets])
        new = {int(source): int(target) for source, target in zip(sources, targets, strict=True)}
        for group in self._groups:
            group.rows = [new.get(row, row) for row in group.rows]

    def clear(self) -> None:
        """See ``Rows``."""
        self._groups = []

    @property
    def held_bytes(self) -> int:
        """Bytes of all tensors in all caches."""
        layers = [layer for group in self._groups if group.cache is not None for layer in group.cache.layers]
        return sum(_bytes_of(value) for layer in layers for value in vars(layer).values())


def _bytes_of(value: object) -> int:
    """Bytes of the tensors in a layer's attribute, also within dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        return value.nbytes
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(_bytes_of, parts))


class RecomputedRows:
    """Keeps tokens alone, and computes whole sequences for each token: slow, but right for every causal model."""

    bytes_per_token = 8  # an int64

    def __init__(self, forward: Forward, max_tokens: int) -> None:
        """``max_tokens``: in one forward pass, but for a sequence that is longer."""
        self._forward = forward
        self._max_tokens = max_tokens
        self._tokens = np.zeros((0, 0), np.int64)
        self._media: dict[int, Tensors] = {}

    def resize(self, num_rows: int, num_columns: int) -> None:
        """See ``Rows``."""
        staying = self._tokens[:num_rows, :num_columns]
        self._tokens = np.zeros((num_rows, num_columns), np.int64)
        self._tokens[: staying.shape[0], : staying.shape[1]] = staying

    def begin(self, first_row: int, contexts: Sequence[Sequence[int]], images: Sequence[MediaRefs | None]) -> None:
        """See ``Rows``."""
        # Images of a group are one object, which is opened once.
        distinct = {id(media_refs): media_refs for media_refs in images}.values()
        media = {id(media_refs): self._forward.media_of(media_refs) for media_refs in distinct}
        for row, (context, media_refs) in enumerate(zip(contexts, images, strict=True), first_row):
            self._tokens[row, : len(context)] = context
            self._media[row] = media[id(media_refs)]

    def step(self, tokens: Tensor, positions: np.ndarray) -> Tensor:
        """See ``Rows``."""
        rows = np.arange(len(positions))
        self._tokens[rows, positions] = tokens.cpu().numpy()
        logits: list[Tensor] = []
        order: list[int] = []
        for length in np.unique(positions + 1).tolist():
            same = rows[positions + 1 == length]
            for start in range(0, len(same), max(self._max_tokens // length, 1)):
                part = same[start : start + max(self._max_tokens // length, 1)]
                media = [self._media[row] for row in part.tolist()]
                input_ids = torch.from_numpy(self._tokens[part, :length]).to(tokens.device)
                logits.append(self._forward.last(input_ids, media))
                order += part.tolist()
        return torch.cat(logits)[torch.tensor(order, device=tokens.device).argsort()]

    def move(self, sources: RowNumbers, targets: RowNumbers, num_columns: int) -> None:
        """See ``Rows``."""
        self._tokens[list(targets), :num_columns] = self._tokens[list(sources), :num_columns]
        self._media |= {int(new): self._media[int(old)] for old, new in zip(sources, targets, strict=True)}

    def clear(self) -> None:
        """See ``Rows``."""
        self._tokens = np.zeros((0, 0), np.int64)
        self._media.clear()


def _parts_of_similar_length(
    texts: list[tuple[tuple[int, ...], int]], max_tokens: int
) -> Iterator[list[tuple[tuple[int, ...], int]]]:
    """Divides sequences, given as (token ids, row), into parts of about one length that share a forward pass."""
    ordered = sorted(texts, key=lambda text: (-len(text[0]), text[1]))
    while ordered:
        count = max(max_tokens // rounded_up(len(ordered[0][0])), 1)
        shortest = WORTH_PADDING * len(ordered[0][0])
        part = [text for text in ordered[:count] if len(text[0]) >= shortest or len(ordered[0][0]) <= SHORT]
        yield part
        ordered = ordered[len(part) :]


def rounded_up(length: int) -> int:
    """The next multiple of ``COLUMNS``, at least one."""
    return max(-(-length // COLUMNS), 1) * COLUMNS
