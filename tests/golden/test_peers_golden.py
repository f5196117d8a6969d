"""Steps, advantages and losses against what flow_grpo, verl-omni, Flow-Factory and DanceGRPO compute.

Every case of ``data/peers_diffusion.json`` is tested here. Where a convention differs, the test says how one turns
into the other.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from sfumato.algorithms.advantages import Best, BestWorst, GroupAdvantage, RawReward
from sfumato.algorithms.dynamics import CPS, DanceSDE, FlowSDE, GaussianStep, gaussian_step
from sfumato.algorithms.forward_process.group_losses import DPO
from sfumato.algorithms.forward_process.noised import NoisedSamples, reward_probability
from sfumato.algorithms.kl import FlowGRPOKL
from sfumato.algorithms.objectives import DPPO, ClippedRatio, Guard, SampledSteps

FILE = json.loads((Path(__file__).parent / "data" / "peers_diffusion.json").read_text(encoding="utf-8"))
INPUTS = {name: value if name == "prompts" else torch.tensor(value) for name, value in FILE["inputs"].items()}
CASES = {case["id"]: case for case in FILE["cases"]}
SIGMAS = torch.tensor(CASES["sched/n=10,shift=3.0"]["outputs"]["sigmas"])
PROMPTS = torch.tensor([sorted(set(INPUTS["prompts"])).index(prompt) for prompt in INPUTS["prompts"]])
DYNAMICS = {
    "sde": FlowSDE,
    "Flow-SDE": FlowSDE,
    "cps": CPS,
    "CPS": CPS,
    "dance_sde": DanceSDE,
    "Dance-SDE": DanceSDE,
    "flux_step": DanceSDE,
}


def some(*parts: str) -> pytest.MarkDecorator:
    chosen = [case for name, case in CASES.items() if any(part in name for part in parts)]
    assert chosen
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case["id"])


def close(actual: torch.Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), atol=1e-6, rtol=1e-4)


@some("sched/")
def test_sigmas(case: dict) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    from sfumato.models.diffusion.families.sd3 import StableDiffusion3

    class Pipeline:
        scheduler = FlowMatchEulerDiscreteScheduler(shift=case["params"]["shift"])
        components = {}

    sigmas = StableDiffusion3(Pipeline()).sigmas(case["params"]["num_inference_steps"], (16, 64, 64))
    close(sigmas, case["outputs"]["sigmas"])


@some("sde_step/", "/step/", "flux_step/")
def test_stochastic_steps(case: dict) -> None:
    params, outputs = case["params"], case["outputs"]
    kind = params.get("sde_type") or params.get("dynamics_type") or ("sde" if "sde_step" in case["id"] else "flux_step")
    dynamics = DYNAMICS[kind](noise_level=params.get("noise_level", params.get("eta")))
    sigma, sigma_next = (SIGMAS[params["step_index"] + value].expand(3) for value in (0, 1))
    velocity = INPUTS["model_output_new"].clone().requires_grad_(True)
    old, new = (
        dynamics.step(output, INPUTS["latents"], sigma, sigma_next, float(SIGMAS[1]))
        for output in (INPUTS["model_output"], velocity)
    )
    drawn = old.draw(INPUTS["noise"])
    # what is called std_dev_t of Dance-SDE is the noise level in Flow-Factory, the standard deviation elsewhere
    std_dev_t = old.std if kind in ("dance_sde", "flux_step") else old.diffusion
    constant = 0 if params.get("include_logprob_normalizer", True) else old.log_norm

    close(old.mean, outputs["prev_sample_mean"])
    close(new.mean, outputs["prev_sample_mean_new"])
    close(std_dev_t, torch.tensor(outputs["std_dev_t"]).expand(3))
    close(old.std, torch.tensor(outputs["noise_scale"]).expand(3))
    close(drawn, outputs["prev_sample"])
    close(old.log_prob(drawn) - constant, outputs["log_prob_old"])
    close(new.log_prob(drawn) - constant, outputs["log_prob_new"])
    expected = torch.tensor(outputs["log_prob_new"]) - torch.tensor(outputs["log_prob_old"])
    close(new.log_ratio(old.mean, drawn), expected)
    new.log_prob(drawn).sum().backward()
    close(velocity.grad, outputs["grad_log_prob_new_wrt_model_output"])


@some("flow_grpo/adv/grpo", "flow_grpo/adv/rwr", "flow_grpo/adv/sft", "flow_grpo/adv/dpo")
def test_advantages_of_flow_grpo(case: dict) -> None:
    params, rows = case["params"], case["inputs"]["rows"]
    advantage = {
        "grpo": GroupAdvantage(std="global" if params["global_std"] else "group", eps=params["eps"], clip=math.inf),
        "rwr": RawReward(),
        "sft": Best(),
        "dpo": BestWorst(),
    }[params["type"]]
    result = advantage.compute(INPUTS["rewards"][:rows], PROMPTS[:rows])
    expected = torch.tensor(case["outputs"]["advantages"])
    if params["type"] == "dpo":  # upstream labels the first two of a group of equals; here it has neither
        expected[result.no_spread] = 0.0
    torch.testing.assert_close(result.values, expected, atol=1e-6, rtol=1e-6)


def group_advantages(params: dict) -> torch.Tensor:
    """verl-omni's: the sample standard deviation."""
    scaled = params.get("norm_adv_by_std_in_grpo", params.get("norm_by_std"))
    std = ("global" if params["global_std"] else "group") if scaled else "none"
    advantage = GroupAdvantage(std=std, ddof=1, eps=params["epsilon"], clip=math.inf)
    return advantage.compute(INPUTS["rewards"], PROMPTS).values


