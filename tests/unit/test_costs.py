"""Counted operations of an RL iteration against those that torch counts while it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sfumato.config.diffusion_rl import TrajectoryRLConfig
from sfumato.config.load import load_config
from sfumato.config.tasks import schema_of
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.policies import Policies
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.diffusion.final_samples import predict_noised, sample_final
from sfumato.rollout.diffusion.policy import count_costs
from sfumato.rollout.diffusion.trajectories import replay_trajectories, sample_trajectories
from tests import tiny_families
from tests.tiny import rl_task, tiny_rl_config

STEPS, GUIDANCE = 4, 3.0
TRAJECTORIES = {"recipe": "flow_grpo_fast", "window": {"type": "random", "size": 2, "range": [0, 3]}}

CASES: dict[str, tuple[Callable[[], dict[str, Any]], int, dict[str, Any], dict[str, Any]]] = {
    "two branches, a reference": (
        tiny_families.tiny_sd3,
        7,
        {**TRAJECTORIES, "kl": {"type": "gaussian", "coef": 0.1}},
        {},
    ),
    "adapters": (tiny_families.tiny_sd3, 7, TRAJECTORIES, {"lora": {"rank": 4, "alpha": 8}}),
    "guidance as an input": (tiny_families.tiny_flux, 7, TRAJECTORIES, {}),
    "final samples, an old policy": (
        tiny_families.tiny_qwen_image,
        24,
        {"recipe": "diffusion_nft", "timesteps": {"num": 2}},
        {},
    ),
}


def counted(work: Callable[[], Any]) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("case", CASES)
def test_costs_are_what_torch_counts(case: str, tmp_path: Path) -> None:
    describe, tokens, algorithm, more = CASES[case]
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(describe()))
    sections = tiny_rl_config(tmp_path, rollout={"guidance_scale": GUIDANCE, "num_inference_steps": STEPS})
    sections["model"] = {"config_path": str(tmp_path / "tiny.yaml"), "max_sequence_length": tokens, **more}
    schema = schema_of(rl_task(algorithm["recipe"]))
    config = load_config(schema, overrides={**sections, "algorithm": algorithm})
    model = build_diffusion_model(config.model)
    policies = Policies(model, config.algorithm.other_policies)
    policies.parallelize(Mesh(Layout(), torch.device("cpu")), config.train)
    policies.policy_changed()
    costs, sampled = count_costs(SimpleNamespace(model=model), config), None
    assert costs.flops(8, 12.0) == {"generate": 8 * costs.sample, "update": 12 * costs.row}

    conditioning, ids = model.encode_prompts(["write a", "write b"]), [0, 1]
    keys: dict[str, Any] = {"guidance_scale": GUIDANCE, "seed": 0, "iteration": 0}
    rollout = {"size": (16, 16), "num_steps": STEPS, **keys}
    parts = config.algorithm

    def draw() -> None:
        nonlocal sampled
        if isinstance(config, TrajectoryRLConfig):
            settings = {"dynamics": parts.dynamics, "trained_steps": [0, 1]}
            _, sampled = sample_trajectories(model, conditioning, ids, **settings, **rollout)
        else:
            settings = {"solver": parts.solver, "timesteps": parts.timesteps, "shared_noise": False}
            sampled = sample_final(model, conditioning, ids, ids, **settings, **rollout)

    def learn() -> None:
        if isinstance(config, TrajectoryRLConfig):
            for policy in parts.compared:
                with torch.no_grad(), policies.active(policy) as other:
                    replay_trajectories(other, sampled, conditioning, parts.dynamics, GUIDANCE)
            replay_trajectories(model, sampled, conditioning, parts.dynamics, GUIDANCE).mean.sum().backward()
        else:
            settings = {"compared": parts.compared, "reference_guidance_scale": None}
            predict_noised(policies, sampled, conditioning, **settings, **keys).velocity.sum().backward()

    assert counted(draw) == len(ids) * costs.sample
    assert counted(learn) == len(ids) * 2 * costs.row


def test_costs_are_known_without_encoders(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_families.tiny_flux_kontext()))
    sections = tiny_rl_config(tmp_path)
    sections["model"] = {"config_path": str(tmp_path / "tiny.yaml"), "max_sequence_length": 7}
    config = load_config(TrajectoryRLConfig, overrides=sections)
    model = build_diffusion_model(config.model)
    before = count_costs(SimpleNamespace(model=model), config)
    assert before.sample > 0
    model.free_encoders()
    assert count_costs(SimpleNamespace(model=model), config) == before
