"""Tables of every kind: random access, joined files and folders, and every broken file or row named."""

import csv
import json
import pickle

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from sfumato.data.files.rows import open_rows
from sfumato.errors import DataError

ROWS = [{"text": f'Zeile {i}, ä 日本 "x"\nzwei', "n": str(i)} for i in range(7)]
KINDS = ["rows.jsonl", "rows.json", "rows.parquet", "file.arrow", "stream.arrow", "rows.csv"]


@pytest.fixture(autouse=True)
def _private_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf_cache"))


def opened(path):
    return open_rows(path, "text", "data.train_path")


def refusal(path):
    with pytest.raises(DataError) as caught:
        opened(path)
    return str(caught.value)


def write(folder, name, rows=ROWS):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    if name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows, indent=1))
    elif name.endswith(".csv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    else:
        table = pyarrow.Table.from_pylist(rows)
        make = pyarrow.ipc.new_file if name.startswith("file") else pyarrow.ipc.new_stream
        with make(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    return path


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_same_rows_at_random_and_in_another_process(tmp_path, name):
    path = write(tmp_path, name)
    rows = opened(path)
    again = pickle.loads(pickle.dumps(rows))
    for text_rows in (rows, again):
        assert len(text_rows) == len(ROWS)
        assert [text_rows[index] for index in (6, 0, 3, 2, 3)] == [ROWS[index] for index in (6, 0, 3, 2, 3)]
        assert text_rows.describe(3).startswith(f"{path}, ")
    assert again.fingerprint() == rows.fingerprint()


@pytest.mark.parametrize("name", KINDS)
def test_a_fingerprint_changes_with_the_file(tmp_path, name):
    before = opened(write(tmp_path, name)).fingerprint()
    assert opened(write(tmp_path, name, ROWS[:-1])).fingerprint() != before


def test_csv_lines_are_counted_over_quoted_line_breaks(tmp_path):
    rows = opened(write(tmp_path, "rows.csv"))
    assert rows.describe(2) == f"{tmp_path / 'rows.csv'}, line 6"


def test_csv_fields_can_be_long_and_hold_any_line_break(tmp_path):
    row = {"text": "x" * 300_000 + "\u2028\x0b\r\n", "n": ""}
    limit = csv.field_size_limit()
    assert opened(write(tmp_path, "rows.csv", [row]))[0] == row
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.csv", "text,n\na,1\nb\n", "a.csv, line 3: has 1 values for 2 columns"),
        ("a.csv", 'text,n\n"a,1\n', "a.csv, line 2: not valid CSV: unexpected end of data"),
        ("a.csv", b"text\n\xff\n", "a.csv, line 1: not UTF-8 text: 'utf-8' codec"),
        ("a.csv", "text,text\na,b\n", "two columns have the same name: text, text"),
        ("a.csv", "text,n\n", "a.csv has no rows"),
        ("a.csv", "", "a.csv has no rows"),
        ("a.json", '{"text": "a"}', "a.json must hold a list of JSON objects, not dict"),
        ("a.json", '{"text": "a"', "a.json: not valid JSON: Expecting"),
        ("a.json", "[]", "a.json has no rows"),
        ("a.jsonl", "\n\n", "a.jsonl has no rows"),
        ("a.txt", "", "a.txt has no rows"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert reason in refusal(tmp_path / name)


def test_rows_that_are_no_objects_are_named(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "a"}, "b"]')
    rows = opened(tmp_path / "a.json")
    assert rows[0] == {"text": "a"}
    with pytest.raises(DataError, match=r"a\.json, row 2: must be a JSON object, not str"):
        rows[1]


@pytest.mark.parametrize("name", ["file.arrow", "stream.arrow", "rows.parquet"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_truncated_table_is_named(tmp_path, name, share):
    path = write(tmp_path, name)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    assert f"{path} cannot be read as {'parquet' if name.endswith('parquet') else 'arrow'}" in refusal(path)


def test_an_arrow_file_without_batches_is_refused(tmp_path):
    table = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema):
        pass
    assert "a.arrow has no rows" in refusal(tmp_path / "a.arrow")


def test_a_folder_is_all_its_files_in_order(tmp_path):
    folder = tmp_path / "data"
    for number, name in enumerate(KINDS):
        write(folder / f"part{number}", name, [{"text": f"{number}a", "n": "1"}, {"text": f"{number}b", "n": "2"}])
    (folder / "part0" / "rows.txt").write_text("from text\n")
    (folder / "README.md").write_text("no data")
    write(folder / ".cache", "hidden.jsonl")
    rows = opened(folder)
    texts = [rows[index]["text"] for index in range(len(rows))]
    assert texts == ["0a", "0b", "from text", *(f"{number}{letter}" for number in range(1, 6) for letter in "ab")]
    assert rows.describe(0) == f"{folder / 'part0' / 'rows.jsonl'}, line 1"
    assert rows.describe(2) == f"{folder / 'part0' / 'rows.txt'}, line 1"
    assert rows.describe(len(rows) - 1) == f"{folder / 'part5' / 'rows.csv'}, line 3"
    again = pickle.loads(pickle.dumps(rows))
    assert [again[index]["text"] for index in range(len(again))] == texts
    assert again.fingerprint() == rows.fingerprint()


def test_a_folder_that_datasets_saved(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=2)
    rows = opened(tmp_path / "saved")
    assert [rows[index] for index in range(len(rows))] == ROWS


def test_a_folder_without_data_says_what_it_holds(tmp_path):
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "LICENSE").write_text("x")
    message = refusal(tmp_path)
    assert message.startswith(f"data.train_path: the folder {tmp_path} has no .jsonl or ")
    assert message.endswith("it holds .md, LICENSE")


def test_several_paths_with_commas(tmp_path):
    first, second = write(tmp_path, "a,b.jsonl", ROWS[:2]), write(tmp_path, "c.csv", ROWS[2:4])
    assert len(opened(first)) == 2, "a comma in the name of a file that exists"
    rows = opened(f"{second}, {write(tmp_path, 'd.jsonl', ROWS[:1])}")
    assert [rows[index] for index in range(3)] == [ROWS[2], ROWS[3], ROWS[0]]
    with pytest.raises(IndexError):
        rows[3]


def test_a_path_that_is_missing_is_named_with_the_nearest(tmp_path):
    path = write(tmp_path, "train.jsonl")
    assert refusal(tmp_path / "trian.jsonl").endswith(
        f"file not found: {tmp_path / 'trian.jsonl'}; did you mean {path}?"
    )
    assert refusal(f"{path},") == "data.train_path: file not found: an empty path between commas"
