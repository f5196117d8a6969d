"""Which samples each step trains on: those that follow each other up to a limit, from any position in the data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np

from sfumato.data.mixing import Order
from sfumato.data.text import TextSample
from sfumato.data.token_store import TokenStore

State = dict[str, Any]
"""Where a run is in its data, as JSON: ``step``, ``samples`` and ``tokens`` that it has used; a stream adds more."""


@dataclass(frozen=True)
class StepRule:
    """How many samples a step takes. It takes one at least."""

    limit: int
    """Tokens, or samples."""
    by_tokens: bool


@dataclass(frozen=True)
class RunLength:
    """When the data of a run ends: the first of these that is set says."""

    steps: int | None
    tokens: int | None
    """The run ends with the step in which so many have been used."""
    epochs: int

    def is_over(self, state: State) -> bool:
        """Whether no step follows, as far as steps and tokens say."""
        if self.steps is not None:
            return state["step"] >= self.steps
        return self.tokens is not None and state["tokens"] >= self.tokens


@dataclass(frozen=True)
class Step:
    """The samples of one step."""

    document_lengths: np.ndarray
    """Tokens of each document, int64 ``[n, documents_per_sample]``."""
    sources: list[int]
    """Number of the source of each sample."""
    read: Callable[[int], TextSample]
    """A sample by its position in the step."""
    epoch_ended: bool
    """Whether an epoch ended within the step."""
    after: State
    """Where the run is when the step is done."""


class Steps(Protocol):
    """The steps of a run, whatever the data lies in."""

    fingerprint: str
    """Identifies the samples and their order."""
    num_samples: int | None
    """Samples of the data; None when they are not counted."""
    tokens_per_epoch: int | None
    """Tokens of the first epoch."""

    def num_steps(self, state: State) -> int:
        """Steps that are left of the run."""
        ...

    def begin(self) -> State:
        """Where a run starts."""
        ...

    def epochs(self, state: State) -> int:
        """Epochs that are through at a state."""
        ...

    def steps(self, state: State) -> Iterator[Step]:
        """The steps that are left of the run."""
        ...


class StoreSteps:
    """Steps over the samples of a store."""

    def __init__(self, store: TokenStore, order: Order, fingerprint: str, rule: StepRule, length: RunLength) -> None:
        self.store, self.order, self.fingerprint = store, order, fingerprint
        self.rule, self.length = rule, length
        self.num_samples = len(store)
        self.tokens_per_epoch = int(store.lengths[order.epoch(0)].sum())

    def begin(self) -> State:
        """Where a run starts."""
        return {"step": 0, "samples": 0, "tokens": 0}

    def num_steps(self, state: State) -> int:
        """Steps that are left of the run, counted."""
        if self.length.steps is not None:
            return max(self.length.steps - state["step"], 0)
        return sum(1 for _ in self._cuts(state))

    def epochs(self, state: State) -> int:
        """Epochs that are through at a state."""
        return self.order.locate(state["samples"])[0]

    def steps(self, state: State) -> Iterator[Step]:
        """The steps that are left of the run."""
        for indices, epoch_ended, after in self._cuts(state):
            yield Step(
                document_lengths=self.store.document_lengths[indices],
                sources=self.store.source_of[indices].tolist(),
                read=lambda position, indices=indices: self.store.sample(int(indices[position])),
                epoch_ended=epoch_ended,
                after=after,
            )

    def _cuts(self, state: State) -> Iterator[tuple[np.ndarray, bool, State]]:
        """Sample indices of each step, whether an epoch ended in it, and the state after it."""
        lengths = self.store.lengths
        sizes = lengths if self.rule.by_tokens else np.broadcast_to(np.int64(1), len(lengths))
        ahead = _Ahead(self._epochs(state["samples"]), sizes)
        while not self.length.is_over(state):
            indices, epoch_ended = ahead.take(self.rule.limit)
            if len(indices) == 0:
                return
            state = {
                "step": state["step"] + 1,
                "samples": state["samples"] + len(indices),
                "tokens": state["tokens"] + int(lengths[indices].sum()),
            }
            yield indices, epoch_ended, state

    def _epochs(self, position: int) -> Iterator[np.ndarray]:
        """Sample indices from a position on, epoch by epoch; without an end when steps or tokens end the run."""
        first, offset = self.order.locate(position)
        endless = self.length.steps is not None or self.length.tokens is not None
        for number in count(first) if endless else range(first, self.length.epochs):
            yield self.order.epoch(number)[offset:]
            offset = 0


class _Ahead:
    """The samples that come next, whole epochs at a time."""

    def __init__(self, epochs: Iterator[np.ndarray], sizes: np.ndarray) -> None:
        """``sizes`` are what each sample of the data counts."""
        self._epochs, self._sizes = epochs, sizes
        self._indices = self._filled = np.empty(0, np.int64)
        self._next = 0
        self._ends: deque[int] = deque()  # where epochs end in the indices

    def take(self, limit: int) -> tuple[np.ndarray, bool]:
        """The samples up to a limit, one at least, and whether the last one of an epoch is among them."""
        used = self._fill(limit)
        stop = max(int(np.searchsorted(self._filled, used + limit, side="right")), self._next + 1)
        taken = self._indices[self._next : stop]
        self._next += len(taken)
        epoch_ended = False
        while self._ends and self._ends[0] <= self._next:
            self._ends.popleft()
            epoch_ended = True
        return taken, epoch_ended

    def _fill(self, limit: int) -> int:
        """Sees to more than ``limit`` ahead, if there is so much. Returns what the samples before the next count."""
        used = int(self._filled[self._next - 1]) if self._next else 0
        ahead = (int(self._filled[-1]) if len(self._filled) else 0) - used
        fresh = []
        while ahead <= limit and (epoch := next(self._epochs, None)) is not None:
            ahead += int(self._sizes[epoch].sum())
            fresh.append(epoch)
        if not fresh:
            return used
        end = len(self._indices) - self._next
        self._ends = deque(end - self._next for end in self._ends)
        for epoch in fresh:
            end += len(epoch)
            self._ends.append(end)
        self._indices, self._next = np.concatenate([self._indices[self._next :], *fresh]), 0
        self._filled = np.cumsum(self._sizes[self._indices])
        return 0
