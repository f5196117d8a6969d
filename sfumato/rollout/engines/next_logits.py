"""Two ways to the logits of the next token of many sequences, by transformers' module as it is.

``CachedRows`` keeps keys and values and computes one token a row; ``RecomputedRows`` keeps tokens alone and computes
whole sequences again, those of one length at a time, as recurrent models and others need whose state is no list of
keys. ``choose_rows`` finds out which one gives what the module gives without either. n rows take part; V tokens of the
vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig

from sfumato.models.document_rows import SHORT, WORTH_PADDING, forget_lengths
from sfumato.models.plain import can_set_attention
from sfumato.models.row_cache import RowCache, register_row_attention
from sfumato.rollout.engines.base import EngineError

COLUMNS = 32
"""Columns that are computed, looked at, and kept are multiples of it, and ``FEWEST_ROWS`` rows take part at least: most
CPU kernels then round a row alike whichever rows stand beside it."""

FEWEST_ROWS = 4


class Forward:
    """Forward passes of a module in evaluation mode, without gradients. Afterwards it is as it was."""

    def __init__(self, module: nn.Module, around: Callable[[], AbstractContextManager[object]]) -> None:
        """``around`` makes the context of each forward pass, such as autocast."""
        self.module, self._around = module, around
        self.arguments = inspect.signature(module.forward).parameters
        self.look()

    def look(self) -> None:
        """Looks again at what the module is made of: adapters may have come."""
        # vars, not setattr, which costs a step of a small model a tenth of its time
        self._flags = [vars(submodule) for submodule in self.module.modules()]
        configs = [found["config"] for found in self._flags if isinstance(found.get("config"), PreTrainedConfig)]
        texts = [config.get_text_config() for config in configs]
        self._configs = list({id(config): config for config in [*configs, *texts]}.values())

    @property
    def device(self) -> torch.device:
        """Where the module is now."""
        return self.module.get_input_embeddings().weight.device

    def __call__(self, input_ids: Tensor, attention: str | None = None, **more: object) -> Tensor:
        """Logits of tokens ``[n, q]``, with the module's attention or another one."""
        flags, configs = self._flags, self._configs
        trained = [found["training"] for found in flags]
        attentions = [config._attn_implementation for config in configs]
        for found in flags:
            found["training"] = False
        if attention is not None:
            for config in configs:
                config._attn_implementation = attention
        try:
            with torch.no_grad(), self._around():
                return self.module(input_ids=input_ids, **more).logits
        finally:
            for found, training in zip(flags, trained, strict=True):
                found["training"] = training
            for config, known in zip(configs, attentions, strict=True):
                config._attn_implementation = known

    def last(self, input_ids: Tensor) -> Tensor:
        """Logits of the last tokens ``[n, V]`` of whole sequences ``[n, q]``, nothing cached."""
        forget_lengths(self.module)
        more = {"logits_to_keep": 1} if "logits_to_keep" in self.arguments else {}
        return self(input_ids, use_cache=False, **more)[:, -1]

    def whole(self, input_ids: Tensor) -> Tensor:
        """Logits of all tokens ``[n, q, V]`` of whole sequences, nothing cached."""
        forget_lengths(self.module)
        return self(input_ids, use_cache=False)


class Rows(Protocol):
    """Sequences under way, a row for each; those from 0 to n - 1 take part."""

    bytes_per_token: int
    """Memory that a token of a row costs."""

    def resize(self, num_rows: int, num_columns: int) -> None:
        """Makes room for exactly so many rows of so many tokens. What is there and fits stays."""
        ...

    def begin(self, first_row: int, contexts: Sequence[Sequence[int]]) -> None:
        """Puts sequences into rows from a first one on; equal ones are computed once. At least one token in each; the
        last is left to ``step``."""
        ...

    def step(self, tokens: Tensor, positions: np.ndarray) -> Tensor:
        """Takes the token int64 ``[n]`` of each row, at positions ``[n]``. Returns the next one's logits ``[n, V]``."""
        ...

    def move(self, sources: Sequence[int], targets: Sequence[int], num_columns: int) -> None:
        """Copies rows into others."""
        ...

    def clear(self) -> None:
        """Gives memory back."""
        ...


