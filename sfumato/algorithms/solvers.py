"""Deterministic samplers: for objectives that need only the final sample, and for steps outside the trained window.

Shapes: B samples, ... latent dimensions, T steps. Notation: sigma in [0, 1], 1 is noise; v = eps - x0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Solver(Protocol):
    """One step from sigma_i to sigma_(i+1), without state of its own."""

    def step(
        self, velocity: Tensor, latents: Tensor, sigmas: Tensor, index: int, memory: object = None
    ) -> tuple[Tensor, object]:
        """The next latents, and the ``memory`` that the next step must be called with.

        Args:
            velocity: v ``[B, ...]`` at ``latents``, any float dtype.
            latents: x ``[B, ...]``, any float dtype.
            sigmas: ``[T + 1]``, the whole schedule, descending to 0.
            index: the step i, 0 to T - 1.
            memory: what the previous step returned; None before the first step, or to begin anew.

        Returns:
            float32 ``[B, ...]``, and the memory.
        """
        ...


@dataclass(frozen=True)
class Euler:
    """x' = x + v (sigma' - sigma); DDIM without noise and DPM-Solver++ of order 1 are the same on flows."""

    type: ClassVar[str] = "euler"

    def step(
        self, velocity: Tensor, latents: Tensor, sigmas: Tensor, index: int, memory: None = None
    ) -> tuple[Tensor, None]:
        """As ``Solver.step`` says; nothing is remembered."""
        del memory
        dt = sigmas[index + 1].to(torch.float32) - sigmas[index].to(torch.float32)
        return latents.to(torch.float32) + velocity.to(torch.float32) * dt, None


@dataclass(frozen=True)
class DPMSolver2:
    """Extrapolates x0 from this step's and the last one's prediction; the solver of DiffusionNFT's rollouts.

    The first and the last step are of first order, and so is one without memory.
    """

    type: ClassVar[str] = "dpm2"

    def step(
        self, velocity: Tensor, latents: Tensor, sigmas: Tensor, index: int, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x' = (sigma' / sigma) x - (1 - sigma') (e^-h - 1) (x0 + (x0 - x0_last) h / 2 h_last), h the step in lambda.

        lambda = log((1 - sigma) / sigma) is half the log signal-to-noise ratio. As ``Solver.step`` says; the memory
        is the prediction of x0, float32 ``[B, ...]``.
        """
        v, x = velocity.to(torch.float32), latents.to(torch.float32)
        x0 = x - sigmas[index].to(torch.float32) * v
        if memory is None or index == 0 or index == len(sigmas) - 2:
            return Euler().step(v, x, sigmas, index)[0], x0
        previous_sigma, this_sigma, next_sigma = sigmas[index - 1 : index + 2].to(torch.float64)
        log_snr = [torch.log1p(-sigma) - torch.log(sigma) for sigma in (previous_sigma, this_sigma, next_sigma)]
        h_last, h = log_snr[1] - log_snr[0], log_snr[2] - log_snr[1]  # h_last is infinite where sigma was 1: order 1
        gain = -(1 - next_sigma) * torch.expm1(-h)
        ratio, gain, weight = (number.to(torch.float32) for number in (next_sigma / this_sigma, gain, h / (2 * h_last)))
        return ratio * x + gain * (x0 + weight * (x0 - memory)), x0
