"""Denoising steps as Gaussian policies: how the next latent is drawn, and with which probability.

Shapes: B samples, ... latent dimensions. All arithmetic is float32 whatever the model's dtype.
Notation: sigma in [0, 1], 1 is noise; x_sigma = (1 - sigma) x0 + sigma eps; v = eps - x0; h = sigma - sigma' > 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from torch import Tensor


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """``[B]`` as float32 ``[B, 1, ...]``, to broadcast against ``like`` ``[B, ...]``."""
    return values.to(torch.float32).reshape(-1, *[1] * (like.ndim - 1))


def gaussian_step(mean: Tensor, std: Tensor, diffusion: Tensor, velocity: Tensor) -> GaussianStep:
    """A step whose log-probability is the complete Gaussian log-density, constants included.

    Args:
        mean: float32 ``[B, ...]``.
        std: float32 ``[B]``, above 0.
        diffusion: float32 ``[B]``, as in ``GaussianStep``.
        velocity: float32 ``[B, ...]``.
    """
    return GaussianStep(
        mean=mean,
        std=std,
        diffusion=diffusion,
        weight=1 / (2 * std**2),
        log_norm=-torch.log(std) - math.log(2 * math.pi) / 2,
        velocity=velocity,
    )


def mean_over_sample(values: Tensor) -> Tensor:
    """Mean over all but the batch dimension: ``[B, ...]`` to ``[B]``."""
    return values.flatten(1).mean(dim=1)


@dataclass(frozen=True)
class GaussianStep:
    """The Gaussian from which the next latent is drawn, N(mean, std^2).

    A log-probability is the *mean* over a sample's elements, as in Flow-GRPO; hence the small clip ranges.
    """

    mean: Tensor
    """float32 ``[B, ...]``."""
    std: Tensor
    """float32 ``[B]``: standard deviation S of the injected noise; 0 where the step is deterministic."""
    diffusion: Tensor
    """float32 ``[B]``: the dynamics' own std_dev_t, by which Flow-GRPO's KL divides."""
    weight: Tensor
    """float32 ``[B]``: w in log p = -w (x' - mean)^2 + log_norm. 1/(2 S^2) for a Gaussian density."""
    log_norm: Tensor
    """float32 ``[B]``: the constant of the log-density, 0 where the dynamics leave it out."""
    velocity: Tensor
    """float32 ``[B, ...]``: the prediction that the step was made from."""

    def draw(self, noise: Tensor) -> Tensor:
        """The next latent for standard normal ``noise`` ``[B, ...]``: float32 ``[B, ...]``."""
        return self.mean + per_sample(self.std, noise) * noise.to(torch.float32)

    def log_prob(self, next_latents: Tensor) -> Tensor:
        """Log-probability of ``next_latents`` ``[B, ...]``, mean over elements: float32 ``[B]``."""
        squared = (next_latents.to(torch.float32) - self.mean) ** 2
        return mean_over_sample(-per_sample(self.weight, squared) * squared) + self.log_norm

    def log_ratio(self, old_mean: Tensor, next_latents: Tensor) -> Tensor:
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

    def recentred_log_ratio(self, old_mean: Tensor, next_latents: Tensor) -> Tensor:
        """mean((x' - mu_old)(mu - mu_old)) / S: S (log p(x') - log p_old(x')) + mean((mu - mu_old)^2) / 2S.

        Its mean under the old policy is 0, where the plain log-ratio's is -mean((mu - mu_old)^2) / 2S^2, and its scale
        is the same at every step. The full Gaussian densities are taken, also where the dynamics' own log-probability
        leaves out 1 / 2S^2 (``CPS``). Arguments and result are those of ``log_ratio``.
        """
        return mean_over_sample((next_latents - old_mean) * (self.mean - old_mean)) / self.std

    def kl(self, old_mean: Tensor) -> Tensor:
        """KL(old, this) of two Gaussians with this variance, per element: mean((mu - mu_old)^2) / 2S^2, ``[B]``."""
        return self.squared_distance(old_mean) / (2 * self.std**2)

    def squared_distance(self, old_mean: Tensor) -> Tensor:
        """mean((mu - mu_old)^2): float32 ``[B]``."""
        return mean_over_sample((self.mean - old_mean) ** 2)


class Dynamics:
    """Base of every dynamics that a configuration can choose: a stochastic or deterministic denoising step."""

    def step(
        self, velocity: Tensor, latents: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: float
    ) -> GaussianStep:
        """The step from one noise level to the next.

        Args:
            velocity: v ``[B, ...]``, any float dtype.
            latents: x ``[B, ...]``, any float dtype.
            sigma, sigma_next: ``[B]`` with sigma > sigma_next.
            sigma_max: the schedule's second sigma; stands for sigma in 1 - sigma in the first step.
        """
        v, x, sigma, sigma_next = (tensor.to(torch.float32) for tensor in (velocity, latents, sigma, sigma_next))
        return self._step(v, x, sigma, sigma_next, sigma_max)

    def _step(self, v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: float) -> GaussianStep:
        """The formula, in float32."""
        raise NotImplementedError


@dataclass(frozen=True)
class EulerODE(Dynamics):
    """x' = x + v dt; no noise, so no log-probability."""

    type: ClassVar[str] = "ode"

    def _step(self, v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: float) -> GaussianStep:
        """The returned step has std 0, and its log-probability is not a number."""
        dt = per_sample(sigma_next - sigma, x)
        zero = torch.zeros_like(sigma)
        nan = torch.full_like(zero, float("nan"))
        return GaussianStep(x + v * dt, std=zero, diffusion=zero, weight=nan, log_norm=nan, velocity=v)


@dataclass(frozen=True)
class FlowSDE(Dynamics):
    """Flow-GRPO's SDE: same marginals as the ODE, noise s = a sqrt(sigma / (1 - sigma))."""

    type: ClassVar[str] = "sde"

    noise_level: float = 0.7
    """The factor a; more explores more. Flow-GRPO uses 0.7 for SD3.5-M and 0.9 for FLUX."""

    def __post_init__(self) -> None:
        if not self.noise_level > 0:
            raise ValueError("noise_level must be above 0: without noise there is no log-probability to learn from")

    def _step(self, v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: float) -> GaussianStep:
        """mean = x (1 + s^2 dt / 2 sigma) + v (1 + s^2 (1 - sigma) / 2 sigma) dt, S = s sqrt(-dt)."""
        # 1 - sigma is 0 at pure noise, and next to 0 where a schedule begins just below it (0.9997 of Sana), so that
        # noise would drown the latents. Flow-GRPO takes the schedule's second sigma at 1; here in any first step.
        bounded = sigma.clamp(max=sigma_max)
        s = torch.sqrt(sigma / (1 - bounded)) * self.noise_level
        return reverse_sde_step(v, x, sigma, sigma_next, s)


def reverse_sde_step(v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, s: Tensor) -> GaussianStep:
    """The step of ``FlowSDE`` for any diffusion coefficient ``s``, ``[B]``; all is float32."""
    dt = sigma_next - sigma
    s_, sigma_, dt_ = per_sample(s, x), per_sample(sigma, x), per_sample(dt, x)
    mean = x * (1 + s_**2 / (2 * sigma_) * dt_) + v * (1 + s_**2 * (1 - sigma_) / (2 * sigma_)) * dt_
    return gaussian_step(mean, s * torch.sqrt(-dt), s, v)


@dataclass(frozen=True)
class WanSDE(Dynamics):
    """Flow-SDE's step with s = sigma_max sigma (flow_grpo, wan_pipeline_with_logprob); it has no noise level.

    Upstream writes s = sigma_min + (sigma_max - sigma_min) sigma; its schedules end at sigma_min = 0.
    """

    type: ClassVar[str] = "wan"

    def _step(self, v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: float) -> GaussianStep:
        return reverse_sde_step(v, x, sigma, sigma_next, sigma * sigma_max)


@dataclass(frozen=True)
class DanceSDE(Dynamics):
    """DanceGRPO's SDE: the same noise eta at every step."""

    type: ClassVar[str] = "dance"

    noise_level: float = 0.3
    """eta. DanceGRPO uses 0.3 for FLUX and 0.25 for HunyuanVideo."""

    def __post_init__(self) -> None:
        if not self.noise_level > 0:
            raise ValueError("noise_level must be above 0: without noise there is no log-probability to learn from")

    def _step(self, v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: float) -> GaussianStep:
        """mean = x + v dt + eta^2 dt (x - (1 - sigma) x0) / (2 sigma^2), S = eta sqrt(-dt), x0 = x - sigma v."""
        dt = sigma_next - sigma
        sigma_, dt_ = per_sample(sigma, x), per_sample(dt, x)
        x0 = x - sigma_ * v
        mean = x + v * dt_ + 0.5 * self.noise_level**2 * dt_ * (x - x0 * (1 - sigma_)) / sigma_**2
        return gaussian_step(mean, self.noise_level * torch.sqrt(-dt), torch.full_like(sigma, self.noise_level), v)


@dataclass(frozen=True)
class DDIM(Dynamics):
    """DDIM with noise, as DiffusionNFT's solver writes it for flows; DDPO samples with eta 1."""

    type: ClassVar[str] = "ddim"

    eta: float = 1.0
    """Share of the ancestral noise, in (0, 1]."""

    def __post_init__(self) -> None:
        if not 0 < self.eta <= 1:
            raise ValueError("eta must be above 0 and at most 1: at 0 there is no log-probability to learn from")

    def _step(self, v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: float) -> GaussianStep:
        """mean = (1 - sigma') x0 + sqrt(sigma'^2 - rho^2) x1, S = rho.

        rho = eta sigma' sqrt(1 - sigma'^2 (1 - sigma)^2 / (sigma^2 (1 - sigma')^2)), x0 = x - sigma v and
        x1 = x + (1 - sigma) v.
        """
        shrunk = sigma_next * (1 - sigma) / (sigma * (1 - sigma_next))
        rho = self.eta * sigma_next * torch.sqrt(1 - shrunk**2)
        sigma_, next_ = per_sample(sigma, x), per_sample(sigma_next, x)
        x1_factor = per_sample(torch.sqrt(sigma_next**2 - rho**2), x)
        mean = (1 - next_) * (x - sigma_ * v) + x1_factor * (x + (1 - sigma_) * v)
        return gaussian_step(mean, rho, self.eta * sigma_next, v)


@dataclass(frozen=True)
class CPS(Dynamics):
    """Coefficient-preserving sampling; its log-probability is the bare -(x' - mean)^2, as flow_grpo has it."""

    type: ClassVar[str] = "cps"

    noise_level: float = 0.8
    """The factor a in s = sigma' sin(a pi / 2), in (0, 1]."""

    def __post_init__(self) -> None:
        if not 0 < self.noise_level <= 1:
            raise ValueError(
                "noise_level must be above 0 and at most 1: at 0 there is no log-probability to learn from"
            )

    def _step(self, v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: float) -> GaussianStep:
        """mean = x0 (1 - sigma') + x1 sqrt(sigma'^2 - s^2), S = s = sigma' sin(a pi / 2).

        x0 = x - sigma v and x1 = x + (1 - sigma) v.
        """
        s = sigma_next * math.sin(self.noise_level * math.pi / 2)
        sigma_ = per_sample(sigma, x)
        x0, x1 = x - sigma_ * v, x + v * (1 - sigma_)
        x1_factor = per_sample(torch.sqrt(sigma_next**2 - s**2), x)
        mean = x0 * (1 - per_sample(sigma_next, x)) + x1 * x1_factor
        return GaussianStep(
            mean=mean, std=s, diffusion=s, weight=torch.ones_like(s), log_norm=torch.zeros_like(s), velocity=v
        )