class CachedRows:
    """Keys and values of all tokens are kept."""

    def __init__(self, forward: Forward, max_tokens: int, bytes_per_token: int = 0) -> None:
        """
        Args:
            forward: of the module.
            max_tokens: of prompts, in one forward pass; longer ones are computed in several.
            bytes_per_token: if it is known already.
        """
        self._forward, self._max_tokens, self._cache = forward, rounded_up(max_tokens), RowCache()
        self._attention = register_row_attention()
        self.bytes_per_token = bytes_per_token

    def resize(self, num_rows: int, num_columns: int) -> None:
        """See ``Rows``."""
        self._cache.resize(max(num_rows, FEWEST_ROWS), num_columns)

    def begin(self, first_row: int, contexts: Sequence[Sequence[int]]) -> None:
        """See ``Rows``."""
        row_of: dict[tuple[int, ...], int] = {}
        copies: dict[int, list[int]] = {}
        for row, context in enumerate(contexts, first_row):
            known = tuple(context[:-1])
            if known in row_of:
                copies.setdefault(row_of[known], []).append(row)
            elif known:
                row_of[known] = row
        for part in _parts(row_of, self._max_tokens):
            self._compute(part)
        lengths = {row: len(tokens) for tokens, row in row_of.items()}
        pairs = [(source, target) for source, targets in copies.items() for target in targets]
        if pairs:
            self.move(*zip(*pairs, strict=True), max(lengths[source] for source, _ in pairs))

    def _compute(self, part: list[tuple[tuple[int, ...], int]]) -> None:
        """Keys and values of sequences from their first token on."""
        device, width = self._forward.device, rounded_up(max(len(tokens) for tokens, _ in part))
        input_ids = np.zeros((len(part), width), np.int64)
        for index, (tokens, _) in enumerate(part):
            input_ids[index, : len(tokens)] = tokens
        rows = torch.tensor([row for _, row in part], device=device)
        for start in range(0, width, self._max_tokens):
            columns = input_ids[:, start : start + self._max_tokens]
            end = start + columns.shape[1]
            positions = torch.arange(start, end, device=device).repeat(len(part), 1)
            seen = None
            if start:
                assert len(part) == 1, "long sequences are computed one at a time"
                seen = slice(part[0][1], part[0][1] + 1), end
            self._cache.take(rows, positions, start, seen)
            self._pass(torch.from_numpy(columns).to(device))

    def step(self, tokens: Tensor, positions: np.ndarray) -> Tensor:
        """See ``Rows``."""
        count = len(positions)
        if count < FEWEST_ROWS:  # more rows, which nobody has taken
            tokens = functional.pad(tokens, (0, FEWEST_ROWS - count))
            positions = np.pad(positions, (0, FEWEST_ROWS - count))
        rows = torch.arange(len(positions), device=tokens.device)
        seen = slice(0, len(positions)), rounded_up(int(positions.max()) + 1)
        self._cache.take(rows, torch.from_numpy(positions).to(tokens.device)[:, None], None, seen)
        return self._pass(tokens[:, None])[:count, -1]

    def _pass(self, input_ids: Tensor) -> Tensor:
        cache = self._cache
        more = {"logits_to_keep": 1} if "logits_to_keep" in self._forward.arguments else {}
        logits = self._forward(
            input_ids,
            self._attention,
            position_ids=cache.positions,
            past_key_values=cache,
            use_cache=True,
            **more,
        )
        self.bytes_per_token = cache.bytes_per_token
        return logits

    def move(self, sources: Sequence[int], targets: Sequence[int], num_columns: int) -> None:
        """See ``Rows``."""
        device = self._forward.device
        self._cache.copy(torch.tensor(sources, device=device), torch.tensor(targets, device=device), num_columns)

    def clear(self) -> None:
        """See ``Rows``."""
        self._cache.clear()


