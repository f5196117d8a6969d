"""Samples are complete or absent, read back as they were, and lie where the grid says."""

import io
import json
import math
from base64 import b64decode

import numpy as np
import pytest
from PIL import Image

from sfumato.tracking.samples import (
    SampleRecord,
    choose_evenly,
    drop_samples_after,
    image_grid,
    read_samples,
    save_samples,
    step_folder,
    thumbnail_data_uri,
    write_picture,
)


def make_sample(sample_id=0, kind="eval", value=7, **fields):
    image = np.full((4, 6, 3), value, np.uint8)
    return SampleRecord(image, kind, fields.pop("prompt", "a cat"), seed=5, sample_id=sample_id, **fields)


def test_samples_read_back_as_they_were_saved(tmp_path):
    sample = make_sample(3, rewards={"ocr": 0.67}, total=0.67, policy_version=10, prompt='write "ÄBC"')
    train = make_sample(3, "train", value=9, total=0.1, advantage=1.2)
    folder = save_samples(tmp_path, 10, [sample, train])
    assert folder == tmp_path / "samples" / "step_000010" == step_folder(tmp_path, 10)
    rows = read_samples(tmp_path)
    assert list(rows) == [10]
    assert rows[10][0] == {
        "file": "eval_0003.png",
        "kind": "eval",
        "prompt": 'write "ÄBC"',
        "seed": 5,
        "sample_id": 3,
        "rewards": {"ocr": 0.67},
        "total": 0.67,
        "advantage": None,
        "policy_version": 10,
    }
    assert rows[10][1]["advantage"] == 1.2
    with Image.open(folder / rows[10][1]["file"]) as image:
        np.testing.assert_array_equal(np.asarray(image), train.content)


def test_nan_rewards_are_null_in_strict_json(tmp_path):
    folder = save_samples(tmp_path, 1, [make_sample(rewards={"ocr": math.nan}, total=math.nan, advantage=math.nan)])

    def refuse(token):
        raise AssertionError(token)

    row = json.loads((folder / "samples.jsonl").read_text(), parse_constant=refuse)
    assert (row["rewards"], row["total"], row["advantage"]) == ({"ocr": None}, None, None)


def test_saving_a_step_again_replaces_its_folder(tmp_path):
    save_samples(tmp_path, 1, [make_sample(0), make_sample(1)])
    folder = save_samples(tmp_path, 1, [make_sample(2)])
    assert sorted(p.name for p in folder.iterdir()) == ["eval_0002.png", "samples.jsonl"]
    assert [p.name for p in folder.parent.iterdir()] == ["step_000001"]


def test_a_crash_while_saving_leaves_the_old_folder_and_is_cleaned_up_later(tmp_path, monkeypatch):
    folder = save_samples(tmp_path, 1, [make_sample(0)])

    def fail(*_, **__):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", fail)
        with pytest.raises(OSError, match="disk full"):
            save_samples(tmp_path, 1, [make_sample(5)])
    assert [row["sample_id"] for row in read_samples(tmp_path)[1]] == [0]
    save_samples(tmp_path, 1, [make_sample(6)])
    assert [row["sample_id"] for row in read_samples(tmp_path)[1]] == [6]
    assert [p.name for p in folder.parent.iterdir()] == ["step_000001"]


def test_read_samples_sorts_steps_and_ignores_unfinished_folders(tmp_path):
    assert read_samples(tmp_path) == {}
    for step in (1_000_000, 20, 3):
        save_samples(tmp_path, step, [make_sample()])
    save_samples(tmp_path, 4, [])
    for name in ("step_000005.tmp", "step_000006.old", "step_x"):
        (tmp_path / "samples" / name).mkdir()
        (tmp_path / "samples" / name / "samples.jsonl").write_text('{"kind": "eval"}\n')
    (tmp_path / "samples" / "step_000007").mkdir()
    assert list(read_samples(tmp_path)) == [3, 4, 20, 1_000_000]


def test_a_resumed_run_drops_the_samples_it_makes_again(tmp_path):
    drop_samples_after(tmp_path, 0)
    for step in (0, 10, 20, 30):
        save_samples(tmp_path, step, [make_sample()])
    drop_samples_after(tmp_path, 10)
    assert list(read_samples(tmp_path)) == [0, 10]


def test_doubled_ids_and_wrong_images_are_refused(tmp_path):
    with pytest.raises(ValueError, match="eval_0001"):
        save_samples(tmp_path, 1, [make_sample(1), make_sample(1)])
    assert read_samples(tmp_path) == {}
    with pytest.raises(ValueError, match="uint8"):
        SampleRecord(np.zeros((3, 4, 6), np.uint8), "eval", "", 0, 0)
    with pytest.raises(ValueError, match="uint8"):
        SampleRecord(np.zeros((4, 6, 3), np.float32), "eval", "", 0, 0)
    with pytest.raises(ValueError, match="kind"):
        make_sample(kind="test")


