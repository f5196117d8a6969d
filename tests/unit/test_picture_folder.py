"""Folders of pictures as people have them: every ending that is read, any captions, and what is left out is named."""

from __future__ import annotations

import base64
import io
import json
import tarfile
import unicodedata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from PIL import Image

from sfumato.config.dit import TrainDitConfig
from sfumato.config.image_data import ImageTextDataConfig, PairDataConfig
from sfumato.config.load import load_config
from sfumato.data.files.folders import describe_left_out
from sfumato.data.files.picture_folder import visible_files
from sfumato.data.files.rows import open_rows
from sfumato.data.images.image_text import (
    ImageTextDataset,
    open_held_out_pairs,
    open_image_pairs,
    open_image_text,
)
from sfumato.data.images.prompts import FileSource
from sfumato.data.media.kinds import IMAGE_ENDINGS
from sfumato.data.media.pictures import check_fit
from sfumato.errors import ConfigError, DataError
from tests.tiny import tiny_dit_config, write_config

KINDS = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".jpe": "JPEG",
    ".jfif": "JPEG",
    ".tif": "TIFF",
    ".dib": "BMP",
    ".apng": "PNG",
}


def content(kind: str = "PNG", shade: int = 90) -> bytes:
    Image.fromarray(np.full((16, 16, 3), shade, np.uint8)).save(file := io.BytesIO(), kind)
    return file.getvalue()


def opened(path: Path, said: list[str], **more: Any) -> ImageTextDataset:
    config = ImageTextDataConfig(train_path=str(path), height=16, width=16, **more)
    dataset = open_image_text(config, 0, said.append)
    assert isinstance(dataset, ImageTextDataset)
    return dataset


def test_every_ending_that_is_read_is_taken_and_what_is_hidden_is_not(tmp_path: Path) -> None:
    names = [f"{number}{ending}" for number, ending in enumerate(sorted(IMAGE_ENDINGS))]
    names += ["UPPER.JPG", "Mixed.Png", "sub/deeper/a b c.webp"]
    hidden = [".ipynb_checkpoints/0-checkpoint.png", "._0.png", "__MACOSX/0.png", ".thumbnails/1.jpg", "@eaDir/0.png"]
    for name in names + hidden:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = KINDS.get(path.suffix.lower(), path.suffix[1:].upper())
        path.write_bytes(content("JPEG" if kind == "JPG" else kind))
        path.with_suffix(".txt").write_text(f"caption of {name}")
    said: list[str] = []
    dataset = opened(tmp_path, said)
    assert {dataset.caption(index) for index in range(len(dataset))} == {f"caption of {name}" for name in names}
    assert all(dataset.pixels(index).shape == (3, 16, 16) for index in range(len(dataset))) and said == []


def test_captions_come_in_several_forms(tmp_path: Path) -> None:
    captions = {
        "bom.txt": b"\xef\xbb\xbfwith a mark",
        "crlf.txt": b"two\r\nlines\r\n",
        "loud.TXT": b"upper case",
        "kohya.caption": b"of kohya",
        "table.json": b'{"caption": "of img2dataset", "width": 3}',
        "own.json": b'{"caption": "no", "text": "of the column"}',
    }
    for name, caption in captions.items():
        (tmp_path / name).write_bytes(caption)
        (tmp_path / name).with_suffix(".png").write_bytes(content())
    composed, apart = unicodedata.normalize("NFC", "Größe é"), unicodedata.normalize("NFD", "Größe é")
    (tmp_path / f"{apart}.png").write_bytes(content())
    (tmp_path / f"{composed}.txt").write_text("letters apart")
    said: list[str] = []
    dataset = opened(tmp_path, said)
    results = {Path(dataset.describe(index)).stem: dataset.caption(index) for index in range(len(dataset))}
    assert results == {
        "bom": "with a mark",
        "crlf": "two\nlines",
        "loud": "upper case",
        "kohya": "of kohya",
        "table": "of img2dataset",
        "own": "of the column",
        apart: "letters apart",
    }
    assert said == []
    for name, text, message in (
        ("bom.txt", "", "non-empty text"),
        ("table.json", "{}", "no caption in any of its fields"),
    ):
        (tmp_path / name).write_text(text)
        dataset = opened(tmp_path, [])
        index = next(index for index in range(len(dataset)) if Path(name).stem in dataset.describe(index))
        with pytest.raises(DataError, match=message):
            dataset.caption(index)


