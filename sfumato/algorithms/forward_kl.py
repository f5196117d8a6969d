"""Penalties that keep a policy near its reference, as a value for each row, a final sample at a noise level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sfumato.algorithms.dynamics import mean_over_sample
from sfumato.algorithms.forward_process.noised import NoisedSamples, reward_probability
from sfumato.algorithms.kl import NoKL

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


__all__ = ["NoKL", "SampleMSE", "VelocityMSE"]


@dataclass(frozen=True)
class VelocityMSE:
    """mean((v - v_ref)^2): the penalty of DiffusionNFT, AWM and DGPO."""

    type: ClassVar[str] = "velocity_mse"

    coef: float = 1e-4
    """Factor of the penalty in the loss."""
    floor: float | None = None
    """Factor for the worst samples, rising to ``coef`` for the best (CRD: 1e-4 to 0.1); null is ``coef`` for all."""
    advantage_clip: float = 5.0
    """The advantage that makes a sample the best, where there is a floor."""
    reference_guidance_scale: float | None = None
    """Guidance of the reference's prediction, where it differs from the policy's (CRD: 4.5)."""

    def __post_init__(self) -> None:
        if self.floor is not None and not 0 <= self.floor <= self.coef:
            raise ValueError(f"floor must be from 0 to coef {self.coef}, not {self.floor}")
        if self.reference_guidance_scale is not None and not self.reference_guidance_scale >= 1:
            raise ValueError("reference_guidance_scale must be at least 1, which is no guidance")

    def penalty(self, batch: NoisedSamples, advantages: Float[Tensor, "rows"]) -> Float[Tensor, "rows"]:
        """float32 ``[R]`` for a batch with the reference's velocities and advantages ``[R]``."""
        penalty = mean_over_sample((batch.velocity - batch.velocity_of("reference")) ** 2)
        if self.floor is None:
            return penalty
        share = self.floor / self.coef
        return penalty * (share + reward_probability(advantages, self.advantage_clip) * (1 - share))


@dataclass(frozen=True)
class SampleMSE:
    """mean((x0 - x0_ref)^2) = sigma^2 mean((v - v_ref)^2) of the predicted x0: Flow-Factory's x-based penalty."""

    type: ClassVar[str] = "sample_mse"

    coef: float = 0.01
    """Factor of the penalty in the loss."""

    def penalty(self, batch: NoisedSamples, advantages: Float[Tensor, "rows"]) -> Float[Tensor, "rows"]:
        """float32 ``[R]`` for a batch with the reference's velocities; ``advantages`` are not looked at."""
        del advantages
        return batch.sigma**2 * mean_over_sample((batch.velocity - batch.velocity_of("reference")) ** 2)
