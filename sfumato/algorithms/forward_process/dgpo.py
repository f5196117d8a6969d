"""DGPO: direct preference between the better and the worse part of a group (arXiv 2510.08425)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.algorithms.forward_process.noised import Loss, NoisedSamples
from sfumato.algorithms.objectives.ratio import check_clip_ranges


@dataclass(frozen=True)
class DGPO:
    """w A e with e = mean((v - u)^2) and w = sigmoid(sum over the group of A beta (e - e_ref) / K), without gradient.

    K is the number of the group's rows at a noise level. As Flow-Factory computes it. A row whose exp(e_old - e) has
    left [1 - clip_range, 1 + clip_range_high] in the direction of its advantage has no gradient.
    """

    type: ClassVar[str] = "dgpo"
    whole_groups: ClassVar[bool] = True
    shared_noise: ClassVar[bool] = True

    beta: float = 10.0
    """How fast a group's weight saturates. Published: 10 to 100; 2000 to 5000 with an averaged reference."""
    clip_range: float | None = 5e-2
    """Trust region around the old policy; null has none and needs no old policy."""
    clip_range_high: float | None = None
    """Upper clip range where it differs from the lower one."""

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError("beta must be above 0")
        if self.clip_range is not None:
            check_clip_ranges(self.clip_range, self.clip_range_high)

    @property
    def needs(self) -> frozenset[str]:
        """The reference; the old policy where there is a clip range."""
        return frozenset({"reference"} if self.clip_range is None else {"reference", "old"})

    def loss(self, batch: NoisedSamples, advantages: torch.Tensor) -> Loss:
        """As ``ForwardProcessObjective.loss``."""
        error = batch.error(batch.velocity)
        cells = batch.cells()
        with torch.no_grad():
            gain = advantages * self.beta * (error - batch.error(batch.velocity_of("reference")))
            sums = torch.zeros(len(gain), device=gain.device).index_add(0, cells, gain)
            weight = torch.sigmoid(sums / torch.bincount(cells, minlength=len(gain)).clamp(min=1))[cells]
            clipped = self._clipped(batch, error, advantages)
        loss = weight * advantages * torch.where(clipped, error.detach(), error)
        stats = {"dgpo/group_weight": weight.sum(), "dgpo/clipped": clipped.float().sum()}
        return loss, stats

    def _clipped(self, batch: NoisedSamples, error: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        if self.clip_range is None:
            return torch.zeros_like(advantages, dtype=torch.bool)
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        ratio = torch.exp(batch.error(batch.velocity_of("old")) - error)
        return torch.where(advantages > 0, ratio > 1 + high, ratio < 1 - self.clip_range)
