"""Pretraining and fine-tuning on images from disk, through the real task."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.errors import CheckpointError
from sfumato.models.diffusion.encoded import EncodedBatch
from sfumato.tracking.json_lines import read_jsonl
from tests.tiny import load_task, run_task_here, tiny_dit_config

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220), "white": (250, 250, 250)}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Sixteen plain images with captions, listed in metadata.jsonl."""
    folder = tmp_path / "images"
    folder.mkdir()
    rows = []
    for index in range(16):
        name, colour = list(COLOURS.items())[index % 4]
        pixels = np.full((20, 24, 3), colour, np.uint8) - np.uint8(index)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        rows.append({"file_name": f"{index}.png", "text": f"a {name} square"})
    (folder / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def run(
    tmp_path: Path, images: Path, name: str, task: str | ModuleType = "train_dit", **overrides: Any
) -> list[dict[str, Any]]:
    config = tiny_dit_config(tmp_path, **overrides)
    config["data"] = {"train_path": str(images), "height": 16, "width": 16, **overrides.get("data", {})}
    config["train"]["output_dir"] = str(tmp_path / name)
    return read_jsonl(run_task_here(task, config) / "metrics.jsonl")


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines]


def test_the_loss_falls_and_the_export_is_a_pipeline(tmp_path: Path, images: Path) -> None:
    from diffusers import StableDiffusion3Pipeline

    train = {"max_steps": 60, "lr": 1.0e-2, "lr_decay_style": "constant", "micro_batch_size": 8, "global_batch_size": 8}
    lines = run(tmp_path, images, "run", train=train)
    assert np.mean(losses(lines)[-10:]) < 0.8 * np.mean(losses(lines)[:10])
    pipeline = StableDiffusion3Pipeline.from_pretrained(tmp_path / "run" / "hf_ckpt")
    made = pipeline("a red square", height=16, width=16, num_inference_steps=2, guidance_scale=1.0, output_type="np")
    assert made.images.shape == (1, 16, 16, 3)
    grid = Image.open(tmp_path / "run" / "samples" / "step_000060" / "grid_eval.png")
    assert grid.width > 2 * 16, "both prompts side by side"


def test_a_cache_changes_nothing(tmp_path: Path, images: Path) -> None:
    online = run(tmp_path, images, "online")
    cached = run(tmp_path, images, "cached", data={"cache_dir": str(tmp_path / "cache")})
    freed = run(tmp_path, images, "freed", data={"cache_dir": str(tmp_path / "cache")}, model={"keep_encoders": False})
    assert losses(cached) == pytest.approx(losses(online), rel=1e-5)
    assert losses(freed) == losses(cached)
    assert (tmp_path / "freed" / "hf_ckpt" / "text_encoder" / "config.json").is_file()


