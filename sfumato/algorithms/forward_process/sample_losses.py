"""Objectives that learn from each final sample by itself, not from comparisons within a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from sfumato.algorithms.dynamics import mean_over_sample
from sfumato.algorithms.forward_process.noised import (
    AdvantageMode,
    ForwardProcessObjective,
    NoisedSamples,
    reward_probability,
    row_distances,
)
from sfumato.algorithms.objectives import check_clip_ranges, clipped_surrogate
from sfumato.algorithms.row_losses import RowLosses

if TYPE_CHECKING:
    from jaxtyping import Float, Float32
    from torch import Tensor


@dataclass(frozen=True)
class NFT(ForwardProcessObjective):
    """clip [r mean((x0+ - x0)^2 / w+) + (1 - r) mean((x0- - x0)^2 / w-)] / beta (DiffusionNFT, train_nft_sd3).

    v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v, x0± = x_sigma - sigma v±,
    w± = mean |x0± - x0|, r = clamp(A / 2 clip + 1/2, 0, 1).
    """

    type: ClassVar[str] = "nft"
    needs: ClassVar[frozenset[str]] = frozenset({"old"})

    beta: float = 1.0
    """Step from the old policy to the implicit ones. Published: 1 for GenEval and PickScore, 0.1 for OCR."""
    advantage_clip: float = 5.0
    """The advantage that makes a sample wholly good; also a factor of the loss."""
    advantage_mode: AdvantageMode = "all"
    """The part of the advantages that is kept."""

    def __post_init__(self) -> None:
        if not self.beta > 0 or not self.advantage_clip > 0:
            raise ValueError("beta and advantage_clip must be above 0")

    def loss(self, batch: NoisedSamples, advantages: Float[Tensor, "rows"]) -> RowLosses:
        r = reward_probability(advantages, self.advantage_clip, self.advantage_mode)
        old = batch.velocity_of("old")
        beta = self.beta
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
    def _error(batch: NoisedSamples, velocity: Tensor) -> Tensor:
        x0 = batch.predicted_x0(velocity)
        return mean_over_sample((x0 - batch.x0) ** 2 / row_distances(x0, batch.x0))


_TINY = 1e-10


@dataclass(frozen=True)
class AWM(ForwardProcessObjective):
    """The clipped surrogate of r = exp(log p - log p_old), log p = -weighting(mean((v - u)^2), sigma).

    Without the old policy's velocity the policy is taken as the old one, so that r is 1 and only its gradient counts,
    as in the first update after sampling. An averaged policy holds it back with ``ema_coef`` mean((v - v_ema)^2).
    """

    type: ClassVar[str] = "awm"

    weighting: Literal["uniform", "t", "t2", "huber", "ghuber"] = "ghuber"
    """Weighted error, of l at sigma t: l; l t; l t^2; (sqrt(l) - 1e-5) t; l^p t / p, both shifted to be smooth at 0."""
    power: float = 0.25
    """p of ghuber."""
    clip_range: float = 1.0
    """The ratio is clipped to [1 - clip_range, 1 + clip_range_high]."""
    clip_range_high: float | None = None
    """Upper clip range where it differs from the lower one."""
    advantage_clip: float = 5.0
    """Advantages are clamped to this and divided by it."""
    ema_coef: float = 1.0
    """Factor of the distance to the averaged policy; 0 needs none."""

    def __post_init__(self) -> None:
        check_clip_ranges(self.clip_range, self.clip_range_high)
        if not self.power > 0 or not self.advantage_clip > 0 or self.ema_coef < 0:
            raise ValueError("power and advantage_clip must be above 0, and ema_coef not below 0")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The old policy; the averaged one where it has a factor."""
        return frozenset({"old", "ema"} if self.ema_coef > 0 else {"old"})

    def log_prob(self, batch: NoisedSamples, velocity: Float32[Tensor, "rows *latent"]) -> Float[Tensor, "rows"]:
        """float32 ``[R]`` of the samples under a policy that predicts ``velocity``."""
        error = batch.error(velocity)
        t = batch.sigma
        if self.weighting == "huber":
            return -(torch.sqrt(error + _TINY) - _TINY**0.5) * t
        if self.weighting == "ghuber":
            return -((error + _TINY) ** self.power - _TINY**self.power) * t / self.power
        return -error * {"uniform": torch.ones_like(t), "t": t, "t2": t**2}[self.weighting]

    def loss(self, batch: NoisedSamples, advantages: Float[Tensor, "rows"]) -> RowLosses:
        new = self.log_prob(batch, batch.velocity)
        old = new.detach() if batch.old_velocity is None else self.log_prob(batch, batch.velocity_of("old"))
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        scaled = advantages.clamp(-self.advantage_clip, self.advantage_clip) / self.advantage_clip
        loss, stats = clipped_surrogate(new - old, scaled, self.clip_range, high)
        stats["awm/log_prob"] = new.detach().sum()
        if self.ema_coef > 0:
            pull = mean_over_sample((batch.velocity - batch.velocity_of("ema")) ** 2)
            loss = loss + self.ema_coef * pull
            stats["kl/ema"] = pull.detach().sum()
        return loss, stats


@dataclass(frozen=True)
class RewardWeighted(ForwardProcessObjective):
    """A mean((v - u)^2), or exp(A / temperature) for A (arXiv 2302.12192; flow_grpo, train_sd3_sft, rwr)."""

    type: ClassVar[str] = "rwr"

    temperature: float | None = None
    """null weights by the advantages themselves, which must not be negative; meant for advantage type raw."""

    def __post_init__(self) -> None:
        if self.temperature is not None and not self.temperature > 0:
            raise ValueError("temperature must be above 0")

    @property
    def takes_both_signs(self) -> bool | None:
        """Not without a temperature, and otherwise any."""
        return False if self.temperature is None else None

    def loss(self, batch: NoisedSamples, advantages: Float[Tensor, "rows"]) -> RowLosses:
        """As ``ForwardProcessObjective.loss``. Raises ValueError for a negative weight, which has no lower bound."""
        weight = advantages if self.temperature is None else torch.exp(advantages / self.temperature)
        if bool((weight < 0).any()):
            raise ValueError(
                f"rwr weights by advantages, and one is {float(weight.min()):.3g}: set objective.temperature, or take "
                "rewards that are not negative with advantage type raw"
            )
        return _weighted_losses(batch, weight)


@dataclass(frozen=True)
class BestOfN(ForwardProcessObjective):
    """mean((v - u)^2) of rows with an advantage above 0, for advantage type best (flow_grpo, train_sd3_sft)."""

    type: ClassVar[str] = "sft"

    def loss(self, batch: NoisedSamples, advantages: Float[Tensor, "rows"]) -> RowLosses:
        return _weighted_losses(batch, (advantages > 0).to(batch.x0))


def _weighted_losses(batch: NoisedSamples, weight: Tensor) -> RowLosses:
    error = batch.error(batch.velocity)
    return weight * error, {"sample/error": error.detach().sum(), "sample/weight": weight.sum()}