def test_what_is_not_used_is_named_once_with_its_number(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png", "c.jpg", "d.HEIC", "e.svg", "f.mp4"):
        (tmp_path / name).write_bytes(content())
    for name in ("a", "c", "d", "lonely", "other"):
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "notes.md").write_text("no picture")
    said: list[str] = []
    dataset = opened(tmp_path, said)
    assert len(dataset) == 4
    assert said == [
        f'{tmp_path}: 1 pictures without a caption, which are broken rows (1 .png): "b.png"',
        f'{tmp_path}: 3 captions without a picture or video that is read (3 .txt): "d.txt", "lonely.txt", "other.txt"',
        f"{tmp_path}: 3 pictures, videos or sounds of kinds that are not read here (1 .heic, 1 .svg, 1 .mp4): "
        '"d.HEIC", "e.svg", "f.mp4"',
        f"{tmp_path}: 2 pictures that share their caption with another of the same name (1 .jpg, 1 .png): "
        '"c.jpg", "c.png"',
    ]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "in folders"])
def test_tables_of_hugging_faces_image_folders_and_pictures_that_they_do_not_name(tmp_path: Path, kind: str) -> None:
    for name in ("train/a.png", "test/b.png", "c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content())
    table = pyarrow.table({"file_name": ["train/a.png", "test/b.png"], "text": ["a", "b"]})
    if kind == "jsonl":
        (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, table.to_pylist())))
    elif kind == "csv":
        pyarrow.csv.write_csv(table, tmp_path / "metadata.csv")
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, tmp_path / "metadata.parquet")
    else:
        for row in table.to_pylist():
            folder, name = row["file_name"].split("/")
            (tmp_path / folder / "metadata.jsonl").write_text(json.dumps({"file_name": name, "text": row["text"]}))
    said: list[str] = []
    dataset = opened(tmp_path, said)
    assert sorted(dataset.caption(index) for index in range(len(dataset))) == ["a", "b"]
    assert all(dataset.pixels(index).shape == (3, 16, 16) for index in range(2))
    assert said == [f'{tmp_path}: 1 pictures that its table does not name (1 .png): "c.png"']


def test_masks_and_source_pictures_of_a_table_are_named_by_it(tmp_path: Path) -> None:
    row = {"file_name": "a.png", "mask": "a-mask.png", "source_image": ["b.png", "c.png"], "text": "a"}
    for name in ("a.png", "a-mask.png", "b.png", "c.png"):
        (tmp_path / name).write_bytes(content())
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row))
    opened(tmp_path, said := [], mask_key="mask")
    assert said == []
    opened(tmp_path, said)
    assert said == [f'{tmp_path}: 1 pictures that its table does not name (1 .png): "a-mask.png"']


def test_captions_beside_the_pictures_of_a_table_are_said_to_be_unread(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(content())
    (tmp_path / "a.txt").write_text("another caption")
    (tmp_path / "notes.txt").write_text("of no picture")
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": "a"}))
    opened(tmp_path, said := [])
    assert said == [f'{tmp_path}: 1 captions that are not read, since its table has others (1 .txt): "a.txt"']


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".tar"])
def test_a_folder_of_shards_is_read_as_one_table(tmp_path: Path, ending: str) -> None:
    """As snapshots of data sets are laid out: data/train-00000-of-00002.parquet, and a page that describes them."""
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("of data")
    for number in range(2):
        path = tmp_path / "data" / f"train-{number:05}-of-00002{ending}"
        columns = {"image": [{"bytes": content(shade=number), "path": "a.png"}], "text": [f"text {number}"]}
        if ending == ".parquet":
            pyarrow.parquet.write_table(pyarrow.table(columns), path)
        elif ending == ".arrow":
            table = pyarrow.table(columns)
            with pyarrow.ipc.new_stream(path, table.schema) as writer:
                writer.write_table(table)
        else:
            with tarfile.open(path, "w") as shard:
                for name, blob in ((f"{number}.png", content(shade=number)), (f"{number}.text", b"text %d" % number)):
                    info = tarfile.TarInfo(name.replace(".text", ".txt"))
                    info.size = len(blob)
                    shard.addfile(info, io.BytesIO(blob))
    dataset = opened(tmp_path, said := [], **({"text_key": "txt"} if ending == ".tar" else {}))
    assert [dataset.caption(index) for index in range(2)] == ["text 0", "text 1"] and said == []
    assert [int(dataset.pixels(index)[0, 0, 0]) for index in range(2)] == [0, 1]


