"""Flow matching on the policy's own samples: weighted by reward, or on the best of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.algorithms.forward_process.noised import Loss, NoisedSamples


@dataclass(frozen=True)
class RewardWeighted:
    """A mean((v - u)^2), or exp(A / temperature) for A (arXiv 2302.12192; flow_grpo, train_sd3_sft, rwr)."""

    type: ClassVar[str] = "rwr"
    needs: ClassVar[frozenset[str]] = frozenset()
    whole_groups: ClassVar[bool] = False
    shared_noise: ClassVar[bool] = False

    temperature: float | None = None
    """null weights by the advantages themselves, which must not be negative; meant for advantage type raw."""

    def __post_init__(self) -> None:
        if self.temperature is not None and not self.temperature > 0:
            raise ValueError("temperature must be above 0")

    @property
    def takes_both_signs(self) -> bool | None:
        """Not without a temperature, and otherwise any."""
        return False if self.temperature is None else None

    def loss(self, batch: NoisedSamples, advantages: torch.Tensor) -> Loss:
        """As ``ForwardProcessObjective.loss``. Raises ValueError for a negative weight, which has no lower bound."""
        weight = advantages if self.temperature is None else torch.exp(advantages / self.temperature)
        if bool((weight < 0).any()):
            raise ValueError(
                f"rwr weights by advantages, and one is {float(weight.min()):.3g}: set objective.temperature, or take "
                "rewards that are not negative with advantage type raw"
            )
        return _weighted(batch, weight)


@dataclass(frozen=True)
class BestOfN:
    """mean((v - u)^2) of rows with an advantage above 0, for advantage type best (flow_grpo, train_sd3_sft)."""

    type: ClassVar[str] = "sft"
    needs: ClassVar[frozenset[str]] = frozenset()
    whole_groups: ClassVar[bool] = False
    shared_noise: ClassVar[bool] = False

    def loss(self, batch: NoisedSamples, advantages: torch.Tensor) -> Loss:
        """As ``ForwardProcessObjective.loss``."""
        return _weighted(batch, (advantages > 0).to(batch.x0))


def _weighted(batch: NoisedSamples, weight: torch.Tensor) -> Loss:
    error = batch.error(batch.velocity)
    return weight * error, {"sample/error": error.detach().sum(), "sample/weight": weight.sum()}
