"""Flow-DPPO: a trust region of the exact KL divergence in place of the clipped ratio (verl-omni, flow_dppo)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.algorithms.dynamics.step import GaussianStep
from sfumato.algorithms.objectives.ratio import Loss, Ratio, masked, ratio_sums
from sfumato.algorithms.objectives.steps import SampledSteps


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

    def ratio(self, new: GaussianStep, old: SampledSteps) -> Ratio:
        """log p_new - log p_old of R denoising steps, and their KL. Raises ValueError where old means were not kept."""
        with torch.no_grad():
            kl = new.kl(old.old_means()) if self.scale_by_variance else new.squared_distance(old.old_means()) / 2
        return Ratio(old.log_ratio(new), kl)

    def loss(self, ratio: Ratio, advantages: torch.Tensor, mask: torch.Tensor | None = None) -> Loss:
        """As ``RatioObjective.loss``. Raises ValueError when no KL is known."""
        if ratio.kl is None:
            raise ValueError("dppo needs the KL divergence from the old policy of each decision")
        log_ratio = masked(ratio.log_ratio, mask)
        r = torch.exp(log_ratio)
        with torch.no_grad():
            far = ratio.kl >= self.kl_threshold
            high = far & (r > 1) & (advantages > 0)
            low = far & (r < 1) & (advantages < 0)
        loss = masked(torch.where(high | low, torch.zeros_like(r), -advantages * r), mask)
        stats = ratio_sums(log_ratio, r, mask)
        stats["ratio/masked_high"] = masked(high.float(), mask).sum()
        stats["ratio/masked_low"] = masked(low.float(), mask).sum()
        stats["kl/old"] = masked(ratio.kl, mask).sum()
        return loss, stats
