"""Flow-DPPO: a trust region of the exact KL divergence in place of the clipped ratio (verl-omni, flow_dppo)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.algorithms.dynamics.step import GaussianStep, mean_over_sample
from sfumato.algorithms.objectives.trajectory import Loss, SampledSteps


@dataclass(frozen=True)
class DPPO:
    """-A r, masked where the step left the trust region and the update would lead further away from the old policy.

    A row is masked when KL(old, new) = mean((mu - mu_old)^2) / 2S^2 has reached the threshold and the ratio has
    already moved in the direction that its advantage asks for.
    """

    type: ClassVar[str] = "dppo"

    kl_threshold: float = 1e-5
    """KL divergence per element from which rows are masked."""
    scale_by_variance: bool = True
    """Divide the squared distance of the means by S^2; false measures it as it is."""

    def __post_init__(self) -> None:
        if not self.kl_threshold > 0:
            raise ValueError("kl_threshold must be above 0")

    @property
    def replay_tolerance(self) -> float:
        """A tenth of the threshold."""
        return self.kl_threshold / 10

    def log_ratio(self, new: GaussianStep, old: SampledSteps) -> torch.Tensor:
        """log p_new - log p_old: float32 ``[R]``."""
        return old.log_ratio(new)

    def loss(self, new: GaussianStep, old: SampledSteps, advantages: torch.Tensor) -> Loss:
        """As ``TrajectoryObjective.loss``. Raises ValueError when the old means were not kept."""
        log_ratio = self.log_ratio(new, old)
        ratio = torch.exp(log_ratio)
        with torch.no_grad():
            kl = mean_over_sample((new.mean - old.old_means()) ** 2) / 2
            kl = kl / new.std**2 if self.scale_by_variance else kl
            far = kl >= self.kl_threshold
            high = far & (ratio > 1) & (advantages > 0)
            low = far & (ratio < 1) & (advantages < 0)
        loss = torch.where(high | low, torch.zeros_like(ratio), -advantages * ratio)
        stats = {
            "ratio/mean": ratio.detach().sum(),
            "ratio/approx_kl": 0.5 * (log_ratio.detach() ** 2).sum(),
            "ratio/masked_high": high.float().sum(),
            "ratio/masked_low": low.float().sum(),
            "kl/old": kl.sum(),
        }
        return loss, stats
