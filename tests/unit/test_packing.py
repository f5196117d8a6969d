"""Sharing a step's samples out: every sample once, nothing overfull, as few micro-batches as fit, equal work."""

import itertools

import numpy as np
import pytest

from sfumato.config.parallel import ParallelConfig
from sfumato.errors import ConfigError
from sfumato.parallel.bin_packing import micro_batch_rule, pack
from sfumato.parallel.stages import check_micro_batches


def cost(length):
    return length + length**2 / 1000


def draw(rng, longest):
    count = int(rng.integers(0, 40))
    return np.clip(rng.lognormal(np.log(longest / 6), 0.9, count), 2, 2 * longest).astype(int).tolist()


@pytest.mark.parametrize("seed", range(8))
def test_every_sample_once_and_nothing_overfull(seed):
    rng = np.random.default_rng(seed)
    for _ in range(40):
        capacity, ranks = int(rng.integers(4, 400)), int(rng.integers(1, 9))
        multiple, minimum = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        lengths = draw(rng, capacity)
        shares = pack(lengths, [cost(length) for length in lengths], capacity, ranks, multiple, minimum)
        assert len(shares) == ranks and len({len(share) for share in shares}) == 1
        assert len(shares[0]) % multiple == 0 and len(shares[0]) >= minimum
        assert sorted(itertools.chain(*itertools.chain(*shares))) == list(range(len(lengths)))
        for members in itertools.chain(*shares):
            assert sum(lengths[member] for member in members) <= capacity or len(members) == 1
        least = sum(min(length, capacity) for length in lengths) / (capacity * ranks)
        assert len(shares[0]) <= 2 * (max(least, minimum) + multiple), "far more than need be"
        assert pack(lengths, [cost(length) for length in lengths], capacity, ranks, multiple, minimum) == shares


def test_no_fewer_micro_batches_would_do():
    """Against all assignments of few samples."""
    rng = np.random.default_rng(0)
    fewest = more = 0
    for _ in range(60):
        lengths = rng.integers(2, 10, int(rng.integers(3, 8))).tolist()
        ranks = int(rng.integers(1, 3))
        result = len(pack(lengths, lengths, 10, ranks)[0])

        def fits(bins, lengths=lengths):
            for places in itertools.product(range(bins), repeat=len(lengths)):
                filled = [0] * bins
                for length, place in zip(lengths, places, strict=True):
                    filled[place] += length
                if max(filled) <= 10:
                    return True
            return False

        best = next(num for num in range(1, 9) if fits(num * ranks))
        fewest += result == best
        more += result - best
    assert fewest >= 58 and more <= 2


def test_samples_that_fill_micro_batches_to_the_last_token_are_found():
    lengths = [700, 500, 500, 324, 300, 124, 400, 400, 324, 100, 100, 324]  # 4 bins of 1024 in random order
    assert sum(lengths) == 4 * 1024
    shares = pack(lengths, [cost(length) for length in lengths], 1024, 4)
    assert [len(share) for share in shares] == [1] * 4
    assert all(sum(lengths[index] for index in share[0]) == 1024 for share in shares)


def test_a_full_step_of_mixed_lengths_needs_no_more_than_its_tokens():
    """With one micro-batch of the capacity for each rank and the samples that follow each other up to all of it."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = np.clip(rng.lognormal(np.log(300), 0.8, 400), 2, 2048).astype(int)
        lengths = lengths[: np.searchsorted(np.cumsum(lengths), 8 * 2048, side="right")].tolist()
        assert len(pack(lengths, [cost(length) for length in lengths], 2048, 8)[0]) == 1


def test_work_is_even_between_ranks_and_within_each_round():
    rng = np.random.default_rng(0)
    ratios, rounds = [], []
    for _ in range(20):
        lengths = np.clip(rng.lognormal(np.log(400), 0.9, 2000), 2, 8192).astype(int)
        lengths = lengths[: np.searchsorted(np.cumsum(lengths), 8 * 4 * 7168, side="right")].tolist()
        costs = [length + length**2 / 24_576 for length in lengths]
        shares = pack(lengths, costs, 8192, 8)
        work = np.array([[sum(costs[index] for index in part) for part in share] for share in shares])
        ratios.append(work.sum(axis=1).max() / work.sum(axis=1).mean())
        rounds.append(work.max(axis=0).sum() / work.sum(axis=1).mean())
    assert max(ratios) < 1.15 and np.mean(ratios) < 1.04
    assert max(rounds) < 1.15 and np.mean(rounds) < 1.04


def test_capacity_in_samples():
    shares = pack([1] * 8, [float(index) for index in range(8)], 2, 2)
    assert shares == [[[0, 7], [2, 5]], [[1, 6], [3, 4]]]


def test_few_samples_leave_placeholders():
    assert sorted(pack([5], [5.0], 10, 3)) == [[[]], [[]], [[0]]]
    assert pack([], [], 10, 2, minimum=2) == [[[], []], [[], []]]
    assert pack([99], [99.0], 10, 1) == [[[0]]]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_pipelines_get_a_number_of_micro_batches_that_they_can_run(schedule, size):
    config = ParallelConfig(pipeline_parallel_size=size, **({"pipeline_schedule": schedule} if size > 1 else {}))
    multiple, minimum = micro_batch_rule(config)
    for count in range(1, 40):
        check_micro_batches(config, len(pack([5] * count, [5.0] * count, 10, 2, multiple, minimum)[0]))
    if size == 4 and schedule in ("interleaved_1f1b", "zero_bubble"):
        with pytest.raises(ConfigError):
            check_micro_batches(config, 9)
