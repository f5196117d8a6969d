"""Shards of webdataset as rows."""

from __future__ import annotations

import base64
import io
import json
import pickle
import tarfile
from pathlib import Path

import pytest

from sfumato.config.load import merge
from sfumato.data.files.rows import open_rows
from sfumato.data.files.webdataset import TarRows
from sfumato.errors import DataError
from tests.tiny import run_task_here, run_task_process, weights_in, write_config
from tests.tiny_vision import image_row, picture, tiny_vision_config


def write_shard(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as shard:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            shard.addfile(info, io.BytesIO(content))
    return path


def members_of(index: int) -> list[tuple[str, bytes]]:
    """A conversation of ``image_row`` with its pictures as members."""
    row = image_row(index)
    content = row["messages"][0]["content"]
    pictures = [part.pop("image") for part in content if part["type"] == "image"]
    json_member = (f"a/{index:04}.json", json.dumps(row).encode())
    files = [(f"a/{index:04}.{number}.png", _png(url)) for number, url in enumerate(pictures)]
    return [*files, json_member]


def _png(url: str) -> bytes:
    return base64.b64decode(url.partition(",")[2])


def test_members_become_columns(tmp_path: Path) -> None:
    one, two = picture(8, 8, 1), picture(8, 8, 2)
    path = write_shard(
        tmp_path / "shard.tar",
        [
            ("x/1.jpg", one),
            ("x/1.json", b'{"image": "1.jpg", "a": 1}'),
            ("x/1.txt", "h\u00e9llo\n".encode()),
            ("x/2.0.png", one),
            ("x/2.1.png", two),
            ("x/2.wav", b"sound"),
            ("3.cls", b"7"),
        ],
    )
    rows = open_rows(path, "text", "data.train_path")
    assert [rows[index] for index in range(3)] == [
        {"a": 1, "txt": "h\u00e9llo", "image": one},
        {"images": [one, two], "audio": b"sound"},
        {"cls": b"7"},
    ]
    assert rows.describe(1) == f"{path}, row 2 (x/2)" and rows.folder(0) == tmp_path
    assert pickle.loads(pickle.dumps(rows))[1] == rows[1]


def test_what_macos_adds_is_no_member_and_every_ending_of_pictures_is_one(tmp_path: Path) -> None:
    # tar of macOS writes attributes of each file as ._FILE before it; all of them would be rows of one name
    files = [("./a/1.avif", b"1"), ("./a/1.txt", b"one"), ("./a/2.JFIF", b"2"), ("./a/2.txt", b"two")]
    hidden = [(name.replace("/a/", "/a/._"), b"\0\5\x16\7") for name, _ in files]
    members = [member for pair in zip(hidden, files, strict=True) for member in pair]
    rows = TarRows(write_shard(tmp_path / "shard.tar", [*members, ("__MACOSX/a/1.jpg", b"x"), (".DS_Store", b"")]))
    assert [rows[index] for index in range(len(rows))] == [{"image": b"1", "txt": "one"}, {"image": b"2", "txt": "two"}]


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ([("1.jpg", b"a"), ("2.jpg", b"b"), ("1.json", b"{}")], "1.json does not follow"),
        ([("1.jpg", b"a"), ("1.jpg", b"b")], "1.jpg is there twice"),
        ([], "has no rows"),
    ],
)
def test_shards_whose_rows_are_not_apart_are_refused(
    members: list[tuple[str, bytes]], named: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=named):
        open_rows(write_shard(tmp_path / "shard.tar", members), "text", "data.train_path")


@pytest.mark.parametrize(
    ("json_member", "named"),
    [(b"{", "not valid JSON"), (b"[1]", "must be an object, not list")],
)
def test_a_broken_member_is_named(json_member: bytes, named: str, tmp_path: Path) -> None:
    rows = TarRows(write_shard(tmp_path / "shard.tar", [("0.json", b"{}"), ("k.json", json_member)]))
    with pytest.raises(DataError, match=rf"shard.tar, row 2 \(k\).*{named}"):
        _ = rows[1]


def test_broken_shards_are_named(tmp_path: Path) -> None:
    whole = write_shard(tmp_path / "whole.tar", [("1.jpg", b"a" * 3000), ("2.jpg", b"b" * 3000)]).read_bytes()
    for count in (700, 3500, 5000):
        (tmp_path / "cut.tar").write_bytes(whole[:count])
        with pytest.raises(DataError, match=r"cut.tar"):
            TarRows(tmp_path / "cut.tar")
    (tmp_path / "text.tar").write_text("no archive" * 100)
    with pytest.raises(DataError, match=r"text.tar cannot be read as an uncompressed .tar file"):
        TarRows(tmp_path / "text.tar")
    write_shard(tmp_path / "packed.tar", [("1.jpg", b"a")], "w:gz")
    with pytest.raises(DataError, match="uncompressed"):
        TarRows(tmp_path / "packed.tar")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mapping", "iterable"])
def test_a_run_on_shards_is_one_on_lines_also_when_killed(kind: str, tmp_path: Path) -> None:
    config = tiny_vision_config(tmp_path, "qwen3_vl", train={"save_steps": 2, "max_steps": 6})
    config["data"]["datasets_type"] = kind
    plain = run_task_here("train_text", merge(config, {"train": {"output_dir": str(tmp_path / "plain")}}))
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(3):
        rows = range(8 * number, 8 * number + 8)
        write_shard(shards / f"{number:05}.tar", [member for index in rows for member in members_of(index)])
    config = merge(config, {"data": {"train_path": str(shards)}, "train": {"load_checkpoint_path": "auto"}})
    run_task_process("train_text", write_config(config, tmp_path / "config.yaml"), kill_after=3)
    run = run_task_here("train_text", config)
    assert weights_in(run / "hf_ckpt") == weights_in(plain / "hf_ckpt")
