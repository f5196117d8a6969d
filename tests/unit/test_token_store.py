"""Tokens on disk: what the transform made, named bad rows, used again only when nothing changed, complete or absent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sfumato.data.files.sources import Sources
from sfumato.data.text.token_store import CHUNK_ROWS, build_token_store, in_workers
from sfumato.errors import DataError, OverlongError, RoleLostError
from tests.token_rows import ListRows, NumberTransform, one_source, random_lengths, rows_of, weighted

ROOT = Path(__file__).parents[2]


class Broken(NumberTransform):
    """Fails in a way that is no fault of the data."""

    def __call__(self, row, where):
        if row["number"] == 300:
            raise KeyError("a programming error")
        return super().__call__(row, where)


class Killed(NumberTransform):
    """Kills the process that works on one of the rows."""

    def __call__(self, row, where):
        if row["number"] == 300:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(row, where)


class Slow(NumberTransform):
    """Says which process has come to one of the rows, and stays there."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __call__(self, row, where):
        if row["number"] == 300 and self.folder is not None:
            Path(self.folder, "reached").mkdir()
            Path(self.folder, "reached", str(os.getpid())).touch()
            time.sleep(60)
        return super().__call__(row, where)


def build(folder, sources, transform=None, num_workers=1, max_bad_rows=0, said=None, watch=None):
    say = [].append if said is None else said.append
    return build_token_store(sources, transform or NumberTransform(), folder, num_workers, max_bad_rows, say, watch)


def content(store):
    return [
        [(document.input_ids.tolist(), document.loss_mask.tolist()) for document in store.sample(index).documents]
        for index in range(len(store))
    ]


def wanted(sources, transform):
    return [
        [(document.input_ids.tolist(), document.loss_mask.tolist()) for document in sample.documents]
        for rows in sources.rows
        for index in range(len(rows))
        if "bad" not in rows[index]
        for sample in transform(rows[index], "")
    ]


@pytest.mark.parametrize("documents", [1, 2])
def test_it_holds_what_the_transform_makes(tmp_path, documents):
    parts = [[5, (3, 2, 9), 4], [2] * (2 * CHUNK_ROWS + 3)]
    sources, transform = weighted(parts, [1, 1]), NumberTransform(documents)
    store = build(tmp_path, sources, transform)
    assert content(store) == wanted(sources, transform)
    assert store.names == ["s0", "s1"] and store.documents_per_sample == documents and not store.bad_rows
    assert len(store) == 5 + 2 * CHUNK_ROWS + 3
    assert store.source_of.tolist() == [0] * 5 + [1] * (len(store) - 5)
    assert store.lengths.tolist() == [sum(len(ids) for ids, _ in sample) for sample in content(store)]
    assert store.sample(0).documents[0].input_ids.dtype == np.int32
    assert store.sample(0).documents[0].loss_mask.dtype == bool


def test_workers_make_the_same_store(tmp_path):
    lengths = random_lengths(3 * CHUNK_ROWS + 5)
    lengths[7], lengths[600] = "first", "second"
    said, alone = [], []
    many = build(tmp_path / "many", one_source(lengths), num_workers=2, max_bad_rows=2, said=said)
    one = build(tmp_path / "one", one_source(lengths), max_bad_rows=2, said=alone)
    assert content(many) == content(one) and many.fingerprint == one.fingerprint
    assert (
        said
        == alone
        == [
            "row left out (1 of at most 2): rows, row 8: first",
            "row left out (2 of at most 2): rows, row 601: second",
            "2 rows left out: 1 x first; 1 x second",
        ]
    )


def test_progress_covers_all_parts(tmp_path):
    seen = []

    def watch(parts, count):
        seen.append(count)
        for part in parts:
            seen.append("part")
            yield part

    build(tmp_path, one_source([5] * (CHUNK_ROWS + 1)), watch=watch)
    assert seen == [2, "part", "part"]


def test_an_unchanged_store_is_used_again(tmp_path):
    lengths = [5, "broken", 6]
    first = NumberTransform()
    store = build(tmp_path, one_source(lengths), first, max_bad_rows=1)
    assert first.seen == [0, 1, 2]
    again, said = NumberTransform(), []
    reused = build(tmp_path, one_source(lengths), again, max_bad_rows=1, said=said)
    assert again.seen == [] and content(reused) == content(store) and reused.fingerprint == store.fingerprint
    assert said == ["1 row left out: 1 x broken (the last: rows, row 2: broken)"]
    with pytest.raises(DataError, match=r"row 2: broken.*data\.max_bad_rows is 0"):
        build(tmp_path, one_source(lengths), again)


