"""Losses of reward models: of pairs of answers, or of the steps of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def bradley_terry_loss(
    chosen: Float[Tensor, "pairs"],
    rejected: Float[Tensor, "pairs"],
    margin: Float[Tensor, "pairs"] | float = 0.0,
    center_coef: float = 0.0,
) -> Float[Tensor, "pairs"]:
    """-log sigmoid(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2 of each pair.

    Bradley and Terry's probability that the one is preferred (arXiv 2203.02155, eq. 1), with a margin (arXiv
    2307.09288, eq. 2) and a term that keeps the mean reward near 0 (arXiv 2312.09244).

    Args:
        chosen, rejected: rewards, ``[P]``.
        margin: how much higher the better answer's reward should be, ``[P]``.
        center_coef: c.

    Returns:
        ``[P]``.
    """
    return -functional.logsigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected).square()


def step_loss(values: Float[Tensor, "steps"], labels: Float[Tensor, "steps"]) -> Float[Tensor, "steps"]:
    """-y log sigmoid(v) - (1 - y) log sigmoid(-v) of each step (arXiv 2305.20050, arXiv 2312.08935, eq. 2).

    It is the cross entropy of two classes whose logits differ by v.

    Args:
        values: at the tokens that end the steps, ``[S]``.
        labels: 1 of a right step, 0 of a wrong one, or a share in between, ``[S]``.

    Returns:
        ``[S]``.
    """
    return functional.binary_cross_entropy_with_logits(values, labels, reduction="none")
