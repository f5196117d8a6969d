"""The distribution of the next latent, shared by all dynamics.

Shapes: B samples, ... latent dimensions. All arithmetic is float32 whatever the model's dtype.
Notation: sigma in [0, 1], 1 is noise; x_sigma = (1 - sigma) x0 + sigma eps; v = eps - x0; h = sigma - sigma' > 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch


def per_sample(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``[B]`` as float32 ``[B, 1, ...]``, to broadcast against ``like`` ``[B, ...]``."""
    return values.to(torch.float32).reshape(-1, *[1] * (like.ndim - 1))


def gaussian_step(
    mean: torch.Tensor, std: torch.Tensor, diffusion: torch.Tensor, velocity: torch.Tensor
) -> GaussianStep:
    """A step whose log-probability is the whole Gaussian log-density; arguments are the fields of ``GaussianStep``."""
    return GaussianStep(
        mean=mean,
        std=std,
        diffusion=diffusion,
        weight=1 / (2 * std**2),
        log_norm=-torch.log(std) - math.log(2 * math.pi) / 2,
        velocity=velocity,
    )


def mean_over_sample(values: torch.Tensor) -> torch.Tensor:
    """Mean over all but the batch dimension: ``[B, ...]`` to ``[B]``."""
    return values.flatten(1).mean(dim=1)


@dataclass(frozen=True)
class GaussianStep:
    """The Gaussian from which the next latent is drawn, N(mean, std^2).

    A log-probability is the *mean* over a sample's elements, as in Flow-GRPO; hence the small clip ranges.
    """

    mean: torch.Tensor
    """float32 ``[B, ...]``."""
    std: torch.Tensor
    """float32 ``[B]``: standard deviation S of the injected noise; 0 where the step is deterministic."""
    diffusion: torch.Tensor
    """float32 ``[B]``: the dynamics' own std_dev_t, by which Flow-GRPO's KL divides."""
    weight: torch.Tensor
    """float32 ``[B]``: w in log p = -w (x' - mean)^2 + log_norm. 1/(2 S^2) for a Gaussian density."""
    log_norm: torch.Tensor
    """float32 ``[B]``: the constant of the log-density, 0 where the dynamics leave it out."""
    velocity: torch.Tensor
    """float32 ``[B, ...]``: the prediction that the step was made from."""

    def draw(self, noise: torch.Tensor) -> torch.Tensor:
        """The next latent for standard normal ``noise`` ``[B, ...]``: float32 ``[B, ...]``."""
        return self.mean + per_sample(self.std, noise) * noise.to(torch.float32)

    def log_prob(self, next_latents: torch.Tensor) -> torch.Tensor:
        """Log-probability of ``next_latents`` ``[B, ...]``, mean over elements: float32 ``[B]``."""
        squared = (next_latents.to(torch.float32) - self.mean) ** 2
        return mean_over_sample(-per_sample(self.weight, squared) * squared) + self.log_norm

    def log_ratio(self, old_mean: torch.Tensor, next_latents: torch.Tensor) -> torch.Tensor:
        """log p(x') - log p_old(x') in closed form: mean of 2 w (mean - old_mean)(x' - (mean + old_mean)/2).

        Subtracting two float32 log-probabilities has an error floor near 1e-7, the size of published clip ranges;
        this form has none, and is exactly 0 when the means are equal.

        Args:
            old_mean: float32 ``[B, ...]``, the mean when ``next_latents`` was drawn.
            next_latents: float32 ``[B, ...]``.

        Returns:
            float32 ``[B]``.
        """
        middle = (self.mean + old_mean) / 2
        product = (self.mean - old_mean) * (next_latents.to(torch.float32) - middle)
        return mean_over_sample(product) * (2 * self.weight)

    def recentred_log_ratio(self, old_mean: torch.Tensor, next_latents: torch.Tensor) -> torch.Tensor:
        """mean((x' - mu_old)(mu - mu_old)) / S: S (log p(x') - log p_old(x')) + mean((mu - mu_old)^2) / 2S.

        Its mean under the old policy is 0, where the plain log-ratio's is -mean((mu - mu_old)^2) / 2S^2, and its scale
        is the same at every step. Densities are whole here, also where dynamics leave 1 / 2S^2 out. Args and what it
        returns are those of ``log_ratio``.
        """
        return mean_over_sample((next_latents - old_mean) * (self.mean - old_mean)) / self.std

    def kl(self, old_mean: torch.Tensor) -> torch.Tensor:
        """KL(old, this) of two Gaussians with this variance, per element: mean((mu - mu_old)^2) / 2S^2, ``[B]``."""
        return self.squared_distance(old_mean) / (2 * self.std**2)

    def squared_distance(self, old_mean: torch.Tensor) -> torch.Tensor:
        """mean((mu - mu_old)^2): float32 ``[B]``."""
        return mean_over_sample((self.mean - old_mean) ** 2)


class Dynamics(Protocol):
    """What every file beside this one offers: a stochastic or deterministic denoising step."""

    def step(
        self,
        velocity: torch.Tensor,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        sigma_next: torch.Tensor,
        sigma_max: float,
    ) -> GaussianStep: ...
