"""Preference training of diffusion models on pairs, through the real task."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
from PIL import Image

from sfumato.config.load import merge
from sfumato.tracking.json_lines import read_jsonl
from tests import tiny_families
from tests.resumed import assert_same_run
from tests.tiny import run_task_here, tiny_dit_dpo_config, write_tiny_pipeline

LORA = {"model": {"lora": {"rank": 4, "alpha": 8}}}
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220), "white": (250, 250, 250)}
FAMILIES = {
    "sd3": (tiny_families.tiny_sd3, 7, 1),
    "flux": (tiny_families.tiny_flux, 7, 1),
    "flux_kontext": (tiny_families.tiny_flux_kontext, 7, 1),
    "stable_diffusion": (tiny_families.tiny_stable_diffusion, 7, 1),
    "wan": (tiny_families.tiny_wan, 7, 5),
    "wan_pair": (tiny_families.tiny_wan_pair, 7, 1),
    "wan_image_small": (tiny_families.tiny_wan_image_small, 7, 5),
    "qwen_image": (tiny_families.tiny_qwen_image, 24, 1),
    "z_image": (tiny_families.tiny_z_image, 7, 1),
}
"""Descriptions, model.max_sequence_length, and frames."""
QUICK = {("flux", True), ("flux_kontext", True), ("stable_diffusion", False), ("wan", True)}


def run(folder: Path, name: str = "run", **overrides: Any) -> list[dict[str, Any]]:
    """The metrics of a run in ``folder/name``; ``eval={}`` leaves that section out."""
    config = tiny_dit_dpo_config(folder, **overrides)
    if overrides.get("eval") == {}:
        del config["eval"]
    config["train"]["output_dir"] = str(folder / name)
    return read_jsonl(run_task_here("train_dit_dpo", config) / "metrics.jsonl")


def values(lines: list[dict[str, Any]], *names: str) -> list[float]:
    """Metrics of all steps that have them, in order."""
    return [line[name] for line in lines for name in names if name in line]


def write_pairs(folder: Path, count: int, seed: int) -> str:
    """Pairs of plain images: the better one has the colour that the prompt names."""
    folder.mkdir()
    generator, rows = np.random.default_rng(seed), []
    for index in range(count):
        right, wrong = generator.permutation(list(COLOURS))[:2]
        row = {"prompt": f"write {right}"}
        for side, colour in (("chosen", right), ("rejected", wrong)):
            pixels = np.clip(np.array(COLOURS[colour]) + generator.integers(-30, 30, (16, 16, 3)), 0, 255)
            row[side] = f"{index}_{side}.png"
            Image.fromarray(pixels.astype(np.uint8)).save(folder / row[side])
        rows.append(row)
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "pairs.jsonl")


@pytest.mark.parametrize(
    ("family", "adapters"),
    [
        pytest.param(family, adapters, marks=() if (family, adapters) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for adapters in (False, True)
    ],
)
def test_every_family_starts_as_its_own_reference_and_is_exported(tmp_path: Path, family: str, adapters: bool) -> None:
    describe, tokens, frames = FAMILIES[family]
    path = write_tiny_pipeline(tmp_path / family, described=describe(), tokens=tokens)
    model = {"model_path": str(path), "max_sequence_length": tokens, "keep_encoders": False}
    model |= LORA["model"] if adapters else {}
    train = {"max_steps": 2, "lr_warmup_steps": 0}
    data = {"num_frames": frames, "cache_dir": str(tmp_path / "cache")}
    more = {"data": data, "dpo": {"beta": 1000.0}, "eval": {"num_rows": 2}}
    config = tiny_dit_dpo_config(tmp_path, model=model, train=train, **more)
    folder = run_task_here("train_dit_dpo", config, with_report=family == "wan")
    start, first, second = read_jsonl(folder / "metrics.jsonl")
    for kind, line in (("eval", start), ("pairs", first)):
        assert line[f"{kind}/reward_chosen"] == line[f"{kind}/reward_rejected"] == line[f"{kind}/margin"] == 0
        assert line[f"{kind}/error_chosen"] == line[f"{kind}/reference_error_chosen"] > 0
    assert first["loss"] == pytest.approx(math.log(2)) and first["grad_norm"] > 0
    assert second["pairs/reward_chosen"] != 0 and math.isfinite(second["loss"])
    if family == "stable_diffusion":
        assert first["pairs/error_chosen"] < 2, "the error of the noise; that of the velocity would be larger by far"
    pipeline = diffusers.DiffusionPipeline.from_pretrained(path if adapters else folder / "hf_ckpt")
    if adapters:
        pipeline.load_lora_weights(folder / "hf_ckpt")
        assert pipeline.get_active_adapters()
    if family == "wan":
        assert (folder / "report.html").is_file()
    assert (folder / "samples" / "step_000002" / "samples.jsonl").is_file()


def test_the_better_images_become_likelier(tmp_path: Path) -> None:
    data = {
        "data_type": "pairs",
        "train_path": write_pairs(tmp_path / "train", 64, seed=0),
        "eval_path": write_pairs(tmp_path / "eval", 32, seed=1),
    }
    train = {"max_steps": 32, "lr": 3.0e-3, "micro_batch_size": 8, "global_batch_size": 8, "lr_decay_style": "constant"}
    lines = run(tmp_path, data=data, train=train, dpo={"beta": 200.0}, eval={"every_steps": 0, "num_rows": 32})
    assert lines[0]["eval/loss"] == pytest.approx(math.log(2))
    assert lines[-1]["eval/accuracy"] > 0.9 and lines[-1]["eval/margin"] > 1 and lines[-1]["eval/loss"] < 0.4


def test_a_cache_changes_nothing(tmp_path: Path) -> None:
    online = run(tmp_path, "online", train={"max_steps": 3})
    cached = run(tmp_path, "cached", train={"max_steps": 3}, data={"cache_dir": str(tmp_path / "cache")})
    for name in ("loss", "eval/loss", "pairs/error_rejected"):
        assert values(cached, name) == pytest.approx(values(online, name), rel=1e-5), name
    assert len([*(tmp_path / "cache").glob("rows_*")]) == 2, "one of training, one of evaluation"


def test_accumulation_does_not_change_the_result(tmp_path: Path) -> None:
    runs = [
        run(tmp_path, str(size), flow={"prompt_dropout": 0.5}, dpo={"beta": 10.0}, train={"micro_batch_size": size})
        for size in (1, 4)
    ]
    for name in ("loss", "grad_norm", "eval/loss", "pairs/error_chosen"):
        assert values(runs[0], name) == pytest.approx(values(runs[1], name), rel=1e-4), name


@pytest.mark.parametrize("settings", [{}, pytest.param(LORA, marks=pytest.mark.slow)], ids=["full", "adapters"])
def test_a_resumed_run_ends_as_the_undisturbed_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    train = {"save_steps": 2, "max_steps": 4, "ema_decay": 0.9}
    config = tiny_dit_dpo_config(tmp_path, **merge(settings, {"train": train, "flow": {"prompt_dropout": 0.3}}))
    undisturbed = run_task_here("train_dit_dpo", config)
    resumed = Path(shutil.copytree(undisturbed, tmp_path / "resumed"))
    first = str(resumed / "checkpoints" / "global_step_2")
    again = {"output_dir": str(resumed), "load_checkpoint_path": first, "max_checkpoints": 1}
    run_task_here("train_dit_dpo", merge(config, {"train": again}))
    assert_same_run(resumed, undisturbed)


def test_a_broken_pair_is_left_out_and_named(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "pairs", 8, seed=0)
    (tmp_path / "pairs" / "3_rejected.png").write_bytes(b"no image")
    data = {"data_type": "pairs", "train_path": path, "max_bad_rows": 1}
    lines = run(tmp_path, data=data, train={"max_steps": 2}, eval={})
    assert [line["pairs"] for line in lines] in ([3, 4], [4, 3]), "one epoch of 8 pairs in steps of 4"
    assert "pairs.jsonl, line 4: broken image" in (tmp_path / "run" / "log.txt").read_text()
    assert not any("eval/loss" in line for line in lines), "there are no held-out pairs"
