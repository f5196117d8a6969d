"""The stochastic DDIM step (arXiv 2010.02502, eq. 12) on the straight path of flow matching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.algorithms.dynamics.step import GaussianStep, gaussian_step, per_sample


@dataclass(frozen=True)
class DDIM:
    """DDIM with noise, as DiffusionNFT's solver writes it for flows; DDPO samples with eta 1."""

    type: ClassVar[str] = "ddim"

    eta: float = 1.0
    """Share of the ancestral noise, in (0, 1]."""

    def __post_init__(self) -> None:
        if not 0 < self.eta <= 1:
            raise ValueError("eta must be above 0 and at most 1: at 0 there is no log-probability; use type: ode")

    def step(
        self,
        velocity: torch.Tensor,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        sigma_next: torch.Tensor,
        sigma_max: float,
    ) -> GaussianStep:
        """mean = (1 - sigma') x0 + sqrt(sigma'^2 - rho^2) x1, S = rho.

        rho = eta sigma' sqrt(1 - sigma'^2 (1 - sigma)^2 / (sigma^2 (1 - sigma')^2)), x0 = x - sigma v and
        x1 = x + (1 - sigma) v. Arguments as in ``FlowSDE.step``; ``sigma_max`` is not needed.
        """
        del sigma_max
        v, x = velocity.to(torch.float32), latents.to(torch.float32)
        sigma, sigma_next = sigma.to(torch.float32), sigma_next.to(torch.float32)
        shrunk = sigma_next * (1 - sigma) / (sigma * (1 - sigma_next))
        rho = self.eta * sigma_next * torch.sqrt(1 - shrunk**2)
        sigma_, next_ = per_sample(sigma, x), per_sample(sigma_next, x)
        kept = per_sample(torch.sqrt(sigma_next**2 - rho**2), x)
        mean = (1 - next_) * (x - sigma_ * v) + kept * (x + (1 - sigma_) * v)
        return gaussian_step(mean, rho, self.eta * sigma_next, v)
