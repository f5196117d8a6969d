"""Edits, videos and image-to-video through the same tasks as images."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
from PIL import Image

from sfumato.config.load import merge
from sfumato.models.diffusion.base import read_pipeline_class
from sfumato.rewards.base import Sample
from sfumato.tracking.samples import read_samples, step_folder
from sfumato.tracking.trackers import read_jsonl
from tests import tiny_families
from tests.tiny import run_task_here, tiny_dit_config, tiny_rl_config, weights_in, write_tiny_pipeline

SEEN: list[Sample] = []
"""What ``Watched`` was given."""


@dataclass(frozen=True)
class Case:
    """A family with what its runs need."""

    describe: Callable[[], dict[str, Any]]
    size: tuple[int, int, int] = (16, 16, 1)
    tokens: int = 7
    rollout: dict[str, Any] = field(default_factory=dict)
    needs: str = ""


CASES = {
    "flux_kontext": Case(tiny_families.tiny_flux_kontext, rollout={"guidance_scale": 2.5}),
    "qwen_image_edit": Case(tiny_families.tiny_qwen_image_edit, (32, 64, 1), 24, needs="torchvision"),
    "qwen_image_edit_plus": Case(tiny_families.tiny_qwen_image_edit_plus, (32, 64, 1), 40, needs="torchvision"),
    "wan": Case(tiny_families.tiny_wan, (16, 16, 5), rollout={"guidance_scale": 3.0}),
    "wan_pair": Case(
        tiny_families.tiny_wan_pair, (16, 16, 5), rollout={"guidance_scale": 3.0, "guidance_scale_2": 2.0}
    ),
    "wan_image": Case(tiny_families.tiny_wan_image, (16, 16, 5), 512),
    "wan_image_small": Case(tiny_families.tiny_wan_image_small, (32, 32, 5)),
}


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folders of tiny pipelines, made once each."""
    root = tmp_path_factory.mktemp("pipelines")

    def folder_of(name: str) -> Path:
        if CASES[name].needs:
            pytest.importorskip(CASES[name].needs)
        return write_tiny_pipeline(root / name, described=CASES[name].describe())

    return folder_of


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.tracking.report._curves", lambda series: "")  # they take most of a report's time


def rl_config(name: str, pipeline: Path, tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    case = CASES[name]
    (tmp_path / "pipeline").symlink_to(pipeline)
    height, width, frames = case.size
    config = tiny_rl_config(
        tmp_path,
        model={"max_sequence_length": case.tokens, "lora": {"rank": 4, "alpha": 8}},
        rollout={"num_prompts": 2, "height": height, "width": width, "num_frames": frames, **case.rollout},
        reward={"rewards": [{"type": "brightness", "frame_step": 2}]},
        train={"max_steps": 2, "micro_batch_size": 4, "global_batch_size": 8, "lr_warmup_steps": 0},
        eval={"every_steps": 2},
    )
    return merge(config, overrides)


def dit_config(name: str, pipeline: Path, tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    case = CASES[name]
    (tmp_path / "pipeline").symlink_to(pipeline)
    height, width, frames = case.size
    config = tiny_dit_config(
        tmp_path,
        model={"max_sequence_length": case.tokens},
        data={"height": height, "width": width, "num_frames": frames},
        train={"max_steps": 3},
    )
    return merge(config, overrides)


@pytest.mark.parametrize("recipe", ["flow_grpo_fast", "diffusion_nft"])
@pytest.mark.parametrize("name", CASES)
def test_rl(name: str, recipe: str, pipelines: Callable[[str], Path], tmp_path: Path) -> None:
    pipeline = pipelines(name)
    algorithm = {"recipe": recipe} if recipe == "diffusion_nft" else {}
    config = rl_config(name, pipeline, tmp_path)
    if recipe == "diffusion_nft":
        config["algorithm"] = algorithm
        config["rollout"] |= {"guidance_scale": 1.0, "guidance_scale_2": None}
    run = run_task_here("rl_diffusion", config)

    lines = read_jsonl(run / "metrics.jsonl")[1:]
    assert len(lines) == 2
    for line in lines:
        assert all(math.isfinite(value) for value in line.values()), line
        assert line["rows"] > 0 and line["grad_norm"] > 0 and line["advantage/groups_without_spread"] == 0
        assert line.get("ratio/replay_error", 0) < 1e-5
    assert_samples(run, name, step=2)
    loaded = getattr(diffusers, read_pipeline_class(pipeline)).from_pretrained(pipeline)
    loaded.load_lora_weights(run / "hf_ckpt")


def assert_samples(run: Path, name: str, step: int) -> None:
    """Files of videos have all frames, edits stand beside their source, and the report shows both."""
    height, width, frames = CASES[name].size
    takes_image = ("image" in name and name != "qwen_image") or "kontext" in name
    page = (run / "report.html").read_text()
    rows = read_samples(run)[step]
    for row in rows:
        with Image.open(step_folder(run, step) / row["file"]) as image:
            assert (image.size, getattr(image, "n_frames", 1)) == ((width, height), frames)
        assert ("source" in row) == takes_image
        if takes_image:
            with Image.open(step_folder(run, step) / row["source"]) as image:
                assert image.size == (width, height) and np.ptp(np.asarray(image)) > 100, "a word is written there"
    assert page.count("data:image/webp") == (0 if frames == 1 else page.count("data:image/") - page.count("source: "))
    assert (page.count('alt="source: ') > 0) == takes_image


@pytest.mark.parametrize("name", CASES)
def test_supervised_training_online_and_from_a_cache(
    name: str, pipelines: Callable[[str], Path], tmp_path: Path
) -> None:
    config = dit_config(name, pipelines(name), tmp_path)
    online = run_task_here("train_dit", config)
    lines = read_jsonl(online / "metrics.jsonl")
    assert len(lines) == 3 and all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in lines)
    assert_samples(online, name, step=3)
    cached = merge(
        config,
        {
            "train": {"output_dir": str(tmp_path / "cached")},
            "data": {"cache_dir": str(tmp_path / "cache")},
            "model": {"keep_encoders": False},
        },
    )
    assert weights_in(run_task_here("train_dit", cached) / "hf_ckpt" / "transformer") == weights_in(
        online / "hf_ckpt" / "transformer"
    )
