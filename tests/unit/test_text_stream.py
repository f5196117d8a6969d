"""Streams: shuffled in blocks, resumed exactly without tokenising what is done, errors and threads accounted for."""

import itertools
import json
import os
import threading
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from sfumato.config.text_data import TextDataConfig, TextTrainConfig
from sfumato.data.background import in_background
from sfumato.data.files.row_blocks import FilePlace, RowBlocks, RowFile
from sfumato.data.files.sources import Sources, open_sources
from sfumato.data.text.loader import build_text_loader
from sfumato.errors import ConfigError, DataError, OverlongError
from tests.token_rows import ListRows, NumberTransform, mesh_of, one_source, random_lengths, weighted
from tests.unit.test_text_loader import take, together, tokens_of

LENGTHS = random_lengths(23)
PIECES = [(16, 16, 5), 4, (16, 3), 9, (16,) * 6, 2, 7, (16, 16)]
CASES = {
    "one": {"sources": one_source(LENGTHS)},
    "file order": {"sources": one_source(LENGTHS), "data": {"shuffle": False}},
    "rows of several samples": {"sources": one_source(PIECES)},
    "samples": {"sources": one_source(PIECES), "train": {"dyn_bsz": False}},
    "joined": {"sources": weighted([LENGTHS, PIECES], None)},
    "mixed": {"sources": weighted([LENGTHS, PIECES], [1, 2])},
    "mixed by tokens": {"sources": weighted([LENGTHS, PIECES, [8] * 5], [1, 2, 1], "token", "all_exhausted")},
    "bad rows": {"sources": one_source([5, "bad", (6, 7), "bad", 8]), "data": {"max_bad_rows": 2}},
}


@pytest.fixture
def make(tmp_path):
    def build(sources, data=(), train=(), rank=0, ranks=1, transform=None, said=None):
        buffer = {"shuffle_buffer": 5} if dict(data).get("shuffle", True) else {}
        data = {"train_path": "unused", "datasets_type": "iterable", "max_seq_len": 16, **buffer, **dict(data)}
        train = {"output_dir": str(tmp_path), "micro_batch_size": 2, "global_batch_size": 4, "max_steps": 12} | dict(
            train
        )
        return build_text_loader(
            TextDataConfig(**data),
            TextTrainConfig(**train),
            0,
            transform or NumberTransform(),
            sources,
            mesh_of(rank, ranks),
            [].append if said is None else said.append,
            lambda parts, _count: parts,
        )

    return build


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def passes(lengths, first=0):
    """First tokens of all samples of some rows."""
    return sorted(
        1000 * number + piece
        for number, length in enumerate(lengths, start=first)
        if not isinstance(length, str)
        for piece in range(1 if isinstance(length, int) else len(length))
    )


@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 2), (3, 1)])
def test_ranks_and_micro_batches_share_the_same_samples(make, case, ranks, micro_batch):
    whole = take(make(**case))
    case = case | {"train": {**case.get("train", {}), "micro_batch_size": micro_batch}}
    assert together([make(**case, rank=rank, ranks=ranks) for rank in range(ranks)]) == whole
    assert [number for number, *_ in whole] == list(range(12))


def test_resuming_anywhere_goes_on_as_if_nothing_had_happened(make, case):
    whole = take(make(**case))
    for done in range(1, 13):
        loader = make(**case, transform=NumberTransform())
        take(loader, done)
        resumed = make(**case)
        resumed.restore(loader.state())
        assert resumed.total_steps == 12 and take(resumed) == whole[done:]


def test_resuming_with_other_batches_loses_and_repeats_nothing(make, case):
    long = {**case.get("train", {}), "max_steps": 40}
    wanted = tokens_of(take(make(**case | {"train": long})))
    first = make(**case)
    before = tokens_of(take(first, 5))
    train = {**case.get("train", {}), "global_batch_size": 7, "micro_batch_size": 3}
    loaders = [make(**case | {"train": train}, rank=rank, ranks=2) for rank in range(2)]
    for loader in loaders:
        loader.restore(first.state())
    after = tokens_of(together(loaders))
    assert before + after == wanted[: len(before) + len(after)]


