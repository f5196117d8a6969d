"""Dance-SDE: the stochastic step of DanceGRPO (arXiv 2505.07818)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.algorithms.dynamics.step import GaussianStep, gaussian_step, per_sample


@dataclass(frozen=True)
class DanceSDE:
    """DanceGRPO's SDE: the same noise eta at every step."""

    type: ClassVar[str] = "dance"

    noise_level: float = 0.3
    """eta. DanceGRPO uses 0.3 for FLUX and 0.25 for HunyuanVideo."""

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
        """mean = x + v dt + eta^2 dt (x - (1 - sigma) x0) / (2 sigma^2), S = eta sqrt(-dt), x0 = x - sigma v.

        Arguments as in ``FlowSDE.step``; ``sigma_max`` is not needed.
        """
        del sigma_max
        v, x = velocity.to(torch.float32), latents.to(torch.float32)
        sigma = sigma.to(torch.float32)
        dt = sigma_next.to(torch.float32) - sigma
        sigma_, dt_ = per_sample(sigma, x), per_sample(dt, x)
        x0 = x - sigma_ * v
        mean = x + v * dt_ + 0.5 * self.noise_level**2 * dt_ * (x - x0 * (1 - sigma_)) / sigma_**2
        return gaussian_step(mean, self.noise_level * torch.sqrt(-dt), torch.full_like(sigma, self.noise_level), v)
