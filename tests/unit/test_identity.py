"""What a resume must find unchanged: the content of data, wherever it lies, the seed, and what a step takes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sfumato.config.dit import TrainDitConfig
from sfumato.config.image_data import ImageTextDataConfig, PairDataConfig
from sfumato.config.load import load_config
from sfumato.config.rl import PromptDataConfig
from sfumato.config.text import TrainTextConfig
from sfumato.config.text_data import TextDataConfig
from sfumato.data import identity as module
from sfumato.data.files.sources import open_sources
from sfumato.data.identity import content_of_file
from sfumato.data.images.identity import content_of_images, content_of_prompts
from sfumato.data.images.image_text import ImageTextDataset, PairDataset
from sfumato.data.images.prompts import load_prompts
from sfumato.data.text import identity as text_identity
from sfumato.data.text.identity import content_of_sources
from sfumato.errors import CheckpointError
from sfumato.tracking.identity import KEY, compare_identity, identify
from tests.tiny import tiny_dit_config, tiny_text_config


def write_rows(folder: Path) -> Path:
    """A table that serves every kind of data, with its images."""
    folder.mkdir()
    rows = []
    for index in range(3):
        Image.fromarray(np.full((8, 8, 3), 40 * index, np.uint8)).save(folder / f"{index}.png")
        text = f"caption {index}"
        rows.append({"text": text, "prompt": text, "image": f"{index}.png", "chosen": "0.png", "rejected": "1.png"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def image_content(folder: Path) -> str:
    return content_of_images(ImageTextDataset(ImageTextDataConfig(train_path=str(folder / "rows.jsonl"))))


def folder_content(folder: Path) -> str:
    for index in range(3):
        (folder / f"{index}.txt").write_text(f"caption {index}")
    return content_of_images(ImageTextDataset(ImageTextDataConfig(train_path=str(folder))))


def pair_content(folder: Path) -> str:
    config = PairDataConfig(data_type="pairs", train_path=str(folder / "rows.jsonl"), label_key=None)
    return content_of_images(PairDataset(config, "train_path"))


def text_content(folder: Path) -> str:
    return content_of_sources(
        open_sources(TextDataConfig(train_path=str(folder / "rows.jsonl"), data_type="plaintext"))
    )


def streamed_content(folder: Path) -> str:
    data = TextDataConfig(train_path=str(folder / "rows.jsonl"), data_type="plaintext", datasets_type="iterable")
    return content_of_sources(open_sources(data))


def prompt_content(folder: Path) -> str:
    path = str(folder / "rows.jsonl")
    return content_of_prompts(load_prompts(PromptDataConfig(train_path=path, eval_path=path), "train"))


KINDS = {
    "images": image_content,
    "pairs": pair_content,
    "text": text_content,
    "streamed text": streamed_content,
    "prompts": prompt_content,
}


@pytest.mark.parametrize("kind", [*KINDS, "folder of images"])
def test_content_is_what_counts_and_not_where_it_lies(tmp_path: Path, kind: str) -> None:
    content = KINDS.get(kind, folder_content)
    first = content(write_rows(tmp_path / "first"))
    shutil.copytree(tmp_path / "first", tmp_path / "second", copy_function=shutil.copy)  # with other times
    assert content(tmp_path / "second") == first


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("change", ["another letter", "a row less", "another order"])
def test_other_rows_are_other_data(tmp_path: Path, kind: str, change: str) -> None:
    path = write_rows(tmp_path / "rows") / "rows.jsonl"
    before, lines = KINDS[kind](path.parent), path.read_text().splitlines()
    changed = {"another letter": [lines[0].replace("caption", "cuption"), *lines[1:]], "a row less": lines[:-1]}
    path.write_text("\n".join(changed.get(change, lines[::-1])) + "\n")
    assert KINDS[kind](path.parent) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "0.txt").write_text("another caption"),
        lambda folder: (folder / "0.png").write_bytes((folder / "0.png").read_bytes() + b"more"),
        lambda folder: (folder / "0.png").rename(folder / "9.png"),
    ],
    ids=["caption", "image", "name"],
)
def test_other_files_are_other_data(tmp_path: Path, change: Callable[[Path], object]) -> None:
    folder = write_rows(tmp_path / "rows")
    before = folder_content(folder)
    change(folder)
    dataset = ImageTextDataset(ImageTextDataConfig(train_path=str(folder)))
    assert content_of_images(dataset) != before


def test_of_a_large_file_blocks_are_read_and_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 4)
    monkeypatch.setattr(module, "BLOCKS", 3)
    path, results = tmp_path / "large", []
    for content in (b"a" * 40, b"a" * 39 + b"b", b"a" * 18 + b"bb" + b"a" * 20, b"b" + b"a" * 39, b"a" * 41):
        path.write_bytes(content)
        results.append(content_of_file(path))
    assert len(set(results)) == 5
    path.write_bytes(b"a" * 10 + b"b" + b"a" * 29)
    assert content_of_file(path) == results[0], "what lies between the blocks is not looked at"


def test_of_many_streamed_files_little_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int]] = []
    monkeypatch.setattr(text_identity, "content_of_file", lambda path, blocks: read.append((path.name, blocks)) or "x")
    for number in range(200):
        (tmp_path / f"{number:03}.jsonl").write_text("{}")
    content_of_sources(open_sources(TextDataConfig(train_path=str(tmp_path), datasets_type="iterable")))
    assert read == [(f"{number:03}.jsonl", 1) for number in range(0, 200, 4)], "of the others the sizes"


def test_another_mixture_of_the_same_sources_is_other_data(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "data") / "rows.jsonl"
    sources = open_sources(TextDataConfig(train_path=str(rows), data_type="plaintext"))
    mixed = [
        replace(sources, weights=weights, stopping=stopping)
        for weights in ([1.0], [2.0])
        for stopping in ("first_exhausted", "all_exhausted")
    ]
    assert len({content_of_sources(mixture) for mixture in [sources, *mixed]}) == 5
    unmixed = replace(sources, stopping="all_exhausted")
    assert content_of_sources(unmixed) == content_of_sources(sources), "without weights it has no effect"


def test_what_differs_is_named_and_what_may_change_is_not() -> None:
    saved = {"train.seed": 1, "data.height": 16, "data.train_path": "a" * 40, "data.eval_path": "a" * 40}
    here = {**saved, "train.seed": 2, "data.train_path": "b" * 40, "a new field": 3}
    with pytest.raises(CheckpointError) as caught:
        compare_identity(saved, here, Path("checkpoint"))
    text = str(caught.value)
    assert text.startswith("checkpoint cannot go on") and "train.seed was 1, is 2; data.train_path has another" in text
    assert "data.height" not in text and "a new field" not in text and "aaa" not in text
    assert compare_identity(saved, saved, Path("checkpoint")) == ""
    assert compare_identity(None, here, Path("checkpoint")) == "", "a checkpoint that knows nothing of its data"
    said = compare_identity(saved, {**saved, "data.eval_path": "b" * 40}, Path("checkpoint"))
    assert said == "the evaluation is another one than before the checkpoint: data.eval_path has another content"
    said = compare_identity({"data.eval_path": None}, {"data.eval_path": "b" * 40}, Path("checkpoint"))
    assert said.endswith(f"data.eval_path was None, is '{'b' * 40}'"), "there was none, so it has no other content"


def test_where_data_lies_and_how_it_is_read_may_change(tmp_path: Path) -> None:
    settings = {"cache_dir": str(tmp_path / "cache"), "max_bad_rows": 3}
    plain = load_config(TrainDitConfig, overrides=tiny_dit_config(tmp_path))
    moved = load_config(TrainDitConfig, overrides=tiny_dit_config(tmp_path, data=settings))
    assert identify(plain, {}) == identify(moved, {})
    text = load_config(TrainTextConfig, overrides=tiny_text_config(tmp_path))
    buffered = tiny_text_config(tmp_path, data={"num_workers": 2, "train_size": 999, "shuffle_buffer": 5})
    assert identify(text, {}) == identify(load_config(TrainTextConfig, overrides=buffered), {})
    streamed = tiny_text_config(tmp_path, data={"datasets_type": "iterable", "shuffle_buffer": 5})
    assert identify(load_config(TrainTextConfig, overrides=streamed), {})["data.shuffle_buffer"] == 5


@pytest.mark.parametrize(("here", "changed"), [({"alpha": 16.0}, "alpha was 8.0"), ({"variant": "rslora"}, "variant")])
def test_adapters_under_another_scale_are_another_model(tmp_path: Path, here: dict[str, object], changed: str) -> None:
    def identity(**lora: object) -> dict[str, object]:
        overrides = tiny_text_config(tmp_path, model={"lora": {"rank": 4, "alpha": 8.0, **lora}})
        return identify(load_config(TrainTextConfig, overrides=overrides), {})

    assert identity(dropout=0.1) == identity(), "which may change"
    with pytest.raises(CheckpointError, match=rf"model\.lora\.{changed}"):
        compare_identity(identity(), identity(**here), Path("checkpoint"))


def test_a_resume_is_compared_before_anything_is_built(tmp_path: Path) -> None:
    folder = tmp_path / "run/checkpoints/global_step_3"
    folder.mkdir(parents=True)
    config = load_config(TrainDitConfig, overrides=tiny_dit_config(tmp_path, train={"load_checkpoint_path": "auto"}))
    saved = identify(config, {"data.train_path": "a" * 40}, {"train.global_batch_size": 4})
    (folder / "state.json").write_text(json.dumps({KEY: saved}))
    assert identify(config, {"data.train_path": "a" * 40}, {"train.global_batch_size": 4}) == saved
    with pytest.raises(CheckpointError, match=r"global_step_3 .* train\.global_batch_size was 4, is 8"):
        identify(config, {"data.train_path": "a" * 40}, {"train.global_batch_size": 8})
