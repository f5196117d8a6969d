"""Advantages with gaps, noise levels, keyed noise, windows and clipping, against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sfumato.algorithms.advantages import GroupAdvantage
from sfumato.algorithms.flow_matching import add_noise, draw_sigma, flow_matching_loss, shift_sigma
from sfumato.algorithms.noise import keyed_normal, keyed_permutation, keyed_uniform
from sfumato.algorithms.objectives.clipped_ratio import ClippedRatio
from sfumato.algorithms.windows import AllSteps, RandomWindow

NAN = float("nan")


def compute(rewards: list[float], groups: list[int], **settings: object):
    advantage = GroupAdvantage(**settings)
    return advantage.compute(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))


def test_advantages_are_standardised_within_groups() -> None:
    result = compute([1, 2, 3, 10, 30], [7, 7, 7, 2, 2], clip=100)
    expected = [(value - 2) / (np.std([1, 2, 3]) + 1e-4) for value in (1, 2, 3)]
    expected += [(value - 20) / (10 + 1e-4) for value in (10, 30)]
    assert result.values.tolist() == pytest.approx(expected, rel=1e-6)
    assert not result.no_spread.any() and not result.failed.any()


def test_a_missing_reward_leaves_its_group_and_teaches_nothing() -> None:
    gap = compute([1, NAN, 3, 5, 6], [0, 0, 0, 1, 1])
    without = compute([1, 3, 5, 6], [0, 0, 1, 1])
    assert gap.failed.tolist() == [False, True, False, False, False]
    assert gap.values[1] == 0
    assert torch.equal(gap.values[[0, 2, 3, 4]], without.values)
    assert gap.useful(keep_no_spread=True).tolist() == [True, False, True, True, True]


def test_groups_without_spread_are_marked() -> None:
    result = compute([0.1, 0.1, 0.1, 1, 2, 5, NAN, NAN, NAN], [0, 0, 0, 1, 1, 2, 2, 3, 3])
    assert result.no_spread.tolist() == [True] * 3 + [False] * 2 + [True] * 4
    assert result.values[result.no_spread].tolist() == [0] * 7
    assert result.useful(keep_no_spread=False).tolist() == [False] * 3 + [True] * 2 + [False] * 4
    assert result.metrics["advantage/groups_without_spread"] == 0.75


def test_std_none_global_and_clip() -> None:
    assert compute([1, 3, 5, 9], [0, 0, 1, 1], std="none").values.tolist() == [-1, 1, -2, 2]
    overall = np.std([1, 3, 5, 9]) + 1e-4
    values = compute([1, 3, 5, 9], [0, 0, 1, 1], std="global").values.tolist()
    assert values == pytest.approx([each / overall for each in (-1, 1, -2, 2)])
    assert compute([0] * 99 + [1], [0] * 100, clip=5.0).values.max() == 5.0


def test_rows_follow_an_index_and_shapes_are_checked() -> None:
    result = compute([1, 3, 5, 9], [0, 0, 1, 1], std="none").rows([3, 0])
    assert result.values.tolist() == [2, -1]
    with pytest.raises(ValueError, match=r"\[N\]"):
        GroupAdvantage().compute(torch.zeros(3), torch.zeros(4, dtype=torch.long))


def test_group_ids_are_exact_integers() -> None:
    ids = [2**53, 2**53 + 1]  # equal as float64
    result = compute([0, 1, 5, 9], [ids[0], ids[0], ids[1], ids[1]], std="none")
    assert result.values.tolist() == [-0.5, 0.5, -2, 2]


def test_asymmetric_clipping() -> None:
    loss, stats = ClippedRatio(0.1, 0.3).loss(
        torch.log(torch.tensor([1.5, 1.2, 0.5, 0.5])), torch.tensor([1.0, 1, 1, -1])
    )
    assert loss.tolist() == pytest.approx([-1.3, -1.2, -0.5, 0.9])
    assert float(stats["ratio/clipped_high"]) == 1 and float(stats["ratio/clipped_low"]) == 2


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
    assert not any(torch.equal(base, each) for each in others)


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


def test_windows_refuse_to_reach_the_last_step() -> None:
    RandomWindow(3, (0, 5)).check(6)
    with pytest.raises(ValueError, match="at most 4"):
        RandomWindow(3, (0, 5)).check(5)
    with pytest.raises(ValueError, match="does not fit"):
        RandomWindow(4, (1, 4))
    with pytest.raises(ValueError, match="at least 2"):
        AllSteps().check(1)
