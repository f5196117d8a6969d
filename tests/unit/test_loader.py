"""The order of batches: a function of (seed, epoch) alone, and the same however the work is split."""

import pytest

from sfumato.config.sections import EpochTrainConfig
from sfumato.data.loader import IndexLoader
from sfumato.errors import DataError
from tests.token_rows import index_loader, mesh_of


def make(num_rows=30, global_batch=6, micro_batch=6, seed=0, steps=None, epochs=1, rank=0, ranks=1):
    return index_loader(num_rows, global_batch, micro_batch, seed, steps, epochs, rank, ranks)


def flat(loader, from_step=0):
    """(step, row, sample id) of everything that a rank trains on."""
    return [
        (step, row, sample_id)
        for step, batches in loader.steps(from_step)
        for batch in batches
        for row, sample_id in zip(batch.indices, batch.sample_ids, strict=True)
    ]


def order(loader):
    return [row for _, row, _ in flat(loader)]


def test_the_order_is_a_function_of_the_seed():
    assert order(make(seed=3)) == order(make(seed=3))
    assert order(make(seed=3)) != order(make(seed=4))
    assert order(make(seed=3)) != sorted(order(make(seed=3)))


@pytest.mark.parametrize("global_batch", [6, 7])
def test_every_epoch_is_another_permutation(global_batch):
    rows = order(make(epochs=7, global_batch=global_batch))
    epochs = [rows[start : start + 30] for start in range(0, 210, 30)]
    assert len(rows) == 210
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 7


def test_sample_ids_count_on_over_epochs():
    assert [sample_id for _, _, sample_id in flat(make(epochs=3))] == list(range(90))


@pytest.mark.parametrize("from_step", [0, 1, 4, 5, 9, 14, 15])
def test_starting_later_gives_the_tail(from_step):
    loader = make(epochs=3, global_batch=6, micro_batch=4)
    assert loader.total_steps == 15
    full = flat(loader)
    tail = [entry for entry in full if entry[0] >= from_step]
    assert flat(make(epochs=3, global_batch=6, micro_batch=4), from_step) == tail
    assert flat(loader, from_step) == tail, "also from a loader that was used before"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("micro_batch", [1, 2, 5, 12, 50])
def test_ranks_and_micro_batches_share_the_same_samples_in_the_same_order(ranks, micro_batch):
    whole = flat(make(num_rows=31, global_batch=12, micro_batch=12, steps=6))
    parts = [make(31, 12, micro_batch, steps=6, rank=rank, ranks=ranks) for rank in range(ranks)]
    joined = []
    for step in range(6):
        for part in parts:
            batches = part.micro_batches(step)
            sizes = [len(batch.indices) for batch in batches]
            assert all(size == micro_batch for size in sizes[:-1]) and 0 < sizes[-1] <= micro_batch
            assert sum(sizes) == 12 // ranks
            joined += [(step, r, s) for batch in batches for r, s in zip(batch.indices, batch.sample_ids, strict=True)]
    assert joined == whole


def test_epochs_leave_out_the_last_incomplete_step():
    assert make(num_rows=32, global_batch=6, epochs=1).total_steps == 5
    assert make(num_rows=32, global_batch=6, epochs=3).total_steps == 16
    assert len(flat(make(num_rows=32, global_batch=6, epochs=3))) == 96


def test_max_steps_goes_before_epochs_and_may_be_longer_than_the_data():
    loader = make(num_rows=4, global_batch=6, steps=5, epochs=1)
    rows = order(loader)
    assert loader.total_steps == 5 and len(rows) == 30
    assert all(sorted(rows[start : start + 4]) == [0, 1, 2, 3] for start in range(0, 28, 4))
    assert make(num_rows=100, steps=2).total_steps == 2


def test_too_few_rows_are_an_error():
    with pytest.raises(DataError) as caught:
        make(num_rows=5, global_batch=6)
    message = str(caught.value)
    for part in ("5 rows", "train.global_batch_size 6", "train.max_steps"):
        assert part in message
    assert make(num_rows=5, global_batch=6, epochs=2).total_steps == 1


def test_rows_that_do_not_fill_a_last_step_are_said():
    for num_rows, epochs, steps, said in (
        (32, 1, None, ["the epoch leaves 2 of 32 rows out, which do not fill a step of train.global_batch_size 6"]),
        (32, 2, None, ["the last of 2 epochs leaves 4 of 32 rows out, which do not fill a step of "]),
        (32, 3, None, []),
        (32, 1, 3, []),
    ):
        lines = []
        train = EpochTrainConfig(
            output_dir="nowhere", global_batch_size=6, micro_batch_size=6, max_steps=steps, num_train_epochs=epochs
        )
        loader = IndexLoader(num_rows, train, mesh_of(0, 1), say=lines.append)
        assert len(lines) == len(said) and all(line.startswith(start) for line, start in zip(lines, said, strict=True))
        seen = len({*order(loader)})
        assert seen == min(num_rows, loader.total_steps * 6)


def test_an_average_that_never_moves_is_refused():
    """It is what is exported: the weights that the run began with."""
    settings = {"output_dir": "runs/x", "micro_batch_size": 2, "ema_decay": 0.9, "ema_interval": 4}
    with pytest.raises(ValueError, match=r"train\.ema_interval 4: the run has 3 steps"):
        EpochTrainConfig(max_steps=3, **settings)
    assert IndexLoader(8, EpochTrainConfig(**settings), mesh_of(0, 1)).total_steps == 4
    with pytest.raises(DataError, match=r"train\.ema_interval 4: the run has 3 steps.*lower it"):
        IndexLoader(6, EpochTrainConfig(**settings), mesh_of(0, 1))
