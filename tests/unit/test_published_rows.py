"""Files as publishers lay them: splits and subsets in a folder, compressed, with columns of JSON."""

import bz2
import gzip
import json
import lzma

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from pydantic import TypeAdapter, ValidationError

from sfumato.config.row_limit import RowLimit
from sfumato.config.text_data import TextDataConfig
from sfumato.data.files import rows as rows_module
from sfumato.data.files.bad_rows import bad_row_limit, describe_bad_rows
from sfumato.data.files.folders import describe_left_out, find_sources
from sfumato.data.files.row_blocks import FilePlace, RowBlocks, RowFile
from sfumato.data.files.rows import open_rows, readable_rows
from sfumato.data.files.sources import open_sources, open_validation
from sfumato.data.text import notes as data_notes
from sfumato.data.text.format import build_transform
from sfumato.data.text.messages import read_messages, read_tools
from sfumato.data.text.notes import describe_text_data
from sfumato.errors import DataError
from tests.tiny_tokenizers import build_tokenizer

USER = {"role": "user", "content": "q"}
TRAIN, TEST = "train-00000-of-00001.parquet", "test-00000-of-00001.parquet"


def find_files(path, option, held_out=False):
    return [file for part in find_sources(path, option, held_out) for file in part.files]


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(str(path))


def questions(word, count):
    return [{"question": f"{word} {number}", "answer": f"#### {number}"} for number in range(count)]


@pytest.fixture
def gsm8k(tmp_path):
    for subset in ("main", "socratic"):
        write_parquet(tmp_path / subset / TRAIN, questions("train", 7))
        write_parquet(tmp_path / subset / TEST, questions("test", 3))
    (tmp_path / "README.md").write_text("GSM8K")
    return tmp_path


def test_a_published_folder_gives_the_split_that_is_asked_for(gsm8k):
    main = gsm8k / "main"
    assert [file.name for file in find_files(main, "data.train_path")] == [TRAIN]
    assert [file.name for file in find_files(main, "data.eval_path", held_out=True)] == [TEST]
    assert [file.name for file in find_files(f"{main}/test-*.parquet", "data.eval_path", held_out=True)] == [TEST]
    (line,) = describe_left_out(main, "data.train_path")
    assert f"its train split is read ({TRAIN}); left out: {TEST}" in line
    assert len(open_rows(gsm8k, "text", "data.train_path")) == 14
    lines = describe_left_out(gsm8k, "data.train_path")
    assert len(lines) == 2 and "subsets main, socratic, which are read together" in lines[1]


