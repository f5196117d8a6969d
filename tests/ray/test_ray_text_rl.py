"""RL of language models with its roles on Ray: the results of one process."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from sfumato.config.load import merge
from sfumato.rollout.debug.dumps import dump_path, read_dump
from sfumato.tracking.json_lines import read_jsonl
from tests.dist.test_rl_text_ranks import ROUNDING, config_with_maker
from tests.dist.test_tasks import LAST_BITS, STEPS, assert_equal_runs
from tests.many_ends import N, partial_config
from tests.ray.test_ray_runs import APART, ONE_STEP_OFF, RAY
from tests.resumed import assert_same_run
from tests.role_runs import RoleRun
from tests.tiny import run_task_here, run_task_process, tiny_text_rl_config, write_config
from tests.tiny_vision_rl import tiny_vision_rl_config

pytestmark = pytest.mark.slow
MORE_GROUPS = {
    "rollout": {"n": 2, "max_extra_groups": 8},
    "reward": {"rewards": [{"type": "tests.text_rewards:FirstIsAscii"}]},
}


def on_ray(tmp_path: Path, name: str, *overrides: dict[str, Any]) -> Path:
    config = tiny_text_rl_config(tmp_path, train={"output_dir": str(tmp_path / name)})
    for override in overrides:
        config = merge(config, override)
    done = run_task_process("rl_text", write_config(config, tmp_path / f"{name}.yaml"), timeout_s=400)
    assert done.returncode == 0, done.output
    return done.output_dir


@pytest.mark.parametrize("more", [{}, MORE_GROUPS], ids=["groups as planned", "dynamic sampling"])
def test_pools_of_their_own_give_the_results_of_one_process(more: dict[str, Any], tmp_path: Path) -> None:
    ray = on_ray(tmp_path, "ray", APART, more)
    one = run_task_here("rl_text", merge(tiny_text_rl_config(tmp_path), more))
    assert_same_run(ray, one)


def test_prompts_with_images_give_the_results_of_one_process(tmp_path: Path) -> None:
    config = merge(tiny_vision_rl_config(tmp_path, train={"output_dir": str(tmp_path / "ray")}), APART)
    done = run_task_process("rl_text", write_config(config, tmp_path / "ray.yaml"), timeout_s=400)
    assert done.returncode == 0, done.output
    one = run_task_here("rl_text", tiny_vision_rl_config(tmp_path))
    assert_same_run(done.output_dir, one)


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


def partial_on_ray(tmp_path: Path, name: str, *overrides: dict[str, Any]) -> Path:
    config = partial_config(tmp_path, train={"output_dir": str(tmp_path / name)})
    for override in (APART, *overrides):
        config = merge(config, override)
    done = run_task_process("rl_text", write_config(config, tmp_path / f"{name}.yaml"), timeout_s=400)
    assert done.returncode == 0, done.output
    return done.output_dir


@pytest.mark.parametrize("more", [{}, ONE_STEP_OFF], ids=["synchronous", "one-step-off"])
def test_answers_go_on_in_a_pool_of_samplers_as_in_one_process(more: dict[str, Any], tmp_path: Path) -> None:
    ray = partial_on_ray(tmp_path, "ray", more)
    one = run_task_here("rl_text", merge(partial_config(tmp_path), more))
    assert_same_run(ray, one)
    lines = [line for line in read_jsonl(ray / "metrics.jsonl") if "staleness/max" in line]
    oldest = [line["staleness/max"] for line in lines]
    assert max(oldest) == 2 if more else 1 <= max(oldest) <= 2, oldest


@pytest.mark.parametrize("hybrid", [True, False], ids=["colocated", "three samplers"])
def test_answers_go_on_in_several_processes_as_in_one(hybrid: bool, tmp_path: Path) -> None:
    quarter = {"cpus": 0.25}
    pools = {"actor": {"processes": 2, **quarter}, "scorer": quarter}
    pools |= {} if hybrid else {"sampler": {"processes": 3, **quarter}}
    train = {"max_steps": STEPS, "eps": 1e-4, "data_parallel_mode": "ddp"}
    config = partial_config(tmp_path, train={**train, "output_dir": str(tmp_path / "ray")})
    where = {
        "runtime": {"backend": "ray", "object_store_gb": 0.5, "pools": pools},
        "rollout": {"hybrid_engine": hybrid},
    }
    done = run_task_process("rl_text", write_config(merge(config, where), tmp_path / "ray.yaml"), timeout_s=400)
    assert done.returncode == 0, done.output
    one = run_task_here("rl_text", merge(config, {"train": {"output_dir": str(tmp_path / "one")}}))
    assert_equal_runs(one, done.output_dir, 1e-5, LAST_BITS | ROUNDING)


def test_answers_go_on_under_new_weights_fully_asynchronously_within_the_bound(tmp_path: Path) -> None:
    """Also when what was going on has to be taken up from a checkpoint."""
    ahead = {"rollout": {"async_strategy": "fully-async", "max_staleness": 4, "dump": True}}
    ahead |= {"train": {"max_steps": 8, "save_steps": 1}}
    folder = partial_on_ray(tmp_path, "ray", ahead)
    resumed = partial_on_ray(tmp_path, "ray", ahead, {"train": {"max_steps": 12, "load_checkpoint_path": "auto"}})
    assert resumed == folder
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if "staleness/max" in line]
    assert len(lines) == 12 and 1 <= max(line["staleness/max"] for line in lines) <= 4
    mixed, prompts = 0, []
    for step in range(1, 13):
        rollout = read_dump(dump_path(folder, step)).rollout
        prompts += [request.prompt_id for request in rollout.requests[::N]]
        for (sequence,) in rollout.sequences:
            versions = sequence.versions[sequence.drawn]
            assert (np.diff(versions) >= 0).all() and 0 <= step - 1 - versions.min() <= 4
            mixed += len(set(versions)) > 1
    assert mixed > 0  # answers of several versions of the weights
    assert len(set(prompts)) == len(prompts)  # none is learned from twice before all others


@pytest.mark.parametrize("more", [{}, ONE_STEP_OFF], ids=["synchronous", "one-step-off"])
def test_a_sampler_that_is_killed_loses_nothing_that_was_under_way(more: dict[str, Any], tmp_path: Path) -> None:
    config = merge(partial_config(tmp_path, train={"max_steps": 10, "output_dir": str(tmp_path / "ray")}), more)
    path = write_config(merge(config, merge(APART, more)), tmp_path / "ray.yaml")
    with RoleRun(path, script="tasks/rl_text.py") as run:
        for step in (2, 5):
            run.wait_for_step(step)
            assert run.signal("sampler", signal.SIGKILL)
        assert run.wait(400) == 0, run.output
        assert "role sampler: its processes are replaced (2 of 3)" in run.output
    one = run_task_here("rl_text", merge(config, {"train": {"output_dir": str(tmp_path / "one")}}))
    assert_same_run(run.folder, one)


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
