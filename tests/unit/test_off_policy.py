"""Off-policy corrections against plain computation, and on a model: exact on-policy, right off-policy."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from sfumato.algorithms.dynamics import CPS, FlowSDE, GaussianStep
from sfumato.algorithms.mismatch import Mismatch, mismatch_metrics
from sfumato.algorithms.objectives import DPPO, ClippedRatio, Guard, SampledSteps
from sfumato.algorithms.off_policy import (
    Decoupled,
    KLRejection,
    NoCorrection,
    Rejection,
    log_ratio_of,
    old_policy,
    redrawn,
)
from sfumato.config.base import Variant, find_variants
from sfumato.config.sections import ModelConfig
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.rollout.batch import SampleRequest
from sfumato.rollout.diffusion.trajectories import proximal_means, replay_trajectories, sample_trajectories
from sfumato.rollout.diffusion.trajectory_sampler import DiffusionRollout
from tests.rows import ROUNDING

# Trajectory 7 has three steps, 2 has one, 40 has two; their rows are not in order.
SAMPLE_OF_ROW = [7, 2, 40, 7, 40, 7]
LOG_RATIO = [0.5, -1.25, 0.125, 0.5, 1.0, -0.0625]
SUMS = {7: 0.9375, 2: -1.25, 40: 1.125}
COUNTS = {7: 3, 2: 1, 40: 2}
CORRECTIONS = [NoCorrection(), Decoupled(), Decoupled("trajectory"), Rejection(), Rejection("trajectory_mean")]
OBJECTIVES = [ClippedRatio(0.2), Guard(0.2), DPPO(0.5)]
SHAPE = (6, 2, 4, 4)
SIGMA, SIGMA_NEXT = torch.linspace(0.9, 0.4, 6), torch.linspace(0.8, 0.3, 6)
PROMPTS = ["a", "b", "c", "d"]
EXACT = {
    "mismatch/kl_k1": 0.0,
    "mismatch/kl_k3": 0.0,
    "mismatch/log_ratio_max": 0.0,
    "mismatch/ess": 1.0,
    "mismatch/weight": 1.0,
    "mismatch/truncated": 0.0,
    "mismatch/rejected": 0.0,
}


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(LOG_RATIO), torch.tensor(SAMPLE_OF_ROW)


def at_level(level: str) -> list[float]:
    """Log-ratios of the rows at a level, by hand."""
    by_row = {
        "step": LOG_RATIO,
        "trajectory": [SUMS[sample_index] for sample_index in SAMPLE_OF_ROW],
        "trajectory_mean": [SUMS[sample_index] / COUNTS[sample_index] for sample_index in SAMPLE_OF_ROW],
    }
    return by_row[level]


def named(part: object) -> str:
    return f"{part.type} {getattr(part, 'level', '')}".strip()


def normal(seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * scale


def step_of(velocity: torch.Tensor) -> GaussianStep:
    return FlowSDE(0.7).step(velocity, normal(1), SIGMA, SIGMA_NEXT, 0.9)


def drawn_by(step: GaussianStep) -> SampledSteps:
    drawn = step.draw(normal(2))
    return SampledSteps(drawn, step.log_prob(drawn), SIGMA - SIGMA_NEXT, step.mean)


def corrected_loss(objective, part, new, behaviour, advantages, ids, means=None, mismatch=None):
    """The loss as ``tasks/rl_diffusion.py`` computes it, and its statistics."""
    proximal = None if means is None else dataclasses.replace(new, mean=means.detach())
    old, weights = old_policy(objective, part, behaviour, proximal, ids, mismatch)
    losses, stats = objective.loss(objective.ratio(new, old), advantages)
    return losses * weights, stats


# The weights


@pytest.mark.parametrize("level", ["step", "trajectory", "trajectory_mean"])
def test_each_level_is_what_its_name_says(level):
    log_ratio = log_ratio_of(*rows(), level)
    assert log_ratio.dtype == torch.float64
    assert log_ratio.tolist() == pytest.approx(at_level(level), rel=1e-12)


@pytest.mark.parametrize("cap", [1.0, 1.5, 2.0, None])
@pytest.mark.parametrize("level", ["step", "trajectory", "trajectory_mean"])
def test_weights_are_ratios_up_to_the_cap(level, cap):
    result = Decoupled(level, cap).correct(*rows())
    ratios = [math.exp(value) for value in at_level(level)]
    assert result.weights.dtype == torch.float32
    assert result.weights.tolist() == pytest.approx([min(ratio, cap or math.inf) for ratio in ratios], rel=1e-6)
    assert result.truncated.tolist() == [cap is not None and ratio > cap for ratio in ratios]
    assert not result.rejected.any()


@pytest.mark.parametrize("level", ["step", "trajectory", "trajectory_mean"])
def test_rows_outside_the_bounds_are_left_out_with_their_trajectory_or_alone(level):
    part = Rejection(level, min_ratio=0.4, max_ratio=1.7, weight_level="step", cap=1.6)
    actual = part.correct(*rows())
    outside = [not 0.4 <= math.exp(value) <= 1.7 for value in at_level(level)]
    expected = {
        "step": [False, True, False, False, True, False],
        "trajectory": [True, True, True, True, True, True],
        "trajectory_mean": [False, True, True, False, True, False],
    }
    assert outside == expected[level] == actual.rejected.tolist()
    weights = [0.0 if out else min(math.exp(value), 1.6) for out, value in zip(outside, LOG_RATIO, strict=True)]
    assert actual.weights.tolist() == pytest.approx(weights, rel=1e-6)
    assert actual.truncated.tolist() == [
        not out and value > math.log(1.6) for out, value in zip(outside, LOG_RATIO, strict=True)
    ]


def test_rejection_alone_weights_what_stays_by_one():
    result = Rejection(min_ratio=0.4, max_ratio=1.7, weight_level=None, cap=None).correct(*rows())
    assert result.weights.tolist() == [1, 0, 1, 1, 0, 1]
    assert Rejection(min_ratio=0.0, max_ratio=3.0).correct(*rows()).rejected.sum() == 0


@pytest.mark.parametrize("part", CORRECTIONS, ids=named)
def test_on_policy_nothing_changes_to_the_bit(part):
    result = part.correct(torch.zeros(5), torch.tensor([3, 3, 1, 1, 1]))
    assert torch.equal(result.weights, torch.ones(5)) and not (result.truncated | result.rejected).any()
    mismatch = Mismatch()
    mismatch.add(torch.zeros(5), result)
    metrics = mismatch_metrics(mismatch.sums, mismatch.largest)
    assert metrics == EXACT and math.copysign(1, metrics["mismatch/kl_k1"]) == 1


@pytest.mark.parametrize("part", CORRECTIONS[1:], ids=named)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_never_hidden_by_a_rejection(part, value):
    log_ratio = torch.tensor([0.0, value])
    weights = part.correct(log_ratio, torch.tensor([0, 1])).weights
    assert weights[0] == 1
    assert weights[1].isnan() if math.isnan(value) else weights[1] in (0.0, 2.0)


@pytest.mark.parametrize("level", ["step", "trajectory", "trajectory_mean"])
def test_nan_without_weights_stays_nan(level):
    part = Rejection(level, weight_level=None)
    assert part.correct(torch.tensor([0.0, math.nan]), torch.tensor([0, 1])).weights[1].isnan()


def test_weights_carry_no_gradient():
    log_ratio = torch.tensor(LOG_RATIO, requires_grad=True)
    for part in CORRECTIONS:
        assert not part.correct(log_ratio, rows()[1]).weights.requires_grad


@pytest.mark.parametrize("part", CORRECTIONS, ids=named)
def test_rows_outside_the_mask_count_for_nothing(part):
    log_ratio, samples = rows()
    mask = torch.tensor([True, True, True, False, True, True])
    padded = torch.where(mask, log_ratio, 7.0)  # whatever stands there
    result, alone = part.correct(padded, samples, mask), part.correct(log_ratio[mask], samples[mask])
    for name in ("weights", "log_weights", "truncated", "rejected"):
        assert torch.equal(getattr(result, name)[mask], getattr(alone, name)), name
    with_mask, without = Mismatch(), Mismatch()
    with_mask.add(padded, result, mask=mask)
    without.add(log_ratio[mask], alone)
    assert with_mask.sums == pytest.approx(without.sums, rel=1e-12) and with_mask.largest == without.largest


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        Decoupled().correct(torch.zeros(2), torch.zeros(3, dtype=torch.long))


# The metrics


@pytest.mark.parametrize("split", [0, 2, 6])
def test_metrics_by_hand_whoever_has_the_rows(split):
    part = Rejection("step", min_ratio=0.4, max_ratio=2.0, cap=1.6)
    sums, largest = {}, 0.0
    for at in (slice(0, split), slice(split, 6)):  # two ranks; one may have nothing
        mismatch = Mismatch()
        log_ratio, samples = (row[at] for row in rows())
        mismatch.add(log_ratio, part.correct(log_ratio, samples))
        sums = {name: sums.get(name, 0.0) + value for name, value in mismatch.sums.items()}
        largest = max(largest, mismatch.largest)
    weights = [math.exp(value) for value in LOG_RATIO if 0.4 <= math.exp(value) <= 2.0]
    assert len(weights) == 4
    assert mismatch_metrics(sums, largest) == pytest.approx(
        {
            "mismatch/kl_k1": -sum(LOG_RATIO) / 6,
            "mismatch/kl_k3": sum(math.exp(value) - 1 - value for value in LOG_RATIO) / 6,
            "mismatch/log_ratio_max": 1.25,
            "mismatch/ess": sum(weights) ** 2 / (6 * sum(weight**2 for weight in weights)),
            "mismatch/weight": sum(min(weight, 1.6) for weight in weights) / 6,
            "mismatch/truncated": 2 / 6,
            "mismatch/rejected": 2 / 6,
        },
        rel=1e-6,
    )


def test_metrics_of_nothing_and_of_rows_that_are_all_left_out():
    assert mismatch_metrics(Mismatch().sums, 0.0) == {}
    mismatch, part = Mismatch(), Rejection(min_ratio=0.9, max_ratio=1.1)
    mismatch.add(torch.full((3,), 500.0), part.correct(torch.full((3,), 500.0), torch.arange(3)))
    metrics = mismatch_metrics(mismatch.sums | {"k1": -0.0}, mismatch.largest)
    assert math.copysign(1.0, metrics["mismatch/kl_k1"]) == 1.0, "a zero has no minus"
    assert metrics["mismatch/ess"] == metrics["mismatch/weight"] == 0 and metrics["mismatch/rejected"] == 1
    wild = Mismatch()
    wild.add(torch.tensor([500.0, 0.0]), Decoupled(cap=None).correct(torch.tensor([500.0, 0.0]), torch.arange(2)))
    assert mismatch_metrics(wild.sums, wild.largest)["mismatch/ess"] == pytest.approx(0.5)


def test_kl_estimates_are_those_of_two_gaussians():
    """Whole probabilities: KL(N(0, 1), N(d, 1)) = d^2 / 2."""
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_ratio = 0.3 * x - 0.045
    mismatch = Mismatch()
    mismatch.add(log_ratio, NoCorrection().correct(log_ratio, torch.arange(len(x))))
    metrics = mismatch_metrics(mismatch.sums, mismatch.largest)
    assert metrics["mismatch/kl_k1"] == pytest.approx(0.045, rel=0.03)
    assert metrics["mismatch/kl_k3"] == pytest.approx(0.045, rel=0.01)
    assert metrics["mismatch/ess"] == pytest.approx(math.exp(-0.09), rel=0.01)


# The loss


@pytest.mark.parametrize("objective", OBJECTIVES, ids=named)
@pytest.mark.parametrize("part", CORRECTIONS, ids=named)
def test_a_fresh_sample_has_the_loss_and_gradient_it_always_had(part, objective):
    behaviour, ids = drawn_by(step_of(normal(3))), rows()[1]
    advantages = torch.linspace(-1, 1, 6)
    results = []
    for proximal in (None, behaviour.means):
        velocity = normal(3).requires_grad_()
        new = step_of(velocity)
        losses, stats = corrected_loss(objective, part, new, behaviour, advantages, ids, proximal)
        losses.sum().backward()
        results.append((losses.detach(), velocity.grad, {name: float(value) for name, value in stats.items()}))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2] and results[0][1].any()


def test_decoupled_loss_by_hand():
    """max(-A r, -A clip(r)) w with r = new / proximal and w = min(proximal / behaviour, cap), from densities."""
    behaviour_step, proximal_step = step_of(normal(3)), step_of(normal(3) + normal(18, 0.05))
    behaviour = drawn_by(behaviour_step)
    velocity = (normal(3) + normal(5, 0.05)).requires_grad_()
    new, advantages = step_of(velocity), torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0])
    log_probs = [
        policy_step.log_prob(behaviour.next_latents).tolist() for policy_step in (new, proximal_step, behaviour_step)
    ]
    clip, cap, expected, ratios = 0.001, 1.0015, [], []
    for advantage, at_new, at_proximal, at_behaviour in zip(advantages.tolist(), *log_probs, strict=True):
        ratio, weight = math.exp(at_new - at_proximal), min(math.exp(at_proximal - at_behaviour), cap)
        clipped = min(max(ratio, 1 - clip), 1 + clip)
        expected.append(weight * max(-advantage * ratio, -advantage * clipped))
        ratios.append((ratio, weight))
    assert sum(weight == cap for _, weight in ratios) == 3
    assert 0 < sum(abs(ratio - 1) > clip for ratio, _ in ratios) < 6
    mismatch = Mismatch()
    losses, stats = corrected_loss(
        ClippedRatio(clip), Decoupled(cap=cap), new, behaviour, advantages, rows()[1], proximal_step.mean, mismatch
    )
    assert losses.tolist() == pytest.approx(expected, abs=2e-6)
    assert float(stats["ratio/mean"]) == pytest.approx(sum(ratio for ratio, _ in ratios), rel=1e-6)
    metrics = mismatch_metrics(mismatch.sums, mismatch.largest)
    k1 = sum(c - b for _, b, c in zip(*log_probs, strict=True)) / 6
    assert metrics["mismatch/kl_k1"] == pytest.approx(k1, abs=1e-6)
    assert metrics["mismatch/truncated"] == 3 / 6


def test_without_clipping_and_cap_the_two_ratios_multiply_to_the_whole_one():
    behaviour = drawn_by(step_of(normal(3)))
    proximal, velocity = step_of(normal(3) + normal(4, 0.1)), normal(3) + normal(5, 0.1)
    wide, advantages, gradients = ClippedRatio(1e9), torch.linspace(-1, 1, 6), []
    for part in (NoCorrection(), Decoupled(cap=None)):
        learned = velocity.clone().requires_grad_()
        losses, _ = corrected_loss(wide, part, step_of(learned), behaviour, advantages, rows()[1], proximal.mean)
        losses.sum().backward()
        gradients.append((losses.detach(), learned.grad))
    for plain, decoupled in zip(*gradients, strict=True):
        torch.testing.assert_close(decoupled, plain, rtol=1e-5, atol=1e-8)


def test_rows_left_out_have_no_gradient_and_still_count():
    behaviour = drawn_by(step_of(normal(3)))
    shift = torch.zeros(SHAPE)
    shift[1], shift[4] = 1.0, -1.0
    proximal = step_of(normal(3) + shift)
    velocity = (normal(3) + shift).requires_grad_()
    part = Rejection(min_ratio=0.999999, max_ratio=1.000001)
    mismatch = Mismatch()
    losses, _ = corrected_loss(
        ClippedRatio(0.2), part, step_of(velocity), behaviour, torch.ones(6), rows()[1], proximal.mean, mismatch
    )
    losses.sum().backward()
    assert [bool(tensor.any()) for tensor in velocity.grad] == [True, False, True, True, False, True]
    assert losses.tolist() == [-1, 0, -1, -1, 0, -1]
    assert mismatch.sums["rows"] == 6 and mismatch.sums["rejected"] == 2


def test_guard_is_corrected_by_its_ratio_and_measured_by_probabilities():
    behaviour, objective = drawn_by(step_of(normal(3))), Guard(0.2)
    proximal, mismatch = step_of(normal(3) + normal(4, 0.3)), Mismatch()
    part = Decoupled(cap=None)
    new = step_of(normal(3))
    losses, _ = corrected_loss(objective, part, new, behaviour, torch.ones(6), rows()[1], proximal.mean, mismatch)
    weights = objective.ratio(proximal, behaviour).log_ratio.exp()
    ratio = objective.ratio(new, redrawn(behaviour, proximal))
    expected = objective.loss(ratio, torch.ones(6))[0] * weights
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    k1 = -behaviour.log_ratio(proximal).double().mean()
    assert mismatch.sums["k1"] / 6 == pytest.approx(float(k1), rel=1e-6)


# Choosing one


def test_variants_are_found_and_strict():
    variant_types = find_variants("sfumato.algorithms.off_policy")
    assert variant_types == {
        "none": NoCorrection,
        "decoupled": Decoupled,
        "rejection": Rejection,
        "kl_rejection": KLRejection,
    }
    variant = Variant("sfumato.algorithms.off_policy")
    for part in (*CORRECTIONS, Rejection(weight_level=None, cap=None)):
        assert variant.validate(json.loads(json.dumps(variant.dump(part)))) == part
    for wrong in ({"type": "decoupled", "cap": 0.5}, {"type": "rejection", "min_ratio": 1.2}):
        with pytest.raises(ValidationError, match=r"either side of 1|at least 1"):
            TypeAdapter(variant_types[wrong.pop("type")]).validate_python(wrong)
    with pytest.raises(ValidationError):
        TypeAdapter(Decoupled).validate_python({"level": "word"})


# On a model


@pytest.fixture(scope="module")
def model() -> DiffusionModel:
    """The quickstart's model with random weights everywhere."""
    path = Path(__file__).parents[2] / "configs" / "quickstart" / "tiny_sd3.yaml"
    built = build_diffusion_model(ModelConfig(config_path=str(path), max_sequence_length=7))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in built.denoiser.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    built.denoiser.eval()
    return built


