"""Images with captions: read from every source, broken rows named, and a cache that equals encoding online."""

import io
import json
import os
import shutil
import struct
import threading
import time

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from sfumato.config.image_data import ImageTextDataConfig
from sfumato.config.sections import GlyphConfig, ModelConfig
from sfumato.data.background import STEPS_AHEAD, read_ahead
from sfumato.data.files import file_digests
from sfumato.data.files.row_store import RowStore
from sfumato.data.images.image_text import ImageTextDataset, open_image_text
from sfumato.data.loader import IndexBatch
from sfumato.data.synthetic.glyphs import GlyphDataset
from sfumato.errors import DataError
from sfumato.models.diffusion.encoded import BadRows, OnlineEncoder, read_pixels
from sfumato.models.diffusion.latent_cache import open_cache
from sfumato.models.diffusion.load import build_diffusion_model
from tests.token_rows import index_loader

TINY = """
pipeline: StableDiffusion3Pipeline
transformer:
  {sample_size: 4, patch_size: 2, in_channels: 2, out_channels: 2, num_layers: 1, num_attention_heads: 1,
   attention_head_dim: 8, caption_projection_dim: 8, pos_embed_max_size: 4}
vae: {channels: [8, 8], latent_channels: 2}
text_encoder: {width: 8, num_layers: 1, num_heads: 1}
t5: {num_layers: 1, num_heads: 1}
tokenizer: {max_length: 8}
"""


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")


def build_model(folder, seed=0):
    path = folder / "model.yaml"
    path.write_text(TINY)
    return build_diffusion_model(ModelConfig(config_path=str(path), max_sequence_length=7), seed=seed)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("model"))


