"""RL by the gradient of rewards on several ranks, against the same run in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from sfumato.config.load import merge
from tests.dist.test_tasks import PLAIN, STEPS, assert_equal_runs, run_rank
from tests.tiny import run_task_here
from tests.unit.test_reward_gradients import direct_config

LORA = {"model": {"lora": {"rank": 4, "alpha": 8}}}
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp2 through 3 steps, with a reference": ({}, {"algorithm": {"steps": {"k": 3}, "kl_coef": 0.5}}),
    "ddp with adapters and a reference": (
        {"data_parallel_mode": "ddp"},
        {"algorithm": {"steps": {"k": 2}, "kl_coef": 0.5}, "rollout": {"num_prompts": 3}, "eval": {"num_prompts": 2}}
        | LORA,
    ),
    "fsdp2 recomputed, with adapters": (
        {"activation_checkpointing": "full", "init_device": "meta"},
        {"algorithm": {"recipe": "align_prop", "steps": {"max_k": 4}}} | LORA,
    ),
    "fsdp2 with two backward passes of each sample": (
        {},
        {
            "algorithm": {"recipe": "srpo", "control_words": ["light", "dark"], "kl_coef": 0.5},
            "reward": {"rewards": [{"type": "tests.unit.test_reward_gradients:Light"}]},
        },
    ),
    "fsdp2 with gathered weights": (
        {"enable_reshard_after_forward": False, "enable_reduce_every_micro_batch": True},
        {"algorithm": {"steps": {"k": 2}}},
    ),
}
ROUNDING = {"kl/reference": 1e-9, "eval/reward/std": 1e-5}
"""The second since a pixel of a picture may be rounded to its other neighbour of 256 levels."""


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.slow if number > 0 else ()) for number, mode in enumerate(MODES)]
)
def test_ranks_equal_one_process(mode: str, ranks: Any, tmp_path: Path) -> None:
    train, settings = MODES[mode]
    config = direct_config(
        tmp_path, train={"max_steps": STEPS, "micro_batch_size": 1, **train}, eval={"every_steps": 2}
    )
    config = merge(config, settings)
    many = {"train": {"output_dir": str(tmp_path / "many")}}
    ranks.run(2, functools.partial(run_rank, "rl_diffusion_direct"), merge(config, many))
    one = merge(merge(config, {"train": PLAIN}), {"train": {"output_dir": str(tmp_path / "one")}})
    assert_equal_runs(run_task_here("rl_diffusion_direct", one), tmp_path / "many", 2e-5, ROUNDING)
