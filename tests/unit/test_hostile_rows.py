"""Files of rows that are made to hang, to fill memory, or to end in Python's own errors."""

import os
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from sfumato.config.text_data import TextDataConfig
from sfumato.data.files import rows as rows_module
from sfumato.data.files.bad_rows import BadRows
from sfumato.data.files.rows import open_rows
from sfumato.data.images.image_text import FolderRows
from sfumato.data.text.format import build_transform
from sfumato.data.text.messages import read_messages
from sfumato.errors import DataError
from sfumato.models.language.load import build_byte_tokenizer


def refusal(path: Path, index: int | None = None) -> str:
    """The one line with which a file, or a row of it, is refused."""
    with pytest.raises(DataError) as caught:
        open_rows(path, "text", "data.train_path")[index or 0]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet", ".arrow", ".csv", ".txt"])
def test_a_pipe_is_refused_whatever_it_is_called(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"data{ending}"
    os.mkfifo(path)
    assert refusal(path) == f"data.train_path: {path} is a named pipe, not a file"
    assert refusal(tmp_path) == f"data.train_path: {path} is a named pipe, not a file"


def test_a_device_and_a_caption_that_is_a_pipe_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.txt").symlink_to("/dev/zero")
    assert refusal(tmp_path / "data.txt") == f"data.train_path: {tmp_path / 'data.txt'} is a device, not a file"
    (tmp_path / "a.png").write_bytes(b"")
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"a\.txt is a named pipe, not a file"):
        FolderRows(tmp_path, "image", "text")[0]


DEEP = "[" * 100_000 + "]" * 100_000
ODD_LINES = {
    '{"text": ' + DEEP + "}": "nested deeper than 100 levels",
    '{"text": ' + "[" * 200 + "]" * 200 + "}": "nested deeper than 100 levels",
    '{"text": "\\ud800"}': "\\ud800 is half of a character, of which the other half is missing",
    '{"\\udc00": "a"}': "\\udc00 is half of a character, of which the other half is missing",
    '{"text": ' + "9" * 5000 + "}": "not valid JSON: Exceeds the limit",
    '{"text": "a\x00b"}': "not valid JSON: Invalid control character",
    "[1]": "must be a JSON object, not list",
}


