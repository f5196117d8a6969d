"""Rows at URLs: read by fsspec as the same file here, fetched once, and told apart when they change."""

import http.server
import json
import pickle
import threading
from functools import partial

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from sfumato.config.load import load_config
from sfumato.config.text import TrainTextConfig
from sfumato.config.text_data import TextDataConfig
from sfumato.data.files import remote
from sfumato.data.files.row_blocks import FilePlace, RowBlocks
from sfumato.data.files.rows import open_rows
from sfumato.data.files.sources import open_sources
from sfumato.data.text.identity import content_of_sources
from sfumato.errors import DataError, MissingDependencyError
from sfumato.tracking.json_lines import read_jsonl
from tests.tiny import run_task_here, tiny_text_config

ROWS = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": str(n)}]} for n in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """fsspec's file system in memory, and an empty folder for what is fetched."""
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    file_system = fsspec.filesystem("memory")
    file_system.store.clear()
    yield file_system
    file_system.store.clear()


def write_parquet(file_system, path, rows):
    with file_system.open(path, "wb") as file:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server on the loopback, the folder of its files, and the requests that it got."""
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "served"
    folder.mkdir()
    requests = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *values):  # the name of the base class
            requests.append(values[0])

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}", folder, requests
    httpd.shutdown()
    httpd.server_close()
    thread.join()


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """An empty bucket ``rows`` of a server on the loopback that speaks S3's protocol, and s3fs's view of it."""
    needed = "pip install -c constraints.txt 'sfumato[s3]' 'moto[server]'"
    s3fs = pytest.importorskip("s3fs", reason=needed)
    moto_server = pytest.importorskip("moto.server", reason=needed)
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
    for name, value in {**variables, "SFUMATO_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    file_system = s3fs.S3FileSystem()
    file_system.mkdir("rows")
    yield file_system
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.slow  # for its packages, which the other tests do not need
def test_rows_of_a_bucket(bucket):
    bucket.pipe("rows/chats/train-0.jsonl", LINES.encode())
    bucket.pipe("rows/chats/test-0.jsonl", LINES[: LINES.index("\n") + 1].encode())
    write_parquet(bucket, "rows/chats/train-1.parquet", ROWS)
    rows = open_rows("s3://rows/chats", "text", "data.train_path")
    assert [rows[index] for index in range(len(rows))] == ROWS * 2, "the training split alone"
    assert len(open_rows("s3://rows/chats/train-*.parquet", "text", "x")) == 5

    def content():
        return content_of_sources(open_sources(TextDataConfig(train_path="s3://rows/chats/train-0.jsonl")))

    before = content()
    bucket.pipe("rows/chats/train-0.jsonl", LINES.replace("4", "7").encode())
    assert content() != before, "of the same size, with another ETag"
    for url in ("s3://rows/gone.jsonl", "s3://gone/rows.jsonl"):
        with pytest.raises(DataError, match=r"data\.train_path: s3://.*(nothing is there|not found)"):
            open_rows(url, "text", "data.train_path")


def test_files_in_a_folder_a_pattern_and_alone(memory):
    memory.pipe("/data/train-0.jsonl", LINES.encode())
    memory.pipe("/data/test-0.jsonl", LINES[: LINES.index("\n") + 1].encode())
    write_parquet(memory, "/data/train-1.parquet", ROWS)
    rows = open_rows("memory://data", "text", "data.train_path")
    assert [rows[index] for index in range(len(rows))] == ROWS * 2, "the training split alone"
    assert len(open_rows("memory://data", "text", "data.eval_path", held_out=True)) == 1
    for pattern in ("memory://data/train-*.parquet", "memory://*/train-1.parquet", "memory://**/*.parquet"):
        assert len(open_rows(pattern, "text", "x")) == 5
    assert len(open_rows("memory://data/train-0.jsonl,memory://data/test-0.jsonl", "text", "x")) == 6
    with pytest.raises(DataError, match="given twice"):
        open_rows("memory://data/train-0.jsonl,memory://data/train-0.jsonl", "text", "x")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_streamed_files_are_listed_and_fetched_when_their_turn_comes(memory, ending, tmp_path):
    for number in range(2):
        if ending == "jsonl":
            memory.pipe(f"/data/{number}.jsonl", LINES.encode())
        else:
            write_parquet(memory, f"/data/{number}.parquet", ROWS)
    sources = open_sources(TextDataConfig(train_path="memory://data", datasets_type="iterable"))
    (files,) = sources.files
    content_of_sources(sources)
    assert not any(file.path.exists() for file in files), "nothing is fetched before it is read"
    blocks = RowBlocks([(0, file) for file in pickle.loads(pickle.dumps(files))])
    first = blocks.read(FilePlace(), 3)
    assert [first.rows[index] for index in range(3)] == ROWS[:3] and [file.path.exists() for file in files] == [
        True,
        False,
    ]
    rest = blocks.read(first.after, 20)
    assert [rest.rows[index] for index in range(7)] == ROWS[3:] + ROWS and rest.is_last


@pytest.mark.parametrize("kind", ["mapping", "iterable"])
def test_a_changed_file_is_another_one(memory, kind):
    def content():
        return content_of_sources(open_sources(TextDataConfig(train_path="memory://a.jsonl", datasets_type=kind)))

    memory.pipe("/a.jsonl", LINES.encode())
    before = content()
    assert content() == before
    memory.pipe("/a.jsonl", LINES.replace("4", "7").encode())
    assert content() != before, "of the same size, written later"


def test_a_server_is_asked_once_for_a_file_that_stays(server):
    url, folder, requests = server
    (folder / "rows.jsonl").write_text(LINES)
    assert open_rows(f"{url}/rows.jsonl", "text", "data.train_path")[4] == ROWS[4]
    fetched = [line for line in requests if line.startswith("GET")]
    assert len(open_rows(f"{url}/rows.jsonl", "text", "data.train_path")) == 5
    assert [line for line in requests if line.startswith("GET")] == fetched
    with pytest.raises(DataError, match=r"gone\.jsonl: "):
        open_rows(f"{url}/gone.jsonl", "text", "data.train_path")


REFUSED = [
    ("nosuch://bucket/a.jsonl", "fsspec knows no protocol nosuch"),
    ("s3://key:hunter2@bucket/a.jsonl", "a URL must hold no password"),
    ("https://host.invalid/a.jsonl?X-Amz-Signature=hunter2", "a signed URL is a key"),
    ("memory://gone/a.jsonl", "nothing is there"),
    ("memory://data/a.tsv", "must end in"),
]


@pytest.mark.parametrize(("url", "reason"), REFUSED)
def test_urls_that_cannot_be_read_are_refused_without_their_secrets(memory, url, reason):
    memory.pipe("/data/a.tsv", b"a")
    with pytest.raises(DataError, match=reason) as error:
        open_rows(url, "text", "data.train_path")
    assert "hunter2" not in str(error.value)


def test_the_package_of_a_protocol_is_named(memory, monkeypatch):
    def missing(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(MissingDependencyError, match=r"s3:// needs a package .*pip install 'sfumato\[s3\]' .s3fs"):
        open_rows("s3://bucket/a.jsonl", "text", "data.train_path")


@pytest.mark.parametrize("reason", ["Unable to load libjvm", "Prior attempt to load libhdfs failed"])
def test_hdfs_without_hadoops_client_names_what_it_needs(memory, monkeypatch, reason):
    def missing(url):
        raise OSError(reason)

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(MissingDependencyError, match=f"Java and libhdfs.so.*CLASSPATH.*{reason}"):
        open_rows("hdfs://namenode:9000/a.jsonl", "text", "data.train_path")
    with pytest.raises(DataError, match=reason):
        open_rows("s3://bucket/a.jsonl", "text", "data.train_path")


def test_errors_of_packages_are_said_without_what_is_in_their_urls():
    error = ValueError("cannot open https://me:hunter2@host/a.jsonl?sig=hunter2 now")
    assert remote.describe(error) == "ValueError: cannot open https://host/a.jsonl now"


def test_a_fetch_that_fails_leaves_nothing_that_counts(memory, monkeypatch, tmp_path):
    memory.pipe("/a.jsonl", LINES.encode())
    copy = remote.shutil.copyfileobj

    def cut(source, target, length):
        target.write(source.read(10))

    monkeypatch.setattr(remote.shutil, "copyfileobj", cut)
    with pytest.raises(DataError, match="has 10 bytes, not the"):
        open_rows("memory://a.jsonl", "text", "data.train_path")
    monkeypatch.setattr(remote.shutil, "copyfileobj", copy)
    assert len(open_rows("memory://a.jsonl", "text", "data.train_path")) == 5
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="SFUMATO_CACHE names another folder"):
        open_rows("memory://a.jsonl", "text", "data.train_path")


def test_a_run_learns_from_rows_at_a_url(memory, tmp_path):
    memory.pipe("/rows.jsonl", LINES.encode())
    path = "memory://rows.jsonl"
    data = {"synthetic": None, "train_path": path, "eval_path": path, "chat_template": "chatml"}
    run = run_task_here("train_text", tiny_text_config(tmp_path, data=data))
    lines = [line for line in read_jsonl(run / "metrics.jsonl") if line["step"]]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert "rows: rows read as OpenAI messages (messages)" in (run / "log.txt").read_text()
    assert load_config(TrainTextConfig, run / "config.yaml").data.train_path == path
