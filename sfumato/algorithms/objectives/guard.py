"""GRPO-Guard: a ratio without the drift that makes clipping one-sided (arXiv 2510.22319)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.algorithms.dynamics.step import GaussianStep, mean_over_sample
from sfumato.algorithms.objectives.trajectory import Loss, SampledSteps, check_clip_ranges, clipped_surrogate


@dataclass(frozen=True)
class Guard:
    """The clipped surrogate of log r = mean((x' - mu_old)(mu - mu_old)) / S, divided by the step size h.

    That is S (log p - log p_old) + mean((mu - mu_old)^2) / 2S: its mean under the old policy is 0, where the plain
    log-ratio's is -mean((mu - mu_old)^2) / 2S^2, and its scale is the same at every step. 1 / h evens out the
    gradients of the steps. Computed for each sample by itself: flow_grpo averages the second term over the batch
    (its issue 244), Flow-Factory omits 1 / h. The densities of CPS, which lack 1 / 2S^2, are whole here.
    """

    type: ClassVar[str] = "guard"

    clip_range: float = 2e-6
    """The ratio is clipped to [1 - clip_range, 1 + clip_range_high]."""
    clip_range_high: float | None = None
    """Upper clip range where it differs from the lower one."""

    def __post_init__(self) -> None:
        check_clip_ranges(self.clip_range, self.clip_range_high)

    @property
    def replay_tolerance(self) -> float:
        """A tenth of the clip range."""
        return self.clip_range / 10

    def log_ratio(self, new: GaussianStep, old: SampledSteps) -> torch.Tensor:
        """The recentred log-ratio above: float32 ``[R]``. Raises ValueError when the old means were not kept."""
        old_means = old.old_means()
        return mean_over_sample((old.next_latents - old_means) * (new.mean - old_means)) / new.std

    def loss(self, new: GaussianStep, old: SampledSteps, advantages: torch.Tensor) -> Loss:
        """As ``TrajectoryObjective.loss``."""
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        loss, stats = clipped_surrogate(self.log_ratio(new, old), advantages, self.clip_range, high)
        return loss / old.step_sizes, stats
