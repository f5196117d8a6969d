"""RL of language models with its roles on Ray: the results of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from sfumato.config.load import merge
from sfumato.rollout.dumps import dump_path
from sfumato.tracking.trackers import read_jsonl
from tests.dist.test_rl_text_ranks import config_with_maker
from tests.ray.test_ray_runs import APART, ONE_STEP_OFF, RAY
from tests.tiny import run_task_here, run_task_process, tiny_text_rl_config, weights_in, write_config
from tests.tiny_vision_rl import tiny_vision_rl_config

pytestmark = pytest.mark.slow
MORE_GROUPS = {
    "rollout": {"n": 2, "max_extra_groups": 8},
    "reward": {"rewards": [{"type": "tests.text_rewards:FirstIsAscii"}]},
}


def on_ray(tmp_path: Path, name: str, *overrides: dict[str, Any]) -> Path:
    config = tiny_text_rl_config(tmp_path, train={"output_dir": str(tmp_path / name)})
    for each in overrides:
        config = merge(config, each)
    done = run_task_process("rl_text", write_config(config, tmp_path / f"{name}.yaml"), timeout_s=400)
    assert done.returncode == 0, done.output
    return done.output_dir


@pytest.mark.parametrize("more", [{}, MORE_GROUPS], ids=["groups as planned", "dynamic sampling"])
def test_pools_of_their_own_give_the_results_of_one_process(more: dict[str, Any], tmp_path: Path) -> None:
    ray = on_ray(tmp_path, "ray", APART, more)
    one = run_task_here("rl_text", merge(tiny_text_rl_config(tmp_path), more))
    assert (ray / "metrics.jsonl").read_bytes() == (one / "metrics.jsonl").read_bytes()
    assert weights_in(ray / "hf_ckpt") == weights_in(one / "hf_ckpt")


def test_prompts_with_images_give_the_results_of_one_process(tmp_path: Path) -> None:
    config = merge(tiny_vision_rl_config(tmp_path, train={"output_dir": str(tmp_path / "ray")}), APART)
    done = run_task_process("rl_text", write_config(config, tmp_path / "ray.yaml"), timeout_s=400)
    assert done.returncode == 0, done.output
    one = run_task_here("rl_text", tiny_vision_rl_config(tmp_path))
    assert (done.output_dir / "metrics.jsonl").read_bytes() == (one / "metrics.jsonl").read_bytes()
    assert weights_in(done.output_dir / "hf_ckpt") == weights_in(one / "hf_ckpt")


def test_one_step_off_is_that_of_one_process(tmp_path: Path) -> None:
    ray = on_ray(tmp_path, "ray", RAY, ONE_STEP_OFF)
    one = run_task_here("rl_text", merge(tiny_text_rl_config(tmp_path), ONE_STEP_OFF))
    assert (ray / "metrics.jsonl").read_bytes() == (one / "metrics.jsonl").read_bytes()
    lines = [line for line in read_jsonl(ray / "metrics.jsonl") if "staleness/max" in line]
    assert [line["staleness/max"] for line in lines] == [0.0, 1.0, 1.0, 1.0]
    assert lines[0]["mismatch/log_ratio_max"] < 1e-5 < min(line["mismatch/log_ratio_max"] for line in lines[1:])


def test_fully_asynchronous_within_the_bound(tmp_path: Path) -> None:
    rollout = {"hybrid_engine": False, "async_strategy": "fully-async", "max_staleness": 2, "micro_batch_size": 4}
    folder = on_ray(tmp_path, "ray", RAY, {"rollout": rollout, "train": {"max_steps": 6}})
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if "staleness/max" in line]
    assert len(lines) == 6 and max(line["staleness/max"] for line in lines) <= 2


def test_what_is_drawn_without_learning_is_that_of_one_process(tmp_path: Path) -> None:
    only = {"rollout": {"rollout_only": True}, "train": {"max_steps": 2}}
    ray = on_ray(tmp_path, "ray", APART, only)
    one = run_task_here("rl_text", merge(tiny_text_rl_config(tmp_path), only))
    assert (ray / "metrics.jsonl").read_bytes() == (one / "metrics.jsonl").read_bytes()
    for step in (1, 2):
        assert content(dump_path(ray, step)) == content(dump_path(one, step))


def content(dump: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """Of a file whose metadata safetensors writes in any order."""
    with safe_open(dump, "pt") as file:
        return file.metadata(), {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}  # noqa: SIM118


def test_the_driver_makes_a_model_that_is_missing(tmp_path: Path) -> None:
    path = write_config(merge(config_with_maker(tmp_path), APART), tmp_path / "run.yaml")
    done = run_task_process("rl_text", path, timeout_s=500)
    assert done.returncode == 0, done.output
    assert [line["step"] for line in done.metrics()] == [0, 1]