@pytest.mark.exact
@pytest.mark.parametrize("dynamics", [FlowSDE(0.7), CPS(0.8)], ids=["sde", "cps"])
def test_recomputed_means_are_those_of_the_update_to_the_bit(model, dynamics):
    conditioning = model.encode_prompts(PROMPTS)
    requests = [SampleRequest(row, row, row, is_first=True) for row in range(4)]
    latents, trajectories = sample_trajectories(
        model,
        conditioning,
        range(4),
        dynamics=dynamics,
        trained_steps=[1, 2],
        size=(32, 32),
        num_steps=6,
        guidance_scale=1.0,
        seed=1,
        iteration=0,
    )
    batch = DiffusionRollout.from_samples(requests, trajectories, conditioning, list(range(4)), latents, 0, [""] * 4)
    parts = [torch.tensor([3, 0]), torch.tensor([], dtype=torch.long)]
    modes: list[bool] = []
    hook = model.denoiser.register_forward_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    for with_gradients in (False, True):
        assert not proximal_means(model, batch, parts[:1], dynamics, 1.0, with_gradients).requires_grad
    hook.remove()
    assert modes == [False, True], "compiled blocks have a graph for each"
    fresh = proximal_means(model, batch, [torch.tensor([0, 1, 2, 3])], dynamics, 1.0)
    rounding = 1e-5 if ROUNDING else 0.0
    torch.testing.assert_close(fresh, trajectories.means, atol=rounding, rtol=0)  # the policy that sampled
    updated = copy.deepcopy(model.denoiser.state_dict())
    try:
        with torch.no_grad():
            for parameter in model.denoiser.parameters():
                parameter.mul_(1.01)
        means = proximal_means(model, batch, parts, dynamics, 1.0)
        part = batch.rows(parts[0])
        new = replay_trajectories(model, part.kept, part.row_conditioning, dynamics, 1.0)
    finally:
        model.denoiser.load_state_dict(updated)
    assert new.mean.requires_grad and torch.equal(means[parts[0]].flatten(0, 1), new.mean.detach())
    assert torch.equal(means[[1, 2]], trajectories.means[[1, 2]]) and not torch.equal(means[0], trajectories.means[0])
    objective, mismatch = ClippedRatio(1e-3), Mismatch()
    samples = torch.tensor(part.sample_ids).repeat_interleave(2)
    losses, stats = corrected_loss(
        objective,
        Decoupled("trajectory"),
        new,
        part.kept.sampled_steps(),
        torch.tensor([1.0, 1.0, -1.0, -1.0]),
        samples,
        means[parts[0]].flatten(0, 1),
        mismatch,
    )
    assert float(stats["ratio/mean"]) == 4.0  # new / proximal before any step of the update
    assert (losses.reshape(2, 2)[:, 0] == losses.reshape(2, 2)[:, 1]).all()  # one weight for a trajectory
    metrics = mismatch_metrics(mismatch.sums, mismatch.largest)
    squared = (new.mean.detach() - part.kept.means.flatten(0, 1)).double().square().flatten(1).mean(1)
    assert metrics["mismatch/log_ratio_max"] > 0
    assert metrics["mismatch/kl"] == pytest.approx(float((squared / (2 * new.std.double() ** 2)).mean()), rel=1e-5)
