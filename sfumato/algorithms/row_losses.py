"""Losses of decisions: what an objective returns, rows that are not learned from, and the loss of a critic.

Shapes: R rows, each a decision that a policy made: a (sample, trained denoising step) pair, or a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

RowLosses: TypeAlias = "tuple[Float[Tensor, 'rows'], dict[str, Float[Tensor, '']]]"
"""The loss of each row, and sums over rows by the names of their metrics."""


def masked(values: Float[Tensor, "rows"], mask: Bool[Tensor, "rows"] | None) -> Float[Tensor, "rows"]:
    """``[R]`` with zeros without gradient in the rows outside the mask; None of a mask changes nothing."""
    return values if mask is None else torch.where(mask, values, torch.zeros_like(values))


def value_loss(
    values: Float[Tensor, "rows"],
    old_values: Float[Tensor, "rows"],
    returns: Float[Tensor, "rows"],
    mask: Bool[Tensor, "rows"],
    clip_range: float | None = 0.5,
    factor: float = 0.5,
) -> RowLosses:
    """factor max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2) of each row.

    Args:
        values: ``[R]``, with gradients.
        old_values: ``[R]``, from before the update.
        returns: ``[R]``.
        mask: bool ``[R]``.
        clip_range: c; None clips none.
        factor: 0.5 in verl, OpenRLHF and AReaL, 1 in slime.

    Returns:
        The loss ``[R]``, 0 outside the mask, and sums over rows named ``value/...``.

    Raises:
        ValueError: when ``clip_range`` is not above 0.
    """
    if clip_range is not None and not clip_range > 0:
        raise ValueError(f"clip_range {clip_range} of the values must be above 0, or null")
    values = masked(values, mask)
    losses = (values - returns).square()
    stats = {"value/error": masked(losses.detach(), mask).sum(), "value/mean": values.detach().sum()}
    if clip_range is not None:
        bounded = (values - old_values).clamp(-clip_range, clip_range) + old_values
        clipped = (bounded - returns).square()
        stats["value/clipped"] = masked((clipped > losses).float(), mask).sum()
        losses = torch.maximum(losses, clipped)
    return masked(factor * losses, mask), stats
