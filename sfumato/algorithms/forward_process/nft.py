"""DiffusionNFT: contrast of an implicit better and an implicit worse policy on the forward process (2509.16117)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.algorithms.dynamics.step import mean_over_sample
from sfumato.algorithms.forward_process.noised import AdvantageMode, Loss, NoisedSamples, distance, reward_probability


@dataclass(frozen=True)
class NFT:
    """clip [r mean((x0+ - x0)^2 / w+) + (1 - r) mean((x0- - x0)^2 / w-)] / beta (DiffusionNFT, train_nft_sd3).

    v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v, x0± = x_sigma - sigma v±,
    w± = mean |x0± - x0|, r = clamp(A / 2 clip + 1/2, 0, 1).
    """

    type: ClassVar[str] = "nft"
    needs: ClassVar[frozenset[str]] = frozenset({"old"})
    whole_groups: ClassVar[bool] = False
    shared_noise: ClassVar[bool] = False

    beta: float = 1.0
    """Step from the old policy to the implicit ones. Published: 1 for GenEval and PickScore, 0.1 for OCR."""
    advantage_clip: float = 5.0
    """The advantage that makes a sample wholly good; also a factor of the loss."""
    advantage_mode: AdvantageMode = "all"
    """What is kept of the advantages."""

    def __post_init__(self) -> None:
        if not self.beta > 0 or not self.advantage_clip > 0:
            raise ValueError("beta and advantage_clip must be above 0")

    def loss(self, batch: NoisedSamples, advantages: torch.Tensor) -> Loss:
        """As ``ForwardProcessObjective.loss``."""
        r = reward_probability(advantages, self.advantage_clip, self.advantage_mode)
        old, beta = batch.velocity_of("old"), self.beta
        positive = self._error(batch, beta * batch.velocity + (1 - beta) * old)
        negative = self._error(batch, (1 + beta) * old - beta * batch.velocity)
        loss = self.advantage_clip * (r * positive + (1 - r) * negative) / beta
        with torch.no_grad():
            stats = {
                "nft/positive": positive.sum(),
                "nft/negative": negative.sum(),
                "nft/old_distance": mean_over_sample((batch.velocity - old) ** 2).sum(),
            }
        return loss, stats

    @staticmethod
    def _error(batch: NoisedSamples, velocity: torch.Tensor) -> torch.Tensor:
        x0 = batch.predicted_x0(velocity)
        return mean_over_sample((x0 - batch.x0) ** 2 / distance(x0, batch.x0))