def test_the_losses_of_a_mask_and_of_its_inverse_add_up(tmp_path: Path, images: Path) -> None:
    """Of the first step, before the weights differ: the mask is one half of each image."""
    mask = np.zeros((20, 24), np.uint8)
    mask[:, :12] = 255
    Image.fromarray(mask).save(images / "left.png")
    rows = [json.loads(line) | {"mask": "left.png"} for line in (images / "metadata.jsonl").read_text().splitlines()]
    (images / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train = {"max_steps": 1}
    half = {"mask_key": "mask", "cache_dir": str(tmp_path / "cache")}
    runs = {
        "plain": {},
        "left": half,
        "right": half | {"invert_mask": True},
        "weighted": half | {"mask_outside": 0.5},
    }
    first = {name: losses(run(tmp_path, images, name, train=train, data=data))[0] for name, data in runs.items()}
    assert abs(first["left"] - first["right"]) > 1e-2
    assert (first["left"] + first["right"]) / 2 == pytest.approx(first["plain"], rel=1e-3)
    assert (2 * first["left"] + first["right"]) / 3 == pytest.approx(first["weighted"], rel=1e-3)


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_accumulation_does_not_change_the_result(tmp_path: Path, images: Path, micro_batch_size: int) -> None:
    flow = {"prompt_dropout": 0.5}
    base = run(tmp_path, images, "base", flow=flow, train={"micro_batch_size": 2, "global_batch_size": 4})
    other = {"micro_batch_size": micro_batch_size, "global_batch_size": 4}
    assert losses(run(tmp_path, images, "other", flow=flow, train=other)) == pytest.approx(losses(base), rel=1e-4)


def test_a_row_left_out_leaves_the_mean_over_the_others(tmp_path: Path, images: Path) -> None:
    (images / "5.png").write_bytes(b"no image")
    lines = run(tmp_path, images, "run", data={"max_bad_rows": 1}, train={"max_steps": 4})
    assert sorted(line["images"] for line in lines) == [3, 4, 4, 4], "one epoch of 16 rows in steps of 4"
    assert "metadata.jsonl, line 6" in (tmp_path / "run" / "log.txt").read_text()


def test_prompt_dropout_uniform_timesteps_and_shift_are_used(tmp_path: Path, images: Path) -> None:
    base = losses(run(tmp_path, images, "base"))
    for name, value in (("prompt_dropout", 0.9), ("timestep_sampling", "uniform"), ("shift", 3.0)):
        assert losses(run(tmp_path, images, name, flow={name: value})) != base, name


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    """Thirty images of several aspect ratios, listed in metadata.jsonl."""
    folder, rows = tmp_path / "shapes", []
    folder.mkdir()
    for index in range(30):
        size = [(20, 21), (16, 30), (40, 22), (24, 60)][(index * index) % 7 % 4]
        pixels = np.random.default_rng(index).integers(0, 256, (*size, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        rows.append({"file_name": f"{index}.png", "text": f"a number {index}"})
    (folder / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


BUCKETS = {"buckets": 8, "height": 16, "width": 16}


def test_buckets_train_the_mean_over_samples_one_by_one(tmp_path: Path, shapes: Path) -> None:
    data, train = {**BUCKETS, "max_bad_rows": 1}, {"micro_batch_size": 4, "global_batch_size": 8, "max_steps": 9}
    (shapes / "4.png").write_bytes(b"no image")
    alone: dict[int, list[float]] = {}

    def watched(model: Any, batch: EncodedBatch, flow: Any, seed: int, step: int) -> torch.Tensor:
        """Each sample by itself, before the pass of its micro-batch."""
        assert batch.latents.shape[1:] == model.latent_shape(*batch.size)
        for row in range(batch.num_images):
            one = slice(row, row + 1)
            single = replace(
                batch,
                latents=batch.latents[one],
                conditioning=batch.conditioning.rows(one),
                sample_ids=batch.sample_ids[one],
            )
            with torch.no_grad():
                alone.setdefault(step, []).append(float(losses_of(model, single, flow, seed, step)))
        return losses_of(model, batch, flow, seed, step)

    task = load_task("train_dit")
    losses_of, task.denoising_losses = task.denoising_losses, watched
    lines = run(tmp_path, shapes, "run", task, data=data, train={**train, "save_steps": 4})
    assert {len(value) for value in alone.values()} == {7, 8}, "a broken row is missing where it is"
    for step, value in alone.items():
        assert lines[step]["loss"] == pytest.approx(np.mean(value), rel=1e-5)
        assert lines[step]["images"] == len(value)
    assert "30 rows in" in (tmp_path / "run" / "log.txt").read_text()
    # a cache of each bucket gives the same; a run that is resumed too; another micro-batch size is refused
    cache = {**data, "cache_dir": str(tmp_path / "cache")}
    assert losses(run(tmp_path, shapes, "cached", data=cache, train=train)) == pytest.approx(losses(lines), rel=1e-5)
    first = str(tmp_path / "run" / "checkpoints" / "global_step_4")
    resumed = {**train, "load_checkpoint_path": first}
    assert losses(run(tmp_path, shapes, "resumed", data=data, train=resumed)) == losses(lines)[4:]
    with pytest.raises(CheckpointError, match=r"train.micro_batch_size \(data.buckets\) was 4, is 2"):
        run(tmp_path, shapes, "other", data=data, train={**resumed, "micro_batch_size": 2})
    Image.new("RGB", (90, 20)).save(shapes / "3.png")
    with pytest.raises(CheckpointError, match=r"data.buckets of the images has another content"):
        run(tmp_path, shapes, "moved", data=data, train=resumed)
