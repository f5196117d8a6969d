"""Steps of text: the same samples however the work is split, from any step on, none lost, none twice."""

import itertools
import json
from collections import Counter

import pytest

from sfumato.config.text_data import TextDataConfig, TextTrainConfig
from sfumato.data.text.loader import build_text_loader
from sfumato.errors import DataError
from tests.token_rows import NumberTransform, mesh_of, one_source, random_lengths, weighted

LENGTHS = random_lengths(61)
TOKENS = sum(LENGTHS)


@pytest.fixture
def make(tmp_path):
    def build(sources=None, data=(), train=(), rank=0, ranks=1, transform=None, said=None, **axes):
        data = TextDataConfig(train_path="unused", **{"max_seq_len": 16, **dict(data)})
        train = {"output_dir": str(tmp_path), "micro_batch_size": 2, "global_batch_size": 4, **dict(train)}
        return build_text_loader(
            data,
            TextTrainConfig(**train),
            0,
            transform or NumberTransform(),
            sources or one_source(LENGTHS),
            mesh_of(rank, ranks, **axes),
            [].append if said is None else said.append,
            lambda parts, _count: parts,
        )

    return build


def take(loader, count=None):
    """Of each step: its samples (id, first token), sorted, and the loader's state after it."""
    results = []
    for number, batches in itertools.islice(loader.steps(loader.state()["step"]), count):
        samples = sorted(pair for batch in batches for pair in read(batch))
        results.append((number, samples, loader.state(), loader.epoch_ended))
    return results


def read(batch):
    """Sample id and first token of each sample, of single documents."""
    ids = batch.input_ids
    starts = [0, *itertools.accumulate(batch.document_lengths)][:-1]
    firsts = ids[:, 0] if len(ids) == len(batch.document_lengths) else ids[0, starts]
    return list(zip(batch.sample_ids, firsts.tolist()[: len(starts)], strict=True))


def together(loaders):
    """The samples of each step over all ranks."""
    steps = [take(loader) for loader in loaders]
    assert len({len(step) for step in steps}) == 1
    joined = []
    for parts in zip(*steps, strict=True):
        assert all(part[2:] == parts[0][2:] for part in parts), "ranks disagree on the position"
        joined.append((parts[0][0], sorted(itertools.chain(*(part[1] for part in parts))), *parts[0][2:]))
    return joined


def tokens_of(steps):
    return [first for _, samples, _, _ in steps for _, first in samples]


