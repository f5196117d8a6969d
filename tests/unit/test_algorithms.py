"""Noise levels, flow matching and keyed noise, against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from sfumato.algorithms.flow_matching import add_noise, draw_sigma, flow_matching_loss, shift_sigma
from sfumato.algorithms.noise import keyed_normal, keyed_permutation, keyed_uniform


def test_logit_normal_noise_levels_have_the_density_of_sd3() -> None:
    uniform = torch.linspace(0, 1, 200_001, dtype=torch.float64)[:-1]
    sigma = draw_sigma(uniform, "logit_normal", 0.5, 0.8, 1.0).double()
    logits = torch.logit(sigma[1000:-1000])
    normal = torch.special.ndtri(uniform[1000:-1000]) * 0.8 + 0.5
    assert torch.allclose(logits, normal, atol=1e-3)
    assert torch.equal(draw_sigma(uniform, "uniform", 0, 1, 1.0), uniform.float())
    assert torch.isfinite(draw_sigma(torch.tensor([0.0, 1.0], dtype=torch.float64), "logit_normal", 0, 1, 3.0)).all()
    with pytest.raises(ValueError, match="unknown density"):
        draw_sigma(uniform, "cosmap", 0, 1, 1.0)


def test_the_shift_is_that_of_the_diffusers_scheduler() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    sigma = torch.linspace(0.1, 1, 10, dtype=torch.float64)
    shifted = FlowMatchEulerDiscreteScheduler(num_train_timesteps=10, shift=3.0).sigmas.double().flip(0)
    assert torch.allclose(shift_sigma(sigma, 3.0), shifted, atol=1e-6)


def test_the_flow_matching_target_is_noise_minus_data() -> None:
    latents, noise = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 4, 4)
    sigma = torch.tensor([0.0, 0.25, 1.0])
    noisy = add_noise(latents, noise, sigma)
    assert torch.equal(noisy[0], latents[0]) and torch.equal(noisy[2], noise[2])
    assert torch.allclose(noisy[1], 0.75 * latents[1] + 0.25 * noise[1])
    assert flow_matching_loss(noise - latents, latents, noise).tolist() == [0, 0, 0]
    off = flow_matching_loss(noise - latents + torch.tensor([1.0, 2, 3]).reshape(3, 1, 1, 1), latents, noise)
    assert off.tolist() == pytest.approx([1, 4, 9], rel=1e-5)


@pytest.mark.parametrize("frames", [(), (3,)])
def test_a_weighted_loss_is_the_mean_over_the_weights(frames: tuple[int, ...]) -> None:
    latents, noise = torch.randn(2, 2, *frames, 4, 4), torch.randn(2, 2, *frames, 4, 4)
    velocity = noise - latents
    velocity[..., :2] += 3.0  # the left half is off by 3
    everywhere = torch.ones(2, 4, 4)
    left, right = everywhere.clone(), everywhere.clone()
    left[..., 2:] = 0
    right[..., :2] = 0
    mixed = torch.stack([left[0], right[0] + 0.5 * left[0]])
    for weights, expected in ((left, [9, 9]), (right, [0, 0]), (everywhere, [4.5, 4.5]), (mixed, [9, 3])):
        assert flow_matching_loss(velocity, latents, noise, weights).tolist() == pytest.approx(expected, abs=1e-5)
    plain = flow_matching_loss(velocity, latents, noise)
    torch.testing.assert_close(flow_matching_loss(velocity, latents, noise, 0.3 * everywhere), plain)


def test_keyed_noise_depends_on_every_part_of_its_key_and_on_nothing_else() -> None:
    base = keyed_normal((4, 4), 1, "latent", 2, [3, 4])
    torch.manual_seed(99)
    assert torch.equal(base, keyed_normal((4, 4), 1, "latent", 2, [3, 4]))
    assert torch.equal(base[1:], keyed_normal((4, 4), 1, "latent", 2, [4]))
    others = [
        keyed_normal((4, 4), 2, "latent", 2, [3, 4]),
        keyed_normal((4, 4), 1, "noise", 2, [3, 4]),
        keyed_normal((4, 4), 1, "latent", 3, [3, 4]),
        keyed_normal((4, 4), 1, "latent", 2, [4, 3]),
    ]
    assert not any(torch.equal(base, other) for other in others)


def test_keyed_noise_is_standard_normal_and_uncorrelated_between_samples() -> None:
    noise = keyed_normal((4, 16, 16), 0, "latent", 0, range(200)).flatten(1)
    assert abs(float(noise.mean())) < 0.01 and abs(float(noise.std()) - 1) < 0.01
    correlation = torch.corrcoef(noise) - torch.eye(200)
    assert float(correlation.abs().max()) < 6 / math.sqrt(noise.shape[1])
    uniform = keyed_uniform(0, "sigma", 0, range(4000))
    assert abs(float(uniform.mean()) - 0.5) < 0.02 and float(uniform.min()) >= 0 and float(uniform.max()) < 1


def test_keyed_permutations_differ_by_epoch() -> None:
    first, second = keyed_permutation(100, 0, "order", 0), keyed_permutation(100, 0, "order", 1)
    assert sorted(first.tolist()) == list(range(100))
    assert not torch.equal(first, second)
