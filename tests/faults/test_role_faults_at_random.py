"""SIGKILL of actors, samplers and scorers at random points: each run goes on, with the undisturbed results."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from sfumato.config.load import merge
from sfumato.tracking.json_lines import read_jsonl
from tests.many_ends import partial_config
from tests.role_runs import COLOCATED, ONE_STEP_OFF, SEPARATE, RoleRun, assert_same, role_config, undisturbed
from tests.tiny import run_task_here, tiny_text_rl_config, write_config

KILLS, STEPS_PER_KILL = {"separate": 12, "colocated": 8, "one-step-off": 12}, 4
WHERE = {"separate": SEPARATE, "colocated": COLOCATED, "one-step-off": ONE_STEP_OFF}
TEXT_KILLS, MAX_STALENESS = 10, 2
ASYNCHRONOUS = merge(SEPARATE, {"rollout": {"async_strategy": "fully-async", "max_staleness": MAX_STALENESS}})
TEXT_WHERE = {
    "separate": SEPARATE,
    "one-step-off": ONE_STEP_OFF,
    "one-step-off, partial rollouts": ONE_STEP_OFF,
    "fully asynchronous": ASYNCHRONOUS,
}
PATIENCE_S = 600.0
SECONDS = 1.0
"""A kill comes at most so long after the run has made a step: about two steps."""
SHADE = """
import time
def shade(sample):
    time.sleep(0.01)  # so that scorers are hit at work
    return float(sample.image.mean()) / 255
"""


def disturbed_config(tmp_path: Path, where: dict[str, Any], steps: int) -> dict[str, Any]:
    """A run with a slow reward, whose roles may be replaced often."""
    (tmp_path / "own.py").write_text(SHADE)
    return role_config(
        tmp_path,
        merge(where, {"runtime": {"max_restarts": 20}}),
        reward={"rewards": [{"type": "function", "path": f"{tmp_path}/own.py:shade"}]},
        train={"max_steps": steps},
    )


def kill_one(run: RoleRun, role: str, rng: random.Random) -> str:
    """Kills a process of that role at a random point, and waits until the run has gone on. Returns what it did."""
    before = run.step
    time.sleep(rng.uniform(0, SECONDS))
    size = len(run.output)
    while (hit := run.signal(role, signal.SIGKILL, rng)) is None:
        assert run.driver.poll() is None, run.output
        time.sleep(0.05)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        said = run.output[size:]
        result = re.search(rf"role {role}, rank {hit['rank']}: process {hit['pid']} .*", said)
        if result and run.step > before and run.processes(role):
            break
        assert run.driver.poll() is None, f"it has ended with {run.driver.returncode}:\n{run.output}"
        assert time.monotonic() < deadline, f"the kill of {hit} had no effect:\n{run.output}"
        time.sleep(0.05)
    _, separator, doing = result.group().partition("it had been given ")
    return f"after step {before:3d}  {doing.partition(';')[0] if separator else 'nothing to do'}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list(WHERE))
def test_runs_whose_processes_are_killed_end_as_the_undisturbed_one(name: str, tmp_path: Path) -> None:
    rng = random.Random(name)
    config = disturbed_config(tmp_path, WHERE[name], KILLS[name] * STEPS_PER_KILL)
    roles = ["actor", "sampler", "scorer"] if "sampler" in WHERE[name]["runtime"]["pools"] else ["actor", "scorer"]
    plan = [roles[number % len(roles)] for number in range(KILLS[name])]
    rng.shuffle(plan)
    with RoleRun(write_config(config, tmp_path / "killed.yaml")) as run:
        for number, role in enumerate(plan):
            run.wait_for_step(number)
            print(f"{name:12s} {role:8s} {kill_one(run, role, rng)}", flush=True)
        assert run.wait(300) == 0, run.output
        assert run.left() == {}
    assert_same(run.folder, undisturbed(config, tmp_path / "undisturbed"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list(TEXT_WHERE))
def test_runs_of_language_models_whose_processes_are_killed_go_on(name: str, tmp_path: Path) -> None:
    """To the bits of the undisturbed run, or where what is learned from depends on time, within the staleness."""
    rng = random.Random(name)
    settings = {
        "runtime": {"max_restarts": 20},
        "train": {"max_steps": TEXT_KILLS * STEPS_PER_KILL, "save_steps": 1, "max_checkpoints": 2},
        "eval": {"every_steps": 1000},
    }
    if name.endswith("partial rollouts"):
        config = partial_config(tmp_path, **merge(TEXT_WHERE[name], settings))
    else:
        extra = {} if name == "fully asynchronous" else {"max_extra_groups": 4}
        settings["rollout"] = {"n": 2, "micro_batch_size": 4, **extra}
        settings["reward"] = {"rewards": [{"type": "tests.text_rewards:FirstIsAscii"}]}
        config = tiny_text_rl_config(tmp_path, **merge(TEXT_WHERE[name], settings))
    plan = [["actor", "sampler", "scorer"][number % 3] for number in range(TEXT_KILLS)]
    rng.shuffle(plan)
    with RoleRun(write_config(config, tmp_path / "killed.yaml"), script="tasks/rl_text.py") as run:
        for number, role in enumerate(plan):
            run.wait_for_step(number, PATIENCE_S)
            print(f"{name:12s} {role:8s} {kill_one(run, role, rng)}", flush=True)
        assert run.wait(PATIENCE_S) == 0, run.output
        assert run.left() == {}
    lines = [line for line in read_jsonl(run.folder / "metrics.jsonl") if "staleness/max" in line]
    if name.endswith("partial rollouts"):
        assert min(line["rollout/kept_tokens"] for line in lines) > 0
    if name == "fully asynchronous":
        assert len(lines) == TEXT_KILLS * STEPS_PER_KILL
        assert max(line["staleness/max"] for line in lines) <= MAX_STALENESS
    else:
        plain = {key: value for key, value in config.items() if key != "runtime"}
        train = {"output_dir": str(tmp_path / "undisturbed"), "save_steps": 0}
        assert_same(run.folder, run_task_here("rl_text", merge(plain, {"train": train})))