def test_tables_beside_shards_of_img2dataset_are_not_read(tmp_path: Path) -> None:
    """They list the addresses that pictures were loaded from, and how many could not be."""
    with tarfile.open(tmp_path / "00000.tar", "w") as shard:
        for name, blob in (("000000000.jpg", content()), ("000000000.txt", b"a cat")):
            info = tarfile.TarInfo(name)
            info.size = len(blob)
            shard.addfile(info, io.BytesIO(blob))
    pyarrow.parquet.write_table(pyarrow.table({"url": ["u"], "caption": ["a cat"]}), tmp_path / "00000.parquet")
    (tmp_path / "00000_stats.json").write_text("{}")
    dataset = opened(tmp_path, said := [], image_key="jpg", text_key="txt")
    assert [dataset.caption(index) for index in range(len(dataset))] == ["a cat"]
    (left_out,) = said
    assert "00000.parquet, 00000_stats.json" in left_out


def test_a_run_among_the_data_is_no_data(tmp_path: Path) -> None:
    """Of pictures, and of a table of rows: a resume would else read what the run has drawn and written."""
    (tmp_path / "a.png").write_bytes(content())
    (tmp_path / "a.txt").write_text("a")
    run = tmp_path / "runs" / "first"
    (run / "samples").mkdir(parents=True)
    for name in ("config.yaml", "environment.json", "samples/b.txt", "rows.jsonl"):
        (run / name).write_text('{"text": "b"}')
    (run / "samples" / "b.png").write_bytes(content())
    dataset = opened(tmp_path, said := [])
    assert [dataset.caption(index) for index in range(len(dataset))] == ["a"]
    assert said == [f"run folders in {tmp_path} that are not read: runs/first"]
    (tmp_path / "a.txt").unlink()
    (tmp_path / "data.jsonl").write_text('{"text": "a"}')
    (tmp_path / "@eaDir").mkdir()  # of a NAS
    (tmp_path / "@eaDir" / "data.jsonl").write_text('{"text": "c"}')
    assert len(open_rows(tmp_path, "text", "data.train_path")) == 1
    assert "run folders" in " ".join(describe_left_out(tmp_path, "data.train_path"))
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "a"}')
    opened(tmp_path, said := [])
    assert said == [f"run folders in {tmp_path} that are not read: runs/first"]


def test_a_run_in_the_folder_of_its_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "data")
    for name in ("data", "linked", "data/../data"):
        config = tiny_dit_config(tmp_path, data={"data_type": "image_text", "train_path": str(tmp_path / "data")})
        del config["data"]["glyphs"]
        config["train"]["output_dir"] = str(tmp_path / name)
        with pytest.raises(ConfigError, match=r"output_dir \S+ is the folder of data.train_path.*name another one"):
            load_config(TrainDitConfig, write_config(config, tmp_path / "config.yaml"))


def test_a_path_as_windows_writes_it_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(content())
    (tmp_path / "rows.jsonl").write_text(json.dumps({"image": "images\\a.png", "text": "a"}))
    with pytest.raises(DataError, match=r"line 1: image file not found: .*: it is there as images/a.png; write"):
        opened(tmp_path / "rows.jsonl", []).pixels(0)


def test_links_to_folders_are_followed_once_and_links_to_files_are_files(tmp_path: Path) -> None:
    (tmp_path / "data" / "inside").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for path in (tmp_path / "data" / "a.png", tmp_path / "elsewhere" / "b.png"):
        path.write_bytes(content())
        path.with_suffix(".txt").write_text(path.stem)
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "inside" / "round").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "c.png").symlink_to(tmp_path / "elsewhere" / "b.png")
    (tmp_path / "data" / "c.txt").write_text("c")
    assert [path.name for path in visible_files(tmp_path / "data") if path.suffix == ".png"] == [
        "a.png",
        "c.png",
        "b.png",
    ]
    dataset = opened(tmp_path / "data", said := [])
    assert [dataset.caption(index) for index in range(3)] == ["a", "c", "b"] and said == []


