"""Bin packing: which samples share a micro-batch, with equal work on every rank, from their lengths and costs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from sfumato.config.parallel import ParallelConfig

Bins = list[list[int]]
"""Positions of samples within the step, by micro-batch."""


def pack(
    lengths: Sequence[int],
    costs: Sequence[float],
    capacity: int,
    num_ranks: int,
    multiple: int = 1,
    minimum: int = 1,
) -> list[Bins]:
    """Distributes samples over ranks and micro-batches, with as few micro-batches as possible.

    The costs of the micro-batches that ranks compute at the same time are close to each other, and so are the ranks'
    sums. The result is a function of the arguments alone.

    Args:
        lengths: size of each sample, such as its tokens.
        costs: work of each sample.
        capacity: largest sum of the sizes in a micro-batch; a longer sample has a micro-batch to itself.
        num_ranks: ranks with different samples.
        multiple, minimum: the number of micro-batches of a rank is a multiple of the one and at least the other, see
            ``micro_batch_rule``.

    Returns:
        Positions of samples, ``[rank][micro-batch]``: each of them once, equally many micro-batches on each rank. Some
        are empty when there are too few samples.
    """
    by_cost = sorted(range(len(lengths)), key=lambda position: (-costs[position], -lengths[position], position))
    by_length = sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))
    total = sum(min(length, capacity) for length in lengths)
    least = max(-(-total // (capacity * num_ranks)), minimum, 1)
    num_bins_per_rank = -(-least // multiple) * multiple
    while True:
        # First by cost, so that bins are equal; this may waste space, and then they are filled as densely as possible.
        bins = _fill_lightest_bins(by_cost, costs, lengths, capacity, num_bins_per_rank * num_ranks) or _fill(
            by_length, lengths, capacity, num_bins_per_rank * num_ranks
        )
        if bins is not None:
            return deal_bins(bins, costs, num_ranks)
        num_bins_per_rank += multiple


def micro_batch_rule(config: ParallelConfig) -> tuple[int, int]:
    """The multiple and the minimum of the number of micro-batches that the pipeline's schedule requires."""
    size = config.pipeline_parallel_size
    if config.pipeline_schedule in ("interleaved_1f1b", "zero_bubble"):
        return size, size
    return 1, size if config.pipeline_schedule == "1f1b" else 1


def _fill_lightest_bins(
    order: Sequence[int], weights: Sequence[float], lengths: Sequence[int], capacity: int, num_bins: int
) -> Bins | None:
    """Puts each sample into the lightest bin that has room for it; None when a sample fits into no bin."""
    bins: Bins = [[] for _ in range(num_bins)]
    filled = [0] * num_bins
    lightest = [(0.0, index) for index in range(num_bins)]
    for sample in order:
        popped = []  # bins without room, which go back to the heap afterwards
        while lightest:
            weight, index = heapq.heappop(lightest)
            if filled[index] + lengths[sample] <= capacity or not bins[index]:
                bins[index].append(sample)
                filled[index] += lengths[sample]
                popped.append((weight + weights[sample], index))
                break
            popped.append((weight, index))
        else:
            return None
        for entry in popped:
            heapq.heappush(lightest, entry)
    return bins


def _fill(order: Sequence[int], lengths: Sequence[int], capacity: int, num_bins: int) -> Bins | None:
    """Fills one bin after the other, to the last token where possible; None when samples remain.

    Each bin gets the longest remaining sample, and those that fill the remaining space best.
    """
    bins: Bins = []
    remaining = list(order)
    while remaining and len(bins) < num_bins:
        first = remaining.pop(0)
        companions = _best_sum(remaining, lengths, max(capacity - lengths[first], 0))
        bins.append([first, *companions])
        remaining = [position for position in remaining if position not in companions]
    return None if remaining else bins + [[] for _ in range(num_bins - len(bins))]


def _best_sum(samples: Sequence[int], lengths: Sequence[int], room: int) -> set[int]:
    """Samples with the largest sum of lengths that is at most ``room``, by dynamic programming over bits."""
    fitting = [position for position in samples if lengths[position] <= room]
    sums = [1]  # bit s: the samples so far can add up to s
    for position in fitting:
        sums.append((sums[-1] | sums[-1] << lengths[position]) & ((2 << room) - 1))
        if sums[-1] >> room:
            break
    remaining = sums[-1].bit_length() - 1
    # Backwards: a sample is taken where the samples before it cannot reach the remaining sum without it.
    chosen = set()
    for number in range(len(sums) - 1, 0, -1):
        if not sums[number - 1] >> remaining & 1:
            chosen.add(fitting[number - 1])
            remaining -= lengths[fitting[number - 1]]
    return chosen


def deal_bins(bins: Bins, costs: Sequence[float], num_ranks: int) -> list[Bins]:
    """Deals bins to ranks in rounds, the costliest first; in each round the rank with the least work so far chooses
    first. Ranks get equally many bins where their number divides that of the bins."""
    work = {index: sum(costs[position] for position in members) for index, members in enumerate(bins)}
    order = sorted(work, key=lambda index: (-work[index], index))
    by_rank: list[Bins] = [[] for _ in range(num_ranks)]
    sums = [0.0] * num_ranks
    for start in range(0, len(order), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: (sums[rank], rank))
        for rank, index in zip(ranks, order[start : start + num_ranks], strict=True):
            by_rank[rank].append(sorted(bins[index]))
            sums[rank] += work[index]
    return by_rank
