"""Batches of rows in an order that is a function of (seed, epoch); the position is the number of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sfumato.algorithms.noise import keyed_permutation
from sfumato.config.sections import EpochTrainConfig
from sfumato.data.epoch_order import EpochOrder, refuse_repetition
from sfumato.data.images.buckets import Buckets
from sfumato.errors import DataError
from sfumato.parallel.bin_packing import deal_bins
from sfumato.parallel.mesh import Mesh


@dataclass(frozen=True)
class IndexBatch:
    """Rows of one micro-batch."""

    indices: list[int]
    """Row numbers in the dataset."""
    sample_ids: list[int]
    """Positions in the stream of all samples of the run, from which their noise is keyed."""
    bucket: int = 0
    """Number of the bucket that all of them are in."""


class BucketOrder:
    """As ``EpochOrder``, for rows in buckets: a function of (seed, key, epoch), the buckets and ``run``.

    The positions from one multiple of ``run`` to the next hold rows of one bucket, as long as the bucket can fill them.
    The rows left over of every bucket stand at the beginning and at the end of the epoch.
    """

    def __init__(self, buckets: np.ndarray, run: int, seed: int, key: str) -> None:
        """Takes what the order depends on.

        Args:
            buckets: the bucket of each row, integers ``[N]``.
            run: rows of one bucket that follow each other, a micro-batch.
            seed, key: of the permutations.
        """
        self.buckets = buckets
        self.run = run
        self.seed = seed
        self.key = key
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def __getitem__(self, position: int) -> int:
        epoch, offset = divmod(position, len(self.buckets))
        if epoch != self._epoch:
            self._order = self._arrange_epoch(epoch)
            self._epoch = epoch
        return int(self._order[offset])

    def _arrange_epoch(self, epoch: int) -> np.ndarray:
        count = len(self.buckets)
        run = self.run
        rows = keyed_permutation(count, self.seed, self.key, epoch).numpy()
        rows = rows[np.argsort(self.buckets[rows], kind="stable")]  # by bucket, shuffled within each
        sizes = np.bincount(self.buckets[rows])
        position = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # within its bucket
        is_whole = position < np.repeat(sizes // run * run, sizes)
        runs = rows[is_whole].reshape(-1, run)
        # Runs of all buckets are mixed, then laid between the rows left over so that each begins at a multiple of
        # ``run`` of the position in the whole stream, which an epoch need not begin at.
        runs = runs[keyed_permutation(len(runs), self.seed, f"{self.key} of runs", epoch).numpy()]
        before = min(-epoch * count % run, count)  # positions before the first multiple
        num_whole_runs = (count - before) // run
        rest = np.concatenate([rows[~is_whole], runs[num_whole_runs:].reshape(-1)])
        return np.concatenate([rest[:before], runs[:num_whole_runs].reshape(-1), rest[before:]])


class IndexLoader:
    """Which rows each step trains on, the same whatever the number of processes and the micro-batch size.

    With buckets the order depends on the micro-batch size, of which each has rows of one bucket.
    """

    def __init__(
        self,
        num_rows: int,
        train: EpochTrainConfig,
        mesh: Mesh,
        buckets: Buckets | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Plans the run: ``max_steps`` steps, or those that the epochs fill, without a last incomplete one.

        Args:
            num_rows: rows of the dataset.
            train: the task's section.
            mesh: the ranks.
            buckets: the sizes of the rows; None where all rows have one size.
            say: is told how many rows the run never reaches.

        Raises:
            DataError: when there are fewer rows than a step needs and no max_steps, a step takes each row over
                ``MOST_TIMES`` times, or the run ends before its moving average has moved.
        """
        self.global_batch_size = train.global_batch_size or train.micro_batch_size * mesh.data_size
        self.total_steps = train.max_steps or num_rows * train.num_train_epochs // self.global_batch_size
        if self.total_steps == 0:
            raise DataError(
                f"{train.num_train_epochs} epochs of {num_rows} rows do not fill one step of train.global_batch_size "
                f"{self.global_batch_size}: lower it, or set train.max_steps"
            )
        if problem := train.describe_unmoved_average(self.total_steps):
            raise DataError(problem)
        refuse_repetition("train.global_batch_size", self.global_batch_size, num_rows)
        if say is not None and (line := self._describe_unseen(num_rows, train)):
            say(line)
        self._micro_batch_size = train.micro_batch_size
        self._rank = mesh.data_rank
        self._num_ranks = mesh.data_size
        self._buckets = buckets
        self._rows: EpochOrder | BucketOrder = EpochOrder(num_rows, train.seed, "order")
        if buckets is not None:
            self._rows = BucketOrder(buckets.numbers, train.micro_batch_size, train.seed, "order")

    def _describe_unseen(self, num_rows: int, train: EpochTrainConfig) -> str:
        """A line about the rows that do not fill a last step; empty where there are none, or ``max_steps`` ends it."""
        unseen = num_rows * train.num_train_epochs - self.total_steps * self.global_batch_size
        if train.max_steps is not None or unseen <= 0:
            return ""
        last = f"the last of {train.num_train_epochs} epochs" if train.num_train_epochs > 1 else "the epoch"
        return (
            f"{last} leaves {unseen:,} of {num_rows:,} rows out, which do not fill a step of train.global_batch_size "
            f"{self.global_batch_size:,}"
        )

    def steps(self, from_step: int = 0) -> Iterator[tuple[int, list[IndexBatch]]]:
        """Steps with this rank's micro-batches. ``from_step`` steps are passed over without reading data."""
        for step in range(from_step, self.total_steps):
            yield step, self.micro_batches(step)

    def micro_batches(self, step: int) -> list[IndexBatch]:
        """This rank's micro-batches of a step: contiguous parts of the step's samples, or of those of each bucket."""
        if self._buckets is not None:
            return self._micro_batches_of_buckets(step, self._buckets)
        per_rank = self.global_batch_size // self._num_ranks
        first = step * self.global_batch_size + self._rank * per_rank
        batches = []
        for start in range(first, first + per_rank, self._micro_batch_size):
            ids = list(range(start, min(start + self._micro_batch_size, first + per_rank)))
            batches.append(IndexBatch([self._rows[position] for position in ids], ids))
        return batches

    def _micro_batches_of_buckets(self, step: int, buckets: Buckets) -> list[IndexBatch]:
        """This rank's micro-batches of a step, each of one bucket, and as many as on every other rank.

        The largest micro-batches are halved until the ranks can have equally many.
        """
        first = step * self.global_batch_size
        rows = {position: self._rows[position] for position in range(first, first + self.global_batch_size)}
        positions_by_bucket: dict[int, list[int]] = {}
        for position, row in rows.items():
            positions_by_bucket.setdefault(int(buckets.numbers[row]), []).append(position)
        size = self._micro_batch_size
        pieces = [
            (number, positions[at : at + size])
            for number, positions in positions_by_bucket.items()
            for at in range(0, len(positions), size)
        ]
        # This ends: the samples of a step are a multiple of the ranks, so that pieces of one sample divide evenly.
        while len(pieces) % self._num_ranks:
            largest = max(range(len(pieces)), key=lambda index: (len(pieces[index][1]), -index))
            number, positions = pieces[largest]
            half = len(positions) // 2
            pieces[largest : largest + 1] = [(number, positions[:half]), (number, positions[half:])]
        costs = [len(positions) * math.prod(buckets.sizes[number]) for number, positions in pieces]
        dealt = deal_bins([[index] for index in range(len(pieces))], costs, self._num_ranks)[self._rank]
        batches = []
        for [index] in dealt:  # each bin is one piece
            number, positions = pieces[index]
            batches.append(IndexBatch([rows[position] for position in positions], positions, number))
        return batches


