"""Every recipe of diffusion RL runs: two iterations of the real task on a tiny model, then its adapter in diffusers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from sfumato.config.recipes import DIFFUSION_RECIPES
from sfumato.parallel.shards import trainable_parameters
from sfumato.tracking.run import Run
from sfumato.tracking.trackers import read_jsonl
from tests.tiny import ROOT, load_task, run_task_here, tiny_rl_config, write_tiny_pipeline

STEPS = 11
"""Denoising steps: DanceGRPO trains nine of them, and never the last."""
UNUSED = "transformer_blocks.1.attn.add_q_proj"
"""Has no effect: after the last block of SD3 the text is not looked at."""


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pipeline(tmp_path_factory.mktemp("recipes") / "pipeline")


@pytest.fixture(scope="module")
def diffusers_pipeline(pipeline: Path) -> StableDiffusion3Pipeline:
    return StableDiffusion3Pipeline.from_pretrained(pipeline)


def config_of(recipe: str, pipeline: Path, folder: Path) -> dict[str, Any]:
    """One update in each iteration, so that the policy is always the one that sampled."""
    config = tiny_rl_config(
        folder,
        model={"model_path": str(pipeline), "lora": {"rank": 4, "alpha": 8}},
        rollout={"num_prompts": 2, "micro_batch_size": 4, "num_inference_steps": STEPS},
        train={"max_steps": 2, "global_batch_size": None},
        eval={"every_steps": 2, "num_prompts": 1, "num_inference_steps": 1},
    )
    return {**config, "algorithm": {"recipe": recipe}}


@pytest.mark.parametrize("recipe", DIFFUSION_RECIPES)
def test_two_iterations(
    recipe: str,
    pipeline: Path,
    diffusers_pipeline: StableDiffusion3Pipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Run, "write_report", lambda run: None)  # its curves would take most of the time
    (tmp_path / "pipeline").symlink_to(pipeline)
    config = config_of(recipe, pipeline, tmp_path)
    task, seen = load_task("rl_diffusion"), {}
    build, update = task.build_actor, task.update_policy

    def build_watched(*arguments: Any) -> Any:
        actor = build(*arguments)
        seen["actor"] = actor
        seen["before"] = {name: each.detach().clone() for name, each in actor.model.denoiser.named_parameters()}
        return actor

    def update_watched(actor: Any, *arguments: Any) -> Any:
        reached: set[str] = set()
        trained = trainable_parameters(actor.model.denoiser)
        hooks = [
            each.register_post_accumulate_grad_hook(lambda _, name=name: reached.add(name))
            for name, each in trained.items()
        ]
        metrics = update(actor, *arguments)
        assert reached == trained.keys()
        for each in hooks:
            each.remove()
        return metrics

    task.build_actor, task.update_policy = build_watched, update_watched
    run = run_task_here(task, config)

    lines = read_jsonl(run / "metrics.jsonl")[1:]
    assert [line["updates"] for line in lines] == [1, 1]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values()), line
        assert line["rows"] > 0 and line["grad_norm"] > 0
        if "ratio/mean" in line:
            assert (line["ratio/mean"], line["ratio/approx_kl"]) == (1, 0)
        assert line.get("ratio/replay_error", 0) == 0

    parameters = dict(seen["actor"].model.denoiser.named_parameters())
    changed = {name for name, each in parameters.items() if not torch.equal(each, seen["before"][name])}
    trained = {name for name, each in parameters.items() if each.requires_grad}
    assert changed == {name for name in trained if UNUSED not in name}
    assert all(each.grad is None for name, each in parameters.items() if name not in trained)
    diffusers_pipeline.load_lora_weights(run / "hf_ckpt")
    found = {name for name, _ in diffusers_pipeline.transformer.named_parameters() if "lora" in name}
    diffusers_pipeline.unload_lora_weights()
    assert len(found) == len(trained)


def test_a_reference_that_is_renewed(pipeline: Path, tmp_path: Path) -> None:
    (tmp_path / "pipeline").symlink_to(pipeline)
    config = config_of("flow_grpo", pipeline, tmp_path)
    config["algorithm"]["reference"] = {"type": "refresh", "every": 2}
    config["train"]["max_steps"] = 4
    lines = read_jsonl(run_task_here("rl_diffusion", config) / "metrics.jsonl")[1:]
    assert [line["kl/reference"] > 0 for line in lines] == [False, True, False, True]


def test_advantages_that_look_at_every_reward(pipeline: Path, tmp_path: Path) -> None:
    (tmp_path / "pipeline").symlink_to(pipeline)
    config = config_of("diffusion_nft", pipeline, tmp_path)
    config["algorithm"]["advantage"] = {"type": "gdpo"}
    watched = {"type": "jpeg_incompressibility", "evaluation_only": True}
    config["reward"] = {"rewards": [{"type": "brightness"}, {"type": "jpeg_compressibility", "weight": 0.5}, watched]}
    config["train"]["max_steps"] = 1
    line = read_jsonl(run_task_here("rl_diffusion", config) / "metrics.jsonl")[1]
    assert line["advantage/abs_mean"] > 0 and math.isfinite(line["loss/policy"])


def test_the_documentation_names_every_recipe_and_metric() -> None:
    text = (ROOT / "docs" / "rl_diffusion.md").read_text(encoding="utf-8")
    assert [name for name in DIFFUSION_RECIPES if f"| `{name}` |" not in text] == []
    sources = [each.read_text(encoding="utf-8") for each in (ROOT / "sfumato" / "algorithms").rglob("*.py")]
    logged = {
        name
        for source in [*sources, (ROOT / "tasks" / "rl_diffusion.py").read_text()]
        for name in re.findall(r'"([a-z]+/[a-z_]+)"', source)
    }
    assert len(logged) > 15 and {name for name in logged if f"`{name}`" not in text and "eval" not in name} == set()


def test_kinds_are_shown_by_what_is_logged(pipeline: Path, tmp_path: Path) -> None:
    (tmp_path / "pipeline").symlink_to(pipeline)
    config = config_of("diffusion_nft", pipeline, tmp_path)
    config["train"]["max_steps"] = 1
    line = read_jsonl(run_task_here("rl_diffusion", config) / "metrics.jsonl")[1]
    assert "nft/old_distance" in line and "kl/reference" in line and "ratio/replay_error" not in line
    assert line["rows"] == 8 * 9, "samples x noise levels"
