"""The clipped surrogate of PPO, as GRPO and Flow-GRPO use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.algorithms.dynamics.step import GaussianStep
from sfumato.algorithms.objectives.ratio import Loss, Ratio, check_clip_ranges, clipped_surrogate
from sfumato.algorithms.objectives.steps import SampledSteps


@dataclass(frozen=True)
class ClippedRatio:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (arXiv 1707.06347, eq. 7)."""

    type: ClassVar[str] = "clipped_ratio"

    clip_range: float = 1e-4
    """The ratio is clipped to [1 - clip_range, 1 + clip_range_high]; small, since log-probs are means over elements."""
    clip_range_high: float | None = None
    """Upper clip range where it differs from the lower one."""

    def __post_init__(self) -> None:
        check_clip_ranges(self.clip_range, self.clip_range_high)

    @property
    def replay_tolerance(self) -> float:
        """A tenth of the clip range."""
        return self.clip_range / 10

    def ratio(self, new: GaussianStep, old: SampledSteps) -> Ratio:
        """log p_new - log p_old of R denoising steps."""
        return Ratio(old.log_ratio(new))

    def loss(self, ratio: Ratio, advantages: torch.Tensor, mask: torch.Tensor | None = None) -> Loss:
        """As ``RatioObjective.loss``."""
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        return clipped_surrogate(ratio.log_ratio, advantages, self.clip_range, high, mask)