@pytest.mark.parametrize(
    ("names", "train", "held_out"),
    [
        (["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"]),
        (["a_train.jsonl", "a_dev.jsonl"], ["a_train.jsonl"], ["a_dev.jsonl"]),
        (["data.jsonl", "test.jsonl"], ["data.jsonl"], ["test.jsonl"]),
        (["train/0.jsonl", "validation/0.jsonl", "test/0.jsonl"], ["train/0.jsonl"], ["validation/0.jsonl"]),
        (["constraints.jsonl", "latest.jsonl", "trainer.jsonl"], None, None),
        (["test-0.jsonl", "test-1.jsonl"], None, None),
        (["train.jsonl", "more.jsonl"], None, None),
        (["split=train/0.jsonl", "split=test/0.jsonl"], ["split=train/0.jsonl"], ["split=test/0.jsonl"]),
        (["a(train).jsonl", "a[test].jsonl"], ["a(train).jsonl"], ["a[test].jsonl"]),
        (["Training Set.jsonl", "eval.jsonl.gz"], ["Training Set.jsonl"], ["eval.jsonl.gz"]),
    ],
)
def test_names_say_the_split(tmp_path, names, train, held_out):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    for wanted, is_held_out in ((train, False), (held_out, True)):
        actual = [str(file.relative_to(tmp_path)) for file in find_files(tmp_path, "data.x", is_held_out)]
        assert actual == sorted(names if wanted is None else wanted)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.jsonl", ["a.jsonl"]),
        ("*/b.jsonl", ["en/b.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "en/b.jsonl", "en/d[1]/c.jsonl"]),
        ("en/d[1]/?.jsonl", ["en/d[1]/c.jsonl"]),
    ],
)
def test_patterns_may_stand_for_folders_too_beside_a_list_of_sources_as_well(tmp_path, pattern, names):
    for name in ("a.jsonl", "en/b.jsonl", "en/d[1]/c.jsonl", "en/.c.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    (tmp_path / "mix.yaml").write_text(f'sources: ["{pattern}"]')
    assert find_files(tmp_path / pattern, "data.x") == [tmp_path / name for name in names]
    (rows,) = open_sources(TextDataConfig(train_path=str(tmp_path / "mix.yaml"))).rows
    assert [row["text"] for row in rows] == names


def test_files_that_are_not_read_are_named(tmp_path):
    for name in ("a.jsonl", "b.tsv", "c.parquet.gz", "README.md", ".hidden"):
        (tmp_path / name).write_text("{}")
    (line,) = describe_left_out(tmp_path, "data.train_path")
    assert line.endswith(f"{tmp_path} that are not read: b.tsv, c.parquet.gz")


CACHED = "cache-0123456789abcdef"


@pytest.mark.parametrize("shared", ["save_to_disk", "the cache of load_dataset"])
def test_what_datasets_keeps_of_map_beside_the_rows_is_not_read(tmp_path, shared):
    rows = "data-00000-of-00001.arrow" if shared == "save_to_disk" else "json-train.arrow"
    for name in (rows, f"{CACHED}.arrow", f"{CACHED}_00000_of_00002.arrow", f"{CACHED}_00001_of_00002.arrow"):
        (tmp_path / name).touch()
    (tmp_path / "state.json").write_text("{}")
    assert [file.name for file in find_files(tmp_path, "data.train_path")] == [rows]
    assert describe_left_out(tmp_path, "data.train_path") == []


@pytest.mark.parametrize(
    "names",
    [
        ("data-00000-of-00001.arrow", "data-00000-of-00002.arrow", "data-00001-of-00002.arrow"),
        ("train-00000-of-00001-a09b74b3ef9c3b56.parquet", "train-00000-of-00001.parquet"),
    ],
)
def test_a_table_that_was_written_twice_into_a_folder_is_refused(tmp_path, names):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=f"data.train_path: .*written twice: {', '.join(names)}"):
        find_files(tmp_path, "data.train_path")


@pytest.mark.parametrize("file", ["{}-00000-of-00001.parquet", "{}/data-00000-of-00001.arrow"])
@pytest.mark.parametrize("names", [["train_gen", "train_sft", "test_sft"], ["train", "train_1M"]])
def test_several_splits_of_one_kind_are_refused_until_they_are_named(tmp_path, names, file):
    for path in (tmp_path / file.format(name) for name in names):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    with pytest.raises(DataError, match=f"splits {names[0]}, {names[1]}, which may have the same rows.* as ") as error:
        find_files(tmp_path, "data.x")
    pattern = str(error.value).split(" as ")[-1].split(",")[0]
    assert find_files(pattern, "data.x") == [tmp_path / file.format(names[0])]
    assert len(find_files(str(tmp_path / file.format("train*")), "data.x")) == 2


def test_files_that_a_table_lacks_are_said(tmp_path):
    (tmp_path / "en").mkdir()
    for name in ("train-00001-of-00003.parquet", "train-00002-of-00003.parquet", "en/train-00000-of-00001.parquet"):
        (tmp_path / name).touch()
    (line,) = describe_left_out(tmp_path, "data.train_path")
    assert "has 2 of the 3 files of the table of train-00001-of-00003.parquet" in line


def test_the_hubs_cache_of_a_data_set_with_several_revisions_is_refused(tmp_path):
    (tmp_path / "refs").mkdir()
    for revision in ("aaa", "bbb"):
        (tmp_path / "snapshots" / revision).mkdir(parents=True)
        (tmp_path / "snapshots" / revision / TRAIN).touch()
        if revision == "aaa":
            assert len(find_files(tmp_path, "data.train_path")) == 1
    with pytest.raises(DataError, match=r"data.train_path: .* with 2 revisions: give one of them, as .*/snapshots/bbb"):
        find_files(tmp_path, "data.train_path")