@pytest.mark.parametrize("lengths", [LENGTHS, PIECES])
def test_every_row_once_in_an_epoch_shuffled_in_blocks(make, lengths):
    steps = take(make(one_source(lengths), train={"max_steps": 60}))
    count = len(passes(lengths))
    epochs = [tokens_of(steps)[start : start + count] for start in (0, count, 2 * count)]
    assert all(sorted(epoch) == passes(lengths) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    blocks = [list(dict.fromkeys(first // 1000 // 5 for first in epoch)) for epoch in epochs]
    assert blocks == [list(range(-(-len(lengths) // 5)))] * 3
    for epoch in epochs:  # pieces of a row follow each other
        rows = [number for number, _ in itertools.groupby(epoch, lambda first: first // 1000)]
        assert len(rows) == len(set(rows))


def test_epochs_end_where_all_rows_are_through(make):
    steps = take(make(one_source(LENGTHS), train={"max_steps": 60, "dyn_bsz": False}))
    assert [number for number, *_, ended in steps if ended][:4] == [5, 11, 17, 22]  # samples 23, 46, 69, 92 by fours


def test_resuming_tokenises_only_the_row_in_which_it_stopped(make):
    loader = make(one_source(PIECES), data={"shuffle": False}, train={"dyn_bsz": False})
    take(loader, 2)
    transform = NumberTransform()
    resumed = make(one_source(PIECES), data={"shuffle": False}, train={"dyn_bsz": False}, transform=transform)
    resumed.restore(loader.state())
    assert resumed.state()["places"] == [(0, 4, 1, (0, 0, 0))], "row 4 of epoch 0, after its first sample"
    take(resumed, 1)
    assert transform.seen[:2] == [4, 5]


def test_shares_are_exact(make):
    sources = weighted([[16] * 50, [4] * 400], [1, 1], "token")
    count = [0, 0]
    for _, batches in make(sources, train={"max_steps": 30}).steps():
        for batch in batches:
            for source in batch.source_ids[0].tolist():
                count[source] += 1
    assert abs(count[0] - count[1]) <= 32


def test_the_length_of_a_run_in_tokens(make):
    options = {"data": {"train_size": 1000}, "train": {"max_steps": None}}
    loader = make(one_source(LENGTHS), **options)
    assert loader.total_steps == 16  # 1000 / 64
    whole = take(loader)
    assert len(whole) == 16
    for done in (1, 7, 15, 16):
        first, resumed = make(one_source(LENGTHS), **options), make(one_source(LENGTHS), **options)
        take(first, done)
        resumed.restore(first.state())
        assert resumed.total_steps == 16 and take(resumed) == whole[done:]
    with pytest.raises(ConfigError, match=r"train\.max_steps"):
        make(one_source(LENGTHS), data={"train_size": 1000}, train={"max_steps": None, "dyn_bsz": False})


def test_bad_rows_are_named_once_and_stop_at_the_limit(make):
    said = []
    lengths = [5, "first", 6, "second", 7]
    take(make(one_source(lengths), data={"max_bad_rows": 2}, said=said))
    named = [text for text in said if text.startswith("row left out")]
    assert sorted(text.split("): ")[1] for text in named) == ["rows, row 2: first", "rows, row 4: second"]
    with pytest.raises(DataError, match=r"data\.max_bad_rows is 1"):
        take(make(one_source(lengths), data={"max_bad_rows": 1}))
    with pytest.raises(OverlongError, match="row 2: overlong"):
        take(make(one_source([5, "overlong"]), data={"max_bad_rows": 9}))
    with pytest.raises(DataError, match="not one of 2 rows can be used; the last reason: rows"):
        take(make(one_source(["a", "b"]), data={"max_bad_rows": 9}))


@pytest.mark.parametrize("max_steps", [1, 30])
def test_rows_left_out_are_summed_up_when_an_epoch_ends_and_at_the_end_of_the_run(make, max_steps):
    said, lengths = [], [16, "no 1", 16, "no 2", "empty", *[16] * 9]
    settings = {"data": {"max_bad_rows": 3, "shuffle": False}, "train": {"max_steps": max_steps}}
    take(make(one_source(lengths), **settings, said=said))
    assert said[0] == "row left out (1 of at most 3): rows, row 2: no 1"
    assert said[3:] == ["3 rows left out: 2 x no _; 1 x empty, since this process began"], "once, and not each epoch"


def test_an_error_arrives_after_the_steps_before_it(make):
    loader = make(one_source([16] * 30 + ["broken"]), data={"shuffle": False}, train={"max_steps": 20})
    steps = loader.steps()
    seen = []
    with pytest.raises(DataError, match="row 31: broken"):
        seen.extend(number for number, _ in steps)
    assert seen == list(range(7))
    assert loader.state()["samples"] == 28, "the state of the last step that was yielded"


def test_other_data_is_refused_on_resume(make):
    state = make(one_source(LENGTHS)).state()
    for options in (
        {"sources": one_source([*LENGTHS, 5])},
        {"sources": one_source(LENGTHS), "data": {"shuffle_buffer": 6}},
        {"sources": one_source(LENGTHS), "data": {"datasets_type": "mapping"}},
        {"sources": one_source(LENGTHS), "transform": NumberTransform(fingerprint="another")},
    ):
        with pytest.raises(DataError, match="not what the checkpoint was trained on"):
            make(**options).restore(state)


def test_a_checkpoint_that_counts_rows_is_refused_in_one_line(make):
    loader = make(one_source(LENGTHS))
    old = {"fingerprint": "x", "step": 2, "samples": 9, "tokens": 128, "taken": [9], "rows": [9], "pieces": [0]}
    with pytest.raises(DataError, match=r"counts the rows .* Go on with that version, or start a new run") as caught:
        loader.restore(old)
    assert "\n" not in str(caught.value)


def write_rows(folder, kind, rows):
    """A file of that kind; .parquet and .arrow in groups of three rows."""
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("\n\n".join(map(json.dumps, rows)))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "csv":
        path.write_text("text\n" + "\n".join(row["text"] for row in rows))
    elif kind == "txt":
        path.write_text("\n".join(row["text"] for row in rows))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    else:
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_file(str(path), table.schema) as writer:
            for batch in table.to_batches(3):
                writer.write_batch(batch)
    return path


class TextNumbers(NumberTransform):
    """The row ``{"text": "7"}`` gives a sample of 5 tokens, which begins with 7000."""

    def __call__(self, row, where):
        return super().__call__({"number": int(row["text"]), "lengths": [5]}, where)


KINDS = ("jsonl", "json", "csv", "txt", "parquet", "arrow")


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_streamed_in_the_order_of_rows_in_memory(make, tmp_path, kind):
    """Three files of 7, 1 and 12 rows, in blocks of 5 that reach over their ends, for two epochs, with resumes."""
    rows = [{"text": str(number)} for number in range(20)]
    paths = []
    for number, (start, stop) in enumerate(((0, 7), (7, 8), (8, 20))):
        folder = tmp_path / str(number)
        folder.mkdir()
        paths.append(write_rows(folder, kind, rows[start:stop]))
    options = {"train": {"dyn_bsz": False, "global_batch_size": 3, "max_steps": 14}, "transform": TextNumbers()}
    in_memory = take(make(Sources(["rows"], [ListRows(rows)], None), **options))
    files = open_sources(TextDataConfig(train_path=",".join(map(str, paths)), datasets_type="iterable"))
    assert files.rows == [] and [file.path for file in files.files[0]] == paths
    wanted = take(make(files, **options))
    assert [(samples, ended) for _, samples, _, ended in wanted] == [
        (samples, ended) for _, samples, _, ended in in_memory
    ]
    for done in range(14):
        first, resumed = make(files, **options), make(files, **options)
        take(first, done)
        resumed.restore(json.loads(json.dumps(first.state())))
        assert take(resumed) == wanted[done:]


def test_the_first_step_comes_without_reading_the_files(make, tmp_path):
    """Of two files the first is 1 GB of which little is rows, and the second is broken."""
    first = tmp_path / "a.jsonl"
    first.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(100)))
    os.truncate(first, 1 << 30)
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    with Path("/proc/self/io").open() as file:

        def bytes_read():
            file.seek(0)
            return int(file.readline().split()[1])

        before = bytes_read()
        files = open_sources(TextDataConfig(train_path=str(tmp_path), datasets_type="iterable"))
        steps = make(files, transform=TextNumbers()).steps()
        next(steps)
        steps.close()
        assert bytes_read() - before < 2**22


def test_a_file_is_looked_at_when_its_turn_comes(make, tmp_path):
    write_rows(tmp_path, "jsonl", [{"text": str(number)} for number in range(8)])
    (tmp_path / "tail.parquet").write_bytes(b"no parquet")
    files = open_sources(TextDataConfig(train_path=str(tmp_path), datasets_type="iterable"))
    options = {"train": {"dyn_bsz": False, "global_batch_size": 1}, "transform": TextNumbers()}
    seen = []
    with pytest.raises(DataError, match=r"tail\.parquet cannot be read as parquet"):
        seen.extend(number for number, _ in make(files, **options).steps())
    assert len(seen) == 5, "the block that does not reach into it"
    (tmp_path / "tail.parquet").rename(tmp_path / "tail.jsonl").write_text("\n")
    files = open_sources(TextDataConfig(train_path=str(tmp_path), datasets_type="iterable"))
    with pytest.raises(DataError, match=r"tail\.jsonl has no rows"):
        take(make(files, **options))
    with pytest.raises(DataError, match="file not found"):
        open_sources(TextDataConfig(train_path=str(tmp_path / "none.jsonl"), datasets_type="iterable"))


def test_of_a_parquet_file_few_row_groups_are_in_memory(tmp_path):
    rows = [{"text": "x" * 1000, "number": number} for number in range(3000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=100)
    blocks = RowBlocks([(0, RowFile(tmp_path / "rows.parquet", "text", "data.train_path"))])
    before, most, place, seen = pyarrow.total_allocated_bytes(), 0, FilePlace(), []
    while place.table == 0:
        block = blocks.read(place, 130)
        most = max(most, pyarrow.total_allocated_bytes() - before)
        seen += [block.rows[index]["number"] for index in range(len(block.rows))]
        assert block.rows.describe(0).endswith(f"row {place.number + 1}")
        place = block.after
    assert block.is_last and seen == [*range(3000)]
    assert 100_000 < most < 1_000_000, "all rows are 3 MB"


def test_a_closed_stream_leaves_no_thread(make):
    before = threading.active_count()
    steps = make(one_source(LENGTHS), train={"max_steps": 10_000}).steps()
    next(steps)
    assert threading.active_count() == before + 1
    steps.close()
    assert threading.active_count() == before
    take(make(one_source(LENGTHS)))
    assert threading.active_count() == before


def test_little_is_prepared_before_it_is_asked_for():
    made = []

    def numbers():
        for number in range(100):
            made.append(number)
            yield number

    items = in_background(numbers(), 2)
    assert next(items) == 0
    time.sleep(0.3)
    assert len(made) <= 4
    assert list(items) == list(range(1, 100))


def test_what_the_thread_raises_is_raised_where_items_are_used():
    def broken():
        yield 1
        raise KeyError("inside")

    items = in_background(broken(), 2)
    assert next(items) == 1
    with pytest.raises(KeyError, match="inside"):
        next(items)
