"""Draws samples through whose last denoising steps gradients flow to the policy's weights.

Shapes: B samples, ... latent dimensions, T denoising steps, K differentiated ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sfumato.algorithms.device import to_device
from sfumato.algorithms.flow_matching import add_noise
from sfumato.algorithms.noise import keyed_normal
from sfumato.algorithms.reward_gradients import DirectAlign, recover_sample
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
    gains: torch.Tensor | None = None
    """float32 ``[B]``: k of the relative reward, of Direct-Align; None without."""
    control_words: Sequence[str] | None = None
    """The words whose reward is wanted, and the others; None when rewards are those of the prompt."""


def draw_differentiably(
    policies: Policies[DiffusionModel],
    conditioning: Conditioning,
    sample_ids: Sequence[int],
    config: DirectRLConfig,
    iteration: int,
) -> Iterator[DifferentiableSamples]:
    """Draws B samples as the configuration says, as often as they have a backward pass: ``algorithm.num_passes``.

    Each one's backward pass must be over when the next one is asked for, so that one graph is in memory.

    Args:
        policies: the trained policy, and where there is a penalty the reference.
        conditioning: B rows.
        sample_ids: B integers that key the noise.
        config: of the run.
        iteration: the rest of the noise's key.
    """
    algorithm = config.algorithm
    rollout = config.rollout
    is_direct = isinstance(algorithm.steps, DirectAlign)
    num_steps = rollout.num_inference_steps
    samples = sample_differentiably(
        policies,
        conditioning,
        sample_ids,
        steps=range(num_steps, num_steps)
        if is_direct
        else algorithm.steps.steps(num_steps, config.train.seed, iteration),
        solver=algorithm.solver,
        compares=algorithm.kl_coef > 0 and not is_direct,
        size=rollout.size,
        num_steps=num_steps,
        guidance_scale=rollout.guidance_scale,
        seed=config.train.seed,
        iteration=iteration,
    )
    if not is_direct:
        yield DifferentiableSamples(samples.latents, samples.reference_distances, control_words=algorithm.control_words)
        return
    yield from _align_directly(policies, conditioning, sample_ids, samples.latents, config, iteration)


def _align_directly(
    policies: Policies[DiffusionModel],
    conditioning: Conditioning,
    sample_ids: Sequence[int],
    x0: torch.Tensor,
    config: DirectRLConfig,
    iteration: int,
) -> Iterator[DifferentiableSamples]:
    """Noises samples ``[B, ...]`` by the noise that they were drawn from, and recovers them by one step each."""
    algorithm = config.algorithm
    scale = config.rollout.guidance_scale
    model = policies.model
    noise = keyed_normal(x0.shape[1:], config.train.seed, "latent", iteration, sample_ids, model.device)
    assert algorithm.control_words is not None  # the configuration has refused that
    wanted, unwanted = algorithm.control_words
    for jump in algorithm.steps.jumps(config.train.seed, iteration, sample_ids):
        start = to_device(jump.start, model.device)
        noisy = add_noise(x0, noise, start)
        distances = None
        if algorithm.kl_coef > 0:
            with torch.no_grad(), policies.active("reference") as reference:
                expected = reference.predict_velocity(noisy, start, conditioning, scale)
        velocity = model.predict_velocity(noisy, start, conditioning, scale)
        if algorithm.kl_coef > 0:
            distances = (velocity - expected).square().flatten(1).mean(dim=1)
        yield DifferentiableSamples(
            recover_sample(noisy, velocity, noise, start, to_device(jump.end, model.device)),
            distances,
            to_device(jump.gains, model.device),
            (unwanted, wanted) if jump.is_inversion else (wanted, unwanted),
        )


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
