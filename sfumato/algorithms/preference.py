"""Losses that learn from pairs of a better and a worse answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float, Real
    from torch import Tensor

LOSSES = ("sigmoid", "ipo", "hinge")


def preference_loss(
    chosen: Float[Tensor, "pairs"],
    rejected: Float[Tensor, "pairs"],
    beta: float,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
    lengths: tuple[Real[Tensor, "pairs"], Real[Tensor, "pairs"]] | None = None,
) -> Float[Tensor, "pairs"]:
    """Loss of each pair, from how much likelier the policy makes both answers than the reference does.

    With h the difference of both: ``sigmoid`` is -log sigmoid(beta h) (DPO, arXiv 2305.18290, eq. 7; with label
    smoothing s, conservative DPO: (1 - s) of it and s of it for -h); ``hinge`` is max(0, 1 - beta h) (SLiC, arXiv
    2305.10425); ``ipo`` is (h - 1 / (2 beta))^2 (arXiv 2310.12036, eq. 17) of log-ratios that are means over tokens,
    as its authors recommend.

    Args:
        chosen, rejected: sums over tokens of log p_policy - log p_reference, ``[P]``.
        beta: strength of the pull towards the reference.
        kind: one of ``LOSSES``.
        label_smoothing: share of wrong labels that is assumed, below 0.5; for sigmoid.
        lengths: tokens of the chosen and of the rejected answers, ``[P]`` each; for ipo.

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
    if kind != "sigmoid":
        raise ValueError(f"unknown loss {kind!r}; known: {', '.join(LOSSES)}")
    correct, wrong = torch.nn.functional.logsigmoid(margin), torch.nn.functional.logsigmoid(-margin)
    return -(1 - label_smoothing) * correct - label_smoothing * wrong
