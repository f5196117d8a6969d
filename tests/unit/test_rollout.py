"""Rollout and replay: one function, whatever the batch."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sfumato.algorithms.dynamics import CPS, FlowSDE
from sfumato.config.sections import ModelConfig
from sfumato.errors import SelfCheckError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.rollout.diffusion.self_check import Replay, largest_of_steps
from sfumato.rollout.diffusion.trajectories import Trajectories, replay_trajectories, sample_trajectories
from tests.rows import ROUNDING

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart" / "tiny_sd3.yaml"
PROMPTS = [f'write "A{letter}C"' for letter in "ABCDEFGHIJKLMNOP"]


@pytest.fixture(scope="module")
def model() -> DiffusionModel:
    """The quickstart's model with random weights everywhere."""
    built = build_diffusion_model(ModelConfig(config_path=str(QUICKSTART), max_sequence_length=7))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in built.denoiser.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    built.denoiser.eval()
    return built


def roll_out(model: DiffusionModel, ids: list[int], **changes: object) -> tuple[torch.Tensor, Trajectories]:
    settings = {
        "dynamics": FlowSDE(0.7),
        "trained_steps": [1, 2, 3],
        "size": (32, 32),
        "num_steps": 8,
        "guidance_scale": 1.0,
        "seed": 1,
        "iteration": 4,
        **changes,
    }
    return sample_trajectories(model, model.encode_prompts([PROMPTS[index] for index in ids]), ids, **settings)


@pytest.mark.exact
@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
@pytest.mark.parametrize("dynamics", [FlowSDE(0.7), CPS(0.8)], ids=["sde", "cps"])
def test_replay_before_any_update_gives_log_ratios_of_exactly_zero(
    model: DiffusionModel, dynamics: object, guidance_scale: float
) -> None:
    steps = list(range(7))
    _, sampled = roll_out(model, list(range(16)), dynamics=dynamics, guidance_scale=guidance_scale, trained_steps=steps)
    new = replay_trajectories(model, sampled, model.encode_prompts(PROMPTS), dynamics, guidance_scale)
    log_ratio = new.log_ratio(sampled.means.flatten(0, 1), sampled.next_latents.flatten(0, 1))
    assert new.mean.requires_grad
    assert log_ratio.abs().max() <= ROUNDING, f"largest {float(log_ratio.abs().max()):.1e}"
    log_probs = new.log_prob(sampled.next_latents.flatten(0, 1))
    torch.testing.assert_close(log_probs, sampled.log_probs.flatten(), atol=ROUNDING, rtol=ROUNDING)


@functools.cache
def rolled_out_together(model: DiffusionModel) -> tuple[torch.Tensor, Trajectories]:
    return roll_out(model, list(range(16)))


@pytest.mark.exact
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 6, 8])
def test_a_sample_is_the_same_in_every_micro_batch(model: DiffusionModel, micro_batch_size: int) -> None:
    latents, sampled = rolled_out_together(model)
    ids = list(range(16))
    parts = [roll_out(model, ids[start : start + micro_batch_size]) for start in range(0, 16, micro_batch_size)]
    joined = torch.cat([part for part, _ in parts])
    # the convolution of the patch embedding takes another kernel for a batch of one picture
    tolerance = 1e-4 if micro_batch_size == 1 or ROUNDING else 0.0
    torch.testing.assert_close(joined, latents, atol=tolerance, rtol=0)
    torch.testing.assert_close(
        Trajectories.cat([part for _, part in parts]).means, sampled.means, atol=tolerance, rtol=0
    )


def test_noise_belongs_to_seed_iteration_and_sample(model: DiffusionModel) -> None:
    base, _ = roll_out(model, [3, 5, 7, 9])
    again, _ = roll_out(model, [3, 5, 7, 9])
    assert torch.equal(base, again)
    for change in ({"seed": 2}, {"iteration": 5}):
        other, _ = roll_out(model, [3, 5, 7, 9], **change)
        assert (other - base).abs().amin(dim=(1, 2, 3)).max() >= 0
        assert not torch.allclose(other, base)


def test_shared_initial_latents_still_differ_by_the_noise_of_the_step(model: DiffusionModel) -> None:
    conditioning = model.encode_prompts([PROMPTS[0]] * 4)
    settings = {
        "size": (32, 32),
        "num_steps": 8,
        "guidance_scale": 1.0,
        "seed": 1,
        "iteration": 0,
        "latent_ids": [9] * 4,
    }
    final, sampled = sample_trajectories(
        model, conditioning, [0, 1, 2, 3], dynamics=FlowSDE(0.7), trained_steps=[0, 1], **settings
    )
    assert torch.equal(sampled.latents[0, 0], sampled.latents[3, 0])
    assert not torch.allclose(final[0], final[3])


def test_steps_outside_the_window_are_deterministic(model: DiffusionModel) -> None:
    _, sampled = roll_out(model, list(range(4)), trained_steps=[2, 3])
    assert sampled.latents.shape == (4, 2, 4, 8, 8)
    ode, nothing = roll_out(model, list(range(4)), trained_steps=[])
    assert nothing is None
    assert torch.equal(ode, roll_out(model, list(range(4)), trained_steps=[], dynamics=CPS(0.5))[0])


def test_the_self_check_names_the_step_and_the_dtype() -> None:
    def check(log_ratio: torch.Tensor, steps: list[int], bound: float | None) -> float:
        replay = Replay.from_errors(largest_of_steps(log_ratio, steps), None, steps, torch.float32)
        return replace(replay, bound=bound).check()

    log_ratio = torch.tensor([[0.0, 1e-6, 0.0], [0.0, -3e-4, 1e-6]]).flatten()
    assert check(log_ratio, [4, 5, 6], None) == pytest.approx(3e-4)
    assert check(torch.zeros(6), [4, 5, 6], 1e-5) == 0
    with pytest.raises(SelfCheckError, match=r"denoising step 5 .*3\.00e-04.*1\.00e-05.*float32"):
        check(log_ratio, [4, 5, 6], 1e-5)
    with pytest.raises(SelfCheckError, match=r"by a log-ratio of 1\.00e-09 \(allowed: 0\.00e\+00"):
        check(torch.tensor([0.0, 1e-9]), [4, 5], 0.0)
    with pytest.raises(SelfCheckError):
        check(torch.full((3,), float("nan")), [0, 1, 2], 1e-5)
