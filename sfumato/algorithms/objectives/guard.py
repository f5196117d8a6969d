"""GRPO-Guard: a ratio without the drift that makes clipping one-sided (arXiv 2510.22319)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.algorithms.dynamics.step import GaussianStep
from sfumato.algorithms.objectives.clipped_ratio import ClippedRatio
from sfumato.algorithms.objectives.ratio import Loss, Ratio
from sfumato.algorithms.objectives.steps import SampledSteps


@dataclass(frozen=True)
class Guard(ClippedRatio):
    """The clipped surrogate of the recentred log-ratio, divided by the step size h (``recentred_log_ratio`` of steps).

    1 / h evens out the gradients of the steps. Computed for each sample by itself: flow_grpo averages over the batch
    what recentring adds (its issue 244), Flow-Factory omits 1 / h.
    """

    type: ClassVar[str] = "guard"

    clip_range: float = 2e-6
    """The ratio is clipped to [1 - clip_range, 1 + clip_range_high]."""

    def ratio(self, new: GaussianStep, old: SampledSteps) -> Ratio:
        """Recentred, of R denoising steps. Raises ValueError when the old means were not kept."""
        return Ratio(new.recentred_log_ratio(old.old_means(), old.next_latents), divisor=old.step_sizes)

    def loss(self, ratio: Ratio, advantages: torch.Tensor, mask: torch.Tensor | None = None) -> Loss:
        """As ``RatioObjective.loss``."""
        loss, stats = super().loss(ratio, advantages, mask)
        return loss if ratio.divisor is None else loss / ratio.divisor, stats
