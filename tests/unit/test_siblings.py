"""Tasks that share by copying: what is the same in both stays the same."""

from __future__ import annotations

import ast
import re

import pytest

from tests.tiny import ROOT

SHARED = ("main", "build_actor", "build_sampler", "draw_evaluation")
"""Functions that are equal but for the name of the configuration."""
REPLAY = (
    "    probe = roles.actor.call(probe_rows, config).result()\n",
    "    run.add_environment(probe.environment, probe.message)\n",
    ", probe",
)
"""What the loop of the task that replays trajectories has besides, for its self-check."""
CHECK = "        config.algorithm.check_lowest_advantage(float(advantages.values.min()))\n"
"""What the other has besides: some of its objectives weigh errors by advantages."""


def functions(task: str) -> dict[str, str]:
    """Source of each function, with the names of task and configuration taken out."""
    text = (ROOT / "tasks" / f"{task}.py").read_text(encoding="utf-8")
    text = re.sub(r"\b(Trajectory|Forward)RLConfig\b", "Config", text.replace(f'"{task}"', '"TASK"'))
    lines = text.splitlines(keepends=True)
    results = [function for function in ast.parse(text).body if isinstance(function, ast.FunctionDef)]
    return {function.name: "".join(lines[function.lineno - 1 : function.end_lineno]) for function in results}


def in_one_line(text: str) -> str:
    """The same however long arguments break its lines."""
    return " ".join(text.split()).replace("( ", "(").replace(" )", ")")


@pytest.fixture(scope="module")
def siblings() -> tuple[dict[str, str], dict[str, str]]:
    return functions("rl_diffusion"), functions("rl_diffusion_forward")


@pytest.mark.parametrize("name", SHARED)
def test_what_the_rl_tasks_share_is_equal(siblings, name: str) -> None:
    trajectories, forward = siblings
    assert trajectories[name] == forward[name]


def test_the_loops_differ_in_the_probe_of_what_is_replayed_and_a_check_of_advantages(siblings) -> None:
    loop, other = (sibling["train"] for sibling in siblings)
    assert CHECK in other
    other = other.replace(CHECK, "")
    for line in REPLAY:
        assert line in loop
        loop = loop.replace(line, "")
    assert in_one_line(loop) == in_one_line(other)


def test_an_update_ends_alike_whatever_its_loss(siblings) -> None:
    endings = [sibling["update_policy"].split("            loss = micro.mean(losses)\n")[1] for sibling in siblings]
    steps = [ending.split("    actor.end_update(step + 1)\n") for ending in endings]
    replay_check = "        replay.check()  # before anything has been updated\n"
    assert (
        replay_check in steps[0][0]
        and steps[0][0].replace(replay_check, "") == steps[1][0]
        and steps[1][1].replace("metrics()", "metrics(replayed)") in steps[0][1]
    )


def test_nothing_else_has_the_same_name(siblings) -> None:
    trajectories, forward = siblings
    assert trajectories.keys() & forward.keys() - {*SHARED, "train"} == {"generate", "update_policy"}


@pytest.mark.parametrize("task", ["rl_diffusion", "rl_diffusion_forward"])
def test_they_can_be_read_at_a_sitting(task: str) -> None:
    assert len((ROOT / "tasks" / f"{task}.py").read_text(encoding="utf-8").splitlines()) <= 300
    assert {name: count for name, text in functions(task).items() if (count := len(text.splitlines())) > 60} == {}


@pytest.mark.parametrize("task", ["rl_diffusion", "rl_diffusion_forward"])
def test_prompts_are_read_by_the_driver_alone(task: str) -> None:
    assert [name for name, text in functions(task).items() if "load_prompts(" in text] == ["main"]
