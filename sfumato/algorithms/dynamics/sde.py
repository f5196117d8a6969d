"""Flow-SDE: the stochastic step of Flow-GRPO (arXiv 2505.05470, eq. 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.algorithms.dynamics.step import GaussianStep, gaussian_step, per_sample


@dataclass(frozen=True)
class FlowSDE:
    """Flow-GRPO's SDE: same marginals as the ODE, noise s = a sqrt(sigma / (1 - sigma))."""

    type: ClassVar[str] = "sde"

    noise_level: float = 0.7
    """The factor a; more explores more. Flow-GRPO uses 0.7 for SD3.5-M and 0.9 for FLUX."""

    def __post_init__(self) -> None:
        if not self.noise_level > 0:
            raise ValueError("noise_level must be above 0: without noise there is no log-probability; use type: ode")

    def step(
        self,
        velocity: torch.Tensor,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        sigma_next: torch.Tensor,
        sigma_max: float,
    ) -> GaussianStep:
        """mean = x (1 + s^2 dt / 2 sigma) + v (1 + s^2 (1 - sigma) / 2 sigma) dt, S = s sqrt(-dt).

        Args:
            velocity: v ``[B, ...]``, any float dtype.
            latents: x ``[B, ...]``, any float dtype.
            sigma, sigma_next: ``[B]`` with sigma > sigma_next.
            sigma_max: the schedule's second sigma; stands for sigma in 1 - sigma where sigma is 1.
        """
        sigma = sigma.to(torch.float32)
        bounded = torch.where(sigma == 1, torch.full_like(sigma, sigma_max), sigma)
        s = torch.sqrt(sigma / (1 - bounded)) * self.noise_level
        return reverse_sde_step(velocity, latents, sigma, sigma_next, s)


def reverse_sde_step(
    velocity: torch.Tensor, latents: torch.Tensor, sigma: torch.Tensor, sigma_next: torch.Tensor, s: torch.Tensor
) -> GaussianStep:
    """The step of ``FlowSDE.step`` for any diffusion coefficient ``s``, float32 ``[B]``."""
    v, x = velocity.to(torch.float32), latents.to(torch.float32)
    sigma, sigma_next = sigma.to(torch.float32), sigma_next.to(torch.float32)
    dt = sigma_next - sigma
    s_, sigma_, dt_ = per_sample(s, x), per_sample(sigma, x), per_sample(dt, x)
    mean = x * (1 + s_**2 / (2 * sigma_) * dt_) + v * (1 + s_**2 * (1 - sigma_) / (2 * sigma_)) * dt_
    return gaussian_step(mean, s * torch.sqrt(-dt), s, v)
