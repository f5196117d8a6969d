"""Penalties that keep a policy near its reference, as a value per row.

``kinds`` names the objectives that a penalty fits: ``penalty`` compares steps of trajectories, ``sample_penalty``
predictions on noised final samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.algorithms.dynamics.step import GaussianStep, mean_over_sample
from sfumato.algorithms.objectives.sample import NoisedSamples, reward_probability

BOTH = frozenset({"trajectory", "sample"})


@dataclass(frozen=True)
class NoKL:
    """No penalty; the reference is never computed."""

    type: ClassVar[str] = "none"
    kinds: ClassVar[frozenset[str]] = BOTH
    coef: ClassVar[float] = 0.0


@dataclass(frozen=True)
class GaussianKL:
    """The exact KL of two Gaussians with equal variance, per element: mean((mu - mu_ref)^2) / (2 S^2)."""

    type: ClassVar[str] = "gaussian"
    kinds: ClassVar[frozenset[str]] = frozenset({"trajectory"})

    coef: float = 0.01
    """Factor of the penalty in the loss."""

    def penalty(self, step: GaussianStep, reference: GaussianStep) -> torch.Tensor:
        """float32 ``[R]`` for a step of R rows and the reference's."""
        return mean_over_sample((step.mean - reference.mean) ** 2) / (2 * step.std**2)


@dataclass(frozen=True)
class FlowGRPOKL:
    """Flow-GRPO's penalty, mean((mu - mu_ref)^2) / (2 std_dev_t^2): for Flow-SDE, h times the exact KL.

    flow_grpo's published coefficients belong to this form.
    """

    type: ClassVar[str] = "flow_grpo"
    kinds: ClassVar[frozenset[str]] = frozenset({"trajectory"})

    coef: float = 0.04
    """Factor of the penalty in the loss."""

    def penalty(self, step: GaussianStep, reference: GaussianStep) -> torch.Tensor:
        """float32 ``[R]`` for a step of R rows and the reference's."""
        return mean_over_sample((step.mean - reference.mean) ** 2) / (2 * step.diffusion**2)


@dataclass(frozen=True)
class VelocityMSE:
    """mean((v - v_ref)^2): the penalty of DiffusionNFT, AWM and DGPO, and Flow-Factory's v-based one."""

    type: ClassVar[str] = "velocity_mse"
    kinds: ClassVar[frozenset[str]] = BOTH

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

    def penalty(self, step: GaussianStep, reference: GaussianStep) -> torch.Tensor:
        """float32 ``[R]`` for a step of R rows and the reference's."""
        return mean_over_sample((step.velocity - reference.velocity) ** 2)

    def sample_penalty(self, batch: NoisedSamples, advantages: torch.Tensor) -> torch.Tensor:
        """float32 ``[R]`` for a batch with the reference's velocities and advantages ``[R]``."""
        penalty = mean_over_sample((batch.velocity - batch.velocity_of("reference")) ** 2)
        if self.floor is None:
            return penalty
        share = self.floor / self.coef
        return penalty * (share + reward_probability(advantages, self.advantage_clip) * (1 - share))


@dataclass(frozen=True)
class SampleMSE:
    """Distance of the predicted samples: mean((mu - mu_ref)^2) of the next latents, Flow-Factory's x-based penalty.

    On noised final samples: mean((x0 - x0_ref)^2) = sigma^2 mean((v - v_ref)^2) of the predicted x0.
    """

    type: ClassVar[str] = "sample_mse"
    kinds: ClassVar[frozenset[str]] = BOTH

    coef: float = 0.01
    """Factor of the penalty in the loss."""

    def penalty(self, step: GaussianStep, reference: GaussianStep) -> torch.Tensor:
        """float32 ``[R]`` for a step of R rows and the reference's."""
        return mean_over_sample((step.mean - reference.mean) ** 2)

    def sample_penalty(self, batch: NoisedSamples, advantages: torch.Tensor) -> torch.Tensor:
        """float32 ``[R]`` for a batch with the reference's velocities; ``advantages`` are not looked at."""
        del advantages
        return batch.sigma**2 * mean_over_sample((batch.velocity - batch.velocity_of("reference")) ** 2)
