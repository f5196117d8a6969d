"""Flow matching with straight paths: x_sigma = (1 - sigma) x0 + sigma eps, target v = eps - x0 (arXiv 2209.03003)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sfumato.algorithms.dynamics import mean_over_sample, per_sample

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def shift_sigma(sigma: Tensor, shift: float) -> Tensor:
    """shift sigma / (1 + (shift - 1) sigma), any shape: more noise for larger images (arXiv 2403.03206, eq. 23)."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def draw_sigma(uniform: Tensor, density: str, mean: float, std: float, shift: float) -> Tensor:
    """Noise levels for training, by inverse transform of uniform numbers.

    Args:
        uniform: float64 ``[B]`` in [0, 1).
        density: "uniform", or "logit_normal": sigmoid of a normal variable (arXiv 2403.03206, eq. 19).
        mean, std: of that normal variable.
        shift: applied afterwards; 1 changes nothing.

    Returns:
        float32 ``[B]`` in [0, 1].
    """
    if density == "logit_normal":
        inner = uniform.clamp(1e-7, 1 - 1e-7)
        uniform = torch.sigmoid(mean + std * torch.special.ndtri(inner))
    elif density != "uniform":
        raise ValueError(f"unknown density {density!r}: use uniform or logit_normal")
    return shift_sigma(uniform, shift).to(torch.float32)


def add_noise(latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """x_sigma ``[B, ...]`` for x0 and eps of that shape and sigma ``[B]``."""
    sigma = per_sample(sigma, latents)
    return (1 - sigma) * latents + sigma * noise


def flow_matching_loss(
    velocity: Float[Tensor, "batch *latent"],
    latents: Float[Tensor, "batch *latent"],
    noise: Float[Tensor, "batch *latent"],
    weights: Float[Tensor, "batch height width"] | None = None,
    part_lengths: tuple[int, ...] = (),
) -> Float[Tensor, "batch"]:
    """Mean squared error to eps - x0 over a sample's elements: float32 ``[B]``.

    Args:
        velocity, latents, noise: ``[B, ..., h, w]``.
        weights: of each latent pixel; None counts all alike. The mean is over the weights, so that a sample of which a
            small part counts is as important as others.
        part_lengths: of the parts of a sample along its last dimension, such as video and sound, which take no weights;
            the loss is then the sum of the parts' means. Empty: a sample is one part.
    """
    squares = (velocity.float() - (noise - latents)) ** 2
    if part_lengths:
        assert weights is None, "parts of a sample have no weights"
        means = [mean_over_sample(part) for part in squares.split(part_lengths, dim=-1)]
        return torch.stack(means).sum(dim=0)
    if weights is None:
        return mean_over_sample(squares)
    weights = weights.reshape(len(weights), *[1] * (squares.ndim - 3), *weights.shape[1:])
    return mean_over_sample(squares * weights) / mean_over_sample(weights)
