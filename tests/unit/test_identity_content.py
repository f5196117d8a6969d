"""A resume notices that what a run reads besides its table was replaced: pictures, models, rewards, templates."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sfumato.config.diffusion_rl import TrajectoryRLConfig
from sfumato.config.dit import TrainDitConfig, TrainDitDpoConfig
from sfumato.config.load import load_config
from sfumato.config.text import TrainTextConfig
from sfumato.data import identity as module
from sfumato.data.files.named_files import BEGINNING, content_of_named_files
from sfumato.data.identity import content_of_model_file, sampled_digest
from sfumato.data.images.identity import identify_images, identify_prompts, pictures_of
from sfumato.data.images.image_text import ImageTextDataset, PairDataset, open_image_text
from sfumato.data.images.prompts import load_prompts
from sfumato.errors import CheckpointError
from sfumato.tracking.identity import KEY, compare_identity
from tests.tiny import tiny_dit_config, tiny_dit_dpo_config, tiny_rl_config, tiny_text_config
from tests.unit.test_image_text import settle

PICTURES = "data.train_path (its images)"


def write_pictures(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    rows = []
    for index in range(4):
        pixels = np.random.default_rng([seed, index]).integers(0, 256, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.bmp")
        other = f"{(index + 1) % 4}.bmp"
        rows.append({"image": f"{index}.bmp", "text": "x", "prompt": "x", "chosen": f"{index}.bmp", "rejected": other})
        rows[-1]["source_image"] = f"{index}.bmp"
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settle(folder)
    return folder


def dit(tmp_path: Path, path: Path, **more: Any) -> TrainDitConfig:
    data = {"data_type": "image_text", "train_path": str(path), "height": 16, "width": 16}
    config = tiny_dit_config(tmp_path, **more)
    return load_config(TrainDitConfig, overrides={**config, "data": data})


def identity_of(config: TrainDitConfig) -> dict[str, Any]:
    return identify_images(config, open_image_text(config.data, 0), 4)


def checkpoint(tmp_path: Path, identity: dict[str, Any]) -> Path:
    folder = tmp_path / "run/checkpoints/global_step_3"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(json.dumps({KEY: identity}))
    return folder


@pytest.mark.parametrize("kind", ["table", "folder"])
def test_a_resume_with_replaced_pictures_is_refused(tmp_path: Path, kind: str) -> None:
    """Of the same names and sizes, and with their times set back."""
    folder = write_pictures(tmp_path / "data")
    path = folder / "rows.jsonl"
    if kind == "folder":
        path.unlink()
        for index in range(4):
            (folder / f"{index}.txt").write_text("x")
        path = folder
    config = dit(tmp_path, path, train={"load_checkpoint_path": "auto"})
    saved = identity_of(config)
    checkpoint(tmp_path, saved)
    assert identity_of(config) == saved
    times = {picture: picture.stat().st_mtime_ns for picture in folder.glob("*.bmp")}
    write_pictures(tmp_path / "others", seed=1)
    for picture, moment in times.items():
        shutil.copy(tmp_path / "others" / picture.name, picture)
        os.utime(picture, ns=(moment, moment))
    with pytest.raises(CheckpointError, match=r"data\.train_path \(its images\) has another content"):
        identity_of(config)
    shutil.rmtree(tmp_path / "run/checkpoints")
    assert identity_of(config)["data.train_path"] == saved["data.train_path"], "names and sizes, as older runs have it"


def test_pictures_of_pairs_and_source_images_count_and_their_place_does_not(tmp_path: Path) -> None:
    def contents(folder: Path) -> list[str]:
        data = {"data_type": "pairs", "train_path": str(folder / "rows.jsonl"), "height": 16, "width": 16}
        data["eval_path"] = data["train_path"]
        config = load_config(TrainDitDpoConfig, overrides={**tiny_dit_dpo_config(tmp_path), "data": data})
        held_out = PairDataset(config.data, "eval_path")
        identity = identify_images(config, PairDataset(config.data, "train_path"), 4, held_out)
        pairs = identity[PICTURES] + identity["data.eval_path (its images)"]
        settings = {"train_path": str(folder / "rows.jsonl"), "eval_path": str(folder / "rows.jsonl")}
        rl = load_config(TrajectoryRLConfig, overrides={**tiny_rl_config(tmp_path), "data": settings})
        prompts = load_prompts(rl.data, "train")
        sources = identify_prompts(rl, prompts, prompts[:2])["data.train_path (its source images)"]
        return [pairs, sources]

    before = contents(write_pictures(tmp_path / "data"))
    gone = tmp_path / "data" / "gone.jsonl"  # which a model that takes no images does not look at
    gone.write_text(json.dumps({"prompt": "x", "source_image": "gone.png"}))
    settings = {"train_path": str(gone), "eval_path": str(gone)}
    rl = load_config(TrajectoryRLConfig, overrides={**tiny_rl_config(tmp_path), "data": settings})
    assert "data.train_path (its source images)" not in identify_prompts(rl, load_prompts(rl.data, "train"), [])
    shutil.copytree(tmp_path / "data", tmp_path / "moved", copy_function=shutil.copy)
    assert contents(tmp_path / "moved") == before
    write_pictures(tmp_path / "moved", seed=2)
    assert all(new != old for new, old in zip(contents(tmp_path / "moved"), before, strict=True))


def test_of_many_pictures_little_is_read_and_on_the_next_start_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    digest = sampled_digest
    monkeypatch.setattr(module, "sampled_digest", lambda path: (read.append(path), digest(path))[1])
    config = dit(tmp_path, write_pictures(tmp_path / "data") / "rows.jsonl")
    first = identity_of(config)
    assert len({*read}) == 4
    read.clear()
    assert identity_of(config) == first and read == []
    large = tmp_path / "large"
    content = bytearray(2**20)
    large.write_bytes(content)
    whole = sampled_digest(large)
    for place, noticed in ((0, True), (2**20 - 1, True), (2**19, False)):
        content[place] ^= 1
        large.write_bytes(content)
        content[place] ^= 1
        assert (sampled_digest(large) != whole) is noticed


def test_a_picture_that_is_missing_or_inside_the_table_is_no_problem(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "data")
    (folder / "2.bmp").unlink()
    config = dit(tmp_path, folder / "rows.jsonl")
    assert PICTURES in identity_of(config)
    assert len(pictures_of(ImageTextDataset(config.data))) == 6, "pictures with their source images"


def change(path: Path) -> Callable[[], None]:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    return lambda: path.write_bytes(content)


def test_what_is_frozen_of_a_pipeline_must_stay_and_what_is_trained_is_said(tmp_path: Path) -> None:
    for lora in (None, {"rank": 2}):
        folder = tmp_path / f"{bool(lora)}"
        folder.mkdir()
        config = load_config(TrainDitConfig, overrides=tiny_dit_config(folder, model={"lora": lora}))
        before = content_of_named_files(config, content_of_model_file)
        assert {*before} == {"model.model_path"} | ({BEGINNING} if lora is None else set())
        pipeline = folder / "pipeline"
        for name, field in (("vae", "model.model_path"), ("text_encoder", "model.model_path"), ("transformer", None)):
            [weights] = (pipeline / name).glob("*.safetensors")
            change(weights)()
            after = content_of_named_files(config, content_of_model_file)
            changed = {key for key in before if before[key] != after[key]}
            assert changed == {field or ("model.model_path" if lora else BEGINNING)}
            before = after
        tokenizer = next((pipeline / "tokenizer").glob("*.json"))
        tokenizer.write_text(tokenizer.read_text() + " ")
        assert content_of_named_files(config, content_of_model_file)["model.model_path"] != before["model.model_path"]


def test_the_base_of_a_language_model_counts_under_an_adapter(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"weights")
    (base / "generation_config.json").write_text("{}")
    for lora, field in ((None, BEGINNING), ({"rank": 2}, "model.model_path")):
        settings = tiny_text_config(tmp_path)
        tokenizer = settings["model"].get("tokenizer_path")
        settings["model"] = {"model_path": str(base), "lora": lora, "tokenizer_path": tokenizer}
        config = load_config(TrainTextConfig, overrides=settings)
        before = content_of_named_files(config, content_of_model_file)
        assert field in before and len({"model.model_path", BEGINNING} & {*before}) == 1
        (base / "generation_config.json").write_text('{"eos_token_id": 1}')
        assert content_of_named_files(config, content_of_model_file) == before
        (base / "model.safetensors").write_bytes(b"weightz" if lora is None else b"weighty")
        assert content_of_named_files(config, content_of_model_file)[field] != before[field]


@pytest.mark.parametrize("field", ["config_path", "model_path"])
def test_the_description_of_a_language_model_counts_whatever_is_trained(tmp_path: Path, field: str) -> None:
    """With other rotary positions the weights of the checkpoint would load, and be another model."""
    settings = tiny_text_config(tmp_path)
    description = Path(settings["model"]["config_path"])
    if field == "model_path":
        description = tmp_path / "config.json"
        description.write_text('{"model_type": "qwen3"}')
        settings["model"] = {"model_path": str(tmp_path), "tokenizer_path": "bytes"}
    config = load_config(TrainTextConfig, overrides=settings)
    before = content_of_named_files(config, content_of_model_file)
    name = "model.config_path" if field == "config_path" else "model.model_path (its config.json)"
    description.write_text(description.read_text() + " ")
    after = content_of_named_files(config, content_of_model_file)
    assert {key for key in before if before[key] != after[key]} == {name}
    with pytest.raises(CheckpointError, match="other models"):
        compare_identity(before, after, Path("checkpoint"))


def test_what_the_checkpoint_does_not_know_is_accepted_with_a_word_and_weights_it_has_are_said() -> None:
    saved, digest = {"data.train_path": "a" * 40, BEGINNING: "a" * 40}, "b" * 40
    said = compare_identity(saved, {**saved, PICTURES: digest, "data.crop": "none"}, Path("checkpoint"))
    assert said == f"checkpoint does not say what these held, so they are not compared: {PICTURES}"
    said = compare_identity(saved, {**saved, BEGINNING: digest}, Path("checkpoint"))
    assert said == f"changed since the checkpoint, which is gone on with: {BEGINNING} has another content"
    source = "reward.rewards.0.path (its source)"
    said = compare_identity({**saved, source: "a" * 40}, {**saved, source: digest}, Path("checkpoint"))
    assert "changed since the checkpoint" in said and source in said
    name = "reward.rewards.0.model_path"
    with pytest.raises(CheckpointError, match=r"other models: reward\.rewards\.0\.model_path has another content"):
        compare_identity({**saved, name: "a" * 40}, {**saved, name: digest}, Path("checkpoint"))


def test_rewards_and_functions_that_a_configuration_names_count(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def score(samples):\n    return [1.0]\n")
    settings = tiny_rl_config(tmp_path)
    settings["reward"] = {"rewards": [{"type": "function", "path": f"{tmp_path / 'own.py'}:score"}]}
    config = load_config(TrajectoryRLConfig, overrides=settings)
    before = content_of_named_files(config, content_of_model_file)
    assert "reward.rewards.0.path (its source)" in before
    (tmp_path / "own.py").write_text("def score(samples):\n    return [2.0]\n")
    assert content_of_named_files(config, content_of_model_file) != before
