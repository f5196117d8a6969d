"""Euler's method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class Euler:
    """x' = x + v (sigma' - sigma); DDIM without noise and DPM-Solver++ of order 1 are the same on flows."""

    type: ClassVar[str] = "euler"

    def step(
        self, velocity: torch.Tensor, latents: torch.Tensor, sigmas: torch.Tensor, index: int, memory: None = None
    ) -> tuple[torch.Tensor, None]:
        """As ``Solver.step`` says; nothing is remembered."""
        del memory
        dt = sigmas[index + 1].to(torch.float32) - sigmas[index].to(torch.float32)
        return latents.to(torch.float32) + velocity.to(torch.float32) * dt, None
