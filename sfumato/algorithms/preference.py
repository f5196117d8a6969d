"""Losses that learn from pairs of a better and a worse answer, and from answers that are good or bad."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float, Real
    from torch import Tensor

LOSSES = ("sigmoid", "ipo", "hinge", "simpo", "orpo")


def preference_loss(
    chosen: Float[Tensor, "pairs"],
    rejected: Float[Tensor, "pairs"],
    beta: float,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
    lengths: tuple[Real[Tensor, "pairs"], Real[Tensor, "pairs"]] | None = None,
    gamma: float = 0.0,
) -> Float[Tensor, "pairs"]:
    """Loss of each pair, from the log-ratios of policy to reference of both answers.

    With h the difference of both: ``sigmoid`` is -log sigmoid(beta h) (DPO, arXiv 2305.18290, eq. 7; with label
    smoothing s, conservative DPO: (1 - s) of it and s of it for -h); ``hinge`` is max(0, 1 - beta h) (SLiC, arXiv
    2305.10425); ``ipo`` is (h - 1 / (2 beta))^2 (arXiv 2310.12036, eq. 17) of log-ratios that are means over tokens,
    as its authors recommend.

    Without a reference, of p the mean log-probability of an answer's tokens: ``simpo`` is -log sigmoid(beta (p_chosen -
    p_rejected) - gamma) (SimPO, arXiv 2405.14734, eq. 6; with label smoothing as above); ``orpo`` is -beta log
    sigmoid(log odds(p_chosen) - log odds(p_rejected)) with log odds(p) = p - log(1 - exp(p)) (ORPO, arXiv 2403.07691,
    eq. 7), to which its authors add the negative log-likelihood of the better answer.

    Args:
        chosen, rejected: sums over tokens of log p_policy - log p_reference, ``[P]``; simpo, orpo: means over tokens
            of log p_policy.
        beta: strength of the pull towards the reference; simpo: scale of the rewards; orpo: weight of the odds ratio.
        kind: one of ``LOSSES``.
        label_smoothing: share of wrong labels that is assumed, below 0.5; for sigmoid and simpo.
        lengths: tokens of the chosen and of the rejected answers, ``[P]`` each; for ipo.
        gamma: for simpo.

    Returns:
        ``[P]``.

    Raises:
        ValueError: for an unknown kind, or when ipo has no lengths.
    """
    if kind == "ipo":
        if lengths is None:
            raise ValueError("ipo needs the lengths of the answers")
        return (chosen / lengths[0] - rejected / lengths[1] - 1 / (2 * beta)).square()
    margin = beta * (chosen - rejected)
    if kind == "hinge":
        return torch.relu(1 - margin)
    if kind == "orpo":
        log_odds = (chosen - log1mexp(chosen)) - (rejected - log1mexp(rejected))
        return -beta * torch.nn.functional.logsigmoid(log_odds)
    if kind == "simpo":
        margin = margin - gamma
    elif kind != "sigmoid":
        raise ValueError(f"unknown loss {kind!r}; known: {', '.join(LOSSES)}")
    correct, wrong = torch.nn.functional.logsigmoid(margin), torch.nn.functional.logsigmoid(-margin)
    return -(1 - label_smoothing) * correct - label_smoothing * wrong


def log1mexp(log_p: Float[Tensor, "pairs"]) -> Float[Tensor, "pairs"]:
    """log(1 - p) of log p, which must not be above 0; exact to rounding near p = 0 and p = 1.

    At p = 1 the result is not -inf, but that of the largest log p below 0.
    """
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).tiny)
    # p above a half: log(-expm1(log p)); below: log1p(-exp(log p)). ``where`` on the arguments, too, since the branch
    # that is not taken would give NaN gradients.
    is_large = log_p > -0.6931471805599453
    near_one = torch.log(-torch.expm1(log_p.where(is_large, -1.0)))
    return near_one.where(is_large, torch.log1p(-log_p.where(~is_large, -1.0).exp()))


def kto_loss(
    log_ratios: Float[Tensor, "answers"],
    labels: Float[Tensor, "answers"],
    kl: float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Tensor, "answers"]:
    """Loss of each answer, which is good or bad (KTO, arXiv 2402.01306, eq. 8).

    w_D (1 - sigmoid(beta (r - z))) of a good one, w_U (1 - sigmoid(beta (z - r))) of a bad one.

    Args:
        log_ratios: r, sums over tokens of log p_policy - log p_reference, ``[N]``.
        labels: 1 of good answers, 0 of bad ones, ``[N]``.
        kl: z, an estimate of KL(policy, reference) that is no part of the gradient: the mean log-ratio of answers to
            other prompts, at least 0.
        beta: strength of the pull towards the reference.
        desirable_weight, undesirable_weight: w_D and w_U.

    Returns:
        ``[N]``.
    """
    is_good = labels > 0.5
    margin = beta * torch.where(is_good, log_ratios - kl, kl - log_ratios)
    weights = torch.where(is_good, desirable_weight, undesirable_weight)
    return weights * (1 - margin.sigmoid())