def evaluation_batches(
    num_rows: int, micro_batch_size: int, mesh: Mesh, buckets: Buckets | None = None
) -> list[IndexBatch]:
    """This data-parallel rank's batches over all rows, each row once: full batches, as many as on every other rank.

    Args:
        num_rows: rows of the dataset.
        micro_batch_size: samples of one pass of one rank.
        mesh: the ranks.
        buckets: of the rows; a batch has rows of one.

    Returns:
        Batches whose sample ids are the row numbers. A sample id of -1 marks a row that only fills a batch up and must
        not be counted.
    """
    numbers = np.zeros(num_rows, np.int16) if buckets is None else buckets.numbers
    pieces: list[tuple[int, Sequence[int]]] = []
    for number in np.unique(numbers).tolist():
        rows = np.flatnonzero(numbers == number).tolist()
        pieces += [(number, rows[at : at + micro_batch_size]) for at in range(0, num_rows, micro_batch_size)]
    pieces = [piece for piece in pieces if piece[1]]
    batches = []
    for index in range(mesh.data_rank, math.ceil(len(pieces) / mesh.data_size) * mesh.data_size, mesh.data_size):
        number, rows = pieces[index] if index < len(pieces) else (pieces[0][0], [])
        missing = micro_batch_size - len(rows)
        filler = int(np.flatnonzero(numbers == number)[0])
        batches.append(IndexBatch([*rows, *[filler] * missing], [*rows, *[-1] * missing], number))
    return batches
