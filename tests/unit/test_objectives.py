"""Objectives by what they must do: start neutral, push the right way, mask, and keep apart what must not mix."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from sfumato.algorithms import forward_kl
from sfumato.algorithms.dynamics import CPS, DDIM, DanceSDE, FlowSDE, GaussianStep, WanSDE
from sfumato.algorithms.forward_process.group_losses import CRD, DGPO, DPO
from sfumato.algorithms.forward_process.noised import NoisedSamples, reward_probability
from sfumato.algorithms.forward_process.sample_losses import AWM, NFT, BestOfN, RewardWeighted
from sfumato.algorithms.kl import FlowGRPOKL, GaussianKL, SampleMSE, VelocityMSE
from sfumato.algorithms.objectives import DPPO, ClippedRatio, Guard, Ratio, SampledSteps, clipped_surrogate
from sfumato.config.base import find_variants
from sfumato.config.diffusion_rl import ForwardAlgorithmConfig, TrajectoryAlgorithmConfig
from sfumato.config.recipes import DIFFUSION_RECIPES, TRAJECTORY_RECIPES

SHAPE = (4, 2, 3, 3)
SIGMA, SIGMA_NEXT = torch.tensor([1.0, 0.9, 0.6, 0.3]), torch.tensor([0.9, 0.6, 0.3, 0.1])
DYNAMICS = [FlowSDE(0.7), CPS(0.8), DanceSDE(0.3), WanSDE(), DDIM(0.7)]
TRAJECTORY = [ClippedRatio(0.5), Guard(0.5), DPPO(0.5)]
SAMPLE = [NFT(), AWM(), DPO(beta=5.0), DGPO(), CRD(), RewardWeighted(temperature=1.0), BestOfN()]


def normal(seed: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step_of(dynamics: object, velocity: torch.Tensor) -> GaussianStep:
    return dynamics.step(velocity, normal(1), SIGMA, SIGMA_NEXT, 0.9)


def sampled(dynamics: object, velocity: torch.Tensor, keep_means: bool = True) -> SampledSteps:
    step = step_of(dynamics, velocity)
    drawn = step.draw(normal(2))
    return SampledSteps(drawn, step.log_prob(drawn), SIGMA - SIGMA_NEXT, step.mean if keep_means else None)


def noised(groups: list[int], levels: list[int] | None = None, seed: int = 10) -> NoisedSamples:
    """Random rows; those of one group and level share noise and sigma, as objectives that need it ask for."""
    shape = (len(groups), *SHAPE[1:])
    levels = levels or [0] * len(groups)
    cells = [1000 * group + level for group, level in zip(groups, levels, strict=True)]
    return NoisedSamples(
        x0=normal(seed, shape),
        noise=torch.stack([normal(seed + 1 + cell, SHAPE[1:]) for cell in cells]),
        sigma=torch.tensor([0.2 + 0.3 * level for level in levels]),
        velocity=normal(seed + 2, shape).requires_grad_(True),
        group_ids=torch.tensor(groups),
        levels=torch.tensor(levels),
        old_velocity=normal(seed + 3, shape),
        reference_velocity=normal(seed + 4, shape),
        ema_velocity=normal(seed + 5, shape),
        error_weight=torch.ones(len(groups)),
    )


def named(objective: object) -> str:
    return objective.type


# Steps of trajectories


@pytest.mark.parametrize("dynamics", DYNAMICS, ids=named)
@pytest.mark.parametrize("objective", TRAJECTORY, ids=named)
def test_equal_means_give_a_log_ratio_of_exactly_zero_and_a_gradient(objective: object, dynamics: object) -> None:
    velocity, advantages = normal(3).requires_grad_(True), torch.tensor([1.0, -1.0, 2.0, 0.0])
    old, new = sampled(dynamics, velocity.detach()), step_of(dynamics, velocity)
    loss, stats = objective.loss(objective.ratio(new, old), advantages)
    scale = old.step_sizes if isinstance(objective, Guard) else 1.0
    assert torch.equal(objective.ratio(new, old).log_ratio, torch.zeros(4))
    assert torch.equal(loss * scale, -advantages)
    assert float(stats["ratio/mean"]) == 4 and float(stats["ratio/approx_kl"]) == 0
    loss.sum().backward()
    assert (velocity.grad.flatten(1).norm(dim=1) > 0).tolist() == [True, True, True, False]


@pytest.mark.parametrize("dynamics", DYNAMICS, ids=named)
@pytest.mark.parametrize("objective", TRAJECTORY, ids=named)
def test_descent_makes_good_steps_likelier_and_bad_ones_less_likely(objective: object, dynamics: object) -> None:
    velocity, advantages = normal(3).requires_grad_(True), torch.tensor([1.0, -1.0, 2.0, -0.5])
    old = sampled(dynamics, velocity.detach())
    objective.loss(objective.ratio(step_of(dynamics, velocity), old), advantages)[0].sum().backward()
    moved = step_of(dynamics, velocity.detach() - 1e-4 * velocity.grad)
    assert torch.equal(old.log_ratio(moved).sign(), advantages.sign())


def test_clipping_stops_what_went_far_enough() -> None:
    log_ratio = torch.log(torch.tensor([1.5, 1.2, 0.5, 0.5])).requires_grad_(True)
    loss, stats = clipped_surrogate(log_ratio, torch.tensor([1.0, 1, 1, -1]), 0.1, 0.3)
    assert loss.tolist() == pytest.approx([-1.3, -1.2, -0.5, 0.9])
    assert float(stats["ratio/clipped_high"]) == 1 and float(stats["ratio/clipped_low"]) == 2
    loss.sum().backward()
    assert (log_ratio.grad != 0).tolist() == [False, True, True, False]


def test_asymmetric_ranges_reach_the_surrogate() -> None:
    old, new = sampled(FlowSDE(), normal(3)), step_of(FlowSDE(), normal(4))
    for objective in (ClippedRatio, Guard):
        log_ratio = objective().ratio(new, old).log_ratio
        loss = objective(1e-3, 2e-3).loss(objective().ratio(new, old), torch.ones(4))[0]
        expected = clipped_surrogate(log_ratio, torch.ones(4), 1e-3, 2e-3)[0]
        assert torch.equal(loss, expected / (old.step_sizes if objective is Guard else 1))
        with pytest.raises(ValueError, match="above 0"):
            objective(clip_range=0.0)


def test_log_ratios_without_the_old_means() -> None:
    old, new = sampled(FlowSDE(), normal(3), keep_means=False), step_of(FlowSDE(), normal(4))
    torch.testing.assert_close(old.log_ratio(new), sampled(FlowSDE(), normal(3)).log_ratio(new), atol=1e-5, rtol=1e-4)
    assert torch.equal(ClippedRatio().ratio(new, old).log_ratio, old.log_ratio(new))
    for objective in (Guard(), DPPO()):
        with pytest.raises(ValueError, match="means of the sampled steps"):
            objective.ratio(new, old)


@pytest.mark.parametrize("dynamics", DYNAMICS, ids=named)
def test_guard_recentres_every_dynamics_by_the_whole_density(dynamics: object) -> None:
    """log r = S (log p - log p_old) + d^2 / 2S for Gaussian densities, also where CPS leaves 1 / 2S^2 out."""
    old, new = sampled(dynamics, normal(3)), step_of(dynamics, normal(3) + 0.1 * normal(4))
    gaussian = dataclasses.replace(new, weight=1 / (2 * new.std**2)).log_ratio(old.means, old.next_latents)
    bias = ((new.mean - old.means) ** 2).flatten(1).mean(dim=1) / (2 * new.std)
    torch.testing.assert_close(Guard().ratio(new, old).log_ratio, gaussian * new.std + bias, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("dynamics", DYNAMICS, ids=named)
def test_a_schedule_that_begins_just_below_pure_noise_draws_as_one_that_begins_there(dynamics: Any) -> None:
    """That of Sana begins at 0.9997."""
    just_below, pure = (
        dynamics.step(normal(3), normal(1), torch.full((4,), first), torch.full((4,), 0.964), 0.964)
        for first in (1 - 1 / 3000, 1.0)
    )
    torch.testing.assert_close(just_below.mean, pure.mean, atol=0.05, rtol=0)
    torch.testing.assert_close(just_below.std, pure.std, atol=0.02, rtol=0)


def test_guard_has_no_drift_where_the_plain_ratio_has() -> None:
    rows = (2000, 16)
    step = FlowSDE(0.7).step(
        normal(3, rows), normal(1, rows), *(torch.full((2000,), value) for value in (0.6, 0.5)), 0.9
    )
    drawn = step.draw(normal(2, rows))
    old = SampledSteps(drawn, step.log_prob(drawn), torch.full((2000,), 0.1), step.mean)
    new = dataclasses.replace(step, mean=step.mean + 0.2 * step.std[:, None])
    plain, guarded = ClippedRatio().ratio(new, old).log_ratio, Guard().ratio(new, old).log_ratio
    assert float(plain.mean()) == pytest.approx(-0.02, abs=3e-3)
    assert float(guarded.mean()) == pytest.approx(0.0, abs=3e-3 * float(step.std[0]))


def test_dppo_masks_what_would_go_on_away_from_the_old_policy() -> None:
    old = sampled(FlowSDE(), normal(3))
    start = step_of(FlowSDE(), normal(3))
    towards = old.next_latents - old.means
    mean = (old.means + torch.tensor([0.1, 0.1, -0.1, -0.1]).reshape(-1, 1, 1, 1) * towards).requires_grad_(True)
    new, advantages = dataclasses.replace(start, mean=mean), torch.tensor([1.0, -1.0, 1.0, -1.0])
    kl = (0.1**2 * (towards / start.std.reshape(-1, 1, 1, 1)) ** 2).flatten(1).mean(dim=1) / 2
    ratio = DPPO().ratio(new, old)
    loss, stats = DPPO(kl_threshold=float(kl.min()) / 2).loss(ratio, advantages)
    loss.sum().backward()
    assert (loss != 0).tolist() == [False, True, True, False]
    assert (mean.grad.flatten(1).norm(dim=1) > 0).tolist() == [False, True, True, False]
    assert float(stats["ratio/masked_high"]) == 1 and float(stats["ratio/masked_low"]) == 1
    assert float(stats["kl/old"]) == pytest.approx(float(kl.sum()), rel=1e-4)
    inside, _ = DPPO(kl_threshold=float(kl.max()) * 2).loss(ratio, advantages)
    assert (inside != 0).all()


@pytest.mark.parametrize("objective", TRAJECTORY, ids=named)
def test_tokens_have_the_losses_of_steps_and_those_outside_the_mask_have_none(objective: object) -> None:
    """Decisions of any kind: a log-ratio each, perhaps a divergence, and a mask of those that are learned from."""
    log_probs, drawn = normal(1, (9,)).requires_grad_(True), normal(1, (9,)) + 0.3 * normal(2, (9,))
    mask = torch.tensor([True, True, False, True, False, True, True, True, False])
    kl, advantages = torch.rand(9, generator=torch.Generator().manual_seed(3)) * 2e-5, normal(4, (9,))

    def learned(rows: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        log_ratio = (log_probs - drawn)[rows]
        log_ratio = log_ratio if mask is None else torch.where(mask, log_ratio, torch.nan)
        loss, stats = objective.loss(Ratio(log_ratio, kl[rows]), advantages[rows], mask)
        (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
        return loss.detach(), gradient, {name: float(value) for name, value in stats.items()}

    alone, whole = learned(mask.nonzero().flatten(), None), learned(torch.arange(9), mask)
    assert torch.equal(whole[0][mask], alone[0]) and not whole[0][~mask].any() and alone[0].all()
    assert torch.equal(whole[1][mask], alone[1]) and not whole[1][~mask].any()
    assert whole[2] == pytest.approx(alone[2], rel=1e-6)


def test_dppo_needs_a_divergence() -> None:
    with pytest.raises(ValueError, match="KL divergence"):
        DPPO().loss(Ratio(torch.zeros(2)), torch.ones(2))


@pytest.mark.parametrize("kl", [GaussianKL(), FlowGRPOKL(), VelocityMSE(), SampleMSE()], ids=named)
def test_penalties_of_steps(kl: object) -> None:
    velocity = normal(3).requires_grad_(True)
    new, reference = step_of(FlowSDE(0.7), velocity), step_of(FlowSDE(0.7), normal(4))
    assert torch.equal(kl.penalty(new, step_of(FlowSDE(0.7), velocity)), torch.zeros(4))
    squared = ((new.mean - reference.mean) ** 2).flatten(1).mean(dim=1)
    expected = {
        "gaussian": squared / (2 * new.std**2),
        "flow_grpo": squared / (2 * new.std**2) * (SIGMA - SIGMA_NEXT),
        "velocity_mse": ((velocity - normal(4)) ** 2).flatten(1).mean(dim=1),
        "sample_mse": squared,
    }
    torch.testing.assert_close(kl.penalty(new, reference), expected[kl.type])
    kl.penalty(new, reference).sum().backward()
    assert (velocity.grad.flatten(1).norm(dim=1) > 0).all()


# Final samples


@pytest.mark.parametrize("objective", SAMPLE, ids=named)
def test_only_the_policy_gets_gradients_and_statistics_are_detached(objective: object) -> None:
    batch = noised([0, 0, 1, 1])
    others = {name: getattr(batch, name).requires_grad_(True) for name in ("old_velocity", "reference_velocity")}
    loss, stats = objective.loss(batch, torch.tensor([1.0, -1.0, 0.5, -0.5]))
    assert loss.shape == (4,) and torch.isfinite(loss).all()
    assert all(value.ndim == 0 and not value.requires_grad for value in stats.values())
    loss.sum().backward()
    assert batch.velocity.grad.abs().sum() > 0
    assert all(other.grad is None for other in others.values())


@pytest.mark.parametrize("objective", SAMPLE, ids=named)
def test_descent_moves_towards_good_samples_and_not_towards_bad_ones(objective: object) -> None:
    """From the old policy, which is the reference, one step lowers the error of good rows and not that of bad ones."""
    advantages = torch.tensor([1.0, -1.0, 2.0, -2.0])
    batch = noised([0, 0, 1, 1])
    start = batch.velocity.detach().clone()
    equal = {f"{name}_velocity": start for name in ("old", "reference", "ema")}
    batch = dataclasses.replace(batch, velocity=start.clone().requires_grad_(True), **equal)
    objective.loss(batch, advantages)[0].sum().backward()
    before, after = batch.error(start), batch.error(start - 1e-3 * batch.velocity.grad)
    assert (after[advantages > 0] < before[advantages > 0]).all()
    if objective.type == "sft":
        assert torch.equal(after[advantages < 0], before[advantages < 0])
    elif objective.type != "rwr":  # regression has no other direction, only less weight
        assert (after[advantages < 0] > before[advantages < 0]).all()


@pytest.mark.parametrize("objective", [objective for objective in SAMPLE if objective.type != "crd"], ids=named)
def test_groups_do_not_mix(objective: object) -> None:
    advantages = torch.tensor([1.0, -1.0, 2.0, -2.0, 1.5, -1.5])
    groups, levels = [7, 7, 3, 3, 7, 7], [0, 0, 0, 0, 1, 1]
    whole = noised(groups, levels)
    loss, _ = objective.loss(whole, advantages)
    for part in ([0, 1], [2, 3], [4, 5]):
        rows = {
            field.name: getattr(whole, field.name)[part]
            for field in dataclasses.fields(whole)
            if isinstance(getattr(whole, field.name), torch.Tensor)
        }
        alone, _ = objective.loss(NoisedSamples(**rows), advantages[part])
        torch.testing.assert_close(alone, loss[part])


def test_crd_centres_groups_or_the_batch() -> None:
    batch, advantages = noised([0, 0, 1, 1]), torch.tensor([1.0, -1.0, 4.0, 2.0])
    first = NoisedSamples(**{f.name: getattr(batch, f.name)[:2] for f in dataclasses.fields(batch)})
    for temperature in (None, 0.0, 0.5):
        grouped = CRD(temperature=temperature).loss(batch, advantages)[0]
        torch.testing.assert_close(CRD(temperature=temperature).loss(first, advantages[:2])[0], grouped[:2])
        together = CRD(temperature=temperature, centre="batch").loss(batch, advantages)[0]
        assert not torch.allclose(together, grouped)
    one = dataclasses.replace(batch, group_ids=torch.zeros(4, dtype=torch.long))
    assert torch.equal(CRD(centre="batch").loss(batch, advantages)[0], CRD().loss(one, advantages)[0])


@pytest.mark.parametrize("form", ["mse", "bce"])
def test_crd_is_least_where_implicit_and_given_rewards_agree(form: str) -> None:
    batch, advantages = noised([0, 0, 0, 0]), torch.tensor([3.0, -1.0, 2.0, -4.0])
    objective, q = CRD(form=form), reward_probability(advantages, 5.0)
    r = objective.implicit_reward(batch).detach()
    fitted = objective._fit(q + 0.3, q, objective._weights(q, batch.cells())[0])
    apart = objective._fit(r, q, objective._weights(q, batch.cells())[0])
    assert float(fitted.mean()) < float(apart.mean())
    if form == "mse":
        assert float(fitted.max()) < 1e-12, "a common shift does not count"


def test_the_implicit_reward_of_dpo_is_half_beta_times_the_gain() -> None:
    batch = noised([0, 0])
    expected = 1.5 * (batch.error(batch.reference_velocity) - batch.error(batch.velocity))
    torch.testing.assert_close(DPO(beta=3.0).implicit_reward(batch), expected)


def test_crd_without_adaptive_weights_is_the_difference_of_errors() -> None:
    batch = noised([0, 0])
    expected = batch.error(batch.old_velocity) - batch.error(batch.velocity)
    torch.testing.assert_close(CRD(adaptive=False).implicit_reward(batch), expected)


def test_nft_weighs_both_policies_by_how_good_the_sample_is() -> None:
    batch = noised([0, 0, 0])
    loss = NFT(beta=0.5, advantage_clip=2.0).loss(batch, torch.tensor([9.0, 0.0, -9.0]))[0]
    positive = NFT._error(batch, 0.5 * batch.velocity + 0.5 * batch.old_velocity)
    negative = NFT._error(batch, 1.5 * batch.old_velocity - 0.5 * batch.velocity)
    expected = torch.stack([positive[0], (positive[1] + negative[1]) / 2, negative[2]]) * 2.0 / 0.5
    torch.testing.assert_close(loss, expected)


def test_reward_probability_of_an_objective_follows_its_mode() -> None:
    advantages = torch.tensor([-9.0, -1, 0, 1, 9])
    expected = {
        "all": [0, 0.4, 0.5, 0.6, 1],
        "positive_only": [0.5, 0.5, 0.5, 0.6, 1],
        "negative_only": [0, 0.4, 0.5, 0.5, 0.5],
        "one_only": [0.5, 0.5, 0.5, 0.6, 0.6],
        "binary": [0.4, 0.4, 0.5, 0.6, 0.6],
    }
    for mode, values in expected.items():
        assert reward_probability(advantages, 5.0, mode).tolist() == pytest.approx(values)


def test_awm_is_on_policy_without_an_old_velocity_and_held_back_by_the_average() -> None:
    batch, advantages = noised([0, 0]), torch.tensor([5.0, -2.5])
    alone = dataclasses.replace(batch, old_velocity=None)
    loss, stats = AWM(ema_coef=0.0).loss(alone, advantages)
    assert loss.tolist() == [-1.0, 0.5], "the ratio is exactly 1"
    assert float(stats["ratio/approx_kl"]) == 0
    pull = ((batch.velocity - batch.ema_velocity) ** 2).flatten(1).mean(dim=1)
    torch.testing.assert_close(AWM(ema_coef=0.3).loss(alone, advantages)[0], loss + 0.3 * pull)
    assert AWM().needs == {"old", "ema"} and AWM(ema_coef=0.0).needs == {"old"}


def test_dpo_pairs_all_winners_with_all_losers_of_their_group_and_level() -> None:
    batch = noised([0] * 5 + [1] * 2)
    advantages = torch.tensor([1.0, -1.0, 1.0, 0.0, -1.0, 1.0, -1.0])
    loss, stats = DPO(beta=3.0).loss(batch, advantages)
    gain = 1.5 * (batch.error(batch.reference_velocity) - batch.error(batch.velocity))
    chosen = [(0, 1), (0, 4), (2, 1), (2, 4), (5, 6)]
    pairs = {(good, bad): -torch.nn.functional.logsigmoid(gain[good] - gain[bad]) for good, bad in chosen}
    for row in range(7):
        mine = [value for pair, value in pairs.items() if row in pair]
        expected = torch.stack(mine).mean() if mine else torch.tensor(0.0)
        torch.testing.assert_close(loss[row], expected)
    right = [float(gain[good] > gain[bad]) for good, bad in pairs]
    assert float(stats["dpo/accuracy"]) == pytest.approx(sum(right[:4]) + 2 * right[4])


def test_dpo_refuses_a_group_that_was_torn_apart() -> None:
    with pytest.raises(ValueError, match="group 8 has no partner"):
        DPO().loss(noised([4, 4, 8]), torch.tensor([1.0, -1.0, 1.0]))
    with pytest.raises(ValueError, match="group 4 has no partner"):
        DPO().loss(noised([4, 4], levels=[0, 1]), torch.tensor([1.0, -1.0]))


def test_dgpo_weighs_a_group_by_how_far_it_is_ahead_and_masks_what_left_the_trust_region() -> None:
    batch, advantages = noised([0, 0, 1, 1, 1]), torch.tensor([1.0, -1.0, 2.0, -1.0, -1.0])
    loss, _ = DGPO(beta=4.0, clip_range=None).loss(batch, advantages)
    error, ahead = batch.error(batch.velocity), batch.error(batch.velocity) - batch.error(batch.reference_velocity)
    for rows in ([0, 1], [2, 3, 4]):
        weight = torch.sigmoid((advantages * 4.0 * ahead)[rows].mean())
        torch.testing.assert_close(loss[rows], (weight * advantages * error)[rows])
    clipped, stats = DGPO(beta=4.0, clip_range=0.05).loss(batch, advantages)
    torch.testing.assert_close(clipped, loss)
    clipped.sum().backward()
    ratio = torch.exp(batch.error(batch.old_velocity) - error)
    outside = torch.where(advantages > 0, ratio > 1.05, ratio < 0.95)
    assert (batch.velocity.grad.flatten(1).norm(dim=1) == 0).tolist() == outside.tolist()
    assert outside.any() and float(stats["dgpo/clipped"]) == int(outside.sum())
    assert DGPO(clip_range=None).needs == {"reference"} and DGPO().needs == {"reference", "old"}


def test_regression_weighs_errors() -> None:
    batch = noised([0, 0, 0])
    error = batch.error(batch.velocity)
    weights = torch.tensor([0.5, 0.0, 2.0])
    torch.testing.assert_close(RewardWeighted().loss(batch, weights)[0], weights * error)
    tempered = RewardWeighted(temperature=2.0).loss(batch, -weights)[0]
    torch.testing.assert_close(tempered, torch.exp(-weights / 2) * error)
    with pytest.raises(ValueError, match=r"one is -0\.1: set objective\.temperature"):
        RewardWeighted().loss(batch, torch.tensor([1.0, -0.1, 0.2]))
    torch.testing.assert_close(BestOfN().loss(batch, torch.tensor([1.0, 0.0, 1.0]))[0], error * torch.tensor([1, 0, 1]))


@pytest.mark.parametrize("objective", SAMPLE, ids=named)
def test_what_is_needed_is_asked_for(objective: object) -> None:
    batch = noised([0, 0])
    for policy in ("old", "reference", "ema"):
        without = dataclasses.replace(batch, **{f"{policy}_velocity": None})
        if policy in objective.needs and not (objective.type == "awm" and policy == "old"):
            with pytest.raises(ValueError, match=f"velocity of the {policy} policy"):
                objective.loss(without, torch.tensor([1.0, -1.0]))
        else:
            objective.loss(without, torch.tensor([1.0, -1.0]))


def test_penalties_of_samples() -> None:
    batch, advantages = noised([0, 0, 0], levels=[0, 1, 2]), torch.tensor([5.0, 0.0, -5.0])
    squared = ((batch.velocity - batch.reference_velocity) ** 2).flatten(1).mean(dim=1)
    torch.testing.assert_close(forward_kl.VelocityMSE().penalty(batch, advantages), squared)
    x0 = ((batch.predicted_x0(batch.velocity) - batch.predicted_x0(batch.reference_velocity)) ** 2).flatten(1).mean(1)
    torch.testing.assert_close(forward_kl.SampleMSE().penalty(batch, advantages), x0)
    adaptive = forward_kl.VelocityMSE(coef=0.1, floor=0.02)
    expected = torch.tensor([0.1, 0.06, 0.02]) * squared
    torch.testing.assert_close(adaptive.coef * adaptive.penalty(batch, advantages), expected)
    with pytest.raises(ValueError, match="floor"):
        forward_kl.VelocityMSE(coef=0.1, floor=0.2)


def test_noised_samples() -> None:
    batch = noised([5, 2, 5, 5], levels=[0, 0, 1, 0])
    cells = batch.cells()
    assert cells[0] == cells[3] and len(set(cells.tolist())) == 3
    assert torch.equal(batch.target, batch.noise - batch.x0)
    torch.testing.assert_close(batch.predicted_x0(batch.target), batch.x0)
    assert torch.equal(batch.error(batch.target), torch.zeros(4))


def test_an_error_has_the_weight_of_its_noise_level() -> None:
    batch = noised([0, 1])
    weighted = dataclasses.replace(batch, error_weight=torch.tensor([0.5, 2.0]))
    error = batch.error(batch.velocity)
    assert torch.equal(error, dataclasses.replace(batch, error_weight=None).error(batch.velocity))
    assert torch.equal(weighted.error(batch.velocity), error * torch.tensor([0.5, 2.0]))


# Presets


@pytest.mark.parametrize("name", DIFFUSION_RECIPES)
def test_the_parts_of_every_recipe_fit_together(name: str) -> None:
    schema = TrajectoryAlgorithmConfig if name in TRAJECTORY_RECIPES else ForwardAlgorithmConfig
    algorithm = schema(recipe=name, **DIFFUSION_RECIPES[name])
    named_parts = {part for part, value in DIFFUSION_RECIPES[name].items() if isinstance(value, dict)}
    if name in TRAJECTORY_RECIPES:
        assert named_parts == {"dynamics", "window", "advantage", "objective", "kl"}
        assert algorithm.rows_per_sample(10) > 0 and algorithm.other_policies.keys() <= {"reference"}
    else:
        assert {"solver", "advantage", "objective", "timesteps", "kl"} <= named_parts
        assert {"old", "ema", "reference"} & named_parts <= algorithm.other_policies.keys(), "a decay that is of no use"


def test_every_objective_says_what_it_is_given() -> None:
    assert find_variants("sfumato.algorithms.objectives").keys() == {objective.type for objective in TRAJECTORY}
    assert find_variants("sfumato.algorithms.forward_process").keys() == {objective.type for objective in SAMPLE}
    for objective in TRAJECTORY:
        assert 0 < objective.replay_tolerance < 0.1
    for objective in SAMPLE:
        assert isinstance(objective.whole_groups, bool) and isinstance(objective.shared_noise, bool)
        assert objective.needs <= {"old", "reference", "ema"}


def test_crd_without_warmth_centres_by_the_good_samples_of_a_group_or_by_all_where_none_is():
    q, cells = torch.tensor([0.5, 0.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 1, 1])
    towards_good, towards_all = CRD(temperature=0.0)._weights(q, cells)
    assert torch.equal(towards_good[:3, :3], torch.tensor([[1.0, 0.0, 0.0]] * 3))
    assert torch.equal(towards_good[3:, 3:], torch.full((2, 2), 0.5)) and not towards_good[3:, :3].any()
    torch.testing.assert_close(towards_all[:3, :3], torch.full((3, 3), 1 / 3))
