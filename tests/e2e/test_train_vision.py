"""tasks/train_text.py with pictures from start to end: a kill, an export, and a run that begins from the export."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from sfumato.config.load import load_config, merge
from sfumato.config.text import TrainTextConfig
from sfumato.models.language.load import build_language_model
from tests.resumed import assert_same_run, resume_after_kill
from tests.tiny import run_task_here, run_task_process, write_config
from tests.tiny_vision import tiny_media_config, tiny_vision_config
from tests.tiny_vision_rl import tiny_vision_pairs_config, tiny_vision_rl_config

STEPS = 6


def evaluated(run: Path, step: int) -> dict[str, float]:
    """What the evaluation of a step found."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return next(
        {name: line[name] for name in line if name.startswith("eval/")} for line in lines if line["step"] == step
    )


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return tiny_vision_config(tmp_path_factory.mktemp("vision"), "qwen3_vl", train={"save_steps": 2})


@pytest.fixture(scope="module")
def whole(settings: dict) -> Path:
    return run_task_here("train_text", settings)


@pytest.mark.slow
def test_a_killed_run_with_videos_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("cv2", reason="videos need opencv-python-headless (extra 'video')")
    settings = tiny_media_config(tmp_path, train={"save_steps": 2, "output_dir": str(tmp_path / "whole")})
    whole = run_task_here("train_text", settings)
    assert_same_run(resume_after_kill("train_text", settings, tmp_path), whole)

    path = str(whole / "hf_ckpt")  # what was exported is read with its processor, and goes on from there
    model = {"model_path": path, "config_path": None, "tokenizer_path": None}
    train = {"output_dir": str(tmp_path / "again"), "max_steps": 1}
    again = run_task_here("train_text", merge(settings, {"model": model, "train": train}))
    assert evaluated(again, 0) == evaluated(whole, STEPS)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(settings: dict, whole: Path, tmp_path: Path) -> None:
    assert_same_run(resume_after_kill("train_text", settings, tmp_path), whole)


def test_a_run_begins_from_the_folder_that_another_exported(settings: dict, whole: Path, tmp_path: Path) -> None:
    """Its first evaluation is the last one of the other; transformers loads the same weights."""
    path = str(whole / "hf_ckpt")
    model = {"model_path": path, "config_path": None, "tokenizer_path": None}
    again = run_task_here(
        "train_text", merge(settings, {"model": model, "train": {"output_dir": str(tmp_path / "run"), "max_steps": 1}})
    )
    assert evaluated(again, 0) == evaluated(whole, STEPS)
    plain, info = AutoModelForImageTextToText.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert plain.config.model_type == "qwen3_vl"


ENCODERS = r"\.(visual|vision_tower|vision_model)\."
FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "gemma3",
    "gemma4",
    "glm4v",
    "internvl",
    "llava",
)
FAMILIES += ("llava_next", "llava_onevision", "smolvlm", "janus")


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_families_are_trained_exported_and_go_on_with_their_processor(kind: str, tmp_path: Path) -> None:
    """Frozen encoders are exported as they were drawn; the folder has what the images are read with."""
    settings = tiny_vision_config(tmp_path, kind, train={"max_steps": 2}, model={"freeze": [ENCODERS]})
    config = load_config(TrainTextConfig, overrides=settings)
    drawn = build_language_model(config.model, config.train, data_type=config.data.data_type).plain.state_dict()
    path = str(run_task_here("train_text", settings) / "hf_ckpt")
    plain, info = AutoModelForImageTextToText.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    same = {name for name, weight in plain.state_dict().items() if torch.equal(weight, drawn[name])}
    assert any(re.search(ENCODERS, name) for name in same)
    assert {name for name, _ in plain.named_parameters() if re.search(ENCODERS, name)} <= same
    assert not all(name in same for name, _ in plain.named_parameters())
    model = {"model_path": path, "config_path": None, "tokenizer_path": None}
    train = {"output_dir": str(tmp_path / "again"), "max_steps": 1}
    again = run_task_here("train_text", merge(settings, {"model": model, "train": train}))
    assert evaluated(again, 0) == evaluated(tmp_path / "run", 2)


def preferred(folder: Path, name: str) -> list[float]:
    """A metric by step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "make"), [("rl_text", tiny_vision_rl_config), ("train_text_dpo", tiny_vision_pairs_config)]
)
def test_killed_rl_and_dpo_go_on_to_the_same_bits(task: str, make: Callable[..., dict], tmp_path: Path) -> None:
    settings = make(tmp_path, train={"save_steps": 2, "max_steps": STEPS, "output_dir": str(tmp_path / "whole")})
    whole = run_task_here(task, settings)
    config = merge(settings, {"train": {"output_dir": str(tmp_path / "run"), "load_checkpoint_path": "auto"}})
    run_task_process(task, write_config(config, tmp_path / "config.yaml"), kill_after=3)
    assert not (tmp_path / "run" / "hf_ckpt").exists()
    resumed = run_task_here(task, config)
    assert_same_run(resumed, whole)


@pytest.mark.slow
def test_dpo_with_images_learns_what_is_preferred(tmp_path: Path) -> None:
    """Of held-out prompts, too: the preferred answers have a form of their own."""
    folder = run_task_here("train_text_dpo", tiny_vision_pairs_config(tmp_path, train={"max_steps": 30, "lr": 1.0e-3}))
    losses = preferred(folder, "eval/loss")
    assert losses[-1] < 0.5 * losses[0] and preferred(folder, "eval/accuracy")[-1] == 1.0
