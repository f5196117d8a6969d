"""RL with its roles on Ray: the results of one process, whatever the pools and however long anything takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sfumato.config.load import merge
from tests.tiny import run_task_here, run_task_process, tiny_rl_config, weights_in, write_config

STEPS = 4
RAY = {
    "runtime": {
        "backend": "ray",
        "object_store_gb": 0.5,
        "pools": {"actor": {"cpus": 0.25}, "sampler": {"cpus": 0.25}, "scorer": {"cpus": 0.25}},
    }
}
APART = merge(RAY, {"rollout": {"hybrid_engine": False}})
ONE_STEP_OFF = {"rollout": {"hybrid_engine": False, "async_strategy": "one-step-off"}}


def metrics_of(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


class Runs:
    """Runs of one configuration in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        settings = {"train": {"max_steps": STEPS}, "eval": {"every_steps": STEPS}, "rollout": {"micro_batch_size": 4}}
        self.base = tiny_rl_config(folder, **settings)
        self.done: dict[str, Path] = {}

    def config(self, name: str, overrides: dict[str, Any]) -> dict[str, Any]:
        return merge(merge(self.base, overrides), {"train": {"output_dir": str(self.folder / name)}})

    def here(self, name: str, overrides: dict[str, Any] | None = None) -> Path:
        """In this process; each once."""
        if name not in self.done:
            self.done[name] = run_task_here("rl_diffusion", self.config(name, overrides or {}))
        return self.done[name]

    def apart(self, name: str, overrides: dict[str, Any], **more: Any) -> Path:
        """In processes of its own."""
        path = write_config(self.config(name, overrides), self.folder / f"{name}.yaml")
        result = run_task_process("rl_diffusion", path, timeout_s=500, **more)
        assert result.returncode == 0, result.output
        return result.output_dir


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("ray"))


def assert_same(left: Path, right: Path) -> None:
    """Rewards, losses and weights are equal to the bit."""
    assert (left / "metrics.jsonl").read_bytes() == (right / "metrics.jsonl").read_bytes()
    assert weights_in(left / "hf_ckpt") == weights_in(right / "hf_ckpt")
    samples = [sorted((path / "samples").rglob("*.*")) for path in (left, right)]
    assert [path.read_bytes() for path in samples[0]] == [path.read_bytes() for path in samples[1]]


@pytest.mark.slow  # tests/faults/test_role_faults.py compares such a run in every test run
def test_pools_of_their_own_give_the_results_of_one_process(runs: Runs) -> None:
    ray = runs.apart("sync", APART)
    assert_same(ray, runs.here("process"))
    timings = metrics_of(ray, "timings")[-1]
    assert {"utilisation/actor", "utilisation/sampler", "utilisation/scorer"} <= timings.keys()
    kinds = {(metric["role"], metric["kind"]) for metric in metrics_of(ray, "timeline")}
    wanted = {("sampler", "generate"), ("scorer", "score"), ("actor", "update"), ("actor", "sync"), ("sampler", "sync")}
    assert wanted <= kinds
    assert "What each role did" in (ray / "report.html").read_text()


@pytest.mark.slow
def test_colocated_roles_give_the_results_of_one_process(runs: Runs) -> None:
    pools = {name: pool for name, pool in RAY["runtime"]["pools"].items() if name != "sampler"}
    colocated = {"runtime": {**RAY["runtime"], "pools": pools}}
    assert_same(runs.apart("colocated", colocated), runs.here("process"))


@pytest.mark.slow
def test_one_step_off_does_not_depend_on_how_long_anything_takes(runs: Runs) -> None:
    reference = runs.here("late", ONE_STEP_OFF)
    for seed in range(2):
        slow = {
            "algorithm": {"dynamics": {"type": "tests.slow_parts:SlowSDE", "most_s": 0.2}},
            "reward": {"rewards": [{"type": "tests.slow_parts:SlowBrightness", "name": "brightness", "most_s": 0.5}]},
            "runtime": {"pools": {"scorer": {"processes": 1 + seed}}},
        }
        assert_same(runs.apart(f"late {seed}", merge(merge(APART, ONE_STEP_OFF), slow)), reference)


@pytest.mark.slow
def test_fully_async_never_exceeds_its_bound(runs: Runs) -> None:
    ahead = {"rollout": {"async_strategy": "fully-async", "max_staleness": 2}, "train": {"max_steps": 10}}
    slow = {"algorithm": {"dynamics": {"type": "tests.slow_parts:SlowSDE", "most_s": 0.2}}}
    lines = metrics_of(runs.apart("fully", merge(merge(APART, ahead), slow)))[1:]
    assert max(line["staleness/max"] for line in lines) in (1, 2)
    assert all(line["staleness/mean"] <= line["staleness/max"] for line in lines)


@pytest.mark.slow
def test_two_actors_in_shards_and_two_samplers_in_slices_equal_two_ranks(runs: Runs) -> None:
    """The actor under fsdp2 on two processes, the sampler under tensor parallelism on two others."""
    shards = {"train": {"data_parallel_mode": "fsdp2"}}
    two = runs.apart("torchrun", shards, num_processes=2)
    pools = {
        "actor": {"processes": 2, "cpus": 0.25},
        "sampler": {"processes": 2, "cpus": 0.25, "parallel": {"tensor_parallel_size": 2}},
    }
    ray = runs.apart("sliced", merge(merge(APART, shards), {"runtime": {"pools": pools}}))
    for left, right in zip(metrics_of(two)[1:], metrics_of(ray)[1:], strict=True):  # the first only evaluates
        for name in ("reward/total", "loss/policy", "grad_norm"):
            assert left[name] == pytest.approx(right[name], rel=1e-3, abs=1e-6), (left["step"], name)
    replicas = {"actor": {"processes": 2, "cpus": 0.25}, "sampler": {"processes": 2, "cpus": 0.25}}
    same = runs.apart("same cut", merge(merge(APART, shards), {"runtime": {"pools": replicas}}))
    assert_same(same, two)


@pytest.mark.slow
def test_bytes_through_the_driver_do_not_grow_with_the_resolution(runs: Runs) -> None:
    results = []
    for size in (16, 32):
        sized = {"rollout": {"height": size, "width": size}}
        lines = metrics_of(runs.apart(f"size {size}", merge(APART, sized)), "timings")[2:]
        results.append([sum(line[f"driver_bytes/{role}"] for role in ("actor", "sampler", "scorer")) for line in lines])
    assert results[0] == pytest.approx(results[1], rel=0.01), "but for the lengths of pickled numbers"
