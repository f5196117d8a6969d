"""An objective in a file of its own: the plain policy gradient. ``objective: {type: reinforce:Reinforce}`` names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.algorithms.dynamics import GaussianStep
from sfumato.algorithms.objectives import Ratio, RowLosses, SampledSteps, masked


@dataclass(frozen=True)
class Reinforce:
    """-A log p, without a ratio that is clipped (Williams, 1992): for one update in each iteration."""

    type: ClassVar[str] = "reinforce"

    scale: float = 1.0
    """Factor of the loss."""

    @property
    def replay_tolerance(self) -> float:
        """What replay and rollout may differ by."""
        return 1e-5

    def ratio(self, new: GaussianStep, old: SampledSteps) -> Ratio:
        """log p - log p_old of R denoising steps, whose gradient is that of log p."""
        return Ratio(old.log_ratio(new))

    def loss(self, ratio: Ratio, advantages: torch.Tensor, mask: torch.Tensor | None = None) -> RowLosses:
        """The loss ``[R]`` and sums over rows for the log; rows where the mask is false are left out."""
        log_ratio = masked(ratio.log_ratio, mask)
        return -self.scale * advantages * log_ratio, {"reinforce/log_ratio": log_ratio.detach().sum()}