def test_a_changed_one_is_not(tmp_path):
    store = build(tmp_path, one_source([5, 6]))
    for sources, transform in (
        (one_source([5, 7]), NumberTransform()),
        (one_source([5, 6, 6]), NumberTransform()),
        (Sources(["other"], [rows_of([5, 6])], None), NumberTransform()),
        (one_source([5, 6]), NumberTransform(fingerprint="another template")),
        (one_source([5, 6]), NumberTransform(documents_per_sample=2)),
    ):
        other = build(tmp_path, sources, transform)
        assert len(transform.seen) == len(sources.rows[0]) and other.folder != store.folder
    assert content(build(tmp_path, one_source([5, 6]))) == content(store)


def test_files_that_only_moved_keep_the_identity_of_the_samples(tmp_path):
    here = build(tmp_path, Sources(["text"], [rows_of([5, 6], name="here")], None))
    there = build(tmp_path, Sources(["text"], [rows_of([5, 6], name="there")], None))
    other = build(tmp_path, Sources(["text"], [rows_of([5, 7], name="there")], None))
    assert here.folder != there.folder and here.fingerprint == there.fingerprint != other.fingerprint


def test_too_many_bad_rows_stop_and_leave_nothing(tmp_path):
    said = []
    with pytest.raises(DataError, match=r"row 4: c \(data\.max_bad_rows is 2\)"):
        build(tmp_path, one_source(["a", 5, "b", "c", 5]), max_bad_rows=2, said=said)
    assert [text.split(": ", 1)[1] for text in said] == ["rows, row 1: a", "rows, row 3: b"]
    with pytest.raises(DataError, match=r"row 1: a \(data\.max_bad_rows leaves such rows out"):
        build(tmp_path, one_source(["a", 5]))
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"] * 2


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_fatal_row_stops_whatever_is_allowed(tmp_path, num_workers):
    with pytest.raises(OverlongError, match="row 2: overlong"):
        build(tmp_path, one_source([5, "overlong"]), max_bad_rows=9, num_workers=num_workers)


def test_a_source_without_a_usable_row(tmp_path):
    with pytest.raises(DataError, match="source 's1' has no row that can be used; the last reason: rows1, row 1: bad"):
        build(tmp_path, weighted([[5], ["bad"]], [1, 1]), max_bad_rows=5)


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_other_errors_are_not_taken_for_bad_rows(tmp_path, num_workers):
    with pytest.raises(KeyError, match="programming error"):
        build(tmp_path, one_source([5] * 600), Broken(), num_workers, max_bad_rows=9)


def test_a_worker_that_dies_is_noticed(tmp_path):
    with pytest.raises(RoleLostError, match=r"data\.num_workers: a process that reads rows died.*less than 2"):
        build(tmp_path, one_source([5] * 600), Killed(), num_workers=2)
    assert content(build(tmp_path, one_source([5] * 600))), "and the next attempt works"


class KillsReader:
    """Kills the process that reads it."""

    def __reduce__(self):
        return signal.raise_signal, (signal.SIGKILL,)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_worker_that_dies_before_it_has_read_its_rows_is_noticed():
    """The rows are longer than a pipe, so that nobody may wait for it to take them."""
    rows: list[Any] = [KillsReader(), bytes(10**6)]
    anything: Any = print  # no process comes to call it
    with pytest.raises(RoleLostError, match="a process that reads rows died"):
        list(in_workers(rows, anything, anything, [0, 1], 2))


def test_a_damaged_store_is_named(tmp_path):
    store = build(tmp_path, one_source([5, 6]))
    path = store.folder / "tokens.bin"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"tokens\.bin is missing or has not 44 bytes; delete its folder"):
        build(tmp_path, one_source([5, 6]))


KILLED = """
import sys
from pathlib import Path
from sfumato.data.text.token_store import build_token_store
from tests.token_rows import one_source
from tests.unit.test_token_store import Slow
build_token_store(one_source([5] * 600), Slow(sys.argv[1]), Path(sys.argv[1]), int(sys.argv[2]), 0, print)
"""


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_killed_build_leaves_no_store_and_no_process(tmp_path, num_workers):
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(num_workers)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    while not (pids := [int(path.name) for path in (tmp_path / "reached").glob("*")]):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not list(tmp_path.glob("*/manifest.json")) and list(tmp_path.glob("*.tmp"))
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}/cmdline").is_file() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        assert time.monotonic() < deadline, "a worker outlived the process that started it"
        time.sleep(0.02)
    assert len(build(tmp_path, one_source([5] * 600), Slow(None))) == 600
    assert not list(tmp_path.glob("*.tmp"))


def test_rows_that_cannot_be_read_are_bad_rows(tmp_path):
    class Unreadable(ListRows):
        def __getitem__(self, index):
            if index == 1:
                raise DataError(f"{self.describe(index)}: not valid JSON")
            return super().__getitem__(index)

    rows = Unreadable(rows_of([5, 6, 7]).rows)
    said = []
    assert len(build(tmp_path, Sources(["rows"], [rows], None), max_bad_rows=1, said=said)) == 2
    assert said == ["row left out (1 of at most 1): rows, row 2: not valid JSON"]
