"""What processors make of media, kept on disk: the same bits, never stale, whole after kills, for several at once."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.cli import main as command
from sfumato.config.load import load_config
from sfumato.config.text import TrainTextConfig
from sfumato.data.files.sources import open_sources
from sfumato.data.media import cache as media_cache
from sfumato.data.media.cache import MediaCache, fingerprint_of_media, pack, unpack
from sfumato.data.media.threads import open_ahead
from sfumato.data.text.format import build_transform
from sfumato.data.text.identity import identify_text
from sfumato.data.text.token_store import build_token_store
from sfumato.errors import DataError
from sfumato.models.language.load import build_reader
from tests.tiny import merge, run_task_here, write_config
from tests.tiny_vision import picture, tiny_media_config, tiny_vision_config
from tests.unit.test_image_text import settle


def opened(config: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Store, rows and transform of a configuration."""
    config = load_config(TrainTextConfig, overrides=config)
    transform = build_transform(config.data, *build_reader(config.model, config.train, config.data.data_type))
    sources = open_sources(config.data)
    store = build_token_store(sources, transform, Path(config.data.cache_dir), 1, 0, lambda text: None)
    return store, sources.rows, transform


def fill(config: dict[str, Any], workers: int = 1, said: list[str] | None = None) -> tuple[MediaCache, Any]:
    store, rows, transform = opened(config)
    say = (said if said is not None else []).append
    folder = Path(config["data"]["cache_dir"])
    return media_cache.build_media_cache(store, rows, transform, folder, workers, say), store


def documents(store: Any) -> list[Any]:
    samples = [store.sample(index) for index in range(len(store))]
    return [document.images for sample in samples for document in sample.documents if document.images is not None]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert other[name].dtype == tensor.dtype and torch.equal(other[name], tensor), name


def file_rows(folder: Path, count: int = 6) -> Path:
    """Rows whose pictures are files that lie beside; two rows share one."""
    for index in range(count - 1):
        (folder / f"{index}.png").write_bytes(picture(24, 16, index))
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"<image>What is {index}?"},
                {"role": "assistant", "content": f"It is {index}."},
            ],
            "images": [f"{index % (count - 1)}.png"],
        }
        for index in range(count)
    ]
    (folder / "files.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "files.jsonl"


def file_config(tmp_path: Path, **more: Any) -> dict[str, Any]:
    data = {"train_path": str(file_rows(tmp_path)), "cache_dir": str(tmp_path / "cache"), "eval_path": None}
    config = tiny_vision_config(tmp_path, "qwen3_vl", data=data)
    del config["eval"]
    return merge(config, more)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8, bool])
@pytest.mark.parametrize("values", [1, 2, 255, 256, 257, 5000])
def test_packed_tensors_come_back_to_the_bit(dtype: Any, values: int) -> None:
    source = np.random.default_rng(values)
    table = source.normal(size=values).astype(dtype)
    tensors = {"many": table[source.integers(0, values, (300, 301))], "few": table[:3], "none": table[:0].reshape(0, 4)}
    if dtype == np.float32:
        tensors["many"][0, :4] = [0.0, -0.0, np.nan, np.inf]
        tensors["noise"] = source.normal(size=(300, 301)).astype(np.float32)
    torch_tensors = {name: torch.from_numpy(array) for name, array in tensors.items()}
    shapes = source.integers(0, 9, (3, 3)).astype(np.int32)
    content = pack(torch_tensors, shapes)
    found_shapes, result = unpack(bytearray(content))
    assert np.array_equal(found_shapes, shapes) and list(result) == list(torch_tensors)
    for name, tensor in torch_tensors.items():
        assert result[name].dtype == tensor.dtype and result[name].shape == tensor.shape
        assert result[name].numpy().tobytes() == tensor.numpy().tobytes(), name
    if dtype == np.float32 and values < 200:
        assert len(content) < 0.3 * tensors["many"].nbytes + tensors["noise"].nbytes + 10_000, "codes of one byte"


KINDS = ("qwen3_vl", "internvl", "qwen2_vl", "gemma3", "llava_onevision")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if n > 1 else ()) for n, kind in enumerate(KINDS)]
)
def test_the_cache_and_threads_give_what_the_reader_gives(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_cache, "MANY", 16)  # tiny pictures are coded, too
    make = tiny_media_config if kind.startswith("qwen") else tiny_vision_config
    config = make(tmp_path, kind, data={"cache_dir": str(tmp_path / "cache"), "max_seq_len": 256})
    said: list[str] = []
    cache, store = fill(config, said=said)
    reader, images = cache.reader, documents(store)
    assert len(cache) == len(images) > 5 and "GiB were added" in said[-1]
    samples = [store.sample(index) for index in range(len(store))]
    for _ in range(3):
        for tensors in (reader.tensors, cache.tensors):
            results = [
                d.images for sample in open_ahead(samples, tensors) for d in sample.documents if d.images is not None
            ]
            for one, image in zip(results, images, strict=True):
                assert_same(one.opened.result(), reader.tensors(image))
    monkeypatch.setattr(type(reader), "tensors", None)
    assert cache.tensors(images[0]), "nothing is opened"
    assert len(said) == 1


