"""Draws samples through whose last denoising steps gradients flow to the policy's weights.

Shapes: B samples, ... latent dimensions, T denoising steps, K differentiated ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sfumato.algorithms.solvers import Solver
from sfumato.config.direct_rl import DirectRLConfig
from sfumato.models.diffusion.base import Conditioning, DiffusionModel
from sfumato.models.diffusion.flops import denoiser_flops
from sfumato.models.policies import Policies
from sfumato.rollout.batch import SampleRequest
from sfumato.rollout.diffusion.trajectory_sampler import start_latents


@dataclass(frozen=True)
class DifferentiableSamples:
    """B samples with the graph of their differentiated steps."""

    latents: torch.Tensor
    """float32 ``[B, ...]``: x0, the final latents or the prediction of the last computed step."""
    reference_distances: torch.Tensor | None
    """float32 ``[B]``: mean squared difference of the velocities of policy and reference, over latent elements and
    differentiated steps; None when there is no reference."""


def sample_differentiably(
    policies: Policies[DiffusionModel],
    conditioning: Conditioning,
    sample_ids: Sequence[int],
    *,
    steps: range,
    solver: Solver,
    compares: bool,
    size: tuple[int, ...],
    num_steps: int,
    guidance_scale: float,
    seed: int,
    iteration: int,
) -> DifferentiableSamples:
    """Denoises B samples deterministically, at first without gradient.

    Args:
        policies: the trained policy, and where ``compares`` the reference.
        conditioning: B rows.
        sample_ids: B integers that key the first latents.
        steps: the differentiated steps, consecutive; no later one is computed.
        solver: the deterministic step.
        compares: compute the distances to the reference.
        size: height and width in pixels, and of videos the number of frames.
        num_steps: denoising steps T.
        guidance_scale: classifier-free guidance; 1 is none.
        seed, iteration: the rest of the noise's key.

    Returns:
        The samples, whose graph holds the activations of the K steps.
    """
    model = policies.model
    latents, sigmas = start_latents(model, size, num_steps, seed, iteration, sample_ids)
    memory = None
    distances: list[torch.Tensor] = []
    for index in range(steps.stop):
        sigma = sigmas[index].expand(len(latents))
        with torch.set_grad_enabled(index in steps):
            velocity = model.predict_velocity(latents, sigma, conditioning, guidance_scale)
            if index in steps and compares:
                with torch.no_grad(), policies.active("reference") as reference:
                    expected = reference.predict_velocity(latents, sigma, conditioning, guidance_scale)
                distances.append((velocity - expected).square().flatten(1).mean(dim=1))
            if index + 1 == steps.stop:
                # after the last step of the schedule this is the Euler step to sigma 0
                latents = latents - sigmas[index] * velocity
            else:
                latents, memory = solver.step(velocity, latents, sigmas, index, memory)
    return DifferentiableSamples(latents, torch.stack(distances).mean(dim=0) if compares else None)


def split_requests(requests: Sequence[SampleRequest], size: int) -> list[list[SampleRequest]]:
    """Micro-batches of at most ``size`` samples, in order."""
    return [list(requests[start : start + size]) for start in range(0, len(requests), size)]


def iteration_flops(model: DiffusionModel, num_samples: int, steps: range, config: DirectRLConfig) -> dict[str, float]:
    """Operations of the denoiser on ``num_samples``, by what they are for; those that are recomputed do not count."""
    rollout = config.rollout
    forward, training = denoiser_flops(model, rollout.height, rollout.width)  # of one sample and guidance branch
    branches = 1 if rollout.guidance_scale == 1.0 or model.embeds_guidance else 2
    update = training + forward * len(config.algorithm.compared)
    return {
        "generate": float(num_samples * branches * forward * steps.start),
        "update": float(num_samples * branches * update * len(steps)),
    }
