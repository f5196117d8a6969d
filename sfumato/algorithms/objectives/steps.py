"""The denoising steps that were drawn, as replay compares the policy with them.

Shapes: R rows, each a (sample, trained step) pair; ... latent dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sfumato.algorithms.dynamics.step import GaussianStep


@dataclass(frozen=True)
class SampledSteps:
    """What was drawn when the trajectories were sampled. The standard deviation does not depend on the policy."""

    next_latents: torch.Tensor
    """float32 ``[R, ...]``: the latents that were drawn."""
    log_probs: torch.Tensor
    """float32 ``[R]``: their log-probability then."""
    step_sizes: torch.Tensor
    """float32 ``[R]``: h = sigma - sigma' > 0."""
    means: torch.Tensor | None
    """float32 ``[R, ...]``: the means they were drawn around; None where they were not kept."""

    def log_ratio(self, new: GaussianStep) -> torch.Tensor:
        """log p_new - log p_old of each row: in closed form where the means were kept, for precision."""
        if self.means is None:
            return new.log_prob(self.next_latents) - self.log_probs
        return new.log_ratio(self.means, self.next_latents)

    def old_means(self) -> torch.Tensor:
        """The means. Raises ValueError where they were not kept."""
        if self.means is None:
            raise ValueError("this objective needs the means of the sampled steps")
        return self.means
