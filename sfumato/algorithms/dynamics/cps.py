"""Coefficient-preserving sampling (arXiv 2509.05952): injects noise, keeps the noise level of the schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.algorithms.dynamics.step import GaussianStep, per_sample


@dataclass(frozen=True)
class CPS:
    """Coefficient-preserving sampling; its log-probability is the bare -(x' - mean)^2, as flow_grpo has it."""

    type: ClassVar[str] = "cps"

    noise_level: float = 0.8
    """The factor a in s = sigma' sin(a pi / 2), in (0, 1]."""

    def __post_init__(self) -> None:
        if not 0 < self.noise_level <= 1:
            raise ValueError(
                "noise_level must be above 0 and at most 1: at 0 there is no log-probability; use type: ode"
            )

    def step(
        self,
        velocity: torch.Tensor,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        sigma_next: torch.Tensor,
        sigma_max: float,
    ) -> GaussianStep:
        """mean = x0 (1 - sigma') + x1 sqrt(sigma'^2 - s^2), S = s = sigma' sin(a pi / 2).

        x0 = x - sigma v and x1 = x + (1 - sigma) v. Arguments as in ``FlowSDE.step``; ``sigma_max`` is not needed.
        """
        del sigma_max
        v, x = velocity.to(torch.float32), latents.to(torch.float32)
        sigma, sigma_next = sigma.to(torch.float32), sigma_next.to(torch.float32)
        s = sigma_next * math.sin(self.noise_level * math.pi / 2)
        sigma_ = per_sample(sigma, x)
        x0, x1 = x - sigma_ * v, x + v * (1 - sigma_)
        kept = per_sample(torch.sqrt(sigma_next**2 - s**2), x)
        mean = x0 * (1 - per_sample(sigma_next, x)) + x1 * kept
        return GaussianStep(
            mean=mean, std=s, diffusion=s, weight=torch.ones_like(s), log_norm=torch.zeros_like(s), velocity=v
        )
