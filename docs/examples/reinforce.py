"""An objective in a file of its own: the plain policy gradient. ``objective: {type: reinforce:Reinforce}`` names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.algorithms.dynamics.step import GaussianStep
from sfumato.algorithms.objectives.trajectory import Loss, SampledSteps


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

    def log_ratio(self, new: GaussianStep, old: SampledSteps) -> torch.Tensor:
        """log p - log p_old ``[R]``, whose gradient is that of log p."""
        return old.log_ratio(new)

    def loss(self, new: GaussianStep, old: SampledSteps, advantages: torch.Tensor) -> Loss:
        """The loss ``[R]`` and sums over rows for the log."""
        log_ratio = self.log_ratio(new, old)
        return -self.scale * advantages * log_ratio, {"reinforce/log_ratio": log_ratio.detach().sum()}