CASES = {
    "tokens": {},
    "samples": {"train": {"dyn_bsz": False}},
    "padded": {"train": {"dyn_bsz": False, "rmpad_with_pos_ids": False}},
    "many epochs": {"train": {"num_train_epochs": 4}},
    "steps": {"train": {"max_steps": 30}},
    "train_size": {"data": {"train_size": 3 * TOKENS // 2}},
    "file order": {"data": {"shuffle": False}},
    "by samples": {"sources": weighted([LENGTHS[:20], LENGTHS[20:]], [1, 3])},
    "by tokens": {
        "sources": weighted([LENGTHS[:9], LENGTHS[9:30], LENGTHS[30:]], [1, 2, 2], "token", "all_exhausted"),
        "train": {"num_train_epochs": 3},
    },
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 1), (7, 3)])
def test_ranks_and_micro_batches_share_the_same_samples(make, case, ranks, micro_batch):
    whole = take(make(**case))
    case = case | {"train": {**case.get("train", {}), "micro_batch_size": micro_batch}}
    many = [make(**case, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert {loader.total_steps for loader in many} == {len(whole)}
    assert together(many) == whole


def test_ranks_have_as_many_micro_batches(make):
    for train in ({}, {"dyn_bsz": False}, {"global_batch_size": 7}):
        runs = zip(*(make(train=train, rank=rank, ranks=3).steps() for rank in range(3)), strict=True)
        for parts in runs:
            assert len({len(batches) for _, batches in parts}) == 1


def test_micro_batches_hold_what_fits(make):
    for _, batches in make(train={"global_batch_size": 8}).steps():
        assert all(sum(batch.document_lengths) <= 2 * 16 for batch in batches)
    for _, batches in make(train={"dyn_bsz": False}).steps():
        assert all(len(batch.sample_ids) <= 2 for batch in batches)


def test_every_sample_once_in_an_epoch_and_the_last_step_too(make):
    for train in ({}, {"dyn_bsz": False}):
        loader = make(train=train | {"num_train_epochs": 3})
        steps = take(loader)
        firsts = tokens_of(steps)
        for epoch in range(3):
            assert sorted(firsts[epoch * 61 : (epoch + 1) * 61]) == [1000 * index for index in range(61)]
        ids = [sample_id for _, samples, _, _ in steps for sample_id, _ in samples]
        assert ids == list(range(3 * 61))
        assert loader.total_steps == len(steps)
        assert loader.state()["samples"] == 3 * 61 and loader.state()["tokens"] == 3 * TOKENS
        assert sum(ended for *_, ended in steps) == 3 and steps[-1][3]


def test_steps_are_as_large_as_they_may_be(make):
    steps = take(make())
    sizes = [sum(LENGTHS[first // 1000] for _, first in samples) for _, samples, _, _ in steps]
    firsts = [LENGTHS[first // 1000] for first in (samples[0][1] for _, samples, _, _ in steps)]
    assert all(size <= 64 for size in sizes)
    assert all(size + first > 64 for size, first in zip(sizes, firsts[1:], strict=False))
    assert [len(samples) for _, samples, _, _ in take(make(train={"dyn_bsz": False}))] == [4] * 15 + [1]


def test_contents_are_those_of_the_rows(make):
    for _, batches in make().steps():
        for batch in batches:
            for (_, first), length, start in zip(
                read(batch), batch.document_lengths, [0, *itertools.accumulate(batch.document_lengths)], strict=False
            ):
                assert length == LENGTHS[first // 1000]
                ids = batch.input_ids[0, start : start + length].tolist()
                assert ids == list(range(first, first + length))


def test_the_length_of_a_run(make):
    assert make(train={"max_steps": 500}).total_steps == 500
    assert make(train={"max_steps": 3}, data={"train_size": 10_000}).total_steps == 3
    loader = make(data={"train_size": 2 * TOKENS + 1})
    used = [state["tokens"] for _, _, state, _ in take(loader)]
    assert used[-1] >= 2 * TOKENS + 1 > used[-2] and loader.total_steps == len(used)
    assert make().num_samples == 61 and make().tokens_per_epoch == TOKENS
    assert (
        make(train={"global_batch_size": None}, ranks=3).total_steps == make(train={"global_batch_size": 6}).total_steps
    )


def test_resuming_anywhere_goes_on_as_if_nothing_had_happened(make, case):
    whole = take(make(**case))
    for done in range(1, len(whole)):
        loader = make(**case)
        take(loader, done)
        saved = json.loads(json.dumps(loader.state()))
        resumed = make(**case)
        resumed.restore(saved)
        assert resumed.total_steps == len(whole)
        assert take(resumed) == whole[done:]


@pytest.mark.parametrize("done", [1, 5, 9, 10, 11])
def test_resuming_with_other_batches_loses_and_repeats_nothing(make, done):
    sources = weighted([LENGTHS[:20], LENGTHS[20:]], [1, 2], stopping="all_exhausted")
    for others in (one_source(LENGTHS), sources):
        options = {"sources": others, "train": {"num_train_epochs": 2}}
        wanted = tokens_of(take(make(**options)))
        first = make(**options)
        before = tokens_of(take(first, done))
        changed = {"num_train_epochs": 2, "global_batch_size": 7, "micro_batch_size": 3}
        loaders = [make(sources=others, train=changed, rank=rank, ranks=2) for rank in range(2)]
        for loader in loaders:
            loader.restore(first.state())
        after = together(loaders)
        assert after[0][0] == done and loaders[0].total_steps == done + len(after)
        assert before + tokens_of(after) == wanted


def test_resuming_at_the_end_has_no_steps_left(make):
    loader = make()
    total = len(take(loader))
    again = make()
    again.restore(loader.state())
    assert take(again) == [] and again.total_steps == total
    longer = make(train={"num_train_epochs": 2})
    longer.restore(loader.state())
    assert len(tokens_of(take(longer))) == 61


def test_other_data_is_refused_on_resume(make):
    state = make().state()
    for options in (
        {"sources": one_source([*LENGTHS, 5])},
        {"train": {"seed": 1}},
        {"data": {"shuffle": False}},
        {"sources": weighted([LENGTHS], [1])},
    ):
        with pytest.raises(DataError, match="the data is not what the checkpoint was trained on"):
            make(**options).restore(state)
    make(train={"global_batch_size": 9, "num_train_epochs": 5, "max_steps": 3}).restore(state)


def test_a_step_that_is_not_the_restored_one_is_refused(make):
    with pytest.raises(ValueError, match="the data is at step 0, not 3"):
        next(make().steps(from_step=3))


def test_shares_of_sources_in_what_is_trained(make):
    sources = weighted([[16] * 50, [4] * 200], [1, 1], "token")
    loader = make(sources=sources, train={"max_steps": 20})
    count = Counter()
    for _, batches in loader.steps():
        for batch in batches:
            for source, ids in zip(batch.source_ids[0].tolist(), batch.input_ids[0], strict=True):
                assert source == (int(ids) >= 1_000_000)
                count[source] += 1
    assert abs(count[0] - count[1]) <= 32


def test_bad_rows_are_left_out_and_named(make):
    said = []
    loader = make(one_source([5, "broken", 6]), data={"max_bad_rows": 1}, said=said)
    assert sorted(tokens_of(take(loader))) == [0, 2000]
    assert said == ["row left out (1 of at most 1): rows, row 2: broken"]
    with pytest.raises(DataError, match="row 1: broken"):
        make(one_source(["broken"]))


def test_pairs_stay_together(make):
    transform = NumberTransform(documents_per_sample=2)
    loader = make(one_source([3] * 30), transform=transform, train={"global_batch_size": 2, "micro_batch_size": 1})
    for _, batches in loader.steps():
        assert sum(len(batch.sample_ids) for batch in batches) <= 2 * 2 * 16 // 8
        for batch in batches:
            assert batch.document_lengths == [3, 5] * len(batch.sample_ids)
            assert sum(batch.document_lengths) <= 2 * 16


def test_sequence_parallel_ranks_see_the_same_and_enough(make):
    first, second = (make(one_source([2]), rank=rank, ring=2) for rank in range(2))
    (_, one), (_, two) = next(first.steps()), next(second.steps())
    assert one[0].input_ids.equal(two[0].input_ids)
    assert one[0].input_ids.shape == (1, 4)


def test_pipelines_get_as_many_micro_batches_as_they_need(make):
    train = {"pipeline_parallel_size": 3, "pipeline_schedule": "1f1b"}
    loader = make(one_source([5, 5]), train=train, pp=3)
    (_, batches), *rest = loader.steps()
    assert not rest and sorted(len(batch.document_lengths) for batch in batches) == [0, 1, 1]