def test_grid_places_images_row_by_row_with_padding():
    images = [np.full((4, 6, 3), 10 * (i + 1), np.uint8) for i in range(5)]
    grid = np.asarray(image_grid(images, columns=3, padding=2))
    assert grid.shape == (2 * 4 + 3 * 2, 3 * 6 + 4 * 2, 3)
    for index, image in enumerate(images):
        y, x = 2 + index // 3 * 6, 2 + index % 3 * 8
        np.testing.assert_array_equal(grid[y : y + 4, x : x + 6], image)
    assert (grid[:2] == 255).all() and (grid[8:, 18:] == 255).all()


def test_captions_stand_below_their_cells_and_stay_inside():
    images = [np.full((20, 40, 3), 128, np.uint8)] * 2
    captions = ["a very long caption that cannot fit 日本\nat all", ""]
    grid = np.asarray(image_grid(images, 2, captions, padding=4)).astype(int)
    assert (grid[4:24, 4:44] == 128).all()
    below = grid[24:]
    assert (below[:, 4:44] < 100).any(), "the caption is drawn"
    assert (below[:, 44:] == 255).all(), "and does not run into the next cell"


def test_grid_refuses_nonsense():
    image = np.zeros((2, 2, 3), np.uint8)
    for images, columns, captions in (([], 1, None), ([image], 0, None), ([image], 1, ["a", "b"])):
        with pytest.raises(ValueError):
            image_grid(images, columns, captions)


def test_thumbnails_keep_small_files_and_shrink_large_ones(tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGB", (64, 32)).save(path)
    uri, width, height = thumbnail_data_uri(path, 256)
    assert (width, height) == (64, 32)
    assert b64decode(uri.removeprefix("data:image/png;base64,")) == path.read_bytes()
    Image.new("RGB", (1024, 512), (200, 10, 10)).save(path)
    uri, width, height = thumbnail_data_uri(path, 256)
    assert (width, height) == (256, 128)
    with Image.open(io.BytesIO(b64decode(uri.removeprefix("data:image/jpeg;base64,")))) as image:
        assert image.size == (256, 128)
        assert image.getpixel((9, 9))[0] > 180


def make_video(num_frames=6, height=48, width=64):
    rows = np.linspace(0, 120, height)[None, :, None, None] + 20 * np.arange(num_frames)[:, None, None, None]
    return np.broadcast_to(rows, (num_frames, height, width, 3)).astype(np.uint8)


def test_videos_are_animations_and_sources_are_kept_once(tmp_path):
    source = np.full((8, 8, 3), 77, np.uint8)
    records = [SampleRecord(make_video(), "train", "p", seed=5, sample_id=i, source=source) for i in range(2)]
    folder = save_samples(tmp_path, 1, records)
    rows = read_samples(tmp_path)[1]
    assert [row["file"] for row in rows] == ["train_0000.webp", "train_0001.webp"]
    assert rows[0]["source"] == rows[1]["source"] and len(list(folder.glob("source_*.png"))) == 1
    with Image.open(folder / rows[0]["source"]) as image:
        np.testing.assert_array_equal(np.asarray(image), source)
    with Image.open(folder / "train_0000.webp") as film:
        assert (film.n_frames, film.size) == (6, (64, 48))
        for index, frame in enumerate(make_video()):
            film.seek(index)
            assert np.abs(np.asarray(film.convert("RGB")).astype(int) - frame).max() <= 4
    still = records[0].still
    assert still.shape == (48, 3 * 64, 3)
    np.testing.assert_array_equal(still[:, 64:128], make_video()[3])


def test_large_animations_are_made_smaller_to_be_embedded(tmp_path, monkeypatch):
    noise = np.random.default_rng(0).integers(0, 256, (9, 64, 128, 3), np.uint8)
    path = tmp_path / "a.webp"
    write_picture(noise, path)
    uri, width, height = thumbnail_data_uri(path, 256)
    assert (width, height) == (128, 64)
    assert b64decode(uri.removeprefix("data:image/webp;base64,")) == path.read_bytes()
    monkeypatch.setattr("sfumato.tracking.samples.EMBEDDED_BYTES", 4_000)
    uri, width, height = thumbnail_data_uri(path, 64)
    content = b64decode(uri.removeprefix("data:image/webp;base64,"))
    assert (width, height) == (64, 32) and len(content) <= 4_000
    with Image.open(io.BytesIO(content)) as film:
        assert film.size == (64, 32) and 1 < film.n_frames < 9


def test_choose_evenly_keeps_first_and_last():
    assert choose_evenly([0, 10, 20], 8) == [0, 10, 20]
    chosen = choose_evenly(list(range(0, 1010, 10)), 8)
    assert len(chosen) == 8 and chosen[0] == 0 and chosen[-1] == 1000
    assert max(np.diff(chosen)) - min(np.diff(chosen)) <= 10
