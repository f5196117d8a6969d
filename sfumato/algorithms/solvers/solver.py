"""What every deterministic sampler offers.

Shapes: B samples, ... latent dimensions, T steps. Notation: sigma in [0, 1], 1 is noise; v = eps - x0.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Solver(Protocol):
    """One step from sigma_i to sigma_(i+1), without state of its own."""

    def step(
        self, velocity: torch.Tensor, latents: torch.Tensor, sigmas: torch.Tensor, index: int, memory: Any = None
    ) -> tuple[torch.Tensor, Any]:
        """The next latents, and what the next step must be given as ``memory``.

        Args:
            velocity: v ``[B, ...]`` at ``latents``, any float dtype.
            latents: x ``[B, ...]``, any float dtype.
            sigmas: ``[T + 1]``, the whole schedule, descending to 0.
            index: the step i, 0 to T - 1.
            memory: what the step before returned; None where there was none, after which a solver begins anew.

        Returns:
            float32 ``[B, ...]``, and the memory.
        """
        ...
