"""The endless order of samples of one or several sources, which depends on the data and the seed alone."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import count, repeat
from typing import Literal

import numpy as np

from sfumato.algorithms.noise import keyed_permutation
from sfumato.errors import DataError

MAX_EPOCH = 10**9
"""Most samples of an epoch of weighted sources, which is planned in memory as a whole."""

BLOCK = 1 << 16
"""Samples of a source whose lengths are looked up in one numpy call."""


class Mixer:
    """Chooses the source of the next sample so that no source is ever a whole sample ahead of or behind its share.

    Among the sources that would not get too far ahead, it chooses the one that would be too far behind first (the rule
    for the chairman assignment problem, Tijdeman 1980). Where shares are of tokens, the bound holds for samples of the
    mean length.
    """

    def __init__(self, weights: Sequence[float], taken: Sequence[int] | None = None, num_samples: int = 0) -> None:
        """Starts at the beginning, or at the state of another mixer.

        Args:
            weights: positive, one for each source; their sum does not matter.
            taken: amount that each source has given so far, in samples or tokens.
            num_samples: samples that all sources have given.
        """
        self.taken = [0] * len(weights) if taken is None else list(taken)
        self._fractions = [weight / sum(weights) for weight in weights]
        self._total = sum(self.taken)
        self._num_samples = num_samples

    def choose(self) -> int:
        """The number of the source whose turn it is."""
        unit = self._total / self._num_samples if self._num_samples else 1.0
        least = unit / (2 * len(self.taken))
        chosen = 0
        first = float("inf")
        for source, fraction in enumerate(self._fractions):
            lacks = fraction * (self._total + unit) - self.taken[source]  # behind its share after the next sample
            if lacks >= least and (unit - least - lacks) / fraction < first:
                chosen = source
                first = (unit - least - lacks) / fraction
        return chosen

    def add(self, source: int, amount: int) -> None:
        """Adds the amount of the sample that a source has given."""
        self.taken[source] += amount
        self._total += amount
        self._num_samples += 1


class Order:
    """Epochs of sample indices. Each source goes through its samples in passes, each in an order of its own.

    A source that does not get to its end in an epoch goes on in the next one, so it never repeats a sample before it
    has given all.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        source_of: np.ndarray,
        names: Sequence[str],
        weights: Sequence[float] | None,
        level: Literal["sample", "token"],
        stopping: Literal["first_exhausted", "all_exhausted"],
        seed: int,
        shuffle: bool,
    ) -> None:
        """Plans nothing yet.

        Args:
            lengths: tokens of each sample, int64 ``[N]``.
            source_of: number of its source, integers ``[N]``; every source has samples.
            names: names of the sources.
            weights: their shares; None goes through all samples of all sources as through one.
            level: what is shared: samples or tokens.
            stopping: whether an epoch ends when one source, or every source, has come to the end of a pass. Sources
                that are through before begin again.
            seed: key of the order.
            shuffle: false keeps the order of the samples within a source.

        Raises:
            DataError: when an epoch would have more than ``MAX_EPOCH`` samples.
        """
        self.lengths = lengths
        self.level = level
        self.stopping = stopping
        self.seed = seed
        self.shuffle = shuffle
        self._mixed = weights is not None
        self._weights = [1.0] if weights is None else list(weights)
        if self._mixed:
            self._members = [np.flatnonzero(source_of == source) for source in range(len(self._weights))]
            self._check_size(names)
        else:
            self._members = [np.arange(len(lengths))]
        self._passes: dict[int, tuple[int, np.ndarray]] = {}
        self._epoch: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        self._starts = [([0] * len(self._members), [0] * len(self._members))]
        """What each source has given before each epoch that is known: in the unit of the shares, and in samples."""

    def epoch(self, number: int) -> np.ndarray:
        """Sample indices of an epoch in order, int64 ``[n]``. With weights, epochs before it are planned first."""
        if not self._mixed:
            return self._permute_pass(0, number)
        while self._epoch[0] != number:
            planned = min(number, len(self._starts) - 1)
            self._epoch = planned, self._mix(planned)
        return self._epoch[1]

    def locate(self, position: int) -> tuple[int, int]:
        """The epoch of a position in the run, and the position within it."""
        if not self._mixed:
            return divmod(position, len(self.lengths))
        number = 0
        while True:
            if number + 1 == len(self._starts):
                self.epoch(number)
            start, end = (sum(num_given) for _, num_given in self._starts[number : number + 2])
            if position < end:
                return number, position - start
            number += 1

    def _mix(self, number: int) -> np.ndarray:
        """Sample indices of an epoch of weighted sources, int64 ``[n]``; stores where the next epoch starts.

        Args:
            number: of the epoch; all epochs before it have been planned.
        """
        taken, num_given = self._starts[number]
        mixer = Mixer(self._weights, taken, sum(num_given))
        sizes = [len(members) for members in self._members]
        amounts = [self._sample_amounts(source, start) for source, start in enumerate(num_given)]
        num_left = [size - start % size for size, start in zip(sizes, num_given, strict=True)]
        passes = [start // size for size, start in zip(sizes, num_given, strict=True)]
        reached = max if self.stopping == "first_exhausted" else min
        pattern = array("H")
        while True:
            source = mixer.choose()
            mixer.add(source, next(amounts[source]))
            pattern.append(source)
            num_left[source] -= 1
            if num_left[source] == 0:
                num_left[source] = sizes[source]
                passes[source] = passes[source] + 1
                if reached(passes) > number:
                    break
        sources = np.frombuffer(pattern, np.uint16)
        order = np.empty(len(sources), np.int64)
        num_given_after = list(num_given)
        for source, start in enumerate(num_given):
            places = np.flatnonzero(sources == source)
            num_given_after[source] += len(places)
            order[places] = self._run_of(source, start, num_given_after[source])
        if len(self._starts) == number + 1:
            self._starts.append((mixer.taken, num_given_after))
        return order

    def _sample_amounts(self, source: int, start: int) -> Iterator[int]:
        """The amount of each sample of a source, from a position in its passes on, without end: 1, or its tokens."""
        if self.level == "sample":
            yield from repeat(1)
        size = len(self._members[source])
        for number in count(start // size):
            members = self._permute_pass(source, number)[max(start - number * size, 0) :]
            for begin in range(0, len(members), BLOCK):
                yield from self.lengths[members[begin : begin + BLOCK]].tolist()

    def _run_of(self, source: int, start: int, stop: int) -> np.ndarray:
        """Sample indices of a source between two positions in its passes."""
        size = len(self._members[source])
        parts = [
            self._permute_pass(source, number)[max(start - number * size, 0) : stop - number * size]
            for number in range(start // size, -(-stop // size))
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _permute_pass(self, source: int, number: int) -> np.ndarray:
        """Sample indices of one pass through a source."""
        members = self._members[source]
        if not self.shuffle:
            return members
        if self._passes.get(source, (-1,))[0] != number:
            permutation = keyed_permutation(len(members), self.seed, "text order", source, number).numpy()
            self._passes[source] = number, members[permutation]
        return self._passes[source][1]

    def _check_size(self, names: Sequence[str]) -> None:
        """Raises DataError when an epoch would have more than ``MAX_EPOCH`` samples; ``names`` are the sources'."""
        by_tokens = self.level == "token"
        amounts = [int(self.lengths[members].sum()) if by_tokens else len(members) for members in self._members]
        needed = [amount / weight for amount, weight in zip(amounts, self._weights, strict=True)]
        epoch = min(needed) if self.stopping == "first_exhausted" else max(needed)
        size = sum(len(members) * epoch / need for members, need in zip(self._members, needed, strict=True))
        if size > MAX_EPOCH:
            raise DataError(
                f"with these weights an epoch would have {size:.2g} samples until source "
                f"{names[needed.index(max(needed))]!r} has given all: raise its weight, or set stopping_strategy to "
                "first_exhausted"
            )
