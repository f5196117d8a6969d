"""Real ranks: the first tokenises, the others read what it made, and all agree on steps and samples."""

import functools
import json
import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from sfumato.config.text_data import TextDataConfig, TextTrainConfig
from sfumato.data.files import rows as rows_module
from sfumato.data.files.rows import open_file
from sfumato.data.files.sources import open_sources_once
from sfumato.data.text.loader import build_text_loader
from sfumato.errors import UserError
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh, build_mesh
from tests.token_rows import NumberTransform, one_source, random_lengths, weighted
from tests.unit.test_text_loader import take

LENGTHS = random_lengths(61)


def run(folder, train, from_state=None, count=None, sources=None, transform=NumberTransform, **data):
    """What a rank sees: rows that it tokenised, the steps of the run, and those that it took, or the error that it got.

    ``sources`` makes those of a stream; without it the rows of ``LENGTHS`` are stored.
    """
    place = {}
    if "SINGLE" not in train:
        place = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}  # as a launcher says; the group is there already
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        train = {name: value for name, value in train.items() if name != "SINGLE"}
        config = TextTrainConfig(output_dir=folder, device="cpu", global_batch_size=4, num_train_epochs=2, **train)
        transform, data = transform(), TextDataConfig(train_path="unused", max_seq_len=16, **data)
        rows = one_source(LENGTHS) if sources is None else sources()
        loader = build_text_loader(
            data, config, 0, transform, rows, build_mesh(config), print, lambda parts, _count: parts
        )
        if from_state is not None:
            loader.restore(from_state)
        try:
            return len(transform.seen), loader.total_steps, take(loader, count), transform.seen
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    finally:
        for name in place:
            del os.environ[name]


def test_ranks_agree_and_share_one_store(ranks, tmp_path):
    _, total, wanted, _ = run(str(tmp_path / "one"), {"SINGLE": True})
    actual = ranks.run(4, run, str(tmp_path / "four"), {"tensor_parallel_size": 2})
    assert [result[0] for result in actual] == [61, 0, 0, 0], "rows that each rank has tokenised"
    assert {result[1] for result in actual} == {total}
    assert actual[0][2] == actual[1][2] and actual[2][2] == actual[3][2], "ranks that share matrices see the same"
    for number, step in enumerate(wanted):
        parts = [actual[rank][2][number] for rank in (0, 2)]
        assert (step[0], step[2:]) == (parts[0][0], parts[0][2:]) == (parts[1][0], parts[1][2:])
        assert step[1] == sorted(parts[0][1] + parts[1][1])
    state = actual[0][2][9][2]
    _, again, rest, _ = run(str(tmp_path / "four"), {"SINGLE": True}, state)
    assert again == total and rest == wanted[10:]


STREAMS = {
    "mixed by tokens": (
        functools.partial(
            weighted, [LENGTHS, [(3, 9), "bad", 6, "bad", 4], [8] * 5], [1, 2, 1], "token", "all_exhausted"
        ),
        {"max_bad_rows": 2, "shuffle_buffer": 20},
    ),
    "in order": (functools.partial(one_source, random_lengths(300)), {"shuffle": False}),
}


@pytest.mark.parametrize("name", STREAMS)
def test_ranks_share_the_work_on_a_stream(name, ranks, tmp_path):
    sources, data = STREAMS[name]
    data = {"datasets_type": "iterable", "sources": sources, **data}
    train = {"max_steps": 40}
    wanted = run(str(tmp_path / "one"), train | {"SINGLE": True}, **data)[2]
    actual = ranks.run(4, functools.partial(run, **data), str(tmp_path), train | {"tensor_parallel_size": 2})
    assert actual[0][2] == actual[1][2] and actual[2][2] == actual[3][2], "ranks that share matrices see the same"
    for number, step in enumerate(wanted):
        parts = [actual[rank][2][number] for rank in (0, 2)]
        assert (step[0], step[2:]) == (parts[0][0], parts[0][2:]) == (parts[1][0], parts[1][2:])
        assert step[1] == sorted(parts[0][1] + parts[1][1])
    if name == "in order":  # 160 of 300 rows are trained on: each was tokenised once, as the rest of their chunk was
        tokenised = [number for _, _, _, numbers in actual for number in numbers]
        assert sorted(tokenised) == list(range(len(tokenised))) and len(tokenised) in (256, 300)
        assert max(len(numbers) for _, _, _, numbers in actual) <= 75
    going_on = functools.partial(run, from_state=wanted[9][2], **data)
    (first, second) = (rank[2] for rank in ranks.run(2, going_on, str(tmp_path), train))
    assert [sorted(one[1] + other[1]) for one, other in zip(first, second, strict=True)] == [
        step[1] for step in wanted[10:]
    ]


class Failing(NumberTransform):
    """Cannot read row 21, which the second of two ranks does."""

    def __call__(self, row, where):
        return 1 / 0 if row["number"] == 21 else super().__call__(row, where)


@pytest.mark.parametrize(
    ("lengths", "transform", "error"),
    [
        ([*LENGTHS[:21], "too bad"], NumberTransform, "DataError: rows, row 22: too bad"),
        ([*LENGTHS[:21], "overlong"], NumberTransform, "OverlongError: rows, row 22: overlong"),
        (LENGTHS[:30], Failing, "ZeroDivisionError: division by zero"),
    ],
)
def test_an_error_of_a_row_is_raised_on_all_ranks_when_its_turn_comes(lengths, transform, error, ranks, tmp_path):
    data = {"datasets_type": "iterable", "shuffle": False, "sources": functools.partial(one_source, lengths)}
    run_ranks = functools.partial(run, transform=transform, **data)
    result = ranks.run(2, run_ranks, str(tmp_path), {"max_steps": 40})
    assert result[1].startswith(error) and (result[0].startswith(error) or result[0] == f"DataError: rank 1: {error}")
    taken = ranks.run(2, run_ranks, str(tmp_path), {"max_steps": 40}, None, 3)
    assert [len(rank[2]) for rank in taken] == [3, 3], "a run that ends before does not hear of it"


def opened_files(folder):
    """The files that a rank opens to know its data, and to read row 5; the row; or the error, if there is one."""
    opened = []

    def counting(path, *arguments):
        opened.append(path.name)
        return open_file(path, *arguments)

    mesh = Mesh(Layout(dp_shard=4), torch.device("cpu"), dist.get_rank())
    with patch.object(rows_module, "open_file", counting):
        try:
            (rows,) = open_sources_once(TextDataConfig(train_path=folder), mesh).rows
        except UserError as error:
            return str(error)
        before = len(opened)
        return opened[:before], len(rows), rows.fingerprint(), rows[5], rows.describe(5), opened[before:]


def test_one_rank_opens_all_files_and_the_others_those_that_they_read(ranks, tmp_path):
    for number in range(3):
        lines = [json.dumps({"text": f"{number} {row}"}) for row in range(4)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    first, *others = ranks.run(4, opened_files, str(tmp_path))
    assert first[0] == ["0.jsonl", "1.jsonl", "2.jsonl"] and first[1] == 12 and first[3] == {"text": "1 1"}
    for other in others:
        assert other == ([], *first[1:5], ["1.jsonl"])
    (tmp_path / "1.jsonl").write_text("")
    texts = set(ranks.run(4, opened_files, str(tmp_path)))
    assert len(texts) == 1 and "1.jsonl has no rows" in texts.pop()