@pytest.mark.slow
def test_a_run_with_the_cache_is_the_run_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_media_config(tmp_path, "qwen3_vl", train={"max_steps": 3})
    cached = {"data": {"cache_dir": str(tmp_path / "cache"), "cache_media": True}}
    plain = run_task_here("train_text", config)
    before = (plain / "metrics.jsonl").read_bytes()
    # the command makes it before the run, by two processes; the run makes nothing any more
    monkeypatch.setattr(media_cache, "SAMPLES", 4)
    path = write_config(merge(config, cached), tmp_path / "run.yaml")
    assert command(["preprocess", str(path), "--data.num_workers", "2"]) == 0

    def files() -> dict[str, int]:
        result = (path for path in (tmp_path / "cache").rglob("*") if path.is_file() and "lock" not in path.name)
        return {path.name: path.stat().st_mtime_ns for path in result}

    made = files()
    assert any(name.startswith("complete_") for name in made) and any(name.endswith(".npy") for name in made)
    monkeypatch.setattr(media_cache, "_write", None)
    folder = run_task_here("train_text", merge(config, cached | {"train": {"output_dir": str(tmp_path / "again")}}))
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert "are not in" not in (folder / "log.txt").read_text()
    assert files() == made


def test_stale_media_are_never_used(tmp_path: Path) -> None:
    config, said = file_config(tmp_path), []
    cache, store = fill(config, said=said)
    images = documents(store)
    assert len(images) == 6 and len(cache) == 5, "what two rows share is kept once"
    old = cache.tensors(images[1])
    (tmp_path / "1.png").write_bytes(picture(24, 16, 77))
    fresh = cache.tensors(images[1])
    assert not torch.equal(fresh["pixel_values"], old["pixel_values"])
    assert_same(fresh, cache.reader.tensors(images[1]))
    assert "line 2: its media are not in" in said[-1]
    (tmp_path / "2.png").write_bytes(picture(16, 16, 2))
    (tmp_path / "3.png").write_bytes((tmp_path / "2.png").read_bytes())
    with pytest.raises(DataError, match="another size than when the data was preprocessed"):
        cache.tensors(images[2])
    # other limits, another version of a library, another processor: another folder
    limited = file_config(tmp_path, data={"data_type": {"max_pixels": 256}})
    other = opened(limited)[2].reader
    assert fingerprint_of_media(other) != fingerprint_of_media(cache.reader)
    print_of = media_cache._package_version
    try:
        media_cache._package_version = lambda name: f"{print_of(name)}x" if name == "pillow" else print_of(name)
        assert fingerprint_of_media(cache.reader) != cache.folder.name.removeprefix("media_")
    finally:
        media_cache._package_version = print_of
    assert fingerprint_of_media(cache.reader) == cache.folder.name.removeprefix("media_")


def test_an_image_that_took_the_place_of_another_is_compared_by_its_size(tmp_path: Path) -> None:
    (tmp_path / "sizes").mkdir()
    config = file_config(tmp_path)
    (tmp_path / "4.png").write_bytes(picture(16, 40, 4))
    cache, store = fill(config)
    images = documents(store)
    (tmp_path / "0.png").write_bytes((tmp_path / "4.png").read_bytes())
    with pytest.raises(DataError, match="line 1: an image has another size"):
        cache.tensors(images[0])


def test_damage_is_named(tmp_path: Path) -> None:
    cache, store = fill(file_config(tmp_path))
    [shard] = cache.folder.glob("*.bin")
    whole, images = shard.read_bytes(), documents(store)
    for damaged in (whole[:200], whole[:-9] + b"x" * 9, b""):
        shard.write_bytes(damaged)
        with pytest.raises(DataError, match=r"damaged media cache: .*delete its folder"):
            [cache.tensors(image) for image in images]
    shard.unlink()
    with pytest.raises(DataError, match="damaged media cache"):
        cache.tensors(images[0])
    index = shard.with_suffix(".npy")
    index.write_bytes(index.read_bytes()[:-3])
    with pytest.raises(DataError, match="damaged media cache"):
        fill(file_config(tmp_path))


def test_a_full_disk_keeps_what_was_finished_and_it_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_cache, "SAMPLES", 2)
    config, written = file_config(tmp_path), []

    def full(tensors: Any, shapes: Any) -> bytes:
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(pack(tensors, shapes))
        return written[-1]

    monkeypatch.setattr(media_cache, "pack", full)
    with pytest.raises(DataError, match=r"data.cache_media: .*No space left on device.*gone on with"):
        fill(config)
    [folder] = (tmp_path / "cache").glob("media_*")
    assert len([*folder.glob("*.bin")]) == len([*folder.glob("*.npy")]) == 1 and not [*folder.glob("*.part")]
    assert not [*folder.glob("complete_*")]
    monkeypatch.setattr(media_cache, "pack", lambda *args: written.append(pack(*args)) or written[-1])
    cache, store = fill(config)
    assert len(cache) == 5 and len(written) == 3 + 3, "two were there"
    for images in documents(store):
        assert_same(cache.tensors(images), cache.reader.tensors(images))