@some("verl_omni/adv")
def test_advantages_of_verl_omni(case: dict) -> None:
    close(group_advantages(case["params"]), case["outputs"]["advantages"])


@some("nft/reward_prob")
def test_reward_probabilities_of_diffusion_nft(case: dict) -> None:
    advantages = group_advantages(case["params"])
    close(advantages, case["outputs"]["advantages"])
    r = reward_probability(advantages, case["params"]["adv_clip_max"], case["params"]["adv_mode"])
    close(r, case["outputs"]["reward_prob"])


def policy_steps() -> tuple[GaussianStep, SampledSteps, torch.Tensor]:
    """The inputs of verl-omni's losses as steps: latents that have just the given log-ratio, between the given means.

    verl-omni takes log-probabilities and means as independent inputs; here one follows from the other. Also returned
    is d log p / d mean, which turns gradients for one into gradients for the other.
    """
    mean, old_mean = INPUTS["mean_new"].clone().requires_grad_(True), INPUTS["mean_old"]
    rows, std = len(mean), INPUTS["std_dev_t"] * INPUTS["sqrt_dt"]
    step = gaussian_step(mean, std.expand(rows), INPUTS["std_dev_t"].expand(rows), mean)
    apart = mean.detach() - old_mean
    log_ratio = INPUTS["log_prob"] - INPUTS["old_log_prob"]
    share = log_ratio * std**2 / (apart**2).flatten(1).mean(dim=1)
    drawn = (mean.detach() + old_mean) / 2 + share.reshape(-1, 1, 1, 1) * apart
    old = SampledSteps(
        next_latents=drawn,
        log_probs=INPUTS["old_log_prob"],
        step_sizes=(INPUTS["sqrt_dt"] ** 2).expand(rows),
        means=old_mean,
    )
    return step, old, (drawn - mean.detach()) / std**2 / apart[0].numel()


@some("verl_omni/loss/flow_grpo", "verl_omni/loss/grpo_guard", "verl_omni/loss/flow_dppo")
def test_policy_losses_of_verl_omni(case: dict) -> None:
    params, outputs, metrics = case["params"], case["outputs"], case["outputs"]["metrics"]
    new, old, slope = policy_steps()
    advantages = INPUTS["adv"]
    if "flow_dppo" in case["id"]:
        objective = DPPO(kl_threshold=params["kl_mask_threshold"], scale_by_variance=params["add_kl_coefficient"])
    else:
        objective = (Guard if "guard" in case["id"] else ClippedRatio)(clip_range=params["clip_ratio"])
        advantages = advantages.clamp(-params["adv_clip_max"], params["adv_clip_max"])
    losses, stats = objective.loss(objective.ratio(new, old), advantages)
    weights = INPUTS[case["inputs"]["rollout_is_weights"]] if case["inputs"]["rollout_is_weights"] else torch.ones(8)
    loss = (losses * weights).mean()  # weights of importance sampling are the caller's business
    loss.backward()

    close(loss, outputs["loss"])
    expected = slope * torch.tensor(outputs["grad_log_prob"]).reshape(-1, 1, 1, 1)
    if "grad_prev_sample_mean" in outputs:
        expected = expected + torch.tensor(outputs["grad_prev_sample_mean"])
    close(new.mean.grad, expected)
    names = {
        "ratio/mean": "ratio_mean",
        "ratio/clipped_high": "pg_clipfrac_higher",
        "ratio/clipped_low": "pg_clipfrac_lower",
        "ratio/masked_high": "pos_rm_fraction",
        "ratio/masked_low": "neg_rm_fraction",
        "kl/old": "kl_new_old_mean",
    }
    for name in set(names) & set(stats):
        close(stats[name] / 8, metrics[f"actor/{names[name]}"])
    if "actor/approx_kl" in metrics:
        close(stats["ratio/approx_kl"] / 8, metrics["actor/approx_kl"])


def test_kl_of_verl_omni() -> None:
    outputs = CASES["verl_omni/loss/kl"]["outputs"]
    new, old, _ = policy_steps()
    reference = gaussian_step(old.means, new.std, new.diffusion, old.means)
    penalty = FlowGRPOKL().penalty(new, reference).mean()
    penalty.backward()
    close(penalty, outputs["loss"])
    close(new.mean.grad, outputs["grad_prev_sample_mean"])


def test_dpo_of_verl_omni() -> None:
    case = CASES["verl_omni/loss/dpo/beta=5.0"]
    velocity = INPUTS["dpo_pred"].clone().requires_grad_(True)
    batch = NoisedSamples(
        x0=INPUTS["dpo_latent"],
        noise=INPUTS["dpo_noise"],
        sigma=torch.full((6,), 0.5),
        velocity=velocity,
        group_ids=torch.tensor([0, 0, 1, 1, 2, 2]),
        levels=torch.zeros(6, dtype=torch.long),
        reference_velocity=INPUTS["dpo_ref"],
    )
    loss, stats = DPO(beta=case["params"]["dpo_beta"]).loss(batch, torch.tensor([1.0, -1.0] * 3))
    loss.mean().backward()
    close(loss.mean(), case["outputs"]["loss"])
    close(stats["dpo/accuracy"] / 6, case["outputs"]["metrics"]["actor/implicit_acc"])
    close(stats["dpo/margin"] / 6, case["outputs"]["metrics"]["rewards/margins"])
    close(velocity.grad, case["outputs"]["grad_noise_pred"])


def test_every_case_is_tested() -> None:
    tested = ("sched/", "sde_step/", "/step/", "flux_step/", "/adv/", "/reward_prob/", "/loss/")
    assert [name for name in CASES if not any(part in name for part in tested)] == []
