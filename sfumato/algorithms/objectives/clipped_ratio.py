"""The clipped surrogate of PPO, as GRPO and Flow-GRPO use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class ClippedRatio:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (arXiv 1707.06347, eq. 7)."""

    type: ClassVar[str] = "clipped_ratio"

    clip_range: float = 1e-4
    """The ratio is clipped to [1 - clip_range, 1 + clip_range_high]; small, since log-probs are means over elements."""
    clip_range_high: float | None = None
    """Upper clip range where it differs from the lower one."""

    def __post_init__(self) -> None:
        if not self.clip_range > 0 or (self.clip_range_high is not None and not self.clip_range_high > 0):
            raise ValueError("clip ranges must be above 0")

    def loss(self, log_ratio: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss per row and its statistics.

        Args:
            log_ratio: float32 ``[R]``, log p_new - log p_old of each (sample, step) row.
            advantages: float32 ``[R]``.

        Returns:
            The loss ``[R]`` (lower is better), and detached sums over rows named ``ratio/...``; the caller divides
            them by the number of rows.
        """
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        ratio = torch.exp(log_ratio)
        clipped = ratio.clamp(1 - self.clip_range, 1 + high)
        loss = torch.maximum(-advantages * ratio, -advantages * clipped)
        with torch.no_grad():
            stats = {
                "ratio/mean": ratio.sum(),
                "ratio/approx_kl": 0.5 * (log_ratio**2).sum(),
                "ratio/clipped_high": (ratio > 1 + high).float().sum(),
                "ratio/clipped_low": (ratio < 1 - self.clip_range).float().sum(),
            }
        return loss, stats
