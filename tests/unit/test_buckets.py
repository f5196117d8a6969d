"""Aspect ratio buckets: the sizes, which one an image gets, and an order that loses and repeats no sample."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.commands.check_config import WRONG, check_config
from sfumato.config.image_data import ImageTextDataConfig, sizes_of_area
from sfumato.config.sections import EpochTrainConfig, ModelConfig
from sfumato.data.images import buckets as module
from sfumato.data.images.buckets import Buckets, read_sizes, sort_into_buckets
from sfumato.data.images.image_text import ImageTextDataset, nearest_size
from sfumato.data.loader import IndexLoader, evaluation_batches
from sfumato.data.media.pictures import read_image, read_size
from sfumato.errors import ConfigError, DataError
from sfumato.models.diffusion.base import set_source_images
from sfumato.models.diffusion.encoders import open_encoder
from sfumato.models.diffusion.flops import BatchFlops, denoiser_flops
from sfumato.models.diffusion.latents import encode_sources
from sfumato.models.diffusion.load import build_diffusion_model
from tests.tiny import tiny_dit_config, write_config, write_tiny_pipeline
from tests.tiny_families import tiny_flux2_klein, tiny_flux_kontext
from tests.token_rows import mesh_of
from tests.unit.test_image_text import settle

SIZES = [(16, 16), (8, 16), (16, 8)]


def kohya(height: int, width: int, least: int, most: int, step: int) -> list[tuple[int, int]]:
    """``make_bucket_resolutions`` of kohya's scripts, as (width, height)."""
    area, result = height * width, set()
    side = int(math.sqrt(area) // step) * step
    result.add((side, side))
    for side in range(least, most + 1, step):
        other = min(most, int((area // side) // step) * step)
        if other >= least:
            result |= {(side, other), (other, side)}
    return sorted(result)


@pytest.mark.parametrize(
    ("height", "width", "step"), [(1024, 1024, 64), (512, 512, 64), (512, 768, 64), (480, 832, 16)]
)
def test_sizes_are_those_of_kohya(height: int, width: int, step: int) -> None:
    edge = math.isqrt(height * width)
    least, most = math.ceil(edge / 2 / step) * step, 2 * edge // step * step
    assert sizes_of_area(height, width, step) == kohya(height, width, least, most, step)


def test_sizes_of_sdxl() -> None:
    sizes = sizes_of_area(1024, 1024, 64)
    assert {(1024, 1024), (832, 1216), (1216, 832), (896, 1152), (768, 1344), (640, 1536), (512, 2048)} <= set(sizes)
    assert all(0.8 * 2**20 < h * w <= 2**20 and max(h, w) <= 4 * min(h, w) for h, w in sizes)
    config = ImageTextDataConfig(train_path="x", height=1024, width=1024, buckets=64)
    assert config.sizes == sizes and ImageTextDataConfig(train_path="x").sizes == [(512, 512)]


def test_the_nearest_ratio_and_of_equal_ones_the_largest_that_is_filled() -> None:
    sizes = [(64, 64), (128, 128), (64, 128), (128, 64), (32, 32)]
    wanted = {
        (500, 500): (128, 128),
        (100, 100): (64, 64),  # without enlarging it
        (20, 21): (32, 32),
        (300, 600): (64, 128),
        (141, 100): (64, 64),  # as logarithms 1:1 is nearer than 2:1, by a little
        (142, 100): (128, 64),
        (4000, 10): (128, 64),
    }
    for (height, width), size in wanted.items():
        assert sizes[nearest_size(height, width, sizes)] == size, (height, width)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_head_says_the_size_that_the_image_has(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (30, 20)).save(tmp_path / "a.jpg", exif=exif)
    image = read_image(tmp_path / "a.jpg", "here")
    assert read_size(tmp_path / "a.jpg", "here") == (image.height, image.width)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"buckets": 64, "height": 32, "width": 32}, "gives no size"),
        ({"buckets": []}, "gives no size"),
        ({"buckets": [[64, 64], [64, 64]]}, "given twice"),
        ({"buckets": 64, "num_frames": 5}, "data.num_frames 5: remove one"),
        ({"buckets": [[4, 64]]}, r"list of \[height, width\] .* not \[\[4, 64\]\]"),
        ({"buckets": "fish"}, "must be a number of pixels, or a list"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageTextDataConfig(train_path="x", **settings)


def loaders(numbers: np.ndarray, ranks: int, **train: Any) -> list[IndexLoader]:
    section = EpochTrainConfig(output_dir="x", lr=1e-3, seed=3, **train)
    results = []
    for rank in range(ranks):
        results.append(IndexLoader(len(numbers), section, mesh_of(rank, ranks), Buckets(SIZES, numbers)))
    return results


def numbers_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).choice(3, count, p=[0.7, 0.27, 0.03]).astype(np.int16)


@pytest.mark.parametrize(
    ("count", "size", "micro"), [(97, 12, 2), (97, 12, 12), (24, 8, 4), (7, 12, 3), (3, 4, 2), (50, 6, 1)]
)
def test_every_epoch_has_each_row_once_and_a_micro_batch_one_bucket(count: int, size: int, micro: int) -> None:
    numbers = numbers_of(count)
    settings = {"global_batch_size": size, "micro_batch_size": micro, "num_train_epochs": 5, "max_steps": 5 * count}
    [one] = loaders(numbers, 1, **settings)
    whole = []
    for step in range(5 * count // size):
        results = {position: row for batch in one.micro_batches(step) for row, position in _pairs(batch, numbers)}
        assert sorted(results) == list(range(step * size, (step + 1) * size)), "the samples of a step are as without"
        whole += [results[position] for position in sorted(results)]
        for ranks in (2, 3) if size % (6 * micro) == 0 else ():
            parts = [loader.micro_batches(step) for loader in loaders(numbers, ranks, **settings)]
            assert len({len(part) for part in parts}) == 1, "ranks compute together"
            shared = [pair for part in parts for batch in part for pair in _pairs(batch, numbers)]
            assert {position: row for row, position in shared} == results and len(shared) == size
    for epoch in range(len(whole) // count):
        assert sorted(whole[epoch * count : (epoch + 1) * count]) == list(range(count))
    later = loaders(numbers, 1, **settings)[0].micro_batches(3)
    assert later == one.micro_batches(3), "a loader that begins at a step"


def _pairs(batch: Any, numbers: np.ndarray) -> list[tuple[int, int]]:
    assert {int(numbers[row]) for row in batch.indices} == {batch.bucket}
    return list(zip(batch.indices, batch.sample_ids, strict=True))


def test_micro_batches_are_full_but_for_the_ends_of_epochs() -> None:
    numbers = numbers_of(1003)
    [loader] = loaders(numbers, 1, global_batch_size=16, micro_batch_size=4, num_train_epochs=4)
    sizes = Counter(len(batch.indices) for step in range(loader.total_steps) for batch in loader.micro_batches(step))
    full = sum(count for size, count in sizes.items() if size == 4)
    assert max(sizes) == 4 and full > 0.97 * sum(sizes.values()), sizes
    epochs = [[loader._rows[epoch * 1003 + at] for at in range(1003)] for epoch in range(2)]
    assert epochs[0] != epochs[1]
    shown = [int(numbers[row]) for row in epochs[0][:800]]
    assert 0.2 < shown.count(1) / 800 < 0.35, "buckets are mixed over the epoch"


def test_ranks_work_alike() -> None:
    numbers = numbers_of(600)
    section = {"global_batch_size": 32, "micro_batch_size": 2, "num_train_epochs": 2}
    parts = loaders(numbers, 4, **section)
    for step in range(parts[0].total_steps):
        work = [
            sum(len(batch.indices) * math.prod(SIZES[batch.bucket]) for batch in part.micro_batches(step))
            for part in parts
        ]
        assert max(work) - min(work) <= 2 * 16 * 16, (step, work)


def test_evaluation_has_each_row_once_and_batches_of_one_size() -> None:
    numbers = numbers_of(21)
    results = []
    for mesh in (mesh_of(rank, 3) for rank in range(3)):
        batches = evaluation_batches(21, 2, mesh, Buckets(SIZES, numbers))
        results.append(batches)
        for batch in batches:
            assert len(batch.indices) == 2 and {int(numbers[row]) for row in batch.indices} == {batch.bucket}
    assert len({len(batches) for batches in results}) == 1
    ids = [sample_id for batch in itertools.chain(*results) for sample_id in batch.sample_ids if sample_id >= 0]
    assert sorted(ids) == list(range(21))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Twelve images of three shapes, and one that is broken."""
    rows = []
    for index in range(12):
        height, width = [(40, 42), (20, 40), (90, 44)][index % 3]
        pixels = np.random.default_rng(index).integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
        rows.append({"image": f"{index}.png", "text": f"no {index}"})
    (tmp_path / "broken.png").write_bytes(b"no image")
    rows.append({"image": "broken.png", "text": "broken"})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "rows.jsonl"


def sorted_rows(images: Path, said: list[str], **settings: Any) -> tuple[ImageTextDataset, Buckets]:
    config = ImageTextDataConfig(train_path=str(images), height=16, width=16, buckets=[*map(list, SIZES)], **settings)
    dataset = ImageTextDataset(config)
    return dataset, sort_into_buckets(dataset, config, mesh_of(0, 1), said.append)


def test_rows_are_sorted_by_the_heads_of_their_images(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    settle(images.parent)
    cache = {"cache_dir": str(images.parent / "cache")}
    dataset, result = sorted_rows(images, said, **cache)
    assert result.numbers.tolist() == [0, 1, 2] * 4 + [0]
    assert [tuple(dataset.pixels(index).shape[1:]) for index in range(3)] == SIZES
    assert said == ["13 rows in 3 buckets (height x width): 16 x 16: 5, 8 x 16: 4, 16 x 8: 4"]
    # sizes are kept beside the latents; a damaged file is read again, another caption column is another data set
    monkeypatch.setattr(module, "read_sizes", None)
    assert sorted_rows(images, said, **cache)[1].digest == result.digest
    [stored] = (images.parent / "cache").glob("sizes_*.npz")
    stored.write_bytes(stored.read_bytes()[:-3])
    monkeypatch.setattr(module, "read_sizes", read_sizes)
    assert sorted_rows(images, said, **cache)[1].digest == result.digest
    assert np.load(stored)["sizes"].shape == (13, 2)
    # a picture that is replaced by one of another shape is looked at anew
    Image.new("RGB", (40, 20)).save(images.parent / "0.png")
    assert sorted_rows(images, said, **cache)[1].numbers.tolist()[:2] == [1, 1]


def test_an_image_that_changed_its_shape_is_named(images: Path) -> None:
    dataset, result = sorted_rows(images, [])
    rows = module.OneSize(dataset, (8, 16), np.flatnonzero(result.numbers == 1))
    assert rows.pixels(2).shape == (3, 8, 16) and rows.caption(2) == "no 7"
    Image.new("RGB", (40, 40)).save(images.parent / "7.png")
    with pytest.raises(DataError, match=r"rows.jsonl, line 8: the image has another size"):
        rows.pixels(2)


def test_check_takes_the_largest_bucket_and_names_one_that_the_model_cannot_make(tmp_path: Path, images: Path) -> None:
    def findings_of(buckets: Any, size: int = 8) -> Any:
        data = {"data_type": "image_text", "train_path": str(images), "height": size, "width": size, "buckets": buckets}
        config = tiny_dit_config(tmp_path, train={"device": "cpu"})
        config["data"] = {**data, "max_bad_rows": 1}
        return check_config(write_config(config, tmp_path / "run.yaml"))

    one, many = findings_of(None, 16), findings_of([[8, 8], [16, 16], [8, 16]])
    assert many.model.largest.total == one.model.largest.total > findings_of([[8, 8]]).model.largest.total
    wrong = findings_of(8, 32)
    assert wrong.exit_code == WRONG
    assert any("data.buckets: 16 x " in problem and "32 pixels at most" in problem for problem in wrong.problems)
    with pytest.raises(
        ConfigError, match=r"data.buckets are for images of many sizes, and not for data.data_type glyphs"
    ):
        check_config(write_config(tiny_dit_config(tmp_path, data={"buckets": 8}), tmp_path / "run.yaml"))


def test_edits_of_several_sizes_are_encoded_alike_with_a_cache(tmp_path: Path, images: Path) -> None:
    """Source images, whose embeddings have another shape in each bucket."""
    rows = [json.loads(line) | {"source_image": f"{index % 5}.png"} for index, line in enumerate(images.open())]
    images.write_text("\n".join(map(json.dumps, rows)))
    pipeline = write_tiny_pipeline(tmp_path / "pipeline", described=tiny_flux_kontext())
    model = build_diffusion_model(ModelConfig(model_path=str(pipeline), max_sequence_length=7))
    settings = {"train_path": str(images), "height": 16, "width": 16, "buckets": [*map(list, SIZES)], "max_bad_rows": 1}
    encoders, said = [], []
    for more in ({}, {"cache_dir": str(tmp_path / "cache")}):
        config = ImageTextDataConfig(**settings, **more)
        dataset = ImageTextDataset(config)
        buckets = sort_into_buckets(dataset, config, mesh_of(), said.append)
        encoders.append(
            open_encoder(dataset, model, config, mesh_of(), said.append, lambda starts, count: starts, buckets)
        )
    for batch in evaluation_batches(13, 2, mesh_of(), buckets):
        online, cached = (encoder.batch(batch) for encoder in encoders)
        assert online.size == cached.size == SIZES[batch.bucket] and online.num_images == cached.num_images
        assert online.latents.shape[1:] == model.latent_shape(*online.size)
        torch.testing.assert_close(cached.latents, online.latents, rtol=1e-5, atol=1e-5)
        assert online.conditioning.tensors.keys() == cached.conditioning.tensors.keys()
        for name, tensor in online.conditioning.tensors.items():
            torch.testing.assert_close(cached.conditioning.tensors[name], tensor, rtol=1e-5, atol=1e-5)
    assert len([*(tmp_path / "cache").glob("latents_*")]) == 3
    broken = [line for line in said if "line 13" in line]
    assert len(broken) == 2, "once by each encoder"


def test_rows_of_different_numbers_of_source_images_are_batches_apart(tmp_path: Path, images: Path) -> None:
    """Online, and from a cache that a second run reads without encoding; rows with too many or none are broken."""
    sources: list[Any] = ["1.png", ["2.png", "3.png"], ["4.png"], ["3.png", "2.png"], ["1.png", "0.png"], [], None]
    rows = [json.loads(line) for line in images.open()][: len(sources) + 2]
    for row, source in zip(rows, [*sources, ["1.png"] * 4, ["2.png", "gone.png"]], strict=True):
        row["source_image"] = source
    images.write_text("\n".join(map(json.dumps, rows)))
    pipeline = write_tiny_pipeline(tmp_path / "pipeline", described=tiny_flux2_klein())
    model = build_diffusion_model(ModelConfig(model_path=str(pipeline), max_sequence_length=24, from_images=True))
    set_source_images(model, 3)
    settings = {"train_path": str(images), "height": 16, "width": 16, "max_bad_rows": 4, "max_source_images": 3}
    encoders, said = [], []
    for more in ({}, {"cache_dir": str(tmp_path / "cache")}, {"cache_dir": str(tmp_path / "cache")}):
        config = ImageTextDataConfig(**settings, **more)
        dataset = ImageTextDataset(config)
        buckets = sort_into_buckets(dataset, config, mesh_of(), said.append)
        assert buckets is not None
        encoders.append(
            open_encoder(dataset, model, config, mesh_of(), said.append, lambda starts, count: starts, buckets)
        )
    assert said[0] == (
        "9 rows in 2 buckets (height x width): 16 x 16 from 1 source image(s): 5, 16 x 16 from 2 source image(s): 4"
    )
    counts: dict[int, int] = {}
    flops = BatchFlops(model)
    for batch in evaluation_batches(9, 2, mesh_of(), buckets):
        online, cached, again = (encoder.batch(batch) for encoder in encoders)
        assert online.num_images == cached.num_images
        for name, tensor in online.conditioning.tensors.items():
            torch.testing.assert_close(cached.conditioning.tensors[name], tensor, rtol=1e-5, atol=1e-5)
            assert torch.equal(cached.conditioning.tensors[name], again.conditioning.tensors[name])
        if not online.num_images:
            continue
        assert online.num_sources == cached.num_sources
        index_of = dict(zip(batch.sample_ids, batch.indices, strict=True))
        for sample_id, row_latents in zip(online.sample_ids, online.conditioning.tensors["image_latents"], strict=True):
            source = dataset.source(index_of[sample_id], dataset.pixels(index_of[sample_id]))
            torch.testing.assert_close(row_latents[None], encode_sources(model, source), rtol=1e-5, atol=1e-5)
            counts[index_of[sample_id]] = 1 if source.ndim == 3 else len(source)
        assert flops.count_image(online).forward == denoiser_flops(model, 16, 16, online.conditioning.tensors).forward
    assert counts == {0: 1, 1: 2, 2: 1, 3: 2, 4: 2}
    broken = " ".join(said)
    assert "line 6: column 'source_image' is an empty list: give at least one source image" in broken
    assert "line 7: column 'source_image' holds no image path or bytes" in broken
    assert "line 8: column 'source_image' holds 4 source images: at most 3 are read (data.max_source_images)" in broken
    assert "line 9, source image 2: image file not found" in broken
    rows[1]["source_image"] = ["2.png"]
    images.write_text("\n".join(map(json.dumps, rows)))
    dataset = ImageTextDataset(config)
    with pytest.raises(DataError, match="line 2: the row has another number of source images"):
        module.OneSize(dataset, (16, 16), np.array([1]), 2).source(0, dataset.pixels(1))
