"""The stochastic step that flow_grpo uses for Wan 2.1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.algorithms.dynamics.sde import reverse_sde_step
from sfumato.algorithms.dynamics.step import GaussianStep


@dataclass(frozen=True)
class WanSDE:
    """Flow-SDE's step with s = sigma_max sigma (flow_grpo, wan_pipeline_with_logprob); it has no noise level.

    Upstream writes s = sigma_min + (sigma_max - sigma_min) sigma; its schedules end at sigma_min = 0.
    """

    type: ClassVar[str] = "wan"

    def step(
        self,
        velocity: torch.Tensor,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        sigma_next: torch.Tensor,
        sigma_max: float,
    ) -> GaussianStep:
        """mean and S as in ``FlowSDE.step``, with the arguments of it."""
        return reverse_sde_step(velocity, latents, sigma, sigma_next, sigma.to(torch.float32) * sigma_max)
