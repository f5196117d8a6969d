"""The order of rows, epoch after epoch: a function of (seed, key, epoch)."""

from __future__ import annotations

import torch

from sfumato.algorithms.noise import keyed_permutation
from sfumato.errors import DataError

MOST_TIMES = 100
"""How often a step may take each row at most."""


def refuse_repetition(option: str, count: int, num_rows: int) -> None:
    """Raises DataError when a step takes every row so often that the configuration must be a mistake.

    Args:
        option: the configuration field that says how many samples a step takes.
        count: samples of one step.
        num_rows: rows of the data.
    """
    if count > MOST_TIMES * num_rows:
        raise DataError(
            f"{option} would make one step of {count:,} samples, which takes each of the {num_rows:,} of the data "
            f"{count // num_rows:,} times: lower it, to at most {MOST_TIMES} times"
        )


class EpochOrder:
    """An endless sequence of the numbers below ``count``, shuffled anew in each epoch by (seed, key, epoch).

    Position ``i`` is in epoch ``i // count``. The order of the epoch that was asked for last is kept, so that access in
    order is cheap.
    """

    def __init__(self, count: int, seed: int, key: str) -> None:
        self.count = count
        self.seed = seed
        self.key = key
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.long)

    def __getitem__(self, position: int) -> int:
        epoch, offset = divmod(position, self.count)
        if epoch != self._epoch:
            self._order = keyed_permutation(self.count, self.seed, self.key, epoch)
            self._epoch = epoch
        return int(self._order[offset])