def test_a_parquet_file_without_rows_says_so(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet has no rows"):
        open_rows(tmp_path / "a.parquet", "text", "data.train_path")


def test_a_parquet_file_may_begin_with_an_empty_row_group(tmp_path):
    table = pyarrow.table({"text": ["a", "b"]})
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        writer.write_table(table.slice(0, 0))
        writer.write_table(table)
    assert [row["text"] for row in open_rows(tmp_path / "a.parquet", "text", "data.train_path")] == ["a", "b"]


@pytest.mark.parametrize(("ending", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_compressed_files_hold_the_same_rows(tmp_path, ending, compress):
    contents = {
        "a.jsonl": b'{"text": "a\xe2\x80\xa8b"}\r\n\n{"text": "c"}\n',
        "b.json": b'[{"text": "a"}, {"text": "c"}]',
        "c.csv": b"\xef\xbb\xbftext,n\r\na,1\r\nc,2\r\n",
        "d.txt": b"a\nc\n",
        "e.json": b'{"text": "a"}\n{"text": "c"}\n',
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / f"{name}.{ending}").write_bytes(compress(content))
        plain, packed = (
            open_rows(tmp_path / name, "text", "data.x"),
            open_rows(tmp_path / f"{name}.{ending}", "text", "data.x"),
        )
        assert [*packed] == [*plain] and len(packed) == 2
        block = RowBlocks([(0, RowFile(tmp_path / f"{name}.{ending}", "text", "data.x"))]).read(FilePlace(), 5)
        assert [block.rows[index] for index in range(2)] == [*plain] and block.is_last
    broken = tmp_path / f"e.jsonl.{ending}"
    broken.write_bytes(compress(contents["a.jsonl"])[:-9])
    with pytest.raises(DataError, match="cannot be decompressed"):
        open_rows(broken, "text", "data.x")


ROW = {
    "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"unit": None, "n": 1}}]},
        {"role": "assistant", "content": "a"},
    ],
    "tools": [{"name": "f", "parameters": {"unit": {"default": None}}}],
    "answer": {"value": [1, None]},
}


@pytest.mark.parametrize("how", ["parquet", "arrow", "stream"])
def test_the_json_type_of_datasets_is_parsed(tmp_path, how):
    features = datasets.Features(
        {"messages": datasets.List(datasets.Json()), "tools": datasets.Json(), "answer": datasets.Json()}
    )
    table = datasets.Dataset.from_list([ROW, ROW], features=features)
    if how == "arrow":
        table.save_to_disk(str(tmp_path / "saved"))
        rows = open_rows(tmp_path / "saved", "text", "data.x")
    else:
        path = tmp_path / "rows.parquet"
        table.to_parquet(str(path))
        rows = open_rows(path, "text", "data.x")
        if how == "stream":
            rows = RowBlocks([(0, RowFile(path, "text", "data.x"))]).read(FilePlace(), 5).rows
    row = rows[1]
    assert row == ROW == table[1]
    assert read_tools(row, "row") == [{"type": "function", "function": tool} for tool in ROW["tools"]]
    (call,) = read_messages(row["messages"], "row")[1]["tool_calls"]
    assert call["function"]["arguments"] == {"unit": None, "n": 1}


def test_keys_of_other_rows_of_a_table_are_left_out(tmp_path):
    calls = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": 2}}]
    rows = [{"messages": [{"role": "assistant", "content": "x", "tool_calls": [call]}]} for call in calls]
    write_parquet(tmp_path / "rows.parquet", rows)
    views = pyarrow.list_view(pyarrow.Table.from_pylist(rows).schema.field("messages").type.value_type)
    views = pyarrow.table({"messages": pyarrow.array([row["messages"] for row in rows], views)})
    with pyarrow.ipc.new_file(str(tmp_path / "rows.arrow"), views.schema) as file:
        file.write_table(views)
    for name in ("rows.parquet", "rows.arrow"):
        for row, call in zip(open_rows(tmp_path / name, "text", "data.x"), calls, strict=True):
            assert read_messages(row["messages"], "row")[0]["tool_calls"][0]["function"] == call


def test_what_nothing_reads_and_rows_of_both_sets_are_said_once(tmp_path):
    def write(name, words):
        lines = [
            {"id": index, "source": "web", "messages": [{"role": "user", "content": word, "uuid": 1}, answer]}
            for index, word in enumerate(words)
        ]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(tmp_path / name)

    answer = {"role": "assistant", "content": "yes"}
    data = TextDataConfig(
        train_path=write("a.jsonl", "pqrs"), eval_path=write("b.jsonl", "xsq"), chat_template="chatml"
    )
    transform = build_transform(data, build_tokenizer())
    lines = describe_text_data(data, open_sources(data), open_validation(data), transform, 256)
    assert lines[0] == "a: rows read as OpenAI messages (messages)"
    assert lines[1].endswith("not read: column 'id', column 'source', key 'uuid' of messages")
    shared = f"{tmp_path}/b.jsonl, line 2 is {tmp_path}/a.jsonl, line 4; {tmp_path}/b.jsonl, line 3 is"
    assert f"2 of the 3 evaluation rows are among the training rows ({shared}" in lines[2]


@pytest.mark.parametrize("kind", ["mapping", "iterable"])
def test_all_rows_of_training_are_compared_with_those_of_evaluation(tmp_path, kind, monkeypatch):
    write_parquet(tmp_path / "train" / "a.parquet", [{"text": f"a{n}"} for n in range(70)])
    write_parquet(tmp_path / "train" / "b.parquet", [{"text": f"b{n}"} for n in range(70)])
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": f"b{n}"}) + "\n" for n in range(64, 72)))
    monkeypatch.setattr(data_notes, "COMPARED", 137)
    data = TextDataConfig(
        train_path=str(tmp_path / "train"),
        eval_path=str(tmp_path / "c.jsonl"),
        data_type="plaintext",
        datasets_type=kind,
    )
    tables = open_sources(data.model_copy(update={"datasets_type": "mapping"}))  # as sfumato check opens them
    transform = build_transform(data, build_tokenizer())
    for sources in (tables, open_sources(data)):
        (line,) = describe_text_data(data, sources, open_validation(data), transform, 7)
        assert line.startswith(f"data.eval_path: {6 if kind == 'mapping' else 3} of the 7 evaluation rows are")
        assert f"{tmp_path}/c.jsonl, line 1 is {tmp_path}/train/b.parquet, row 65;" in line
        assert ("; and 3 more)" in line) == (kind == "mapping")


@pytest.mark.parametrize(
    ("data_type", "keys", "row"),
    [
        ("plaintext", ["title", "body"], {"title": "a", "body": "b"}),
        ("plaintext", [], {"text": "a", "content": "b"}),
        ("conversation", ["long", "short"], {"long": [USER], "short": [USER]}),
    ],
)
def test_columns_beside_the_one_that_is_read_are_said(tmp_path, data_type, keys, row):
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    template = None if data_type == "plaintext" else "chatml"
    path = str(tmp_path / "a.jsonl")
    data = TextDataConfig(train_path=path, data_type=data_type, text_keys=keys, chat_template=template)
    (line,) = describe_text_data(data, open_sources(data), None, build_transform(data, build_tokenizer()), 1)
    assert line.endswith(f" is read, and not {[*row][1]!r}")


def test_rows_of_several_sources_are_named_by_the_files_of_their_own(tmp_path):
    for name, count in (("a", 3), ("b", 1)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name}{n}"}}\n' for n in range(count)))
    (tmp_path / "mix.yaml").write_text("sources: [a.jsonl, b.jsonl]\n")
    data = TextDataConfig(
        train_path=str(tmp_path / "mix.yaml"), eval_path=str(tmp_path / "a.jsonl"), data_type="plaintext"
    )
    transform = build_transform(data, build_tokenizer())
    (line,) = describe_text_data(data, open_sources(data), open_validation(data), transform, 3)
    assert all(f"a.jsonl, line {n} is {tmp_path}/a.jsonl, line {n}" in line for n in (1, 2, 3))


def test_rows_that_are_read_together_are_those_that_are_read_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "ARROW_BLOCK", 4)
    texts = ['{"n": 1}', "{broken", *(json.dumps({"n": n}) for n in range(2, 9))]
    schema = pyarrow.schema([("value", pyarrow.json_())])
    table = pyarrow.table({"value": pyarrow.array(texts, pyarrow.json_())}, schema)
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    (tmp_path / "a.jsonl").write_text('{"value": 1}\n{"value"\n{"value": 2}\n')
    datasets.Dataset.from_list(questions("q", 9)).save_to_disk(str(tmp_path / "c"))
    rows = open_rows(tmp_path, "text", "data.x")
    alone = []
    for index in range(len(rows)):
        try:
            alone.append((index, rows[index]))
        except DataError:
            continue
    assert [*readable_rows(rows)] == alone and [index for index, _ in alone] == [0, 2, 3, *range(5, 21)]


@pytest.mark.parametrize(("value", "limit"), [(3, 3), ("3", 3), (0.01, 0.01), ("1%", 0.01), ("2.5%", 0.025), (0.0, 0)])
def test_bad_rows_are_a_number_or_a_share(value, limit):
    result = TypeAdapter(RowLimit).validate_python(value)
    assert result == pytest.approx(limit) and type(result) is type(limit)
    assert bad_row_limit(result, 1000) == (limit if isinstance(limit, int) else round(limit * 1000))


@pytest.mark.parametrize("value", [-1, 1.5, "100%", "many", True, float("nan"), None, "-1%"])
def test_other_limits_are_refused(value):
    with pytest.raises(ValidationError, match="a share below 1"):
        TypeAdapter(RowLimit).validate_python(value)


def test_rows_left_out_are_summed_up_by_their_kind():
    reasons = [f"a.jsonl, line {n}: has {n}00 tokens, more than 9" for n in (1, 2)] + ["a.jsonl, line 3: no 'x'"]
    assert describe_bad_rows(reasons) == "3 rows left out: 2 x has _ tokens, more than _; 1 x no _"


@pytest.mark.parametrize("data_type", ["preference", "unpaired"])
def test_answers_that_are_equal_once_cut_are_refused(data_type):
    data = TextDataConfig(
        train_path="x", data_type=data_type, chat_template="chatml", max_seq_len=40, overlong="truncate"
    )
    transform = build_transform(data, build_tokenizer())
    row = {"prompt": "q", "chosen": "b " * 50 + "x", "rejected": "b " * 50 + "y"}
    with pytest.raises(DataError, match="chosen and rejected are the same 40 tokens"):
        transform(row, "row")
    assert transform(row | {"rejected": "c"}, "row")


def test_columns_of_other_kinds_beside_the_text_change_nothing(tmp_path):
    features = {
        "text": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["no", "yes"]),
        "translation": datasets.Translation(languages=["de", "en"]),
        "when": datasets.Value("timestamp[s]"),
        "content": datasets.Value("binary"),
    }
    row = {"text": "a b", "label": 1, "translation": {"de": "Haus", "en": "house"}, "when": 5, "content": b"x"}
    table = datasets.Dataset.from_list([row], features=datasets.Features(features))
    table.to_parquet(str(tmp_path / "a.parquet"))
    for column in features:
        data = TextDataConfig(train_path=str(tmp_path / "a.parquet"), data_type="plaintext", text_keys=[column])
        transform, (rows,) = build_transform(data, build_tokenizer()), open_sources(data).rows
        if column == "text":
            assert len(transform(rows[0], "row 1")) == 1
            continue
        with pytest.raises(DataError, match=f"row 1: column '{column}' must be a non-empty text"):
            transform(rows[0], "row 1")


