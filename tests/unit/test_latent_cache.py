"""Cached latents belong to what files hold: what was replaced is encoded anew, and a kill loses nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sfumato.config.image_data import ImageTextDataConfig, PairDataConfig
from sfumato.data.files import row_store
from sfumato.data.files.bad_rows import BadRows
from sfumato.data.files.file_digests import FileDigests, digest_of_file, signature_of
from sfumato.data.files.row_store import RowStore, RowWriter
from sfumato.data.images.image_text import ImageTextDataset, PairDataset
from sfumato.data.loader import IndexBatch
from sfumato.errors import DataError
from sfumato.models.diffusion.encoded import OnlineEncoder
from sfumato.models.diffusion.encoder_identity import identify_encoders
from sfumato.models.diffusion.families.stable_diffusion_xl import StableDiffusionXL
from sfumato.models.diffusion.latent_cache import LatentCache, open_cache
from tests.tiny_families import tiny_stable_diffusion_xl
from tests.unit.test_image_text import build_model, count_encoded, picture, settle, silent

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_model(tmp_path_factory.mktemp("model"))


def write_folder(folder: Path, count: int = 6, seed: int = 0) -> Path:
    """Uncompressed pictures, so that all files have one size."""
    folder.mkdir(exist_ok=True)
    for index in range(count):
        picture(100 * seed + index, 16, 16).save(folder / f"{index}.bmp")
        (folder / f"{index}.txt").write_text(f"{'abc'[seed]} {index}")
    return folder


def open_folder(folder: Path, cache: Path, model: Any, say: list[str] | None = None, **more: Any) -> LatentCache:
    settle(folder)
    config = ImageTextDataConfig(train_path=str(folder), height=16, width=16, max_bad_rows=3, **more)
    rows = BadRows(3, (say if say is not None else []).append)
    return open_cache(cache, ImageTextDataset(config), model, rows, 2)


def same_as_online(cache: LatentCache, folder: Path, model: Any, count: int = 6) -> None:
    dataset = ImageTextDataset(ImageTextDataConfig(train_path=str(folder), height=16, width=16))
    batch = IndexBatch([*range(count)], [*range(count)])
    online, cached = OnlineEncoder(dataset, model, silent(0)).batch(batch), cache.batch(batch)
    torch.testing.assert_close(cached.latents, online.latents)
    for name, tensor in online.conditioning.tensors.items():
        torch.testing.assert_close(cached.conditioning.tensors[name], tensor)
    assert torch.equal(cached.framing, online.framing)


@pytest.mark.parametrize("keeps_time", [False, True])
def test_pictures_that_were_replaced_are_encoded_and_others_are_not(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch, keeps_time: bool
) -> None:
    """Files of the same size, also where their time was set back: then ctime tells."""
    folder, cache = write_folder(tmp_path / "data"), tmp_path / "cache"
    open_folder(folder, cache, model)
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    counts = count_encoded(monkeypatch, model)
    for replaced in (["3"], [*"012345"]):
        for name in replaced:
            content = picture(1000 + int(name) + len(replaced), 16, 16)
            content.save(folder / f"{name}.bmp")
            if keeps_time:
                os.utime(folder / f"{name}.bmp", ns=(0, times[folder / f"{name}.bmp"]))
        counts.clear()
        result = open_folder(folder, cache, model)
        assert sum(counts) == len(replaced)
        same_as_online(result, folder, model)
    counts.clear()
    open_folder(folder, cache, model)
    assert sum(counts) == 0


def test_captions_that_were_replaced_are_embedded_and_a_moved_folder_is_not_encoded_anew(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = write_folder(tmp_path / "data"), tmp_path / "cache"
    open_folder(folder, cache, model)
    counts, embedded = count_encoded(monkeypatch, model), []
    embed = type(model).embed_prompts
    monkeypatch.setattr(
        type(model), "embed_prompts", lambda self, texts: (embedded.extend(texts), embed(self, texts))[1]
    )
    for index in range(6):
        caption = folder / f"{index}.txt"
        moment = caption.stat().st_mtime_ns
        caption.write_text(f"z {index}")  # as long as before, and with its time set back
        os.utime(caption, ns=(moment, moment))
    result = open_folder(folder, cache, model)
    assert sum(counts) == 0 and {*embedded} >= {f"z {index}" for index in range(6)}
    same_as_online(result, folder, model)
    counts.clear()
    embedded.clear()
    folder.rename(tmp_path / "moved")
    same_as_online(open_folder(tmp_path / "moved", cache, model), tmp_path / "moved", model)
    write_folder(tmp_path / "copy")  # the same pictures as at first
    open_folder(tmp_path / "copy", cache, model)
    assert sum(counts) == 6, "those that the comparison encoded online, and none of the cache"


def test_pictures_that_a_table_names_are_looked_at(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tables and of pairs, whose files lie outside of them; one that was missing counts when it is there."""
    folder = write_folder(tmp_path / "data", 4)
    rows = [{"image": f"{index}.bmp", "text": "x"} for index in range(5)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said: list[str] = []

    def opened() -> LatentCache:
        settle(folder)
        config = ImageTextDataConfig(train_path=str(folder / "rows.jsonl"), height=16, width=16)
        return open_cache(tmp_path / "cache", ImageTextDataset(config), model, BadRows(1, said.append), 2)

    assert opened().bad_rows[0][0] == 4
    counts = count_encoded(monkeypatch, model)
    assert opened().bad_rows[0][0] == 4 and sum(counts) == 0
    picture(55, 16, 16).save(folder / "4.bmp")
    assert not opened().bad_rows and sum(counts) == 1
    before = opened().batch(IndexBatch([0, 1], [0, 1])).latents
    (folder / "0.bmp").write_bytes((folder / "1.bmp").read_bytes())
    after = opened().batch(IndexBatch([0, 1], [0, 1])).latents
    assert torch.equal(after[0], before[1]) and sum(counts) == 1, "that picture had been encoded"
    pairs = [
        {"prompt": "x", "chosen": "1.bmp", "rejected": "2.bmp"},
        {"prompt": "y", "chosen": "2.bmp", "rejected": "3.bmp"},
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    config = PairDataConfig(train_path=str(folder / "pairs.jsonl"), height=16, width=16)
    settle(folder)
    open_cache(tmp_path / "cache", PairDataset(config, "train_path"), model, silent(0))
    counts.clear()
    picture(56, 16, 16).save(folder / "3.bmp")
    settle(folder)
    cache = open_cache(tmp_path / "cache", PairDataset(config, "train_path"), model, silent(0))
    assert sum(counts) == 2, "both of the second pair"
    wanted = OnlineEncoder(PairDataset(config, "train_path"), model, silent(0)).batch(IndexBatch([1], [0]))
    torch.testing.assert_close(cache.batch(IndexBatch([1], [0])).latents, wanted.latents)


def test_a_token_that_was_added_and_its_embedding_are_another_encoder(tmp_path: Path) -> None:
    """Which the example that encoders are told apart by does not reach."""
    model = build_model(tmp_path)
    before = identify_encoders(model)
    assert identify_encoders(build_model(tmp_path)) == before
    encoder = model.pipeline.text_encoder
    table = encoder.get_input_embeddings().weight
    unused = ({*range(len(table))} - {*model.pipeline.tokenizer("a probe")["input_ids"]}).pop()
    with torch.no_grad():
        table[unused] += 1
    model.forget_prompts()
    changed = identify_encoders(model)
    assert changed.prompts != before.prompts and changed.latents == before.latents
    model = build_model(tmp_path)
    model.pipeline.tokenizer.add_tokens(["<new>"])
    assert identify_encoders(model).prompts != before.prompts


def test_what_stands_for_the_empty_prompt_is_part_of_the_encoders() -> None:
    """A setting of Stable Diffusion XL's pipeline, which no weight, configuration or tokenizer holds."""
    model = StableDiffusionXL(StableDiffusionXL.build(tiny_stable_diffusion_xl(), 0))
    before = identify_encoders(model)
    model.forget_prompts()
    model.pipeline.register_to_config(force_zeros_for_empty_prompt=False)
    after = identify_encoders(model)
    assert after.prompts != before.prompts
    assert after.latents == before.latents


KILLED = """
import sys, os, signal, random
from pathlib import Path
from tests.unit.test_latent_cache import *
folder, cache, after = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
model = build_model(cache.parent)
writes = 0
write = row_store._append
def kill_in_a_write(path, content):
    global writes
    writes += 1
    if writes == after:
        with path.open('ab') as file:
            file.write(content[: len(content) // 2])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    write(path, content)
row_store._append = kill_in_a_write
open_folder(folder, cache, model)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_loses_the_rows_of_one_batch_at_most(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL at random writes, one after the other in one cache; half of what was to be written is on disk then."""
    folder, cache = write_folder(tmp_path / "data", 8), tmp_path / "cache"
    whole = 0
    for place in np.random.default_rng(0).integers(9, 14, 2).tolist():
        command = [sys.executable, "-c", KILLED, str(folder), str(cache), str(place - 4 * bool(whole))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        killed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert num_latents(cache) >= whole
        whole = num_latents(cache)
    counts = count_encoded(monkeypatch, model)
    result = open_folder(folder, cache, model)
    assert sum(counts) == 8 - whole and 0 < whole < 8
    same_as_online(result, folder, model, 8)


class KilledError(BaseException):
    """In the place of a signal."""


def test_a_stop_at_any_write_loses_the_rows_of_one_batch_at_most(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what was to be written is on disk then; the next start encodes what is missing, and no more."""
    folder, write = write_folder(tmp_path / "data"), row_store._append
    counts, wholes = count_encoded(monkeypatch, model), []
    for place in range(1, 40):
        cache, writes = tmp_path / f"cache{place}", 0

        def stop_in_a_write(path: Path, content: bytes, place: int = place) -> None:
            nonlocal writes
            writes += 1
            write(path, content[: len(content) // 2] if writes == place else content)
            if writes == place:
                raise KilledError

        monkeypatch.setattr(row_store, "_append", stop_in_a_write)
        try:
            open_folder(folder, cache, model)
            break  # there are no more writes
        except KilledError:
            monkeypatch.setattr(row_store, "_append", write)
        wholes.append(num_latents(cache))
        counts.clear()
        result = open_folder(folder, cache, model)
        assert sum(counts) == 6 - wholes[-1], place
    assert {*wholes} >= {0, 2, 4} and wholes == sorted(wholes)
    same_as_online(result, folder, model)


def num_latents(cache: Path) -> int:
    return sum(len(RowStore(path, "")) for path in cache.glob("latents_*"))


def test_a_full_disk_is_named_and_what_was_finished_stays(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache, write = write_folder(tmp_path / "data"), tmp_path / "cache", row_store._append

    def refuse(path: Path, content: bytes) -> None:
        if path.name == "latents.bin" and path.exists() and path.stat().st_size > 3 * len(content) // 2:
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(row_store, "_append", refuse)
    with pytest.raises(DataError, match=r"data.cache_dir: .*No space left on device: what was finished stays"):
        open_folder(folder, cache, model)
    monkeypatch.undo()
    whole, counts = num_latents(cache), count_encoded(monkeypatch, model)
    same_as_online(open_folder(folder, cache, model), folder, model)
    assert whole == 4 and sum(counts) >= 2


def open_in_another_process(folder: Path, cache: Path, home: Path) -> None:
    torch.set_num_threads(1)
    open_folder(folder, cache, build_model(home))


@pytest.mark.slow
def test_two_processes_make_one_cache(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = write_folder(tmp_path / "data"), tmp_path / "cache"
    (tmp_path / "other").mkdir()
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=open_in_another_process, args=(folder, cache, tmp_path / "other")) for _ in range(2)
    ]
    for other in others:
        other.start()
    for other in others:
        other.join(120)
        assert other.exitcode == 0
    assert num_latents(cache) == 6
    counts = count_encoded(monkeypatch, model)
    same_as_online(open_folder(folder, cache, model), folder, model)
    assert sum(counts) == 6, "of the comparison"


def test_what_nobody_uses_is_named_with_its_size(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.models.diffusion.latent_cache.UNUSED_BYTES", 0)
    folder, cache, said = write_folder(tmp_path / "data"), tmp_path / "cache", []
    (cache / "0123456789abcdef0123").mkdir(parents=True)
    (cache / "0123456789abcdef0123" / "latents.bin").write_bytes(b"x" * 3 * 2**20)
    open_folder(folder, cache, model, said)
    assert any("holds 1 folders of an older layout (3 MiB), which are not used: delete them" in line for line in said)
    write_folder(folder, seed=1)
    said.clear()
    open_folder(folder, cache, model, said)
    assert any("6 of 12 rows in" in line and "delete the folder" in line for line in said)
    assert any("6 of 6 rows were encoded anew" in line for line in said)


def test_enlarged_pictures_are_counted(tmp_path: Path, model: Any) -> None:
    folder, said = write_folder(tmp_path / "data"), []
    for index in (1, 4):
        picture(index, 8, 20).save(folder / f"{index}.bmp")
    open_folder(folder, tmp_path / "cache", model, said)
    assert any(line.startswith("2 of 6 pictures so far are smaller than 16 x 16") for line in said)
    config = ImageTextDataConfig(train_path=str(folder), height=16, width=16)
    online: list[str] = []
    encoder = OnlineEncoder(ImageTextDataset(config), model, BadRows(0, online.append))
    for index in range(6):
        encoder.batch(IndexBatch([index], [index]))
    assert [line[:6] for line in online] == ["1 of 2", "2 of 5"]


def test_digests_are_read_again_only_when_a_file_changed(tmp_path: Path) -> None:
    read: list[str] = []

    def digest(path: Path) -> bytes:
        read.append(path.name)
        return digest_of_file(path)

    folder = write_folder(tmp_path / "data", 3)
    files = sorted(folder.glob("*.bmp"))
    settle(folder)
    for expected in (3, 0):
        digests = FileDigests(tmp_path / "files.npy", digest)
        before = [digests[file] for file in files]
        digests.save()
        assert len(read) == expected
        read.clear()
    files[1].write_bytes(files[0].read_bytes())
    digests = FileDigests(tmp_path / "files.npy", digest)
    after = [digests[file] for file in files]
    assert read == ["1.bmp"] and after == [before[0], before[0], before[2]]
    (tmp_path / "files.npy").write_bytes(b"damaged")
    assert [FileDigests(tmp_path / "files.npy")[file] for file in files] == after


def test_what_stands_behind_the_last_whole_row_is_cut_off(tmp_path: Path) -> None:
    rows = {"a": torch.arange(6.0).reshape(3, 2), "b": torch.arange(3, dtype=torch.int32)}
    keys = [bytes([number]) * 16 for number in range(3)]
    RowWriter(RowStore(tmp_path, "store")).append(keys, rows)
    for name in ("a", "b", "index"):
        with (tmp_path / f"{name}.bin").open("ab") as file:
            file.write(b"half")
    assert len(RowStore(tmp_path, "store")) == 3
    writer = RowWriter(RowStore(tmp_path, "store"))
    writer.append([b"z" * 16], {name: tensor[:1] + 7 for name, tensor in rows.items()})
    row_store = RowStore(tmp_path, "store")
    assert row_store.positions([b"z" * 16, keys[1], b"y" * 16]).tolist() == [3, 1, -1]
    assert torch.equal(row_store.tensors["a"], torch.cat([rows["a"], rows["a"][:1] + 7]))
    assert row_store.tensors["b"].tolist() == [0, 1, 2, 7]


def test_a_finished_cache_is_read_where_nothing_can_be_written_and_while_another_adds_to_it(
    tmp_path: Path, model: Any
) -> None:
    folder, cache = write_folder(tmp_path / "data"), tmp_path / "cache"
    open_folder(folder, cache, model)
    (cache / "lock").unlink()
    (cache / "lock").mkdir()  # which cannot be opened, whoever runs the test
    same_as_online(open_folder(folder, cache, model), folder, model)
    picture(77, 16, 16).save(folder / "0.bmp")
    with pytest.raises(DataError, match=r"lock: .*, and not all is cached"):
        open_folder(folder, cache, model)


def test_a_frame_that_was_added_to_a_folder_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a video that is a folder of images, all of whose other files stayed."""
    frames = tmp_path / "video"
    frames.mkdir()
    for number in (0, 2, 4):
        picture(number, 16, 16).save(frames / f"{number}.bmp")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"image": "video", "text": "x"}))
    settle(tmp_path)
    config = ImageTextDataConfig(train_path=str(tmp_path / "rows.jsonl"), height=16, width=16, num_frames=2)
    dataset = ImageTextDataset(config)
    before = signature_of(dataset.paths(0))[0]
    files = dataset.files(0)
    picture(9, 16, 16).save(frames / "5.bmp")
    assert signature_of(dataset.paths(0))[0] != before
    assert dataset.files(0) == [*files, frames / "5.bmp"]
