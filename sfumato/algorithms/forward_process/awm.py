"""Advantage-weighted matching: PPO with the flow-matching loss as log-probability (arXiv 2509.25050)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from sfumato.algorithms.dynamics.step import mean_over_sample
from sfumato.algorithms.forward_process.noised import Loss, NoisedSamples
from sfumato.algorithms.objectives.ratio import check_clip_ranges, clipped_surrogate

_TINY = 1e-10


@dataclass(frozen=True)
class AWM:
    """The clipped surrogate of r = exp(log p - log p_old), log p = -weighting(mean((v - u)^2), sigma).

    Without the old policy's velocity the policy is taken as the old one, so that r is 1 and only its gradient counts,
    as in the first update after sampling. An averaged policy holds it back with ``ema_coef`` mean((v - v_ema)^2).
    """

    type: ClassVar[str] = "awm"
    whole_groups: ClassVar[bool] = False
    shared_noise: ClassVar[bool] = False

    weighting: Literal["uniform", "t", "t2", "huber", "ghuber"] = "ghuber"
    """Of an error l at sigma t: l; l t; l t^2; (sqrt(l) - 1e-5) t; l^p t / p, both shifted to be smooth at 0."""
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
    def needs(self) -> frozenset[str]:
        """The old policy; the averaged one where it has a factor."""
        return frozenset({"old", "ema"} if self.ema_coef > 0 else {"old"})

    def log_prob(self, batch: NoisedSamples, velocity: torch.Tensor) -> torch.Tensor:
        """float32 ``[R]`` of the samples under a policy that predicts ``velocity``."""
        error, t = batch.error(velocity), batch.sigma
        if self.weighting == "huber":
            return -(torch.sqrt(error + _TINY) - _TINY**0.5) * t
        if self.weighting == "ghuber":
            return -((error + _TINY) ** self.power - _TINY**self.power) * t / self.power
        return -error * {"uniform": torch.ones_like(t), "t": t, "t2": t**2}[self.weighting]

    def loss(self, batch: NoisedSamples, advantages: torch.Tensor) -> Loss:
        """As ``ForwardProcessObjective.loss``."""
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
