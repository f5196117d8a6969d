"""Rows of files, beside what ``test_text_rows.py`` and ``test_hostile_rows.py`` show of all their kinds."""

import errno
import os
import time

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from sfumato.data.files.rows import JsonlRows, open_rows, text_field
from sfumato.errors import DataError


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")


def opened(path):
    return open_rows(path, "prompt", "data.train_path")


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(path):
    with pytest.raises(DataError) as caught:
        opened(path)
    return str(caught.value)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "end"])
def test_jsonl_blank_lines_are_skipped_but_counted(tmp_path, end, last):
    content = end.join(["", '{"prompt": "a"}', "", "  ", '{"prompt": "b"}']) + (end if last else "")
    path = write(tmp_path, "a.jsonl", content)
    rows = opened(path)
    assert [rows[i]["prompt"] for i in range(len(rows))] == ["a", "b"]
    assert [rows.describe(i) for i in range(2)] == [f"{path}, line 2", f"{path}, line 5"]


def test_text_rows(tmp_path):
    path = write(tmp_path, "a.txt", "\n  a cat \n\na\u2028dog\x0bhere\r\nlast")
    rows = opened(path)
    assert [rows[i] for i in range(len(rows))] == [
        {"prompt": "a cat"},
        {"prompt": "a\u2028dog\x0bhere"},
        {"prompt": "last"},
    ]
    assert [rows.describe(i) for i in range(3)] == [f"{path}, line {n}" for n in (2, 4, 5)]


def test_text_with_a_byte_order_mark(tmp_path):
    assert opened(write(tmp_path, "a.txt", b"\xef\xbb\xbfa cat\n"))[0] == {"prompt": "a cat"}


def test_a_missing_file_is_named_with_its_option(tmp_path):
    assert refusal(tmp_path / "none.jsonl") == f"data.train_path: file not found: {tmp_path / 'none.jsonl'}"
    assert "the folder" in refusal(tmp_path) and "has no .jsonl" in refusal(tmp_path)


def test_an_empty_parquet_file_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    assert str(path) in refusal(path)


@pytest.mark.parametrize("name", ["a.xml", "a", "jsonl"])
def test_an_unknown_ending_is_refused(tmp_path, name):
    path = write(tmp_path, name, "{}\n")
    assert refusal(path) == f"data.train_path: {path} must end in .jsonl, .json, .parquet, .arrow, .tar, .csv or .txt"


def test_a_text_column():
    assert text_field({"text": " a "}, "text", "here") == " a "


def test_a_missing_column_is_named_with_those_there_are():
    with pytest.raises(DataError, match=r"^f\.jsonl, line 3: no column 'text'; its columns are caption, n$"):
        text_field({"caption": "a", "n": 1}, "text", "f.jsonl, line 3")


@pytest.mark.parametrize("value", [3, None, "", "  ", ["a"], {"a": 1}])
def test_a_column_of_the_wrong_type_is_named_with_its_value(value):
    with pytest.raises(DataError) as caught:
        text_field({"text": value}, "text", "f.jsonl, line 3")
    assert str(caught.value) == f"f.jsonl, line 3: column 'text' must be a non-empty text, not {value!r}"


def test_rows_are_not_held_in_memory(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n')
    rows = JsonlRows(path)
    path.write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    assert rows[1] == {"prompt": "y"}


def test_a_parquet_file_that_was_replaced_under_its_time_is_read_anew(tmp_path):
    # as by cp -p, rsync -t or an archive; datasets knows its copy by path and mtime alone
    path = tmp_path / "a.parquet"
    for texts in (["one", "two"], ["ONE", "TWO"], ["one", "two", "three"]):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
        os.utime(path, (1_700_000_000, 1_700_000_000))
        rows = open_rows(path, "text", "data.train_path")
        assert [rows[index]["text"] for index in range(len(rows))] == texts


def test_no_room_for_the_copy_of_a_parquet_file_is_no_broken_file(tmp_path, monkeypatch):
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["one"]}), tmp_path / "a.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "a.parquet" / "cache")
    message = refusal(tmp_path / "a.parquet")
    assert "which cannot be written: Not a directory" in message and "set HF_DATASETS_CACHE" in message

    def write(*arguments, **settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(pyarrow.RecordBatchStreamWriter, "write_table", write, raising=True)
    assert "No space left on device: make room" in refusal(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_a_file_that_was_replaced_under_its_size_and_time_is_another_one(tmp_path, name):
    # stored tokens are found by the fingerprint, and would be those of the old file
    fingerprints = set()
    for word in ("red", "sky"):
        path = write(tmp_path, name, f'{{"prompt": "{word}"}}\n' if name == "a.jsonl" else f"prompt\n{word}\n")
        os.utime(path, (1_700_000_000, 1_700_000_000))
        fingerprints.add(opened(path).fingerprint())
        time.sleep(0.02)  # a step of the file system's clock
    assert len(fingerprints) == 2
