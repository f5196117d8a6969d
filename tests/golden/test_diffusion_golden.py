"""Steps, losses and statistics against values that other implementations computed (``data/flow_rl.json``)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from sfumato.algorithms.advantages import GroupAdvantage
from sfumato.algorithms.dynamics.cps import CPS
from sfumato.algorithms.dynamics.ode import EulerODE
from sfumato.algorithms.dynamics.sde import FlowSDE
from sfumato.algorithms.kl import FlowGRPOKL, GaussianKL
from sfumato.algorithms.objectives.clipped_ratio import ClippedRatio
from sfumato.algorithms.windows import AllSteps, RandomWindow

GOLDEN = json.loads((Path(__file__).parent / "data" / "flow_rl.json").read_text())
SHARED = {name: torch.tensor(GOLDEN["shared_tensors"][name]) for name in ("x", "v_old", "v_new", "v_ref", "eps")}
SIGMAS = torch.tensor(GOLDEN["V01_sigma_schedules"]["sd3_shift3_n10_sigmas"])
STEP_CASES = GOLDEN["V02_flow_sde_and_cps_steps"]["cases"]


def close(actual: torch.Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), atol=2e-6, rtol=2e-5)


def step_of(dynamics: object, velocity: torch.Tensor, index: int):
    sigma, sigma_next = SIGMAS[index].expand(2), SIGMAS[index + 1].expand(2)
    return dynamics.step(velocity, SHARED["x"], sigma, sigma_next, float(SIGMAS[1]))


def test_sigmas_of_the_sd3_scheduler() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    from sfumato.models.diffusion.sd3 import StableDiffusion3

    class Pipeline:
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        components = {}

    model = StableDiffusion3(Pipeline())
    close(model.sigmas(10, (16, 64, 64)), GOLDEN["V01_sigma_schedules"]["sd3_shift3_n10_sigmas"])
    forty = model.sigmas(40, (16, 64, 64))
    close(torch.cat([forty[:5], forty[-5:]]), GOLDEN["V01_sigma_schedules"]["sd3_shift3_n40_sigmas_first5_last5"])


@pytest.mark.parametrize("case", STEP_CASES, ids=lambda case: f"{case['type']}-{case['step']}")
def test_stochastic_steps(case: dict) -> None:
    dynamics = {"sde": FlowSDE, "cps": CPS}[case["type"]](noise_level=case["noise_level"])
    old = step_of(dynamics, SHARED["v_old"], case["step"])
    new = step_of(dynamics, SHARED["v_new"], case["step"])
    drawn = old.draw(SHARED["eps"])

    close(old.mean, case["mean"])
    close(new.mean, case["mean_new"])
    close(old.diffusion, [case["std_dev_t"]] * 2)
    scale = case["sqrt_minus_dt"] if case["type"] == "sde" else 1.0
    close(old.std, [case["std_dev_t"] * scale] * 2)
    close(drawn, case["next_sample"])
    close(old.log_prob(drawn), case["log_prob_old"])
    close(new.log_prob(drawn), case["log_prob_new"])
    close(new.log_ratio(old.mean, drawn), case["log_ratio"])


@pytest.mark.parametrize("case", STEP_CASES, ids=lambda case: f"{case['type']}-{case['step']}")
def test_closed_form_is_the_difference_of_log_probs(case: dict) -> None:
    dynamics = {"sde": FlowSDE, "cps": CPS}[case["type"]](noise_level=case["noise_level"])
    old, new = (step_of(dynamics, SHARED[name], case["step"]) for name in ("v_old", "v_new"))
    drawn = old.draw(SHARED["eps"])
    close(new.log_ratio(old.mean, drawn), new.log_prob(drawn) - old.log_prob(drawn))
    assert torch.equal(old.log_ratio(old.mean, drawn), torch.zeros(2)), "equal means must give exactly 0"


def test_without_noise_the_step_is_eulers() -> None:
    case = GOLDEN["V02_flow_sde_and_cps_steps"]["noise_level_zero_step4"]
    close(step_of(EulerODE(), SHARED["v_old"], 4).mean, case["mean"])
    for dynamics in (FlowSDE, CPS):
        with pytest.raises(ValueError, match="noise_level"):
            dynamics(noise_level=0.0)


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
    log_ratio = new.log_ratio(old.mean, old.draw(SHARED["eps"]))
    loss, stats = ClippedRatio(clip_range=inputs["clip_range"]).loss(log_ratio, advantages)
    flow_grpo = FlowGRPOKL(coef=inputs["beta"])

    close(log_ratio.exp(), case["ratio"])
    close(loss.mean(), case["policy_loss"])
    close(flow_grpo.penalty(new, reference.mean).mean(), case["kl_flow_grpo (divides by 2*std_dev_t^2, no dt)"])
    exact = GaussianKL(coef=1.0).penalty(new, reference.mean).mean()
    close(exact, case["kl_exact_gaussian_per_dim (divides by 2*std_dev_t^2*|dt|)"])
    close(stats["ratio/approx_kl"] / 2, case["approx_kl"])
    close((stats["ratio/clipped_high"] + stats["ratio/clipped_low"]) / 2, case["clipfrac"])
    total = (loss + flow_grpo.coef * flow_grpo.penalty(new, reference.mean)).mean()
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
    log_ratio = new.log_ratio(old.mean, old.draw(SHARED["eps"]))
    loss = ClippedRatio(clip_range=case["clip_range"]).loss(log_ratio, advantages)[0].mean()
    loss.backward()
    close(log_ratio.exp(), case["ratio"])
    assert bool((log_ratio.exp() == 1).all()) == case["ratio_is_exactly_one"]
    close(loss, case["policy_loss"])
    close(velocity.grad, case["grad_wrt_v_new"])


@pytest.mark.parametrize(("std", "key"), [("group", "grpo_group_std"), ("global", "grpo_global_std")])
def test_advantages(std: str, key: str) -> None:
    golden = GOLDEN["V08_advantages"]
    prompts = golden["prompts"]
    groups = torch.tensor([sorted(set(prompts)).index(each) for each in prompts])
    rewards = torch.tensor(golden["rewards"], dtype=torch.float64)
    result = GroupAdvantage(std=std, clip=math.inf).compute(rewards, groups)
    torch.testing.assert_close(
        result.values.double(), torch.tensor(golden["flow_grpo"][key], dtype=torch.float64), rtol=1e-6, atol=1e-7
    )


def test_windows() -> None:
    for case, expected in GOLDEN["V11_schedulers_samplers_ema"]["fast_window_possible_starts"].items():
        if not case.startswith("size"):
            continue
        size = int(case.split()[1])
        bounds = tuple(int(each) for each in case.split("(")[1].rstrip(")").split(","))
        window = RandomWindow(size=size, range=bounds)
        assert window.starts() == expected
        drawn = {tuple(window.steps(10, seed=3, iteration=each)) for each in range(200)}
        assert drawn == {tuple(range(start, start + size)) for start in expected}
    assert AllSteps().steps(10, 0, 0) == list(range(9)), "the last step is never trained"


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
        steps = [gaussian(each, std) for each in (mean, new_mean)]
        error = (steps[1].log_ratio(mean, drawn).double() - exact.flatten(1).mean(1)).abs().max()
        difference = steps[1].log_prob(drawn) - steps[0].log_prob(drawn)
        floor = (difference.double() - exact.flatten(1).mean(1)).abs().max()
        assert error < 20 * row["max_err_fp32_closed_form"]
        assert error < floor / 100


def gaussian(mean: torch.Tensor, std: float):
    from sfumato.algorithms.dynamics import GaussianStep

    full = torch.full((len(mean),), std)
    return GaussianStep(mean, full, full, 1 / (2 * full**2), -torch.log(full) - math.log(2 * math.pi) / 2)