def picture(seed=0, height=10, width=12):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def encoded(image, file_format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def array(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def open_images(path, **options):
    return ImageTextDataset(ImageTextDataConfig(train_path=str(path), **{"height": 10, "width": 12, **options}))


def write_jsonl(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def write_rows(folder, count=6, **changed):
    """A .jsonl of ``count`` rows with random images; ``changed`` replaces rows (``row2=...``)."""
    folder.mkdir(exist_ok=True)
    rows = []
    for index in range(count):
        picture(index).save(folder / f"{index}.png")
        rows.append(changed.get(f"row{index}", {"image": f"{index}.png", "text": f"no {index}"}))
    return write_jsonl(folder / "data.jsonl", rows)


def refusal(function, *arguments):
    with pytest.raises(DataError) as caught:
        function(*arguments)
    return str(caught.value)


# Sources


def test_jsonl_with_paths_relative_to_the_file(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    picture(1).save(tmp_path / "images" / "a.png")
    path = write_jsonl(tmp_path / "data.jsonl", [{"image": "images/a.png", "text": "a cat"}])
    monkeypatch.chdir(tmp_path.parent)
    for path_or_relative in (path, path.relative_to(tmp_path.parent)):
        data = open_images(path_or_relative)
        assert (len(data), data.caption(0)) == (1, "a cat")
        assert data.pixels(0).dtype == torch.uint8 and torch.equal(data.pixels(0), array(picture(1)))


def test_column_names_can_be_chosen(tmp_path):
    picture(1).save(tmp_path / "a.png")
    path = write_jsonl(tmp_path / "data.jsonl", [{"file": str(tmp_path / "a.png"), "label": "x", "text": 3}])
    data = open_images(path, image_key="file", text_key="label")
    assert data.caption(0) == "x" and torch.equal(data.pixels(0), array(picture(1)))


@pytest.mark.parametrize("kind", ["binary", "struct", "features"])
def test_parquet_with_bytes(tmp_path, kind):
    blobs = [encoded(picture(i)) for i in range(3)]
    path = tmp_path / "data.parquet"
    if kind == "features":
        columns = {"image": [{"bytes": blob, "path": None} for blob in blobs], "text": ["a", "b", "c"]}
        features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
        datasets.Dataset.from_dict(columns, features=features).to_parquet(str(path))
    else:
        images = blobs if kind == "binary" else [{"bytes": blob, "path": "x.png"} for blob in blobs]
        pyarrow.parquet.write_table(pyarrow.table({"image": images, "text": ["a", "b", "c"]}), path)
    data = open_images(path)
    assert [data.caption(i) for i in range(len(data))] == ["a", "b", "c"]
    for index in (2, 0, 1):
        assert torch.equal(data.pixels(index), array(picture(index)))


def test_parquet_struct_with_a_path_only(tmp_path):
    picture(1).save(tmp_path / "a.png")
    table = pyarrow.table({"image": [{"bytes": None, "path": "a.png"}], "text": ["a"]})
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    assert torch.equal(open_images(tmp_path / "data.parquet").pixels(0), array(picture(1)))


def test_parquet_names_the_broken_row(tmp_path):
    table = pyarrow.table({"image": [encoded(picture(0)), b"junk", None], "text": ["a", "b", None]})
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(table, path)
    data = open_images(path)
    data.pixels(0)
    assert refusal(data.pixels, 1).startswith(f"{path}, row 2: broken image (its bytes)")
    assert refusal(data.pixels, 2).startswith(f"{path}, row 3: column 'image' holds no image path or bytes")
    assert refusal(data.caption, 2).startswith(f"{path}, row 3: column 'text'")


def test_a_source_that_is_missing_or_empty_is_named(tmp_path):
    assert "data.train_path: file not found" in refusal(open_images, tmp_path / "none.jsonl")
    (tmp_path / "empty").mkdir()
    assert f"data.train_path: {tmp_path / 'empty'} holds no images" in refusal(open_images, tmp_path / "empty")


def test_glyphs_are_chosen_by_data_type():
    data = open_image_text(ImageTextDataConfig(data_type="glyphs", height=16, width=24), seed=3)
    assert isinstance(data, GlyphDataset) and data.pixels(0).shape == (3, 16, 24)


# Broken rows


BROKEN = {
    "truncated png": encoded(picture(0))[:-200],
    "truncated jpeg": encoded(picture(0, 64, 64), "JPEG")[:-300],
    "cut header": encoded(picture(0))[:20],
    "random bytes": bytes(np.random.default_rng(0).integers(0, 256, 500, np.uint8)),
    "empty": b"",
    "text": b"<html>404 not found</html>",
    "32 bit float": encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_image_is_named_with_file_and_row(tmp_path, kind):
    path = write_rows(tmp_path, 3)
    (tmp_path / "1.png").write_bytes(BROKEN[kind])
    data = open_images(path)
    data.pixels(0), data.pixels(2)
    assert refusal(data.pixels, 1).startswith(f"{path}, line 2: broken image ({tmp_path / '1.png'}): ")


def test_broken_exif_is_a_broken_image(tmp_path, monkeypatch):
    def fail(_):
        raise struct.error("required argument is not an integer")  # what Pillow lets out for some headers

    path = write_rows(tmp_path, 1)
    monkeypatch.setattr(PngImageFile, "getexif", fail)
    assert refusal(open_images(path).pixels, 0).startswith(f"{path}, line 1: broken image")


def test_an_image_that_is_too_large_to_be_true_is_a_broken_row(tmp_path, monkeypatch):
    path = write_rows(tmp_path, 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    assert refusal(open_images(path).pixels, 0).startswith(f"{path}, line 1: image ({tmp_path / '0.png'}) of more")


def test_a_missing_image_file_is_named_with_file_and_row(tmp_path):
    path = write_rows(tmp_path, 3, row2={"image": "gone.png", "text": "x"})
    assert refusal(open_images(path).pixels, 2) == f"{path}, line 3: image file not found: {tmp_path / 'gone.png'}"


def test_a_missing_caption_is_named_with_file_and_row(tmp_path):
    path = write_rows(tmp_path, 3, row0={"image": "0.png"}, row1={"image": "1.png", "text": ""}, row2={"text": "c"})
    data = open_images(path)
    assert refusal(data.caption, 0) == f"{path}, line 1: no column 'text'; its columns are image"
    assert refusal(data.caption, 1).startswith(f"{path}, line 2: column 'text' must be a non-empty text")
    assert refusal(data.pixels, 2).startswith(f"{path}, line 3: column 'image' holds no image path or bytes")


def test_a_missing_or_unreadable_caption_file_is_named(tmp_path):
    for name in ("a", "b", "c"):
        picture(0).save(tmp_path / f"{name}.png")
    (tmp_path / "b.txt").write_bytes("Straße".encode("latin-1"))
    (tmp_path / "c.txt").write_text("  \n")
    data = open_images(tmp_path)
    assert refusal(data.caption, 0).startswith(f"{tmp_path / 'a.png'}: no caption: {tmp_path / 'a.txt'}")
    assert f"{tmp_path / 'b.txt'} is not UTF-8" in refusal(data.caption, 1)
    assert refusal(data.caption, 2).startswith(f"{tmp_path / 'c.png'}: column 'text'")


def test_example_captions_pass_over_as_many_broken_rows_as_are_allowed(tmp_path):
    path = write_rows(tmp_path, 6, row0="{broken", row2={"image": "2.png"})
    data = open_images(path, max_bad_rows=2)
    assert data.example_captions(3) == ["no 1", "no 3", "no 4"]
    assert data.example_captions(99) == [f"no {i}" for i in (1, 3, 4, 5)]
    assert "line 3" in refusal(open_images(path, max_bad_rows=1).example_captions, 3)
    assert "line 1" in refusal(open_images(path).example_captions, 3)


def test_a_broken_first_row_of_a_folder_is_a_row_like_any_other(tmp_path):
    picture(1).save(tmp_path / "a.png")
    write_jsonl(tmp_path / "metadata.jsonl", ["{broken", {"file_name": "a.png", "text": "a cat"}])
    data = open_images(tmp_path)
    assert torch.equal(data.pixels(1), array(picture(1)))
    assert f"{tmp_path / 'metadata.jsonl'}, line 1" in refusal(data.pixels, 0)


# Pixels


def one_pixel_row(tmp_path, blob, name="a.png", **options):
    (tmp_path / name).write_bytes(blob)
    return open_images(write_jsonl(tmp_path / "data.jsonl", [{"image": name, "text": "x"}]), **options).pixels(0)


def halves(height, width):
    """Red on the left, green in the middle half, blue on the right."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 4, 0] = pixels[:, width // 4 : -width // 4, 1] = pixels[:, -width // 4 :, 2] = 255
    return encoded(Image.fromarray(pixels))


def test_center_crop_keeps_the_middle_and_none_stretches(tmp_path):
    cropped = one_pixel_row(tmp_path, halves(32, 64), height=16, width=16)
    assert cropped.shape == (3, 16, 16) and cropped.is_contiguous()
    assert (cropped[1, :, 2:-2] > 250).all() and (cropped[0, :, 2:] < 5).all() and (cropped[2, :, :-2] < 5).all()
    stretched = one_pixel_row(tmp_path, halves(32, 64), height=16, width=16, crop="none")
    assert stretched.shape == (3, 16, 16)
    assert (
        (stretched[0, :, :3] > 250).all() and (stretched[1, :, 6:10] > 250).all() and (stretched[2, :, -3:] > 250).all()
    )


@pytest.mark.parametrize("crop", ["center", "none"])
@pytest.mark.parametrize("size", [(8, 24), (24, 8), (40, 40)])
def test_height_and_width_are_not_mixed_up(tmp_path, crop, size):
    pixels = one_pixel_row(tmp_path, halves(20, 30), height=size[0], width=size[1], crop=crop)
    assert pixels.shape == (3, *size)


# Broken rows in batches


def test_broken_rows_are_named_once_and_counted_up_to_the_limit(tmp_path):
    path = write_rows(tmp_path, 5, row1={"image": "gone.png", "text": "x"}, row3={"image": "3.png"})
    said = []
    bad_rows = BadRows(2, said.append)
    batch = IndexBatch([0, 1, 2, 3, 4], [10, 11, 12, 13, 14])
    data = open_images(path)
    for _ in range(2):
        captions = []
        pixels, sample_ids = read_pixels(data, batch, bad_rows, captions)
        assert sample_ids == [10, 12, 14] and captions == ["no 0", "no 2", "no 4"]
        assert torch.equal(pixels, torch.stack([data.pixels(i) for i in (0, 2, 4)]))
    assert len(said) == 2
    assert said[0].startswith(f"row left out (1 of at most 2): {path}, line 2: image file not found")
    assert said[1].startswith(f"row left out (2 of at most 2): {path}, line 4: no column 'text'")


def test_one_broken_row_more_than_allowed_stops(tmp_path):
    path = write_rows(tmp_path, 4, row1={"image": "gone.png", "text": "x"}, row3={"image": "gone.png", "text": "x"})
    data, batch = open_images(path), IndexBatch([0, 1, 2, 3], [0, 1, 2, 3])
    message = refusal(read_pixels, data, batch, BadRows(1, lambda _: None))
    assert f"{path}, line 4" in message and "data.max_bad_rows is 1" in message
    message = refusal(read_pixels, data, batch, BadRows(0, lambda _: None))
    assert f"{path}, line 2" in message and "data.max_bad_rows leaves such rows out" in message


def test_captions_do_not_matter_where_they_are_not_asked_for(tmp_path):
    path = write_rows(tmp_path, 2, row1={"image": "1.png"})
    _, sample_ids = read_pixels(open_images(path), IndexBatch([0, 1], [0, 1]), BadRows(0, print))
    assert sample_ids == [0, 1]


def test_pictures_of_the_next_steps_are_read_in_a_thread_and_broken_rows_count_at_their_step(tmp_path, model):
    path = write_rows(tmp_path, 16, row1={"image": "gone.png", "text": "x"})
    data, batches = open_images(path, height=16, width=16), [IndexBatch([row], [row]) for row in range(16)]
    encoder, threads = OnlineEncoder(data, model, BadRows(0, print)), []
    picture_of = data.picture
    data.picture = lambda row: (threads.append(threading.current_thread()), picture_of(row))[1]
    steps = read_ahead(encoder.read, ((step, [batch]) for step, batch in enumerate(batches)))
    step, (read,) = next(steps)
    wanted = OnlineEncoder(open_images(path, height=16, width=16), model, silent()).batch(batches[0])
    assert step == 0 and torch.equal(encoder.encode(read).latents, wanted.latents)
    deadline = time.monotonic() + 60
    while len(threads) < 1 + STEPS_AHEAD and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 1 + STEPS_AHEAD <= len(threads) <= 2 + STEPS_AHEAD and threading.main_thread() not in threads
    step, (read,) = next(steps)
    assert step == 1 and "line 2" in refusal(encoder.encode, read)
    steps.close()


def test_a_batch_of_broken_rows_alone_is_a_placeholder_that_counts_nothing(tmp_path, model):
    path = write_rows(tmp_path, 4, row1={"image": "gone.png", "text": "x"}, row2="{broken")
    data, batch = open_images(path, height=16, width=16), IndexBatch([1, 2], [5, 6])
    assert read_pixels(data, batch, BadRows(2, lambda _: None)) is None
    for encoder in (
        OnlineEncoder(data, model, BadRows(2, lambda _: None)),
        open_cache(tmp_path / "cache", data, model, BadRows(2, lambda _: None)),
    ):
        placeholder = encoder.batch(batch)
        assert placeholder.num_images == 0 and placeholder.sample_ids == [5]
        assert placeholder.latents.shape == (1, *model.latent_shape(16, 16))
        empty = model.encode_prompts([""]).tensors
        assert all(torch.equal(tensor, empty[name]) for name, tensor in placeholder.conditioning.tensors.items())
        assert encoder.batch(IndexBatch([0, 1], [5, 6])).num_images == 1


# Online and cached


@pytest.fixture
def rows(tmp_path):
    """Twelve rows: one broken image, and two rows with the same caption."""
    same = {"image": "7.png", "text": "no 2"}
    path = write_rows(tmp_path / "rows", 12, row4={"image": "gone.png", "text": "x"}, row7=same)
    return open_images(path, height=16, width=16, max_bad_rows=1)


def silent(limit=1):
    return BadRows(limit, lambda _: None)


def assert_same_batch(ours, theirs, rounded=False):
    assert ours.sample_ids == theirs.sample_ids
    assert torch.equal(ours.latents, theirs.latents) and ours.latents.dtype == theirs.latents.dtype == torch.float32
    for mine, other in (
        (ours.conditioning.tensors, theirs.conditioning.tensors),
        (ours.conditioning.negative, theirs.conditioning.negative),
    ):
        assert list(mine) == list(other)
        for name in mine:
            assert mine[name].dtype == other[name].dtype and mine[name].shape == other[name].shape
            a, b = (mine[name].float(), other[name].float()) if rounded else (mine[name], other[name])
            assert torch.equal(a, b), name


def test_cached_batches_equal_online_batches(tmp_path, rows, model):
    """In the same batch shapes, bit by bit: 4 rows of which one is broken, with captions that stand once."""
    online, cache = OnlineEncoder(rows, model, silent()), open_cache(tmp_path / "cache", rows, model, silent(), 4)
    for first in (0, 4, 8):
        batch = IndexBatch([first, first + 1, first + 2, first + 3], [20, 21, 22, 23])
        ours, theirs = online.batch(batch), cache.batch(batch)
        assert torch.equal(ours.latents, theirs.latents)
        assert ours.sample_ids == theirs.sample_ids == ([21, 22, 23] if first == 4 else [20, 21, 22, 23])


@pytest.mark.parametrize("cache_batch", [1, 3, 64])
def test_cached_batches_equal_online_batches_in_any_order(tmp_path, rows, cache_batch):
    """In float64, rounded to float32, where the shape of a batch does not show in the last bit."""
    model = build_model(tmp_path)
    for component in model.components.values():
        component.double()
    online = OnlineEncoder(rows, model, silent())
    cache = open_cache(tmp_path / "cache", rows, model, silent(), cache_batch)
    loader = index_loader(len(rows), 6, 4, seed=1, steps=5)
    sizes = []
    for _, batches in loader.steps():
        for batch in batches:
            ours = online.batch(batch)
            assert_same_batch(ours, cache.batch(batch), rounded=True)
            sizes.append(len(ours.sample_ids))
    assert sum(sizes) < 30, "the broken row was among them"


def test_cached_rows_are_those_of_the_images(tmp_path, rows, model):
    """Every row against the model itself, so that online and cache cannot be wrong together."""
    cache = open_cache(tmp_path / "cache", rows, model, silent(), 5)
    batch = cache.batch(IndexBatch([7, 4, 2, 11], [0, 1, 2, 3]))
    for row, index in enumerate((7, 2, 11)):
        torch.testing.assert_close(batch.latents[row], model.encode_pixels(rows.pixels(index)[None])[0])
        expected = model.encode_prompts([rows.caption(index)])
        for name, tensor in expected.tensors.items():
            torch.testing.assert_close(batch.conditioning.tensors[name][row], tensor[0])
            torch.testing.assert_close(batch.conditioning.negative[name], expected.negative[name])
    assert torch.equal(batch.conditioning.tensors["pooled"][0], batch.conditioning.tensors["pooled"][1])
    assert not torch.equal(batch.conditioning.tensors["pooled"][1], batch.conditioning.tensors["pooled"][2])
    model.forget_prompts()


def settle(folder):
    """Waits until a change of any file gives it other times."""
    stats = [stat for path in folder.rglob("*") if (stat := file_digests.stat_of(path))]
    while not all(file_digests.is_settled(stat, time.time_ns()) for stat in stats):
        time.sleep(0.005)


def stores(cache_dir, kind):
    return sorted(path.name for path in cache_dir.glob(f"{kind}_*"))


def test_a_cache_is_made_once(tmp_path, rows, model, monkeypatch):
    settle(tmp_path / "rows")
    open_cache(tmp_path / "cache", rows, model, silent())
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}

    def refuse(*_):
        raise AssertionError("a finished cache must not be made again")

    monkeypatch.setattr(ImageTextDataset, "pixels", refuse)
    monkeypatch.setattr(ImageTextDataset, "caption", refuse)
    assert open_cache(tmp_path / "cache", rows, model, silent()).batch(IndexBatch([0], [0])) is not None
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}


def test_a_reused_cache_still_keeps_to_the_limit_of_broken_rows(tmp_path, rows, model):
    open_cache(tmp_path / "cache", rows, model, silent(1))
    said = []
    open_cache(tmp_path / "cache", rows, model, BadRows(1, said.append))
    assert "line 5: image file not found" in said[0] and "row left out" not in " ".join(said[1:])
    message = refusal(open_cache, tmp_path / "cache", rows, model, BadRows(0, said.append))
    assert "line 5: image file not found" in message and "data.max_bad_rows" in message


def test_a_broken_row_beyond_the_limit_stops_the_making_of_a_cache(tmp_path, rows, model):
    assert "line 5" in refusal(open_cache, tmp_path / "cache", rows, model, silent(0))
    assert not [*(tmp_path / "cache").glob("rows_*")]


def num_rows(cache_dir, kind):
    return sum(len(RowStore(path, "")) for path in cache_dir.glob(f"{kind}_*"))


def test_other_weights_or_other_data_are_encoded_anew(tmp_path, rows, model):
    cache_dir = tmp_path / "cache"
    open_cache(cache_dir, rows, model, silent())
    open_cache(cache_dir, rows, build_model(tmp_path), silent())  # the same weights
    assert num_rows(cache_dir, "latents") == 11 and num_rows(cache_dir, "prompts") == 11  # one caption stands twice
    open_cache(cache_dir, rows, build_model(tmp_path, seed=1), silent())
    assert num_rows(cache_dir, "latents") == 22 and num_rows(cache_dir, "prompts") == 22
    path = tmp_path / "rows" / "data.jsonl"
    for options, latents, prompts in (
        ({"crop": "none"}, 11, 0),
        ({"height": 32}, 11, 0),
        ({"text_key": "image"}, 0, 11),
    ):
        before = num_rows(cache_dir, "latents"), num_rows(cache_dir, "prompts")
        open_cache(cache_dir, open_images(path, **{"height": 16, "width": 16, **options}), model, silent())
        after = num_rows(cache_dir, "latents"), num_rows(cache_dir, "prompts")
        assert after == (before[0] + latents, before[1] + prompts), options
    path.write_text(path.read_text().replace("no 3", "no X"))
    open_cache(cache_dir, open_images(path, height=16, width=16), model, silent())
    assert (num_rows(cache_dir, "latents"), num_rows(cache_dir, "prompts")) == (after[0], after[1] + 1)


def test_other_autoencoder_or_text_encoder_weights_alone_are_encoded_anew(tmp_path, rows):
    model, cache_dir = build_model(tmp_path), tmp_path / "cache"
    open_cache(cache_dir, rows, model, silent())
    for part, kind, other in (
        (model.pipeline.vae.encoder.conv_in, "latents", "prompts"),
        (model.pipeline.text_encoder.text_projection, "prompts", "latents"),
    ):
        before = stores(cache_dir, kind), stores(cache_dir, other)
        with torch.no_grad():
            part.weight += 0.05
        model.forget_prompts()
        open_cache(cache_dir, rows, model, silent())
        assert len(stores(cache_dir, kind)) == len(before[0]) + 1 and stores(cache_dir, other) == before[1]


@pytest.mark.parametrize("kind", ["captions beside", "metadata"])
def test_a_changed_caption_in_a_folder_changes_the_fingerprint(tmp_path, kind):
    picture(0).save(tmp_path / "a.png")
    caption = tmp_path / "a.txt" if kind == "captions beside" else tmp_path / "metadata.jsonl"
    texts = (
        ["one", "two"] if kind == "captions beside" else [json.dumps({"file_name": "a.png", "text": t}) for t in "ab"]
    )
    prints = []
    for number, text in enumerate(texts):
        with caption.open("w") as file:  # in place: the folder itself does not change
            file.write(text)
        os.utime(caption, ns=(number, number * 10**9))
        prints.append(open_images(tmp_path).fingerprint())
    assert prints[0] != prints[1]
    assert prints[1] == open_images(tmp_path).fingerprint()


def test_a_changed_image_in_a_folder_changes_the_fingerprint(tmp_path):
    picture(0).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("x")
    before = open_images(tmp_path).fingerprint()
    (tmp_path / "a.png").write_bytes(encoded(picture(1, 20, 20)))
    assert open_images(tmp_path).fingerprint() != before


@pytest.mark.parametrize("name", ["latents", "framing", "prompt_embeds", "pooled"])
def test_a_damaged_cache_is_named(tmp_path, rows, model, name):
    open_cache(tmp_path / "cache", rows, model, silent())
    [file] = (tmp_path / "cache").rglob(f"{name}.bin")
    whole = file.read_bytes()
    for damage in (lambda: file.write_bytes(whole[:-1]), file.unlink):
        damage()
        message = refusal(open_cache, tmp_path / "cache", rows, model, silent())
        assert "damaged latent cache" in message and str(file) in message and "delete its folder" in message
    shutil.rmtree(file.parent)
    open_cache(tmp_path / "cache", rows, model, silent())
    assert next((tmp_path / "cache").rglob(f"{name}.bin")).read_bytes() == whole


def test_a_damaged_description_of_tensors_is_named(tmp_path, rows, model):
    open_cache(tmp_path / "cache", rows, model, silent())
    [described] = (tmp_path / "cache").rglob("latents_*/tensors.json")
    described.write_text(described.read_text()[:20])
    message = refusal(open_cache, tmp_path / "cache", rows, model, silent())
    assert "damaged latent cache" in message and str(described) in message


def test_an_interrupted_cache_is_gone_on_with(tmp_path, rows, model, monkeypatch):
    class StoppedError(Exception):
        pass

    def stop_in_the_middle(starts, _count):
        for number, start in enumerate(starts):
            if number == 2:
                raise StoppedError
            yield start

    with pytest.raises(StoppedError):
        open_cache(tmp_path / "cache", rows, model, silent(), 4, watch=stop_in_the_middle)
    assert num_rows(tmp_path / "cache", "latents") == 7, "two batches of four, of which one row is broken"
    encoded_rows = count_encoded(monkeypatch, model)
    cache = open_cache(tmp_path / "cache", rows, model, silent(), 4)
    assert sum(encoded_rows) == 4
    fresh = open_cache(tmp_path / "other", rows, model, silent(), 4)
    assert_same_batch(cache.batch(IndexBatch([11, 2], [0, 1])), fresh.batch(IndexBatch([11, 2], [0, 1])))


def count_encoded(monkeypatch, model):
    """Numbers of pictures that the autoencoder is given from now on; its probe is not counted."""
    counts, encode = [], type(model).encode_pixels

    def encode_and_count(self, pixels):
        counts.append(len(pixels) if pixels.shape[-1] != self.probe_size or len(pixels) > 1 else 0)
        return encode(self, pixels)

    monkeypatch.setattr(type(model), "encode_pixels", encode_and_count)
    return counts


def test_glyphs_are_cached_too(tmp_path, model):
    data = GlyphDataset(GlyphConfig(num_images=6, length=2), 16, 16, seed=0)
    cache = open_cache(tmp_path / "cache", data, model, silent(0), 3)
    online = OnlineEncoder(data, model, silent(0))
    batch = IndexBatch([3, 4, 5], [3, 4, 5])
    assert torch.equal(online.batch(batch).latents, cache.batch(batch).latents)
    for other in (
        GlyphDataset(GlyphConfig(num_images=6, length=2), 16, 16, seed=1),
        GlyphDataset(GlyphConfig(num_images=6), 16, 16, seed=0),
    ):
        assert other.fingerprint() != data.fingerprint()


def write_masked(folder, mask, image_size=(20, 12)):
    """A table of two pictures of a height and width with masks: of the first its left half, of the second ``mask``."""
    folder.mkdir()
    left_half = np.zeros((*image_size, 3), np.uint8)
    left_half[:, : image_size[1] // 2] = 255
    for name, content in (("0", Image.fromarray(left_half)), ("1", mask)):
        picture(int(name), *image_size).save(folder / f"{name}.png")
        content.save(folder / f"mask_{name}.png")
    rows = [{"image": f"{name}.png", "mask": f"mask_{name}.png", "text": f"a {name}"} for name in "01"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def masked_config(table, **more):
    return ImageTextDataConfig(train_path=str(table), height=8, width=8, mask_key="mask", **more)


def test_a_mask_is_cut_and_scaled_as_its_image(tmp_path):
    grey = Image.new("L", (12, 20), 51)
    table = write_masked(tmp_path / "data", grey)
    dataset = ImageTextDataset(masked_config(table))
    left_half, fifth = (dataset.picture(index).loss_weights for index in range(2))
    assert left_half.shape == (8, 8) and left_half.dtype == torch.float32
    assert left_half[:, 0].min() > 0.9 and left_half[:, 7].max() < 0.1  # 20 x 12 is cut to the middle 12 x 12
    torch.testing.assert_close(fifth, torch.full((8, 8), 0.2))
    inverted = ImageTextDataset(masked_config(table, invert_mask=True)).picture(0).loss_weights
    torch.testing.assert_close(inverted, 1 - left_half)
    outside = ImageTextDataset(masked_config(table, mask_outside=0.25)).picture(0).loss_weights
    torch.testing.assert_close(outside, 0.25 + 0.75 * left_half)
    plain = masked_config(table).model_copy(update={"mask_key": None})
    assert ImageTextDataset(plain).picture(0).loss_weights is None


@pytest.mark.parametrize(
    ("mask", "more", "message"),
    [
        (
            Image.new("L", (12, 10), 255),
            {},
            r"line 2: its mask has 10 x 12 pixels \(height x width\), and its image 20 x",
        ),
        (Image.new("L", (12, 20), 0), {}, r"line 2: nothing of the image lies inside its mask \('mask'\)"),
        (Image.new("L", (12, 20), 255), {"invert_mask": True}, "nothing of the image lies inside"),
        (Image.new("RGBA", (12, 20), (255, 255, 255, 0)), {}, "line 2: broken image .* must not be transparent"),
        (
            Image.new("LA", (12, 20), (255, 254)),
            {},
            "must not be transparent, which is shown as white: put it on black",
        ),
        (Image.new("RGB", (12, 20), (255, 0, 0)), {}, r"line 2: mask \(.*mask_1.png\) with colours"),
        (
            Image.new("L", (12, 20), 1),
            {"mask_outside": 0.1},
            "no value above 1 of 255, as if these were numbers of lab",
        ),
    ],
)
def test_a_mask_that_cannot_be_meant_is_a_broken_row(tmp_path, mask, more, message):
    dataset = ImageTextDataset(masked_config(write_masked(tmp_path / "data", mask), **more))
    dataset.picture(0)
    with pytest.raises(DataError, match=message):
        dataset.picture(1)


def test_masks_of_other_modes_say_the_same(tmp_path):
    """What is white in it counts, however a mask is stored; so is a JPEG file, whose greys are slightly coloured."""
    noise = np.random.default_rng(0).integers(0, 2, (20, 12), np.uint8) * 255
    grey = Image.fromarray(noise)
    expected = None
    for number, mask in enumerate(
        (grey, grey.convert("1"), grey.convert("RGB"), grey.convert("P"), grey.convert("RGBA"))
    ):
        weights = ImageTextDataset(masked_config(write_masked(tmp_path / str(number), mask))).picture(1).loss_weights
        expected = weights if expected is None else expected
        assert torch.equal(weights, expected)
    grey.convert("RGB").save(tmp_path / "0" / "mask_1.png", "JPEG", quality=30)
    stored = ImageTextDataset(masked_config(tmp_path / "0" / "rows.jsonl")).picture(1).loss_weights
    torch.testing.assert_close(stored, expected, atol=0.15, rtol=0)


def test_a_missing_mask_is_a_broken_row_and_a_black_one_may_have_weight(tmp_path):
    table = write_masked(tmp_path / "data", Image.new("L", (12, 20), 0))
    assert ImageTextDataset(masked_config(table, mask_outside=0.5)).picture(1).loss_weights.unique().tolist() == [0.5]
    with pytest.raises(
        DataError, match="column 'masks' holds no mask path or bytes; its columns are image, mask, text"
    ):
        ImageTextDataset(masked_config(table).model_copy(update={"mask_key": "masks"})).picture(0)
    (tmp_path / "data" / "mask_0.png").write_text("no picture")
    with pytest.raises(DataError, match=r"line 1.*mask_0.png"):
        ImageTextDataset(masked_config(table)).picture(0)


def test_cached_masks_equal_those_read_online_and_follow_their_files(tmp_path, model):
    table = write_masked(tmp_path / "data", Image.new("L", (12, 20), 100))
    config = masked_config(table)
    batch = IndexBatch([0, 1], [0, 1])
    settle(tmp_path / "data")
    dataset = ImageTextDataset(config)
    online = OnlineEncoder(dataset, model, silent(0)).batch(batch)
    assert online.loss_weights.shape == (2, *online.latents.shape[-2:])
    cached = open_cache(tmp_path / "cache", dataset, model, silent(0), 2).batch(batch)
    assert torch.equal(cached.loss_weights, online.loss_weights)
    Image.new("L", (12, 20), 200).save(tmp_path / "data" / "mask_1.png")
    settle(tmp_path / "data")
    anew = open_cache(tmp_path / "cache", dataset, model, silent(0), 2).batch(batch)
    assert torch.equal(anew.loss_weights[0], online.loss_weights[0])
    torch.testing.assert_close(anew.loss_weights[1], 2 * online.loss_weights[1])
    plain = ImageTextDataset(config.model_copy(update={"mask_key": None}))
    assert open_cache(tmp_path / "cache", plain, model, silent(0), 2).batch(batch).loss_weights is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"mask_outside": 0.5}, "mask_outside.*without data.mask_key"),
        ({"data_type": "glyphs", "train_path": None, "mask_key": "mask"}, "mask_key.*rendered"),
        ({"data_type": "sound_text", "seconds": 1.0, "mask_key": "mask"}, "mask_key.*on sounds"),
        ({"mask_key": "mask", "mask_outside": 1.0}, "less than 1"),
    ],
)
def test_masks_are_refused_where_they_have_no_effect(more, message):
    with pytest.raises(ValueError, match=message):
        ImageTextDataConfig(**{"train_path": "data", **more})