def _fill_slowly(config: dict[str, Any], pause: float) -> None:
    media_cache.SAMPLES = 1
    slow = media_cache.pack

    def waiting(*args: Any) -> bytes:
        time.sleep(pause)
        return slow(*args)

    media_cache.pack = waiting
    fill(config)


def test_a_kill_and_two_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = file_config(tmp_path)
    opened(config)
    context = multiprocessing.get_context("fork")
    killed = context.Process(target=_fill_slowly, args=(config, 0.2))
    killed.start()
    deadline = time.monotonic() + 60
    while len([*tmp_path.glob("cache/media_*/*.npy")]) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    [folder] = tmp_path.glob("cache/media_*")
    (folder / "left.part").write_bytes(b"half")
    (folder / "left.bin").write_bytes(b"half")
    assert not [*folder.glob("complete_*")] and 2 <= len([*folder.glob("*.npy")]) < 5
    both = [context.Process(target=_fill_slowly, args=(config, 0.05)) for _ in range(2)]
    for span in both:
        span.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert not [*folder.glob("left.*")]
    cache, store = fill(config)
    assert len(cache) == len({entry["key"].tobytes() for entry in cache._entries}) == 5, "nothing was made twice"
    for images in documents(store):
        assert_same(cache.tensors(images), cache.reader.tensors(images))


def test_broken_media_rise_where_their_batch_is_made(tmp_path: Path) -> None:
    store, _, transform = opened(file_config(tmp_path))
    (tmp_path / "3.png").write_bytes(b"no image")
    samples = open_ahead([store.sample(index) for index in range(6)], transform.reader.tensors)
    assert samples[2].documents[0].images.opened.result()
    with pytest.raises(DataError, match=r"files.jsonl, line 4: broken image"):
        samples[3].documents[0].images.opened.result()
    names = {thread.name.split("_")[0] for thread in threading.enumerate()}
    assert "media" in names


def test_a_format_without_images_refuses_it() -> None:
    data = {"train_path": "x.jsonl", "cache_media": True}
    config = {"model": {"model_path": "x"}, "data": data, "train": {"output_dir": "x"}}
    with pytest.raises(Exception, match=r"data.cache_media has no effect with data.data_type conversation"):
        load_config(TrainTextConfig, overrides=config)


def test_a_store_of_tokens_is_made_again_when_a_picture_was_replaced(tmp_path: Path) -> None:
    """By one of another size, which takes another number of tokens; and not otherwise."""
    config = file_config(tmp_path)
    settle(tmp_path)
    store, _, transform = opened(config)
    written = (store.folder / "manifest.json").stat().st_mtime_ns
    again, _, _ = opened(config)
    assert (again.folder / "manifest.json").stat().st_mtime_ns == written
    (tmp_path / "0.png").write_bytes(picture(48, 64, 9))
    settle(tmp_path)
    after, _, transform = opened(config)
    assert after.fingerprint != store.fingerprint and after.lengths[0] > store.lengths[0]
    assert (after.lengths[1:5] == store.lengths[1:5]).all()
    for images in documents(after):
        transform.reader.tensors(images)


def test_a_resume_notices_that_a_picture_of_a_conversation_was_replaced(tmp_path: Path) -> None:
    config = load_config(TrainTextConfig, overrides=file_config(tmp_path))
    settle(tmp_path)
    transform = build_transform(config.data, *build_reader(config.model, config.train, config.data.data_type))
    sources, name = open_sources(config.data), "data.train_path (its images and other media)"
    before = identify_text(config, sources, None, transform)
    assert identify_text(config, sources, None, transform) == before and name in before
    (tmp_path / "0.png").write_bytes(picture(24, 16, 99))
    after = identify_text(config, sources, None, transform)
    assert {key for key in before if before[key] != after[key]} == {name}


def test_a_phones_photograph_of_two_pictures_stands_in_a_conversation(tmp_path: Path) -> None:
    first, second = (Image.new("RGB", (32, 32), colour) for colour in ("red", "blue"))
    config = file_config(tmp_path)
    first.save(tmp_path / "0.png", "MPO", save_all=True, append_images=[second], quality=95)
    store, _, transform = opened(config)
    images = documents(store)[0]
    [result] = [transform.reader.open(file, images.where) for file in images.find()]
    assert result.size == (32, 32) and abs(np.asarray(result).astype(int) - (254, 0, 0)).max() <= 2
