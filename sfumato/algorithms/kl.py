"""Penalties that keep a policy near its reference, as a value for each row, a step of a trajectory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sfumato.algorithms.dynamics import GaussianStep, mean_over_sample

if TYPE_CHECKING:
    from jaxtyping import Float32
    from torch import Tensor


@dataclass(frozen=True)
class NoKL:
    """No penalty; the reference is computed only where an objective needs it."""

    type: ClassVar[str] = "none"
    coef: ClassVar[float] = 0.0


@dataclass(frozen=True)
class GaussianKL:
    """The exact KL of two Gaussians with equal variance, per element: mean((mu - mu_ref)^2) / (2 S^2)."""

    type: ClassVar[str] = "gaussian"

    coef: float = 0.01
    """Factor of the penalty in the loss."""

    def penalty(self, step: GaussianStep, reference: GaussianStep) -> Float32[Tensor, "rows"]:
        """float32 ``[R]`` for a step of R rows and the reference's."""
        return step.kl(reference.mean)


@dataclass(frozen=True)
class FlowGRPOKL:
    """Flow-GRPO's penalty, mean((mu - mu_ref)^2) / (2 std_dev_t^2): for Flow-SDE, h times the exact KL.

    flow_grpo's published coefficients belong to this form.
    """

    type: ClassVar[str] = "flow_grpo"

    coef: float = 0.04
    """Factor of the penalty in the loss."""

    def penalty(self, step: GaussianStep, reference: GaussianStep) -> Float32[Tensor, "rows"]:
        """float32 ``[R]`` for a step of R rows and the reference's."""
        return mean_over_sample((step.mean - reference.mean) ** 2) / (2 * step.diffusion**2)


@dataclass(frozen=True)
class VelocityMSE:
    """mean((v - v_ref)^2): Flow-Factory's v-based penalty."""

    type: ClassVar[str] = "velocity_mse"

    coef: float = 1e-4
    """Factor of the penalty in the loss."""
    reference_guidance_scale: float | None = None
    """Guidance of the reference's prediction, where it differs from the policy's."""

    def penalty(self, step: GaussianStep, reference: GaussianStep) -> Float32[Tensor, "rows"]:
        """float32 ``[R]`` for a step of R rows and the reference's."""
        return mean_over_sample((step.velocity - reference.velocity) ** 2)


@dataclass(frozen=True)
class SampleMSE:
    """mean((mu - mu_ref)^2) of the next latents: Flow-Factory's x-based penalty."""

    type: ClassVar[str] = "sample_mse"

    coef: float = 0.01
    """Factor of the penalty in the loss."""

    def penalty(self, step: GaussianStep, reference: GaussianStep) -> Float32[Tensor, "rows"]:
        """float32 ``[R]`` for a step of R rows and the reference's."""
        return mean_over_sample((step.mean - reference.mean) ** 2)