def test_labels_that_are_classes_are_read_by_name_and_not_by_place(tmp_path):
    def labels(names, place):
        texts = {key: datasets.Value("string") for key in ("prompt", "completion")}
        features = datasets.Features({**texts, "label": datasets.ClassLabel(names=names)})
        rows = [{"prompt": "q", "completion": "a", "label": 0}, {"prompt": "q", "completion": "b", "label": 1}]
        table = datasets.Dataset.from_list(rows, features=features)
        table.to_parquet(str(place)) if place.suffix else table.save_to_disk(str(place))
        data = TextDataConfig(train_path=str(place), data_type="unpaired", chat_template="chatml")
        transform, (rows,) = build_transform(data, build_tokenizer()), open_sources(data).rows
        samples = [transform(rows[index], f"row {index + 1}") for index in range(2)]
        return [float(sample[0].documents[0].numbers[-1]) for sample in samples]

    assert labels(["chosen", "rejected"], tmp_path / "a.parquet") == [1, 0]
    assert labels(["rejected", "chosen"], tmp_path / "b.parquet") == [0, 1]
    assert labels(["True", "False"], tmp_path / "folder") == [1, 0]
    with pytest.raises(DataError, match=r"row 1: column 'label' holds classes .* 'helpful', says neither true nor"):
        labels(["helpful", "harmful"], tmp_path / "c.parquet")