def test_base64_and_data_urls_in_a_column_are_pictures(tmp_path: Path) -> None:
    blob = content("JPEG", 120)
    text = base64.b64encode(blob).decode()
    lines = "\n".join(text[start : start + 76] for start in range(0, len(text), 76))
    safe = base64.urlsafe_b64encode(blob).decode()
    (tmp_path / "a b.jpg").write_bytes(blob)
    values = [text, lines, safe, f"data:image/jpeg;base64,{text}", f"file://{tmp_path}/a%20b.jpg", "a b.jpg"]
    rows = [{"image": value, "text": "x"} for value in values]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = opened(tmp_path / "rows.jsonl", [])
    pixels = [dataset.pixels(index) for index in range(len(rows))]
    assert all((picture == pixels[-1]).all() for picture in pixels)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x" * 360_984, "column 'image' holds 360,984 letters, which are no path and no base64"),
        ("data:image/png;base64," + "!" * 50_000, "no valid base64"),
        ("https://example.org/" + "a" * 50_000, "images are not downloaded"),
        ("data:image/png;base64," + base64.b64encode(b"no picture" * 5_000).decode(), "it is no PNG"),
        ({"bytes": None, "path": None}, "column 'image' holds no image path or bytes"),
        (17, "column 'image' holds no image path or bytes"),
    ],
)
def test_what_is_no_picture_gives_a_short_error(tmp_path: Path, value: Any, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"image": value, "text": "x"}))
    with pytest.raises(DataError) as caught:
        opened(tmp_path / "rows.jsonl", []).pixels(0)
    assert message in str(caught.value) and "line 1" in str(caught.value) and len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "value", [["word " * 9_000], "word " * 9_000, {"a": "b" * 9_000}, list(range(9_000)), "\x00" * 9_000]
)
def test_long_values_of_any_kind_are_shortened_in_errors(value: Any) -> None:
    message = str(
        DataError(f"rows.jsonl, line 3: column 'text' must be a non-empty text, not {value!r} (data.text_key)")
    )
    assert len(message) < 3_500 and "letters" in message
    assert message.startswith("rows.jsonl, line 3") and message.endswith("(data.text_key)")
    whole = f"a path of {'/'.join(['folder'] * 40)}, and 'quoted' words\nin lines " + "of words " * 100
    assert str(DataError(whole)) == whole
    apart = "the model's column 'a' " + "has words between " * 40 + "and 'b' isn't " + "there " * 90 + "it's 'c'"
    assert str(DataError(apart)) == apart, "what stands between two values is none"


@pytest.mark.parametrize(
    ("size", "crop", "message"),
    [
        ((1, 1), "center", "enlarged 64 times"),
        ((30, 20_000), "center", "0.1% would be shown"),
        ((20_000, 30), "none", "0.1% would be left"),
        ((6, 640), "center", "enlarged 11 times"),
        ((64, 64), "center", None),
        ((32, 48), "none", None),
        ((7, 60), "center", None),
        ((8_000, 900), "center", None),
    ],
)
def test_pictures_of_which_little_would_be_seen_are_broken_rows(
    tmp_path: Path, size: tuple[int, int], crop: Any, message: str | None
) -> None:
    if message is None:
        check_fit(size, 64, 64, crop, "row 1")
        return
    with pytest.raises(DataError, match=rf"row 1: a picture of {size[0]} x {size[1]} pixels .*{message}"):
        check_fit(size, 64, 64, crop, "row 1")
    Image.new("RGB", size[::-1]).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("x")
    config = ImageTextDataConfig(train_path=str(tmp_path), height=64, width=64, crop=crop)
    with pytest.raises(DataError, match=rf"a\.png: a picture of {size[0]} x {size[1]} pixels"):
        ImageTextDataset(config).pixels(0)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"source_image": "a.png", "prompt": "x"}))
    if crop == "center":  # the source image of a prompt
        rows = open_rows(tmp_path / "rows.jsonl", "prompt", "data.train_path")
        with pytest.raises(DataError, match=rf"line 1: a picture of {size[0]} x {size[1]} pixels"):
            FileSource(rows, 0, "source_image").read(64, 64)


