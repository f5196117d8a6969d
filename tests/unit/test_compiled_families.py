"""Blocks that torch.compile has compiled: the same rollout, and replay still equals rollout, for every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sfumato.algorithms.dynamics import FlowSDE
from sfumato.algorithms.objectives import ClippedRatio
from sfumato.config.sections import ModelConfig, TrainConfig
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.diffusion.self_check import Replay, largest_of_steps
from sfumato.rollout.diffusion.trajectories import Trajectories, replay_trajectories, sample_trajectories
from tests import tiny_families
from tests.tiny import DEVICE, MESH_DEVICE

ALONE = Mesh(Layout(), MESH_DEVICE)
TRAINED = [0, 2]

FAMILIES: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "sd3": (tiny_families.tiny_sd3, 7),
    "flux": (tiny_families.tiny_flux, 7),
    "qwen_image": (tiny_families.tiny_qwen_image, 24),
    "z_image": (tiny_families.tiny_z_image, 40),
    "wan": (tiny_families.tiny_wan, 7),
    "wan_pair": (tiny_families.tiny_wan_pair, 7),
    "stable_diffusion_xl": (tiny_families.tiny_stable_diffusion_xl, 7),
}


def build(folder: Path, family: str, compiled: bool) -> DiffusionModel:
    describe, tokens = FAMILIES[family]
    (folder / "tiny.yaml").write_text(yaml.safe_dump(describe()))
    described = ModelConfig(config_path=str(folder / "tiny.yaml"), max_sequence_length=tokens)
    model = build_diffusion_model(described, DEVICE)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.denoiser.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.denoiser.eval()
    model.parallelize(ALONE, TrainConfig(output_dir=str(folder), compile=compiled))
    return model


def rollout(model: DiffusionModel) -> Trajectories:
    _, sampled = sample_trajectories(
        model,
        model.encode_prompts(["write a", "write b", "write c", "write d"]),
        [0, 1, 2, 3],
        dynamics=FlowSDE(0.7),
        trained_steps=TRAINED,
        size=(16, 16),
        num_steps=4,
        guidance_scale=3.0,
        seed=0,
        iteration=0,
    )
    return sampled


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_blocks_sample_and_replay_as_plain_ones(family: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    plain, model = build(tmp_path, family, compiled=False), build(tmp_path, family, compiled=True)
    expected, sampled = rollout(plain), rollout(model)
    torch.testing.assert_close(sampled.next_latents, expected.next_latents, atol=1e-5, rtol=1e-5)

    objective = ClippedRatio(clip_range=1e-3)
    conditioning = model.encode_prompts(["write a", "write b"])
    part = sampled.rows(torch.arange(2))  # two samples of two steps: the rollout's four rows
    new = replay_trajectories(model, part, conditioning, FlowSDE(0.7), 3.0)
    log_ratio = objective.ratio(new, part.sampled_steps()).log_ratio
    replay = Replay.from_errors(largest_of_steps(log_ratio, TRAINED), None, TRAINED, torch.float32)
    replace(replay, bound=objective.replay_tolerance).check()
    log_ratio.sum().backward()
    with_gradient = [
        parameter for parameter in model.denoiser.parameters() if parameter.grad is not None and parameter.grad.any()
    ]
    assert len(with_gradient) > 5