class RecomputedRows:
    """Tokens alone are kept."""

    bytes_per_token = 8

    def __init__(self, forward: Forward, max_tokens: int) -> None:
        """``max_tokens``: in one forward pass, but for a sequence that is longer."""
        self._forward, self._max_tokens = forward, max_tokens
        self._tokens = np.zeros((0, 0), np.int64)

    def resize(self, num_rows: int, num_columns: int) -> None:
        """See ``Rows``."""
        kept = self._tokens[:num_rows, :num_columns]
        self._tokens = np.zeros((num_rows, num_columns), np.int64)
        self._tokens[: kept.shape[0], : kept.shape[1]] = kept

    def begin(self, first_row: int, contexts: Sequence[Sequence[int]]) -> None:
        """See ``Rows``."""
        for row, context in enumerate(contexts, first_row):
            self._tokens[row, : len(context)] = context

    def step(self, tokens: Tensor, positions: np.ndarray) -> Tensor:
        """See ``Rows``."""
        rows = np.arange(len(positions))
        self._tokens[rows, positions] = tokens.cpu().numpy()
        found: list[Tensor] = []
        order: list[int] = []
        for length in np.unique(positions + 1).tolist():
            same = rows[positions + 1 == length]
            for start in range(0, len(same), max(self._max_tokens // length, 1)):
                part = same[start : start + max(self._max_tokens // length, 1)]
                found.append(self._forward.last(torch.from_numpy(self._tokens[part, :length]).to(tokens.device)))
                order += part.tolist()
        return torch.cat(found)[torch.tensor(order, device=tokens.device).argsort()]

    def move(self, sources: Sequence[int], targets: Sequence[int], num_columns: int) -> None:
        """See ``Rows``."""
        self._tokens[list(targets), :num_columns] = self._tokens[list(sources), :num_columns]

    def clear(self) -> None:
        """See ``Rows``."""
        self._tokens = np.zeros((0, 0), np.int64)


def choose_rows(forward: Forward, longest: int, max_tokens: int) -> tuple[Rows, str | None]:
    """The fastest way that gives what the module gives for whole sequences.

    A few sequences of random tokens, short ones and one that is as long as the engine's are, so that windows and
    chunks show, go through both.

    Args:
        forward: of the module.
        longest: tokens of the longest sequence that is tried.
        max_tokens: in one forward pass.

    Returns:
        The way, and why it is not the one with keys and values, if it is not.

    Raises:
        EngineError: when the module computes NaN.
    """
    generator = np.random.default_rng(0)
    size = forward.module.get_input_embeddings().num_embeddings
    lengths = sorted({min(length, longest) for length in (13, 5, 2, longest)})
    texts = [generator.integers(size, size=length).tolist() for length in lengths]
    expected = [forward.last(torch.tensor([text], device=forward.device))[0] for text in texts]
    expected += [forward.last(torch.tensor([text[:-1]], device=forward.device))[0] for text in texts]
    expected_log_probs = torch.stack(expected).float().log_softmax(-1)
    if expected_log_probs.isnan().any():
        raise EngineError(f"{type(forward.module).__name__} computes logits that are not finite: look at its weights")
    half = expected[0].dtype != torch.float32 or any(
        parameter.dtype in (torch.bfloat16, torch.float16) for parameter in forward.module.parameters()
    )
    problem, bytes_per_token = _problem_of_cache(forward, texts, expected_log_probs, 0.15 if half else 2e-4)
    if problem is None:
        return CachedRows(forward, max_tokens, bytes_per_token), None
    return RecomputedRows(forward, max_tokens), problem


def _problem_of_cache(
    forward: Forward, texts: list[list[int]], expected: Tensor, bound: float
) -> tuple[str | None, int]:
    """Why keys and values cannot be kept, if so, and what a token of them costs."""
    name = type(forward.module).__name__
    if not can_set_attention(forward.module):
        return f"{name} has an attention of its own", 0
    if not {"position_ids", "past_key_values"} <= set(forward.arguments):
        return f"{name} takes no position_ids", 0
    rows = CachedRows(forward, len(texts[-1]) // 2)  # the longest is computed in parts
    rows.resize(len(texts), rounded_up(len(texts[-1])))
    try:
        found = []
        rows.begin(0, [text[:-1] for text in texts])
        for last in (2, 1):
            tokens = torch.tensor([text[-last] for text in texts], device=forward.device)
            found.append(rows.step(tokens, np.array([len(text) - last for text in texts])))
    except Exception as error:  # whatever transformers' modules raise
        return f"{name} does not run with keys and values in rows ({type(error).__name__}: {error})", 0
    log_probs = torch.cat([found[1], found[0]]).float().log_softmax(-1)
    apart = (log_probs - expected).abs().masked_fill(log_probs == expected, 0.0)
    far = float(apart.nan_to_num(nan=torch.inf).max())
    if far > bound:
        return f"with keys and values in rows {name} differs from whole sequences by {far:.2g} in a log-probability", 0
    return None, rows.bytes_per_token


def _parts(row_of: dict[tuple[int, ...], int], max_tokens: int) -> Iterator[list[tuple[tuple[int, ...], int]]]:
    """Sequences that share a forward pass, those of about one length."""
    ordered = sorted(row_of.items(), key=lambda text: (-len(text[0]), text[1]))
    while ordered:
        count = max(max_tokens // rounded_up(len(ordered[0][0])), 1)
        shortest = WORTH_PADDING * len(ordered[0][0])
        part = [text for text in ordered[:count] if len(text[0]) >= shortest or len(ordered[0][0]) <= SHORT]
        yield part
        ordered = ordered[len(part) :]


def rounded_up(length: int) -> int:
    return max(-(-length // COLUMNS), 1) * COLUMNS
