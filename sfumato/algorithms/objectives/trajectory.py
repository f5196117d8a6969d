"""What objectives on the steps of a trajectory share.

Shapes: R rows, each a (sample, trained step) pair; ... latent dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from sfumato.algorithms.dynamics.step import GaussianStep

Loss: TypeAlias = "tuple[torch.Tensor, dict[str, torch.Tensor]]"


@dataclass(frozen=True)
class SampledSteps:
    """What was drawn when the trajectories were sampled. The standard deviation does not depend on the policy."""

    next_latents: torch.Tensor
    """float32 ``[R, ...]``: the latents that were drawn."""
    log_probs: torch.Tensor
    """float32 ``[R]``: their log-probability then."""
    step_sizes: torch.Tensor
    """float32 ``[R]``: h = sigma - sigma' > 0."""
    means: torch.Tensor | None
    """float32 ``[R, ...]``: the means they were drawn around; None where they were not kept."""

    def log_ratio(self, new: GaussianStep) -> torch.Tensor:
        """log p_new - log p_old of each row: in closed form where the means were kept, for precision."""
        if self.means is None:
            return new.log_prob(self.next_latents) - self.log_probs
        return new.log_ratio(self.means, self.next_latents)

    def old_means(self) -> torch.Tensor:
        """The means. Raises ValueError where they were not kept."""
        if self.means is None:
            raise ValueError("this objective needs the means of the sampled steps")
        return self.means


class TrajectoryObjective(Protocol):
    """What an objective offers."""

    @property
    def replay_tolerance(self) -> float:
        """Largest absolute ``log_ratio`` that may show while the policy is still the one that sampled."""
        ...

    def log_ratio(self, new: GaussianStep, old: SampledSteps) -> torch.Tensor:
        """float32 ``[R]``: what ``loss`` exponentiates; exactly 0 where the means are equal."""
        ...

    def loss(self, new: GaussianStep, old: SampledSteps, advantages: torch.Tensor) -> Loss:
        """The loss ``[R]`` (lower is better) and its statistics, for a step of R rows and advantages ``[R]``."""
        ...


def clipped_surrogate(log_ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> Loss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (PPO, arXiv 1707.06347, eq. 7).

    Args:
        log_ratio: ``[R]``.
        advantages: ``[R]``.
        low, high: clip ranges, above 0.

    Returns:
        The loss ``[R]`` and sums over rows named ``ratio/...``.
    """
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    with torch.no_grad():
        stats = {
            "ratio/mean": ratio.sum(),
            "ratio/approx_kl": 0.5 * (log_ratio**2).sum(),
            "ratio/clipped_high": (ratio > 1 + high).float().sum(),
            "ratio/clipped_low": (ratio < 1 - low).float().sum(),
        }
    return loss, stats


def check_clip_ranges(clip_range: float, clip_range_high: float | None) -> None:
    """Raises ValueError when a clip range is not above 0."""
    if not clip_range > 0 or (clip_range_high is not None and not clip_range_high > 0):
        raise ValueError("clip ranges must be above 0")
