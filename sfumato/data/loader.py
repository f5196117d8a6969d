"""Batches of rows in an order that is a function of (seed, epoch); the position is the number of steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sfumato.algorithms.noise import keyed_permutation
from sfumato.config.sections import EpochTrainConfig
from sfumato.errors import DataError
from sfumato.parallel.mesh import Mesh


@dataclass(frozen=True)
class IndexBatch:
    """Rows of one micro-batch."""

    indices: list[int]
    """Row numbers in the dataset."""
    sample_ids: list[int]
    """Positions in the stream of all samples of the run, from which their noise is keyed."""


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
        self.count, self.seed, self.key = count, seed, key
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def __getitem__(self, position: int) -> int:
        epoch, offset = divmod(position, self.count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, keyed_permutation(self.count, self.seed, self.key, epoch)
        return int(self._order[offset])


class IndexLoader:
    """Which rows each step trains on, the same whatever the number of processes and the micro-batch size."""

    def __init__(self, num_rows: int, train: EpochTrainConfig, mesh: Mesh) -> None:
        """Plans the run: ``max_steps`` steps, or those that the epochs fill, without a last incomplete one.

        Args:
            num_rows: rows of the dataset.
            train: the task's section.
            mesh: the ranks.

        Raises:
            DataError: when there are fewer rows than a step needs and no max_steps, or a step takes each row over
                ``MOST_TIMES`` times.
        """
        self.global_batch_size = train.global_batch_size or train.micro_batch_size * mesh.data_size
        self.total_steps = train.max_steps or num_rows * train.num_train_epochs // self.global_batch_size
        if self.total_steps == 0:
            raise DataError(
                f"{train.num_train_epochs} epochs of {num_rows} rows do not fill one step of train.global_batch_size "
                f"{self.global_batch_size}: lower it, or set train.max_steps"
            )
        refuse_repetition("train.global_batch_size", self.global_batch_size, num_rows)
        self._micro_batch_size, self._rank, self._num_ranks = train.micro_batch_size, mesh.data_rank, mesh.data_size
        self._rows = EpochOrder(num_rows, train.seed, "order")

    def steps(self, from_step: int = 0) -> Iterator[tuple[int, list[IndexBatch]]]:
        """Steps with this rank's micro-batches. ``from_step`` steps are passed over without reading data."""
        for step in range(from_step, self.total_steps):
            yield step, self.micro_batches(step)

    def micro_batches(self, step: int) -> list[IndexBatch]:
        """This rank's micro-batches of a step: contiguous parts of the step's samples."""
        per_rank = self.global_batch_size // self._num_ranks
        first = step * self.global_batch_size + self._rank * per_rank
        batches = []
        for start in range(first, first + per_rank, self._micro_batch_size):
            ids = list(range(start, min(start + self._micro_batch_size, first + per_rank)))
            batches.append(IndexBatch([self._rows[position] for position in ids], ids))
        return batches


def evaluation_batches(num_rows: int, micro_batch_size: int, mesh: Mesh) -> list[IndexBatch]:
    """This data-parallel rank's part of all rows, each once, in as many full batches as every other rank has.

    Args:
        num_rows: rows of the dataset.
        micro_batch_size: samples of one pass of one rank.
        mesh: the ranks.

    Returns:
        Batches whose sample ids are the row numbers; those below 0 only fill a batch up and are not to be counted.
    """
    num_batches = math.ceil(num_rows / (micro_batch_size * mesh.data_size))
    batches = []
    for number in range(mesh.data_rank, num_batches * mesh.data_size, mesh.data_size):
        places = range(number * micro_batch_size, (number + 1) * micro_batch_size)
        ids = [place if place < num_rows else -1 for place in places]
        batches.append(IndexBatch([max(sample_id, 0) for sample_id in ids], ids))
    return batches