@pytest.mark.parametrize("line", ODD_LINES, ids=[f"{number}" for number in range(len(ODD_LINES))])
def test_odd_lines_are_refused_by_file_and_row(tmp_path: Path, line: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n{{"text": "good"}}\n')
    assert refusal(path, 1).startswith(f"{path}, line 2: {ODD_LINES[line]}")
    rows = open_rows(path, "text", "data.train_path")
    assert len(rows) == 3 and rows[2] == {"text": "good"}
    listed = tmp_path / "data.json"
    listed.write_text(f"[{line}]")
    assert ODD_LINES[line].split(":")[0] in refusal(listed, 0)


def test_bytes_that_are_no_text_and_marks_of_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "marked"}\n{"text": "\xff"}\n{"text": "\xed\xa0\x80"}\n\0{\0"\0')
    rows = open_rows(path, "text", "data.train_path")
    assert rows[0] == {"text": "marked"}
    for index in (1, 2):
        assert refusal(path, index).startswith(f"{path}, line {index + 1}: not UTF-8 text: ")
    assert refusal(path, 3).startswith(f"{path}, line 4: not valid JSON")
    (tmp_path / "data.txt").write_bytes(b"a\n\xff\n")
    assert refusal(tmp_path / "data.txt").startswith(f"{tmp_path / 'data.txt'} is not UTF-8 text")


def test_a_line_without_end_is_one_bad_row_and_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_LINE", 2**20)
    path = tmp_path / "data.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "one"}\n{"text": "')
        file.truncate(200 * 2**20)
        file.seek(0, os.SEEK_END)
        file.write(b'"}\n{"text": "three"}\n')
    tracemalloc.start()
    rows = open_rows(path, "text", "data.train_path")
    assert refusal(path, 1) == f"{path}, line 2: is longer than the 1,048,576 bytes that are read"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(rows) == 3 and rows[2] == {"text": "three"} and rows.describe(2) == f"{path}, line 3"
    assert peak < 16 * 2**20


def test_a_file_that_would_be_held_as_a_whole_may_not_be_gigantic(tmp_path: Path) -> None:
    for ending in (".json", ".csv", ".txt"):
        path = tmp_path / f"data{ending}"
        with path.open("wb") as file:
            file.truncate(10 * 2**30)
        assert "has 10,737,418,240 bytes, more than the 2,147,483,648 that are read: write the rows" in refusal(path)


def test_columns_that_hold_json_are_read_with_the_same_care() -> None:
    for value, problem in (
        (DEEP, "nested deeper"),
        ('[{"role": "\\ud800"}]', "half of a character"),
        ("{", "not valid"),
    ):
        with pytest.raises(DataError, match=f"row 3: .*{problem}"):
            read_messages(value, "row 3")


def test_bad_rows_of_text_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [*ODD_LINES, '{"text": null}', '{"content": 3}', '{"text": "good"}']
    path.write_text("\n".join(lines) + "\n")
    config = TextDataConfig(train_path=str(path), data_type="plaintext")
    transform, rows = build_transform(config, build_byte_tokenizer()), open_rows(path, "text", "data.train_path")
    said: list[str] = []
    bad, good = BadRows(len(lines) - 1, said.append), 0
    for index in range(len(rows)):
        try:
            good += len(transform(rows[index], rows.describe(index)))
        except DataError as error:
            bad.add(index, error)
    assert good == 1 and len(bad.seen) == len(lines) - 1 and all(f"{path}, line" in line for line in said)


def arrow_with_wrong_offsets(path: Path) -> None:
    """An .arrow file of three texts, of which the second claims to end far behind the buffer."""
    offsets = pyarrow.array([0, 3, 2**30, 9], pyarrow.int32()).buffers()[1]
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 3, [None, offsets, pyarrow.py_buffer(b"onetwosix")])
    table = pyarrow.RecordBatch.from_arrays([texts], ["text"])
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_batch(table)


def test_offsets_that_point_nowhere_do_not_end_the_process(tmp_path: Path) -> None:
    path = tmp_path / "data.arrow"
    arrow_with_wrong_offsets(path)
    assert open_rows(path, "text", "data.train_path")[0] == {"text": "one"}
    assert refusal(path, 1).startswith(f"{path}, row 2: ")


def parquet(path: Path, columns: dict[str, Any], metadata: dict[str, str] | None = None) -> Path:
    table = pyarrow.table(columns)
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)
    return path


def test_parquet_and_arrow_files_that_are_none_are_named(tmp_path: Path) -> None:
    for name, content in (
        ("a.parquet", b"PAR1junkPAR1"),
        ("b.parquet", b""),
        ("c.arrow", b"ARROW1junk"),
        ("d.arrow", b"x"),
    ):
        (tmp_path / name).write_bytes(content)
        kind = name.partition(".")[2]
        assert refusal(tmp_path / name).startswith(f"{tmp_path / name} cannot be read as {kind}: ")
    odd = {"huggingface": '{"info": {"features": {"text": {"_type": "NoSuchType"}}}}'}
    path = parquet(tmp_path / "odd.parquet", {"text": ["a"]}, odd)
    assert refusal(path).startswith(f"{path} cannot be read as parquet: ")
    path = parquet(tmp_path / "numbers.parquet", {"text": [1, 2]})
    config = TextDataConfig(train_path=str(path), data_type="plaintext")
    transform = build_transform(config, build_byte_tokenizer())
    with pytest.raises(DataError, match="row 2: column 'text' must be a non-empty text, not 2"):
        transform(open_rows(path, "text", "data.train_path")[1], "row 2")
