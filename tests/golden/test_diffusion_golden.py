"""Steps, losses and statistics against values that other implementations computed (``data/flow_rl.json``).

Those of Flow-SDE, CPS and Dance-SDE, and advantages of flow_grpo, are in ``test_peers_golden.py``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from sfumato.algorithms.advantages import GDPO, GroupAdvantage
from sfumato.algorithms.decay import Constant, Linear, WarmUp
from sfumato.algorithms.dynamics import CPS, DDIM, DanceSDE, EulerODE, FlowSDE, GaussianStep, WanSDE, gaussian_step
from sfumato.algorithms.flow_matching import shift_sigma
from sfumato.algorithms.kl import FlowGRPOKL, GaussianKL
from sfumato.algorithms.objectives import ClippedRatio, Guard, SampledSteps
from sfumato.algorithms.solvers import DPMSolver2, Euler
from sfumato.algorithms.windows import AllSteps, RandomSubset, RandomWindow, SlidingWindow

GOLDEN = json.loads((Path(__file__).parent / "data" / "flow_rl.json").read_text())
SHARED = {name: torch.tensor(GOLDEN["shared_tensors"][name]) for name in ("x", "v_old", "v_new", "v_ref", "eps")}
SIGMAS = torch.tensor(GOLDEN["V01_sigma_schedules"]["sd3_shift3_n10_sigmas"])


def close(actual: torch.Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), atol=2e-6, rtol=2e-5)


def step_of(
    dynamics: object, velocity: torch.Tensor, index: int, sigmas: torch.Tensor = SIGMAS, view: tuple = (2, 1, 2, 2)
) -> GaussianStep:
    sigma, sigma_next = sigmas[index].expand(2), sigmas[index + 1].expand(2)
    return dynamics.step(velocity.view(view), SHARED["x"].view(view), sigma, sigma_next, float(sigmas[1]))


def sampled(old: GaussianStep, index: int) -> SampledSteps:
    drawn = old.draw(SHARED["eps"])
    size = (SIGMAS[index] - SIGMAS[index + 1]).expand(2)
    return SampledSteps(next_latents=drawn, log_probs=old.log_prob(drawn), step_sizes=size, means=old.mean)


def test_sigmas_of_dance_grpo() -> None:
    close(shift_sigma(torch.linspace(1, 0, 17), 3.0), GOLDEN["V01_sigma_schedules"]["dance_shift3_n16_sigmas"])


@pytest.mark.parametrize("index", [0, 4, 9])
@pytest.mark.parametrize("dynamics", [FlowSDE(noise_level=0.7), CPS(noise_level=0.8), DanceSDE(noise_level=0.3)])
def test_equal_means_have_a_log_ratio_of_exactly_zero(dynamics: object, index: int) -> None:
    old, new = (step_of(dynamics, SHARED[name], index) for name in ("v_old", "v_new"))
    drawn = old.draw(SHARED["eps"])
    close(new.log_ratio(old.mean, drawn), new.log_prob(drawn) - old.log_prob(drawn))
    assert torch.equal(old.log_ratio(old.mean, drawn), torch.zeros(2))


@pytest.mark.parametrize("case", GOLDEN["V04_wan_sde"]["cases"], ids=lambda case: f"step {case['step']}")
def test_wan_steps(case: dict) -> None:
    step = step_of(WanSDE(), SHARED["v_old"], case["step"], view=(2, 1, 1, 2, 2))
    drawn = step.draw(SHARED["eps"].view(2, 1, 1, 2, 2))
    close(step.diffusion, [case["std_dev_t"]] * 2)
    close(step.mean.flatten(), torch.tensor(case["mean"]).flatten())
    close(drawn.flatten(), torch.tensor(case["next_sample"]).flatten())
    close(step.log_prob(drawn), case["log_prob"])


def test_ddim_step() -> None:
    case = GOLDEN["V05_deterministic_solvers"]["ddim_eta0.7_step4"]
    step = step_of(DDIM(eta=0.7), SHARED["v_old"], 4)
    close(step.std, [case["rho"]] * 2)
    close(step.mean, case["mean"])
    close(step.draw(SHARED["eps"]), case["next_sample"])


@pytest.mark.parametrize(("solver", "name"), [(Euler(), "euler"), (Euler(), "dpm1"), (DPMSolver2(), "dpm2")])
def test_deterministic_solvers(solver: object, name: str) -> None:
    golden = next(value for key, value in GOLDEN["V05_deterministic_solvers"].items() if key.startswith("ode_"))
    latents, memory = SHARED["x"], None
    for index, sigma in enumerate(SIGMAS[:-1]):
        latents, memory = solver.step(0.5 * latents + 0.1 * sigma, latents, SIGMAS, index, memory)
    close(latents, golden[name])


def test_without_noise_the_step_is_eulers() -> None:
    case = GOLDEN["V02_flow_sde_and_cps_steps"]["noise_level_zero_step4"]
    close(step_of(EulerODE(), SHARED["v_old"], 4).mean, case["mean"])
    close(Euler().step(SHARED["v_old"], SHARED["x"], SIGMAS, 4)[0], case["mean"])
    for dynamics in (FlowSDE, CPS, DanceSDE):
        with pytest.raises(ValueError, match="noise_level"):
            dynamics(noise_level=0.0)
    with pytest.raises(ValueError, match="eta"):
        DDIM(eta=0.0)


def test_low_precision_latents_are_why_the_scored_latent_is_the_stored_one() -> None:
    golden = GOLDEN["V02_flow_sde_and_cps_steps"]
    shift = golden["log_prob_shift_if_next_sample_is_stored_in_low_precision_only_after_scoring_step4"]
    step = step_of(FlowSDE(noise_level=0.7), SHARED["v_old"], 4)
    drawn = step.draw(SHARED["eps"])
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        moved = step.log_prob(drawn.to(dtype)) - step.log_prob(drawn)
        close(moved, shift[name])


@pytest.mark.parametrize("index", [0, 1])
def test_policy_loss_and_kl(index: int) -> None:
    golden = GOLDEN["V06_grpo_loss_and_kl"]
    case, inputs = golden["cases"][index], golden["inputs"]
    velocity = SHARED["v_new"].clone().requires_grad_(True)
    dynamics = FlowSDE(noise_level=0.7)
    old, new = step_of(dynamics, SHARED["v_old"], case["step"]), step_of(dynamics, velocity, case["step"])
    reference = step_of(dynamics, SHARED["v_ref"], case["step"])
    advantages = torch.tensor(inputs["advantages"]).clamp(-inputs["adv_clip_max"], inputs["adv_clip_max"])
    drawn, objective = sampled(old, case["step"]), ClippedRatio(clip_range=inputs["clip_range"])
    loss, stats = objective.loss(objective.ratio(new, drawn), advantages)
    flow_grpo = FlowGRPOKL(coef=inputs["beta"])

    close(objective.ratio(new, drawn).log_ratio.exp(), case["ratio"])
    close(loss.mean(), case["policy_loss"])
    close(flow_grpo.penalty(new, reference).mean(), case["kl_flow_grpo (divides by 2*std_dev_t^2, no dt)"])
    exact = GaussianKL(coef=1.0).penalty(new, reference).mean()
    close(exact, case["kl_exact_gaussian_per_dim (divides by 2*std_dev_t^2*|dt|)"])
    close(stats["ratio/approx_kl"] / 2, case["approx_kl"])
    close((stats["ratio/clipped_high"] + stats["ratio/clipped_low"]) / 2, case["clipfrac"])
    total = (loss + flow_grpo.coef * flow_grpo.penalty(new, reference)).mean()
    close(total, case["loss_with_flow_grpo_kl"])
    total.backward()
    close(velocity.grad, case["grad_wrt_v_new"])


@pytest.mark.parametrize("name", ["unclipped_step4_clip_1e-2", "on_policy_step4_v_new_equals_v_old"])
def test_policy_gradient_inside_the_clip_range(name: str) -> None:
    golden = GOLDEN["V06_grpo_loss_and_kl"]
    case = golden[name]
    source = "v_old" if name.startswith("on_policy") else "v_new"
    velocity = SHARED[source].clone().requires_grad_(True)
    dynamics = FlowSDE(noise_level=0.7)
    old, new = step_of(dynamics, SHARED["v_old"], 4), step_of(dynamics, velocity, 4)
    advantages = torch.tensor(golden["inputs"]["advantages"]).clamp(-5, 5)
    drawn, objective = sampled(old, 4), ClippedRatio(clip_range=case["clip_range"])
    log_ratio = objective.ratio(new, drawn).log_ratio
    loss = objective.loss(objective.ratio(new, drawn), advantages)[0].mean()
    loss.backward()
    close(log_ratio.exp(), case["ratio"])
    assert bool((log_ratio.exp() == 1).all()) == case["ratio_is_exactly_one"]
    close(loss, case["policy_loss"])
    close(velocity.grad, case["grad_wrt_v_new"])


def test_guard_is_per_sample_and_divided_by_the_step_size() -> None:
    """Upstream averages the bias over the batch by mistake (flow_grpo issue 244)."""
    golden = GOLDEN["V07_grpo_guard"]
    case, index = golden["cases"]["per_sample"], golden["step"]
    dynamics, guard = FlowSDE(noise_level=0.7), Guard(clip_range=golden["clip_range"])
    old, new = step_of(dynamics, SHARED["v_old"], index), step_of(dynamics, SHARED["v_new"], index)
    drawn = sampled(old, index)
    log_ratio = guard.ratio(new, drawn).log_ratio
    loss, _ = guard.loss(guard.ratio(new, drawn), torch.tensor(golden["advantages"]))

    close(log_ratio, case["identity_value"])
    close(log_ratio.exp(), case["ratio"])
    close((new.log_ratio(old.mean, drawn.next_latents)).exp(), case["plain_ratio_without_guard"])
    torch.testing.assert_close(
        log_ratio / new.std - new.log_ratio(old.mean, drawn.next_latents), torch.tensor(case["bias"]), atol=0, rtol=1e-3
    )
    close((loss * drawn.step_sizes).mean(), case["policy_loss"])
    close(loss.mean(), case["policy_loss_after_V_div"])


V08 = GOLDEN["V08_advantages"]
GROUPS = torch.tensor([sorted(set(V08["prompts"])).index(prompt) for prompt in V08["prompts"]])


@pytest.mark.parametrize("name", V08["flow_factory_two_rewards"]["outputs"])
def test_advantages_of_flow_factory(name: str) -> None:
    """gdpo ignores the choice of the standard deviation, and so has none here."""
    golden = V08["flow_factory_two_rewards"]
    components = {name: torch.tensor(golden[name], dtype=torch.float64) for name in ("r1", "r2")}
    total = sum(weight * components[reward] for reward, weight in golden["weights"].items())
    if name.startswith("gdpo"):
        advantage = GDPO(clip=math.inf)
    else:
        advantage = GroupAdvantage(std=name.split("_")[1], clip=math.inf, eps=0.0)
    result = advantage.compute(total, GROUPS, components, golden["weights"])
    torch.testing.assert_close(result.values, torch.tensor(golden["outputs"][name]), rtol=1e-5, atol=1e-6)


def test_windows() -> None:
    for case, expected in GOLDEN["V11_schedulers_samplers_ema"]["fast_window_possible_starts"].items():
        if not case.startswith("size"):
            continue
        size = int(case.split()[1])
        bounds = tuple(int(word) for word in case.split("(")[1].rstrip(")").split(","))
        window = RandomWindow(size=size, range=bounds)
        assert window.starts() == expected
        drawn = {tuple(window.steps(10, seed=3, iteration=index)) for index in range(200)}
        assert drawn == {tuple(range(start, start + size)) for start in expected}
    assert AllSteps().steps(10, 0, 0) == list(range(9)), "the last step is never trained"


def mixgrpo(start: str) -> list:
    return next(value for key, value in GOLDEN["V11_schedulers_samplers_ema"].items() if key.startswith(start))


def test_sliding_windows_are_those_of_mixgrpo_without_the_empty_one() -> None:
    window = SlidingWindow(size=4, range=(0, 12), iters_per_group=3, stride=1)
    published = [steps for steps in mixgrpo("mixgrpo_progressive iters") if steps]
    assert [window.steps(13, 0, iteration) for iteration in range(len(published))] == published
    window = SlidingWindow(size=4, range=(0, 12), iters_per_group=2, stride=None, roll_back=False)
    # where theirs is empty, ours stays at the end
    published = [steps or [8, 9, 10, 11] for steps in mixgrpo("mixgrpo_progressive_no_overlap")]
    assert [window.steps(13, 0, iteration) for iteration in range(len(published))] == published


def test_sliding_windows_stay_as_long_as_those_of_mixgrpo() -> None:
    published = mixgrpo("mixgrpo_exp_decay")
    window = SlidingWindow(range=(0, 25), strategy="exp_decay", stride=2)
    assert [list(place) for place in window.places(26)] == published


def test_random_subsets_are_those_of_flow_factory() -> None:
    window = RandomSubset(size=2, among=(1, 2, 3, 4, 5))
    for epoch, steps in mixgrpo("flow_factory_sde_step_subset").items():
        assert window.steps(10, 42, int(epoch)) == sorted(steps)


def test_decays() -> None:
    published = GOLDEN["V09_diffusion_nft"]["old_policy_decay"]
    schedules = {
        "type0": Constant(0.0),
        "type1": Linear(slope=0.001, limit=0.5),
        "type2": Linear(start=75, slope=0.0075, limit=0.999),
        "flow_factory_piecewise_linear(flat=0,ramp=0.001,max=0.5)": Linear(slope=0.001, limit=0.5, start=0),
    }
    assert schedules.keys() == published.keys()
    for name, schedule in schedules.items():
        for step, expected in published[name].items():
            assert schedule.at(int(step)) == pytest.approx(expected, rel=1e-8)
    for step, expected in mixgrpo("flow_grpo_ema_decay").items():
        assert WarmUp(0.9).at(int(step)) == pytest.approx(expected, rel=1e-8)


def test_closed_form_log_ratio_is_precise() -> None:
    """V13: subtracting float32 log-probs has an error floor near 1e-7, the closed form has not."""
    generator = torch.Generator().manual_seed(0)
    shape, std = (8, 16, 64, 64), 0.392
    mean = torch.randn(shape, generator=generator)
    noise, shift = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    for row in GOLDEN["V13_log_ratio_precision"]["rows"]:
        new_mean = mean + std * row["mean_shift_over_std"] * shift
        drawn = mean + std * noise
        exact = -((drawn.double() - new_mean.double()) ** 2 - (drawn.double() - mean.double()) ** 2) / (2 * std**2)
        steps = [gaussian(step_mean, std) for step_mean in (mean, new_mean)]
        error = (steps[1].log_ratio(mean, drawn).double() - exact.flatten(1).mean(1)).abs().max()
        difference = steps[1].log_prob(drawn) - steps[0].log_prob(drawn)
        floor = (difference.double() - exact.flatten(1).mean(1)).abs().max()
        assert error < 20 * row["max_err_fp32_closed_form"]
        assert error < floor / 100


def gaussian(mean: torch.Tensor, std: float) -> GaussianStep:
    full = torch.full((len(mean),), std)
    return gaussian_step(mean, full, full, mean)


NOT_HERE = {
    "flow_grpo_ema_trace": "V11: tests/unit/test_optim.py",
    "V09_diffusion_nft": "test_final_sample_golden.py",
    "V10_x0_only_objectives": "test_final_sample_golden.py",
    "V12_cpu_rewards": "test_rewards_golden.py",
}


def test_every_set_is_tested_or_has_its_reason() -> None:
    assert {key[:3] for key in GOLDEN if key.startswith("V")} == {f"V{number:02d}" for number in range(1, 14)} - {"V03"}
    assert GOLDEN["V07_grpo_guard"]["cases"].keys() == {"per_sample"}
    here = ("mixgrpo_", "flow_grpo_ema_decay", "flow_factory_sde_step_subset", "fast_window_possible_starts")
    assert all(key.startswith((*here, *NOT_HERE)) for key in GOLDEN["V11_schedulers_samplers_ema"])
