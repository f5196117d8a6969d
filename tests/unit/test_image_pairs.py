"""Pairs of images: read from every source, ties left out, broken rows named; a cache equals encoding online."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from sfumato.config.image_data import PairDataConfig
from sfumato.config.sections import GlyphConfig, ModelConfig
from sfumato.data.files.bad_rows import BadRows
from sfumato.data.images.image_text import PairDataset, open_held_out_pairs, open_image_pairs
from sfumato.data.images.shared_pairs import describe_shared_pairs
from sfumato.data.loader import IndexBatch, evaluation_batches
from sfumato.data.synthetic.glyphs import GlyphDataset, GlyphPairs, is_held_out
from sfumato.errors import ConfigError, DataError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.encoded import OnlineEncoder, encode_rows
from sfumato.models.diffusion.latent_cache import open_cache
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from tests.tiny import tiny_pipeline_description, write_config
from tests.tiny_families import tiny_flux_kontext

PICK_A_PIC = {"text_key": "caption", "chosen_key": "jpg_0", "rejected_key": "jpg_1", "label_key": "label_0"}


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DiffusionModel:
    path = write_config(tiny_pipeline_description(), tmp_path_factory.mktemp("model") / "tiny.yaml")
    return build_diffusion_model(ModelConfig(config_path=str(path), max_sequence_length=7))


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8))


def pixels(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.array(picture(seed))).permute(2, 0, 1)


def blob(seed: int) -> bytes:
    buffer = io.BytesIO()
    picture(seed).save(buffer, "PNG")
    return buffer.getvalue()


def settings(path: Path, **more: Any) -> PairDataConfig:
    return PairDataConfig(**{"train_path": str(path), "height": 16, "width": 16, **more})


def open_pairs(path: Path, **more: Any) -> PairDataset:
    dataset = open_image_pairs(settings(path, **more), seed=0, say=lambda text: None)
    assert isinstance(dataset, PairDataset)
    return dataset


def write_rows(folder: Path, count: int = 4, **changed: Any) -> Path:
    """A .jsonl of ``count`` pairs of random images; ``changed`` replaces rows (``row2=...``)."""
    folder.mkdir(exist_ok=True)
    lines = []
    for index in range(count):
        picture(2 * index).save(folder / f"{index}a.png")
        picture(2 * index + 1).save(folder / f"{index}b.png")
        row = {"prompt": f"no {index}", "chosen": f"{index}a.png", "rejected": f"{index}b.png"}
        row = changed.get(f"row{index}", row)
        lines.append(row if isinstance(row, str) else json.dumps(row))
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder / "data.jsonl"


def write_parquet(path: Path, labels: list[Any], first: int = 0) -> Path:
    path.parent.mkdir(exist_ok=True)
    numbers = range(first, first + len(labels))
    table = {
        "caption": [f"no {index}" for index in numbers],
        "jpg_0": [blob(2 * index) for index in numbers],
        "jpg_1": [blob(2 * index + 1) for index in numbers],
        "label_0": labels,
    }
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    return path


def refusal(function: Any, *arguments: Any) -> str:
    with pytest.raises(DataError) as caught:
        function(*arguments)
    return str(caught.value)


def test_pairs_have_the_better_image_first(tmp_path: Path) -> None:
    path = write_rows(tmp_path)
    data = open_pairs(path)
    assert len(data) == 4 and data.caption(2) == "no 2" and data.example_captions(2) == ["no 0", "no 1"]
    assert torch.equal(data.pixels(2), torch.stack([pixels(4), pixels(5)]))
    expected = data.pixels(2)
    path.rename(tmp_path / "metadata.jsonl")
    assert torch.equal(open_pairs(tmp_path).pixels(2), expected), "a folder with metadata.jsonl"


def test_pick_a_pic_in_several_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train" / "0.parquet", [1.0, 0.5, 0.0])
    write_parquet(tmp_path / "train" / "1.parquet", [None, 0.0], first=3)
    said: list[str] = []
    config = settings(tmp_path / "train", **PICK_A_PIC)
    data = open_image_pairs(config, seed=0, say=said.append)
    assert [data.caption(index) for index in range(len(data))] == ["no 0", "no 2", "no 4"]
    for index, (better, worse) in enumerate([(0, 1), (5, 4), (9, 8)]):
        assert torch.equal(data.pixels(index), torch.stack([pixels(better), pixels(worse)])), index
    assert said == [f"2 of 5 rows of {tmp_path / 'train'} are ties and are left out"]
    assert "1.parquet, row 2" in data.describe(2)


@pytest.mark.parametrize("label_key", [None, "label_1"])
def test_pick_a_pic_without_its_labels_is_refused(tmp_path: Path, label_key: str | None) -> None:
    """Of every second pair the worse image was learned; by the label of the other column, of every pair."""
    path = write_parquet(tmp_path / "0.parquet", [1.0, 0.0])
    keys = {**PICK_A_PIC, "label_key": label_key}
    assert "set data.label_key label_0" in refusal(lambda: open_pairs(path, **keys))


def test_labels_of_json_lines(tmp_path: Path) -> None:
    def row(index: int, **label: Any) -> dict[str, Any]:
        return {"prompt": "x", "chosen": f"{index}a.png", "rejected": f"{index}b.png", **label}

    rows = {
        "row0": row(0, better=0),
        "row1": row(1, better="left"),
        "row2": row(2),
        "row3": "{broken",
        "row4": row(4, better=0.5),
        "row5": row(5, better=True),
    }
    path = write_rows(tmp_path, 6, **rows)
    data = open_pairs(path, label_key="better")
    assert (len(data), data.num_ties) == (5, 1)
    assert torch.equal(data.pixels(0), torch.stack([pixels(1), pixels(0)]))
    assert torch.equal(data.pixels(4), torch.stack([pixels(10), pixels(11)]))
    assert f"{path}, line 2: column 'better' must be a number, not 'left'" in refusal(data.pixels, 1)
    assert f"{path}, line 3: no column 'better'; its columns are prompt" in refusal(data.pixels, 2)
    assert f"{path}, line 4: not valid JSON" in refusal(data.pixels, 3)


def test_wrong_sources_are_named(tmp_path: Path) -> None:
    assert "data.train_path: file not found" in refusal(open_pairs, tmp_path / "none.jsonl")
    path = write_rows(tmp_path)
    with pytest.raises(DataError, match=r"data\.eval_path: file not found"):
        open_held_out_pairs(settings(path, eval_path=str(tmp_path / "none.jsonl")), 0, 4)
    ties = write_parquet(tmp_path / "ties" / "0.parquet", [0.5, 0.5])
    assert "nothing but ties in column 'label_0'" in refusal(lambda: open_pairs(ties, **PICK_A_PIC))
    unlabelled = {**PICK_A_PIC, "label_key": "label"}
    message = refusal(lambda: open_pairs(ties, **unlabelled))
    assert "no column 'label'; its columns are caption, jpg_0, jpg_1, label_0" in message
    assert "column 'chosen' holds no image path or bytes" in refusal(open_pairs(ties, text_key="caption").pixels, 0)


def test_equal_images_and_a_missing_one_are_broken_rows(tmp_path: Path) -> None:
    same = {"prompt": "x", "chosen": "0a.png", "rejected": "0a.png"}
    gone = {"prompt": "x", "chosen": "0a.png", "rejected": "gone.png"}
    path = write_rows(tmp_path, 4, row1=same, row2=gone)
    data = open_pairs(path)
    assert refusal(data.pixels, 1) == f"{path}, line 2: both images are the same"
    assert refusal(data.pixels, 2) == f"{path}, line 3: image file not found: {tmp_path / 'gone.png'}"


def test_held_out_pairs_are_the_first_ones(tmp_path: Path) -> None:
    path, held_out = write_rows(tmp_path / "train"), write_rows(tmp_path / "eval", 6)
    config = settings(path, eval_path=str(held_out))
    data = open_held_out_pairs(config, seed=0, num_rows=3)
    assert data is not None and len(data) == 3 and str(held_out) in data.describe(2)
    assert torch.equal(data.pixels(2), torch.stack([pixels(4), pixels(5)]))
    assert open_held_out_pairs(settings(path), seed=0, num_rows=3) is None


def test_glyph_pairs_differ_in_the_word_alone() -> None:
    config = GlyphConfig(characters="ABCDEF", length=2, font_sizes=[8, 10], jitter=2, num_images=8)
    right, pairs = GlyphDataset(config, 16, 24, seed=3), GlyphPairs(config, 16, 24, seed=3)
    for index in range(8):
        assert pairs.caption(index) == right.caption(index)
        assert torch.equal(pairs.pixels(index)[0], right.pixels(index))
        assert not torch.equal(pairs.pixels(index)[1], right.pixels(index))
    assert pairs.fingerprint() != right.fingerprint()
    data = PairDataConfig(data_type="glyphs", glyphs=config, height=16, width=24)
    held_out = open_held_out_pairs(data, seed=3, num_rows=5)
    assert isinstance(held_out, GlyphPairs) and len(held_out) == 5
    words = {held_out.caption(index).split('"')[1] for index in range(5)}
    assert all(is_held_out(word, config) for word in words)
    few = config.model_copy(update={"characters": "AD", "held_out": 0.99})
    with pytest.raises(ConfigError, match="fewer than 1 training words"):
        GlyphPairs(few, 16, 24, seed=3).pixels(0)
    one = config.model_copy(update={"characters": "A"})
    with pytest.raises(ConfigError, match="fewer than 2 training words"):
        GlyphPairs(one, 16, 24, seed=3).pixels(0)


def test_cached_pairs_equal_pairs_encoded_online(tmp_path: Path, model: DiffusionModel) -> None:
    gone = {"prompt": "x", "chosen": "0a.png", "rejected": "gone.png"}
    data = open_pairs(write_rows(tmp_path / "rows", 5, row2=gone))

    def bad_rows() -> BadRows:
        return BadRows(1, lambda text: None)

    online = OnlineEncoder(data, model, bad_rows())
    cache = open_cache(tmp_path / "cache", data, model, bad_rows(), batch_size=2)
    for indices in ([0, 1], [2, 3], [4]):
        ids = [10 + index for index in indices]
        ours, theirs = (encoder.batch(IndexBatch(indices, ids)) for encoder in (online, cache))
        assert ours.sample_ids == theirs.sample_ids and ours.num_images == len(ours.sample_ids)
        torch.testing.assert_close(ours.latents, theirs.latents)
        assert ours.latents.shape[1:] == (2, *model.latent_shape(16, 16))
    swapped = encode_rows(data, model, torch.stack([data.pixels(0).flip(0)]))
    torch.testing.assert_close(swapped.flip(1), online.batch(IndexBatch([0], [0])).latents)
    for encoder in (online, cache):
        placeholder = encoder.batch(IndexBatch([2], [5]))
        assert placeholder.num_images == 0 and placeholder.latents.shape == (1, 2, *model.latent_shape(16, 16))


def test_cached_edits_equal_edits_encoded_online(tmp_path: Path) -> None:
    """Both images of a pair belong to one prompt and one source image."""
    path = write_config(tiny_flux_kontext(), tmp_path / "tiny.yaml")
    model = build_diffusion_model(ModelConfig(config_path=str(path), max_sequence_length=7))
    source = {"source_image": "3a.png"}
    rows = {
        f"row{index}": {"prompt": "AB", "chosen": f"{index}a.png", "rejected": f"{index}b.png", **source}
        for index in range(3)
    }
    data = open_pairs(write_rows(tmp_path / "rows", 4, **rows))
    assert data.count_sources(2) == 1 and not data.count_sources(3)
    np.testing.assert_array_equal(data.source(0, data.pixels(0)), np.array(picture(6)))
    online = OnlineEncoder(data, model, BadRows(1, lambda text: None))
    cache = open_cache(tmp_path / "cache", data, model, BadRows(1, lambda text: None))
    ours, theirs = (encoder.batch(IndexBatch([1, 2, 3], [1, 2, 3])) for encoder in (online, cache))
    assert ours.sample_ids == theirs.sample_ids == [1, 2], "the last has no source image"
    torch.testing.assert_close(ours.latents, theirs.latents)
    mine, other = ours.conditioning, theirs.conditioning
    assert mine.own_negative and other.own_negative
    torch.testing.assert_close(mine.tensors, other.tensors)
    torch.testing.assert_close(mine.negative, other.negative)


def test_pairs_of_videos(tmp_path: Path) -> None:
    config = GlyphConfig(characters="ABCDEF", length=2, font_sizes=[8], num_images=4)
    videos, words = GlyphPairs(config, 16, 24, 3, num_frames=5), GlyphDataset(config, 16, 24, 3, num_frames=5)
    assert videos.pixels(1).shape == (2, 3, 5, 16, 24)
    assert torch.equal(videos.pixels(1)[0], words.pixels(1))
    first = videos.pixels(1)[0, :, 0].permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(videos.source(1, videos.pixels(1)), first)
    for name in ("a", "b"):
        frames = [picture(10 * ord(name) + index) for index in range(6)]
        frames[0].save(tmp_path / f"{name}.png", save_all=True, append_images=frames[1:])
    row = {"prompt": "x", "chosen": "a.png", "rejected": "b.png"}
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    pair = open_pairs(tmp_path / "data.jsonl", num_frames=2).pixels(0)
    assert pair.shape == (2, 3, 2, 16, 16)
    assert torch.equal(pair[1, :, 0], pixels(10 * ord("b")))


@pytest.mark.parametrize(("num_rows", "num_ranks"), [(0, 1), (1, 2), (7, 2), (8, 2), (9, 3)])
def test_evaluation_sees_each_row_once_in_full_batches(num_rows: int, num_ranks: int) -> None:
    meshes = [Mesh(Layout(dp_shard=num_ranks), torch.device("cpu"), rank) for rank in range(num_ranks)]
    batches = [evaluation_batches(num_rows, 2, mesh) for mesh in meshes]
    assert len({len(batch) for batch in batches}) == 1
    flat = [batch for of_rank in batches for batch in of_rank]
    assert all(len(batch.indices) == len(batch.sample_ids) == 2 for batch in flat)
    counted = [pair for batch in flat for pair in zip(batch.indices, batch.sample_ids, strict=True) if pair[1] >= 0]
    assert sorted(counted) == [(row, row) for row in range(num_rows)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "data.train_path is required when data.data_type is pairs"),
        ({"data_type": "glyphs", "train_path": "x"}, "data.train_path has no meaning"),
        ({"data_type": "glyphs", "eval_path": "x"}, "data.eval_path has no meaning"),
        ({"train_path": "x", "chosen_key": "rejected"}, "data.chosen_key and data.rejected_key are both 'rejected'"),
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PairDataConfig(**wrong)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_evaluation_pairs_that_are_trained_on_are_said(tmp_path: Path, kind: str) -> None:
    def write(name: str, pairs: list[tuple[str, int, int]]) -> Path:
        path = tmp_path / f"{name}.{kind}"
        for seed in {seed for pair in pairs for seed in pair[1:]}:
            picture(seed).save(tmp_path / f"{seed}.png")
        if kind == "parquet":
            table = {"prompt": [pair[0] for pair in pairs]}
            table |= {key: [blob(pair[place]) for pair in pairs] for key, place in (("chosen", 1), ("rejected", 2))}
            pyarrow.parquet.write_table(pyarrow.table(table), path)
        else:
            rows = [{"prompt": a, "chosen": f"{b}.png", "rejected": f"{c}.png"} for a, b, c in pairs]
            path.write_text("\n".join(map(json.dumps, rows)))
        return path

    train = write("training", [("a cat", 1, 2), ("a dog", 3, 4), ("a fox", 5, 6)])
    held_out = write("held", [("a dog", 4, 3), ("a cat", 1, 7), ("a bird", 5, 6)])
    data = settings(train, eval_path=str(held_out))
    opened = open_held_out_pairs(data, seed=0, num_rows=3)
    [line] = describe_shared_pairs(open_pairs(train), opened)
    assert "1 of the 3 evaluation rows" in line and "held" in line.split(" is ")[0]
    assert describe_shared_pairs(open_pairs(held_out), open_held_out_pairs(data, seed=0, num_rows=1)) != []
    assert describe_shared_pairs(open_pairs(train), None) == []


def test_labels_that_are_classes_are_read_by_name(tmp_path: Path) -> None:
    rows = {"prompt": ["a", "b"], "chosen": [blob(1), blob(1)], "rejected": [blob(2), blob(2)], "first": [0, 1]}

    def labels(names: list[str]) -> list[bool]:
        features = {"prompt": datasets.Value("string"), "first": datasets.ClassLabel(names=names)}
        features |= {key: datasets.Value("binary") for key in ("chosen", "rejected")}
        path = tmp_path / f"{names[0]}.parquet"
        datasets.Dataset.from_dict(rows, features=datasets.Features(features)).to_parquet(str(path))
        dataset = open_pairs(path, label_key="first")
        return [torch.equal(dataset.pixels(index)[0], pixels(1)) for index in range(2)]

    assert labels(["yes", "no"]) == [True, False]
    assert labels(["false", "true"]) == [False, True]
    with pytest.raises(DataError, match=r"row 1: column 'first' holds classes .* 'jpg_0', says neither"):
        labels(["jpg_0", "jpg_1"])