@pytest.mark.parametrize(("written", "on_disk"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_table_names_files_however_their_letters_are_composed(
    written: Literal["NFC", "NFD"], on_disk: Literal["NFC", "NFD"], tmp_path: Path
) -> None:
    # macOS packs names with decomposed letters, and tables have composed ones: both look alike in a message
    name = unicodedata.normalize(on_disk, "caf\u00e9.png")
    (tmp_path / name).write_bytes(content(shade=7))
    line = {"file_name": unicodedata.normalize(written, "caf\u00e9.png"), "text": "a"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(line))
    dataset = opened(tmp_path, said := [])
    assert dataset.file(0) == tmp_path / name and int(dataset.pixels(0).max()) == 7
    assert said == []


@pytest.mark.parametrize("form", ["captions", "metadata", "shards"])
def test_of_a_folder_with_splits_the_training_split_is_read(form: str, tmp_path: Path) -> None:
    for split in ("train", "Validation", "test"):
        (tmp_path / split).mkdir()
        if form == "shards":
            pyarrow.parquet.write_table(
                pyarrow.table({"image": [content()], "text": [split]}), tmp_path / split / "0.parquet"
            )
            continue
        (tmp_path / split / "a.png").write_bytes(content())
        row = json.dumps({"file_name": "a.png", "text": split})
        (tmp_path / split / ("a.txt" if form == "captions" else "metadata.jsonl")).write_text(
            split if form == "captions" else row
        )
    dataset = opened(tmp_path, said := [])
    assert [dataset.caption(index) for index in range(len(dataset))] == ["train"]
    assert said == [f"the folder {tmp_path} holds several splits, of which train is read; left out: Validation, test"]


def test_folders_that_only_sound_like_splits_are_all_read(tmp_path: Path) -> None:
    for name in ("train/a.png", "station/b.png", "crash test/c.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(content())
        (tmp_path / name).with_suffix(".txt").write_text(name)
    assert len(opened(tmp_path, said := [])) == 3 and said == []
    (tmp_path / "test").mkdir()
    (tmp_path / "top.png").write_bytes(content())
    (tmp_path / "top.txt").write_text("beside the folders")
    assert len(opened(tmp_path, said)) == 4 and said == []


def test_pairs_for_evaluation_are_those_of_the_held_out_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "metadata.jsonl").write_text(
            json.dumps({"prompt": split, "chosen": "a.png", "rejected": "b.png"})
        )
    config = PairDataConfig(train_path=str(tmp_path), eval_path=str(tmp_path), height=16, width=16)
    trained, held_out = open_image_pairs(config, 0, (said := []).append), open_held_out_pairs(config, 0, 8)
    assert held_out is not None
    assert [[pairs.caption(index) for index in range(len(pairs))] for pairs in (trained, held_out)] == [
        ["train"],
        ["test"],
    ]
    assert said == [f"the folder {tmp_path} holds several splits, of which train is read; left out: test"]


@pytest.mark.parametrize(("names", "is_said"), [(("10_dog", "1_cat"), True), (("10_dog", "10_cat", "2024_dog"), False)])
def test_repeats_of_kohyas_folders_are_said_to_have_no_effect(
    names: tuple[str, ...], is_said: bool, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(content())
        (tmp_path / name / "a.txt").write_text("a")
    assert len(opened(tmp_path, said := [])) == len(names)
    assert ["10_dog" in line and "once in an epoch" in line for line in said] == [True] * is_said


def test_several_folders_of_pictures_are_refused_with_the_remedy_which_works(tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(content())
        (tmp_path / name / "a.txt").write_text(name)
    with pytest.raises(DataError, match="put them, or links to them, into a folder, and name that"):
        opened(Path(f"{tmp_path}/cats, {tmp_path}/dogs"), [])
    (tmp_path / "all").mkdir()
    for name in ("cats", "dogs"):
        (tmp_path / "all" / name).symlink_to(tmp_path / name)
    dataset = opened(tmp_path / "all", [])
    assert [dataset.caption(index) for index in range(len(dataset))] == ["cats", "dogs"]
