"""What objectives on ratios of probabilities share.

Shapes: R decisions, which a policy made at random: denoising steps, or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from sfumato.algorithms.dynamics.step import GaussianStep
from sfumato.algorithms.objectives.steps import SampledSteps

Loss: TypeAlias = "tuple[torch.Tensor, dict[str, torch.Tensor]]"


@dataclass(frozen=True)
class Ratio:
    """How much likelier R decisions are now than under an older policy."""

    log_ratio: torch.Tensor
    """float32 ``[R]``, with gradients: log p - log p_old, or what an objective has in its place; 0 for one policy."""
    kl: torch.Tensor | None = None
    """float32 ``[R]``, without gradients: KL(old, new) of what a decision was drawn from, where it is known."""
    divisor: torch.Tensor | None = None
    """float32 ``[R]``, by which the losses of denoising steps are evened out; None is 1."""


class RatioObjective(Protocol):
    """What an objective offers."""

    @property
    def replay_tolerance(self) -> float:
        """Largest absolute log-ratio that may show while the policy is still the one that sampled."""
        ...

    def ratio(self, new: GaussianStep, old: SampledSteps) -> Ratio:
        """Of R denoising steps, in the exact form of the dynamics that ``loss`` takes."""
        ...

    def loss(self, ratio: Ratio, advantages: torch.Tensor, mask: torch.Tensor | None = None) -> Loss:
        """The loss ``[R]`` (lower is better) and its statistics.

        Args:
            ratio: of R decisions.
            advantages: ``[R]``.
            mask: bool ``[R]``: decisions that are learned from; the others have a loss of 0 and no part in the
                statistics. None is all.
        """
        ...


def clipped_surrogate(
    log_ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, mask: torch.Tensor | None = None
) -> Loss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (PPO, arXiv 1707.06347, eq. 7).

    Args:
        log_ratio: ``[R]``.
        advantages: ``[R]``.
        low, high: clip ranges, above 0.
        mask: bool ``[R]``, as ``RatioObjective.loss`` has it.

    Returns:
        The loss ``[R]`` and sums over rows named ``ratio/...``.
    """
    log_ratio = masked(log_ratio, mask)  # first, so that what stands elsewhere reaches no gradient
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - low, 1 + high)
    loss = masked(torch.maximum(-advantages * ratio, -advantages * clipped), mask)
    with torch.no_grad():
        stats = ratio_sums(log_ratio, ratio, mask)
        stats["ratio/clipped_high"] = masked((ratio > 1 + high).float(), mask).sum()
        stats["ratio/clipped_low"] = masked((ratio < 1 - low).float(), mask).sum()
    return loss, stats


def ratio_sums(log_ratio: torch.Tensor, ratio: torch.Tensor, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Sums over rows of ratios ``[R]``, and of half their squared logarithms, which are 0 outside the mask."""
    return {
        "ratio/mean": masked(ratio.detach(), mask).sum(),
        "ratio/approx_kl": 0.5 * (log_ratio.detach() ** 2).sum(),
    }


def masked(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """``[R]`` with zeros, which have no gradient, in the place of rows that are not learned from."""
    return values if mask is None else torch.where(mask, values, torch.zeros_like(values))


def check_clip_ranges(clip_range: float, clip_range_high: float | None) -> None:
    """Raises ValueError when a clip range is not above 0."""
    if not clip_range > 0 or (clip_range_high is not None and not clip_range_high > 0):
        raise ValueError("clip ranges must be above 0")
