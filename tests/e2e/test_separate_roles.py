"""A sampler with weights of its own, in process: staleness, corrections, resuming, memory in turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sfumato.config.load import merge
from tests.resumed import assert_same_run
from tests.tiny import load_task, run_task_here, tiny_rl_config, weights_in

STEPS = 5
APART = {"rollout": {"hybrid_engine": False}}


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Runs:
    """Runs of one configuration in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = tiny_rl_config(folder, train={"max_steps": STEPS, "ema_decay": 0.9}, eval={"every_steps": STEPS})
        self.hybrid = self.run("hybrid")
        self.one_step_off = self.run("one", merge(APART, {"rollout": {"async_strategy": "one-step-off"}}))

    def config(self, name: str, overrides: dict[str, Any]) -> dict[str, Any]:
        return merge(merge(self.base, overrides), {"train": {"output_dir": str(self.folder / name)}})

    def run(self, name: str, overrides: dict[str, Any] | None = None, task: Any = "rl_diffusion") -> Path:
        return run_task_here(task, self.config(name, overrides or {}))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("roles"))


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(APART, id="apart"),
        pytest.param(merge(APART, {"runtime": {"offload_idle": True}}), id="apart in turns", marks=pytest.mark.slow),
        pytest.param({"runtime": {"offload_idle": True}}, id="hybrid offloaded", marks=pytest.mark.slow),
    ],
)
def test_without_staleness_results_are_those_of_the_actor_that_samples(
    runs: Runs, overrides: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    other = runs.run(request.node.name, overrides)
    assert_same_run(other, runs.hybrid)


def test_one_step_off_learns_from_the_samples_of_the_policy_before(runs: Runs) -> None:
    hybrid, late = metrics_of(runs.hybrid), metrics_of(runs.one_step_off)
    assert [line["staleness/max"] for line in late[1:]] == [0, 1, 1, 1, 1]
    assert late[1] | {"step": 0} == hybrid[1] | {"step": 0}, "nothing is late in the first iteration"
    assert late[2]["reward/total"] != hybrid[2]["reward/total"]
    assert [line["mismatch/kl"] > 0 for line in late[1:]] == [False, True, True, True, True]
    assert all(line["mismatch/kl"] == 0 and line["mismatch/ess"] == 1 for line in hybrid[1:])


@pytest.mark.slow
def test_fully_async_stays_within_its_bound(runs: Runs) -> None:
    ahead = {"rollout": {"async_strategy": "fully-async", "max_staleness": 2}}
    lines = metrics_of(runs.run("fully", merge(APART, ahead)))[1:]
    assert [line["staleness/max"] for line in lines] == [0, 1, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "off_policy",
    [
        pytest.param({"type": "decoupled"}, id="decoupled"),
        pytest.param({"type": "rejection", "min_ratio": 0.9999, "max_ratio": 1.0001}, id="rejection"),
    ],
)
def test_corrections_apply_where_versions_differ(runs: Runs, off_policy: dict[str, Any]) -> None:
    late = {"rollout": {"async_strategy": "one-step-off"}, "algorithm": {"off_policy": off_policy}}
    plain, corrected = metrics_of(runs.one_step_off), metrics_of(runs.run(off_policy["type"], merge(APART, late)))
    assert corrected[1] == plain[1], "on-policy there is nothing to correct"
    assert corrected[2]["mismatch/kl"] > 0, "of all rows, where plain looks at those before its first optimiser step"
    assert corrected[2]["loss/policy"] != plain[2]["loss/policy"]
    assert (corrected[2]["mismatch/rejected"] > 0) == (off_policy["type"] == "rejection")


@pytest.mark.slow
def test_a_late_run_that_was_killed_goes_on_with_the_samples_of_the_policy_before(runs: Runs) -> None:
    overrides = merge(APART, {"rollout": {"async_strategy": "one-step-off"}, "train": {"save_steps": 1}})
    task = load_task("rl_diffusion")
    update = task.update_policy

    def killed(actor: Any, part: Any, advantages: Any, config: Any, step: int, probe: Any) -> Any:
        if step == 3:
            raise RuntimeError("killed")
        return update(actor, part, advantages, config, step, probe)

    task.update_policy = killed
    with pytest.raises(RuntimeError, match="killed"):
        runs.run("killed", overrides, task)
    resumed = runs.run("killed", merge(overrides, {"train": {"load_checkpoint_path": "auto"}}))
    assert_same_run(resumed, runs.one_step_off)


@pytest.mark.slow
def test_what_the_sampler_is_sent_is_the_policy_that_samples(runs: Runs) -> None:
    base = {key: value for key, value in runs.base.items() if key != "algorithm"}
    settings = {"algorithm": {"recipe": "diffusion_nft", "sample_with": "old"}, "rollout": {"micro_batch_size": 4}}
    folders = []
    for name, overrides in (("old hybrid", {}), ("old apart", APART)):
        config = merge(merge(merge(base, settings), overrides), {"train": {"output_dir": str(runs.folder / name)}})
        folders.append(run_task_here("rl_diffusion_forward", config))
    assert metrics_of(folders[0]) == metrics_of(folders[1])
    assert weights_in(folders[0] / "hf_ckpt") == weights_in(folders[1] / "hf_ckpt")
