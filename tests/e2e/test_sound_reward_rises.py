"""The commands of docs/sound.md: a tiny model learns tones whose captions are often wrong, and RL mends it by ear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from docs.examples.tones import write_data
from sfumato.config.load import merge
from sfumato.config.yaml_text import read_yaml
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.samples import read_samples, step_folder
from tests.tiny import ROOT, run_task_here

ITERATIONS = 20


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the data and of a pretrained model."""
    folder = tmp_path_factory.mktemp("tones")
    write_data(folder / "tones")
    config = shipped(
        "tones_pretrain",
        {
            "model": {"config_path": str(ROOT / "configs/sound/tiny_stable_audio3.yaml")},
            "data": {"train_path": str(folder / "tones"), "cache_dir": None},
            "train": {"output_dir": str(folder / "pretrain")},
        },
    )
    losses = [row["loss"] for row in read_jsonl(run_task_here("train_dit", config) / "metrics.jsonl")]
    assert losses[-1] < 0.25 * losses[0]
    return folder


def shipped(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A file of configs/sound, with changes."""
    return merge(read_yaml(ROOT / "configs" / "sound" / f"{name}.yaml"), changes)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "name"), [("rl_diffusion", "tones_rl"), ("rl_diffusion_forward", "tones_nft")])
def test_what_is_heard_becomes_the_wanted_tone(pretrained: Path, task: str, name: str) -> None:
    prompts = {"train_path": "prompts.jsonl", "eval_path": "eval_prompts.jsonl"}
    config = shipped(
        name,
        {
            "model": {"model_path": str(pretrained / "pretrain" / "hf_ckpt")},
            "data": {key: str(pretrained / "tones" / file) for key, file in prompts.items()},
            "train": {"output_dir": str(pretrained / name), "max_steps": ITERATIONS},
            "eval": {"every_steps": ITERATIONS},
        },
    )
    function = config["reward"]["rewards"][0]
    function["path"] = f"{ROOT}/{function['path']}"
    run = run_task_here(task, config)
    rewards = [row["eval/reward/total"] for row in read_jsonl(run / "metrics.jsonl") if "eval/reward/total" in row]
    assert rewards[-1] > 1.3 * rewards[0], "of 96 sounds from the same latents"
    shown = read_samples(run)[ITERATIONS]
    assert all((step_folder(run, ITERATIONS) / str(sample["sound"])).stat().st_size > 3000 for sample in shown)
