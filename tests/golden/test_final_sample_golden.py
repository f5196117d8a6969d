"""Objectives on final samples against values that other implementations computed (V09, V10 of ``flow_rl.json``)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sfumato.algorithms.forward_kl import VelocityMSE
from sfumato.algorithms.forward_process.group_losses import CRD, DGPO, DPO
from sfumato.algorithms.forward_process.noised import NoisedSamples, reward_probability
from sfumato.algorithms.forward_process.sample_losses import AWM, NFT

GOLDEN = json.loads((Path(__file__).parent / "data" / "flow_rl.json").read_text(encoding="utf-8"))
SHARED = {name: torch.tensor(GOLDEN["shared_tensors"][name]) for name in ("x", "v_old", "v_new", "v_ref", "eps")}
V09, V10 = GOLDEN["V09_diffusion_nft"], GOLDEN["V10_x0_only_objectives"]


def close(actual: torch.Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), atol=2e-6, rtol=2e-5)


def batch(sigma: list[float]) -> NoisedSamples:
    """The two shared rows as one group; the policy's velocity is a leaf with gradients."""
    return NoisedSamples(
        x0=SHARED["x"],
        noise=SHARED["eps"],
        sigma=torch.tensor(sigma),
        velocity=SHARED["v_new"].clone().requires_grad_(True),
        group_ids=torch.zeros(2, dtype=torch.long),
        levels=torch.zeros(2, dtype=torch.long),
        old_velocity=SHARED["v_old"],
        reference_velocity=SHARED["v_ref"],
    )


@pytest.mark.parametrize("case", V09["cases"], ids=lambda case: f"beta {case['beta']}")
def test_diffusion_nft(case: dict) -> None:
    objective, rows = NFT(beta=case["beta"], advantage_clip=V09["adv_clip_max"]), batch(V09["t"])
    advantages = torch.tensor(V09["advantages"])
    loss, stats = objective.loss(rows, advantages)
    kl = VelocityMSE(coef=V09["kl_beta"])
    total = (loss + kl.coef * kl.penalty(rows, advantages)).mean()
    total.backward()

    close(reward_probability(advantages, 5.0), case["r"])
    close(stats["nft/positive"], sum(case["positive_loss"]))
    close(stats["nft/negative"], sum(case["negative_loss"]))
    close(loss.mean(), case["policy_loss"])
    close(total, case["total_loss"])
    close(rows.velocity.grad, case["grad_wrt_v_new"])


@pytest.mark.parametrize(
    ("name", "weighting"),
    [("Uniform", "uniform"), ("t", "t"), ("t**2", "t2"), ("huber", "huber"), ("ghuber", "ghuber")],
)
def test_awm(name: str, weighting: str) -> None:
    case, rows = V10["awm_log_prob"][name], batch(V10["t"])
    objective = AWM(weighting=weighting, ema_coef=0.0, advantage_clip=1.0)
    close(objective.log_prob(rows, rows.old_velocity), case["old"])
    close(objective.log_prob(rows, rows.velocity), case["new"])
    close(objective.loss(rows, -torch.ones(2))[0], case["ratio"])  # the loss of an unclipped row is -A times the ratio


def test_dpo() -> None:
    case, rows = V10["dpo"], batch(V10["t"])
    loss, stats = DPO(beta=case["beta"]).loss(rows, torch.tensor([1.0, -1.0]))
    loss.mean().backward()
    close(rows.error(rows.velocity), case["theta_mse"])
    close(rows.error(rows.reference_velocity), case["ref_mse"])
    close(stats["dpo/margin"] / 2, case["inside"][0])
    close(loss.mean(), case["loss"])
    close(rows.velocity.grad, case["grad_wrt_v_new"])


@pytest.mark.parametrize("clip_range", [None, 5e-2], ids=["", "clipped"])
def test_dgpo(clip_range: float | None) -> None:
    case, rows = V10["dgpo"], batch(V10["t"])
    loss, stats = DGPO(beta=100.0, clip_range=clip_range).loss(rows, torch.tensor(case["advantages"]))
    loss.mean().backward()
    close(stats["dgpo/group_weight"] / 2, case["group_weight"])
    close(loss.mean(), case["loss"])
    close(rows.velocity.grad, case["grad_wrt_v_new"])  # no row has left the trust region in its advantage's direction


@pytest.mark.parametrize("case", V10["crd"]["cases"], ids=lambda case: f"{case['crd_beta']}-{case['weight_temp']}")
def test_crd(case: dict) -> None:
    temperature = None if case["weight_temp"] < 0 else case["weight_temp"]
    rows, advantages = batch(V10["t"]), torch.tensor(V10["crd"]["advantages"])
    objective = CRD(beta=case["crd_beta"], temperature=temperature, advantage_clip=V10["crd"]["adv_clip_max"])
    loss, _ = objective.loss(rows, advantages)
    loss.mean().backward()
    close(objective.implicit_reward(rows), case["r_theta"])
    close(loss.mean() * case["crd_beta"] / V10["crd"]["adv_clip_max"], case["unscaled_loss"])
    close(loss.mean(), case["policy_loss"])
    close(rows.velocity.grad, case["grad_wrt_v_new"])
