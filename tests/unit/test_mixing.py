"""The order of samples: each once in a pass, sources in exact shares, a function of data and seed."""

import functools

import numpy as np
import pytest

from sfumato.data.files.mixing import Mixer, Order
from sfumato.errors import DataError


def order_of(sizes, weights=None, level="sample", stopping="first_exhausted", seed=0, shuffle=True, longest=9):
    source_of = np.repeat(np.arange(len(sizes)), sizes)
    lengths = np.random.default_rng(5).integers(2, longest + 1, sum(sizes))
    names = [f"s{index}" for index in range(len(sizes))]
    return Order(lengths, source_of, names, weights, level, stopping, seed, shuffle), source_of, lengths


def test_one_source_is_a_permutation_in_each_epoch():
    order, _, _ = order_of([50])
    epochs = [order.epoch(number).tolist() for number in (2, 0, 1)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert order_of([50])[0].epoch(1).tolist() == epochs[2]
    assert order_of([50], seed=1)[0].epoch(1).tolist() != epochs[2]
    assert order_of([50], shuffle=False)[0].epoch(3).tolist() == list(range(50))


def test_sources_without_weights_are_one():
    order, source_of, _ = order_of([30, 20])
    epoch = order.epoch(0)
    assert sorted(epoch.tolist()) == list(range(50))
    assert len(set(source_of[epoch][:15].tolist())) == 2, "shuffled together"


@pytest.mark.parametrize(
    "weights", [[1, 1], [0.7, 0.3], [5, 1, 1], [0.1, 0.2, 0.3, 0.4], [0.9, 0.04, 0.03, 0.02, 0.01], [*range(1, 11)]]
)
@pytest.mark.parametrize("level", ["sample", "token"])
def test_shares_are_exact_all_the_time(weights, level):
    order, source_of, lengths = order_of([400] * len(weights), weights, level, longest=9)
    indices = np.concatenate([order.epoch(number) for number in range(3)])
    amounts = lengths[indices] if level == "token" else np.ones(len(indices))
    taken = np.zeros((len(weights), len(indices)))
    taken[source_of[indices], np.arange(len(indices))] = amounts
    taken = taken.cumsum(axis=1)
    shares = np.array(weights)[:, None] / sum(weights) * taken.sum(axis=0)
    assert np.abs(taken - shares).max() <= (0.999 if level == "sample" else 9)


@pytest.mark.parametrize("level", ["sample", "token"])
@pytest.mark.parametrize("stopping", ["first_exhausted", "all_exhausted"])
def test_each_source_goes_through_its_samples_before_it_repeats_one(level, stopping):
    order, source_of, _ = order_of([40, 25, 7], [3, 2, 1], level, stopping)
    indices = np.concatenate([order.epoch(number) for number in range(9)])
    for source, size in enumerate([40, 25, 7]):
        of_source = indices[source_of[indices] == source]
        passes = [of_source[start : start + size] for start in range(0, len(of_source), size)]
        assert len(passes) > 2
        assert all(len(set(tensor.tolist())) == len(tensor) for tensor in passes)
        assert not np.array_equal(passes[0], passes[1])


def test_where_epochs_end():
    first, source_of, _ = order_of([10, 100], [1, 1], "sample", "first_exhausted")
    every, _, _ = order_of([10, 100], [1, 1], "sample", "all_exhausted")
    assert [len(first.epoch(number)) for number in range(3)] == pytest.approx([20, 20, 20], abs=1)
    assert [len(every.epoch(number)) for number in range(3)] == pytest.approx([200, 200, 200], abs=1)
    assert np.bincount(source_of[first.epoch(0)]).tolist() == pytest.approx([10, 10], abs=1)
    assert set(range(10, 110)) <= set(every.epoch(0).tolist())


def test_a_later_epoch_is_the_same_when_asked_for_first():
    many, _, _ = order_of([10, 30], [1, 2], "token")
    forward = [many.epoch(number).tolist() for number in range(6)]
    assert order_of([10, 30], [1, 2], "token")[0].epoch(5).tolist() == forward[5]
    assert many.epoch(2).tolist() == forward[2]


@pytest.mark.parametrize("weights", [None, [1, 2]])
def test_positions_are_found(weights):
    order, _, _ = order_of([10, 30], weights)
    position = 0
    for number in range(4):
        for offset in range(len(order.epoch(number))):
            assert order_of([10, 30], weights)[0].locate(position) == (number, offset)
            position += 1


def test_a_mixer_goes_on_where_another_stopped():
    whole, first = Mixer([3, 2, 1]), Mixer([3, 2, 1])
    amounts = np.random.default_rng(0).integers(1, 9, 100).tolist()

    def run(mixer, part):
        chosen = []
        for amount in part:
            chosen.append(mixer.choose())
            mixer.add(chosen[-1], amount)
        return chosen

    wanted = run(whole, amounts)
    assert run(first, amounts[:37]) + run(Mixer([3, 2, 1], first.taken, 37), amounts[37:]) == wanted


def test_an_epoch_without_an_end_in_sight_is_refused():
    with pytest.raises(DataError, match=r"'s1' has given all.*first_exhausted"):
        order_of([10, 10_000], [1, 1e-9], stopping="all_exhausted")


@pytest.mark.parametrize(("level", "is_long"), [("sample", False), ("token", True)])
def test_the_length_of_an_epoch_is_that_of_the_level(level, is_long, monkeypatch):
    """Equally many samples, of which those of the second source are long: it lasts 50 times as long by tokens."""
    monkeypatch.setattr("sfumato.data.files.mixing.MAX_EPOCH", 100)
    lengths, source_of = np.repeat([1, 50], 10), np.repeat([0, 1], 10)
    made = functools.partial(Order, lengths, source_of, ["short", "long"], [1, 1], level, "all_exhausted", 0, True)
    if is_long:
        with pytest.raises(DataError, match=r"5.1e\+02 samples until source 'long' has given all: raise its weight"):
            made()
    else:
        made()
