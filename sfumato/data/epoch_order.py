"""The order of rows, epoch after epoch: a function of (seed, key, epoch)."""

from __future__ import annotations

import torch

from sfumato.algorithms.noise import keyed_permutation
from sfumato.errors import DataError

MOST_TIMES = 100
"""How often a step may take each row."""


def refuse_repetition(option: str, count: int, num_rows: int) -> None:
    """Raises DataError when a step takes every row so often that it cannot be meant.

    Args:
        option: the configuration field that says how many a step takes.
        count: how many that are.
        num_rows: how many there are.
    """
    if count > MOST_TIMES * num_rows:
        raise DataError(
            f"{option} would make one step of {count:,} samples, which takes each of the {num_rows:,} of the data "
            f"{count // num_rows:,} times: lower it, to at most {MOST_TIMES} times"
        )


class EpochOrder:
    """The numbers below ``count`` over and over, in each epoch in another order: a function of (seed, key, epoch)."""

    def __init__(self, count: int, seed: int, key: str) -> None:
        self.count = count
        self.seed = seed
        self.key = key
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.long)

    def __getitem__(self, position: int) -> int:
        epoch, offset = divmod(position, self.count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, keyed_permutation(self.count, self.seed, self.key, epoch)
        return int(self._order[offset])
