"""The deterministic Euler step: evaluation, and every step outside the trained window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.algorithms.dynamics.step import GaussianStep, per_sample


@dataclass(frozen=True)
class EulerODE:
    """x' = x + v dt; no noise, so no log-probability."""

    type: ClassVar[str] = "ode"

    def step(
        self,
        velocity: torch.Tensor,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        sigma_next: torch.Tensor,
        sigma_max: float,
    ) -> GaussianStep:
        """Arguments as in ``FlowSDE.step``; the returned step has std 0, and its log-probability is not a number."""
        del sigma_max
        v, x = velocity.to(torch.float32), latents.to(torch.float32)
        dt = per_sample(sigma_next.to(torch.float32) - sigma.to(torch.float32), x)
        zero = torch.zeros_like(sigma, dtype=torch.float32)
        nan = torch.full_like(zero, float("nan"))
        return GaussianStep(x + v * dt, std=zero, diffusion=zero, weight=nan, log_norm=nan, velocity=v)
