"""What an error of an RL configuration advises is accepted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sfumato.config.base import find_variants
from sfumato.config.diffusion_rl import ForwardRLConfig, TrajectoryRLConfig
from sfumato.config.load import load_config, merge
from sfumato.config.text_rl import TextRLConfig
from sfumato.errors import ConfigError
from sfumato.evaluation.sources import ModelSource, check_task
from tests.tiny import ROOT

FILES = {
    TrajectoryRLConfig: "configs/quickstart/rl.yaml",
    ForwardRLConfig: "configs/rl/diffusion_nft_sd35_ocr.yaml",
    TextRLConfig: "configs/quickstart/text_rl.yaml",
}


def load(schema: Any, overrides: dict[str, Any]) -> Any:
    return load_config(schema, ROOT / FILES[schema], overrides)


def nested(dotted: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in dotted.items():
        *parents, last = name.split(".")
        inner: dict[str, Any] = {last: value}
        for parent in reversed(parents):
            inner = {parent: inner}
        result = merge(result, inner)
    return result


ODE, PART = {"algorithm.dynamics": {"type": "ode"}}, "algorithm.dynamics"
REWARDS = {"algorithm.advantage": {"type": "raw"}}
GROUP = {"algorithm.advantage": {"type": "group"}}
GAE = {"algorithm.token_advantage": {"type": "gae"}}
T, F, X = TrajectoryRLConfig, ForwardRLConfig, TextRLConfig
CASES: list[tuple[Any, dict[str, Any], str, list[dict[str, Any]]]] = [
    (T, {PART: {"type": "sde", "noise_level": 0.0}}, "must be above 0", [{PART: {"type": "sde", "noise_level": 1e-3}}]),
    (
        T,
        {PART: {"type": "cps", "noise_level": 0.0}},
        "above 0 and at most 1",
        [{PART: {"type": "cps", "noise_level": 1.0}}],
    ),
    (
        T,
        {PART: {"type": "dance", "noise_level": 0.0}},
        "must be above 0",
        [{PART: {"type": "dance", "noise_level": 0.1}}],
    ),
    (T, {PART: {"type": "ddim", "eta": 0.0}}, "above 0 and at most 1", [{PART: {"type": "ddim", "eta": 1.0}}]),
    (T, ODE, "use sde or cps", [{PART: {"type": "sde"}}, {PART: {"type": "cps"}}]),
    (
        T,
        {"algorithm.advantage": {"type": "best_worst", "top": 0}},
        "at least 1",
        [{"algorithm.advantage": {"type": "best_worst", "top": 1}}],
    ),
    (T, {"algorithm.reference": {"type": "linear"}}, "remove it", [{}]),
    (
        T,
        {"train.cfg_parallel_size": 2, "rollout.guidance_scale": 1.0},
        "leave it out",
        [{"rollout.guidance_scale": 1.0}],
    ),
    (
        F,
        {"algorithm.objective": {"type": "dpo"}, "algorithm.advantage": {"type": "best"}},
        "use best_worst or group",
        [
            {
                "algorithm.objective": {"type": "dpo"},
                "algorithm.advantage": {"type": "best_worst"},
                "train.micro_batch_size": 2,
            },
            {
                "algorithm.objective": {"type": "dpo"},
                "algorithm.advantage": {"type": "group"},
                "train.micro_batch_size": 24,
            },
        ],
    ),
    (
        F,
        {"algorithm.objective": {"type": "rwr"}, **GROUP},
        "raw or best, or set algorithm.objective.temperature",
        [
            {"algorithm.objective": {"type": "rwr"}, **REWARDS},
            {"algorithm.objective": {"type": "rwr"}, "algorithm.advantage": {"type": "best"}},
            {"algorithm.objective": {"type": "rwr", "temperature": 1.0}, **GROUP},
        ],
    ),
    (F, {"algorithm.old": None}, "algorithm.old is required", [{"algorithm.old": {"type": "constant"}}]),
    (X, GAE, "takes rewards as they are: set algorithm.advantage to raw", [{**GAE, **REWARDS}]),
    (
        X,
        REWARDS,
        "takes advantages of samples: set algorithm.advantage to group or rloo",
        [GROUP, {"algorithm.advantage": {"type": "rloo"}}],
    ),
    (X, {"algorithm.teacher": "x"}, "set kl.coef above 0", [{"algorithm.teacher": "x", "algorithm.kl.coef": 0.1}]),
    (X, {"algorithm.value_clip_range": 0.2}, "remove it", [{}]),
    (
        X,
        {"rollout.n": 1},
        "set rollout.n to 2 or more, or take a recipe that compares none, such as ppo",
        [
            {"rollout.n": 2},
            {"rollout.n": 1, "algorithm.recipe": "ppo"},
        ],
    ),
    (
        X,
        {"rollout.n": 1, "algorithm.recipe": "ppo", "algorithm.drop_no_spread": True},
        "set it to false",
        [{"rollout.n": 1, "algorithm.recipe": "ppo", "algorithm.drop_no_spread": False}],
    ),
    (
        X,
        {"rollout.max_extra_groups": 2, "algorithm.drop_no_spread": False},
        "set one of them back",
        [
            {"rollout.max_extra_groups": 2, "algorithm.drop_no_spread": True},
            {"algorithm.drop_no_spread": False},
        ],
    ),
    (
        X,
        {"algorithm.kl.coef": 0.1, "algorithm.kl.where": "reward"},
        "set advantage to one of these, and drop_no_spread to false",
        [{"algorithm.kl.coef": 0.1, "algorithm.kl.where": "reward", "algorithm.drop_no_spread": False, **GROUP}],
    ),
    (
        X,
        {"rollout.top_p": 0.9, "algorithm.off_policy": {"type": "none"}},
        "leave them out, or correct for it with algorithm.off_policy decoupled or rejection",
        [
            {"rollout.top_p": 0.9, "algorithm.off_policy": {"type": "decoupled"}},
            {"rollout.top_p": 0.9, "algorithm.off_policy": {"type": "rejection"}},
        ],
    ),
    (X, {"critic.lr": 1e-6}, "remove it, or take gae", [{}, {"critic.lr": 1e-6, **GAE, **REWARDS}]),
    (
        X,
        {"rollout.async_strategy": "one-step-off"},
        "set hybrid_engine to false",
        [{"rollout.async_strategy": "one-step-off", "rollout.hybrid_engine": False}],
    ),
    (
        X,
        {"train.expert_bias_rate": 0.001, "rollout.hybrid_engine": False},
        "would choose other experts: set it to 0",
        [{"train.expert_bias_rate": 0.0, "rollout.hybrid_engine": False}, {"train.expert_bias_rate": 0.001}],
    ),
    (
        X,
        {"rollout.partial_rollout": True},
        "set that above num_prompts",
        [{"rollout.partial_rollout": True, "rollout.over_sampling_batch_size": 64}],
    ),
]


@pytest.mark.parametrize(("schema", "wrong", "message", "remedies"), CASES)
def test_every_remedy_is_accepted(schema: Any, wrong: dict[str, Any], message: str, remedies: list[Any]) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load(schema, nested(wrong))
    for remedy in remedies:
        assert load(schema, nested(remedy)), (str(raised.value), remedy)


def test_no_text_of_an_algorithm_advises_a_type_that_another_check_refuses() -> None:
    for package in ("dynamics", "advantages", "objectives", "windows", "solvers"):
        for cls in find_variants(f"sfumato.algorithms.{package}").values():
            assert "use type:" not in Path(__import__(cls.__module__, fromlist=["x"]).__file__).read_text()


def test_whoever_samples_a_reward_model_is_told_a_reward_that_there_is() -> None:
    run: Any = SimpleNamespace(task="train_text_reward", folder="runs/reward")
    with pytest.raises(ConfigError, match="score with the reward ") as raised:
        check_task(ModelSource("run", Path("runs/reward"), "reward", run))
    assert str(raised.value).rpartition(" ")[2] in find_variants("sfumato.rewards")
