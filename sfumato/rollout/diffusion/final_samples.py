"""Final samples for objectives that noise them anew: draws them, and predicts velocities at their noise levels.

Shapes: B samples, L noise levels of each, ... latent dimensions, T denoising steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from sfumato.algorithms.device import on_host, to_device
from sfumato.algorithms.flow_matching import add_noise
from sfumato.algorithms.forward_process.noised import NoisedSamples
from sfumato.algorithms.noise import keyed_normal
from sfumato.algorithms.rows import by_row
from sfumato.algorithms.solvers import Solver
from sfumato.algorithms.timesteps import Timesteps
from sfumato.models.diffusion.base import Conditioning, DiffusionModel
from sfumato.models.policies import Policies
from sfumato.rollout.diffusion.trajectory_sampler import ReplayData, start_latents


@dataclass(frozen=True)
class FinalSamples(ReplayData):
    """What an update needs of B samples."""

    latents: torch.Tensor = by_row()
    """float32 ``[B, ...]``: x0."""
    sigmas: torch.Tensor = by_row()
    """float32 ``[B, L]``: the noise levels at which each sample is trained."""
    noise_ids: torch.Tensor = by_row()
    """int64 ``[B]``: keys of the noise; samples with the same key have the same noise and levels."""
    group_ids: torch.Tensor = by_row()
    """int64 ``[B]``: the group of each sample."""

    @property
    def rows_per_sample(self) -> int:
        """L."""
        return self.sigmas.shape[1]

    def to(self, device: torch.device | str) -> FinalSamples:
        """The same on another device, without the ids: the host needs them, where noise is keyed."""
        return replace(super().to(device), noise_ids=self.noise_ids, group_ids=self.group_ids)

    def zero_damaged(self, is_whole: torch.Tensor) -> FinalSamples:
        """Zeros in the place of the latents. Noise levels stay as they are, since none may be 0."""
        return replace(super().zero_damaged(is_whole), sigmas=self.sigmas)


@torch.no_grad()
def sample_final(
    model: DiffusionModel,
    conditioning: Conditioning,
    sample_ids: Sequence[int],
    group_ids: Sequence[int],
    *,
    solver: Solver,
    timesteps: Timesteps,
    shared_noise: bool,
    size: tuple[int, ...],
    num_steps: int,
    guidance_scale: float,
    seed: int,
    iteration: int,
) -> FinalSamples:
    """Denoises B samples deterministically and draws the noise levels at which they will be trained.

    Args:
        model: the policy that samples.
        conditioning: B rows.
        sample_ids: B integers that key the first latents.
        group_ids: B integers.
        solver: the deterministic step.
        timesteps: draws the noise levels.
        shared_noise: whether samples of a group have the same noise and noise levels in training.
        size: height and width in pixels, and of videos the number of frames.
        num_steps: denoising steps T.
        guidance_scale: classifier-free guidance; 1 is none.
        seed, iteration: the rest of the noise's key.

    Returns:
        The samples with the noise levels at which they will be trained.

    Raises:
        ValueError: when the schedule has no noise level to train at.
    """
    latents, sigmas = start_latents(model, size, num_steps, seed, iteration, sample_ids)
    noise_ids = group_ids if shared_noise else sample_ids
    levels = to_device(timesteps.draw(on_host(sigmas), seed, iteration, noise_ids), model.device)
    if not timesteps.of_schedule:
        levels = model.training_sigma(levels)
    memory = None
    for index in range(num_steps):
        sigma = sigmas[index].expand(len(latents))
        velocity = model.predict_velocity(latents, sigma, conditioning, guidance_scale)
        latents, memory = solver.step(velocity, latents, sigmas, index, memory)
    ids = (torch.tensor(list(keys), dtype=torch.long) for keys in (noise_ids, group_ids))
    return FinalSamples(latents, levels, *ids)


def predict_noised(
    policies: Policies[DiffusionModel],
    samples: FinalSamples,
    conditioning: Conditioning,
    *,
    compared: Iterable[str],
    guidance_scale: float,
    reference_guidance_scale: float | None,
    seed: int,
    iteration: int,
) -> NoisedSamples:
    """The velocities that the policies predict for samples at all of their noise levels, in one forward pass of each.

    Only the conditional branch predicts, as in flow matching; a model that embeds guidance gets the rollout's scale. A
    policy whose weights equal those of the trained one is not computed again.

    Args:
        policies: the trained policy, through which gradients flow, and the others.
        samples: B samples.
        conditioning: B rows.
        compared: names of the other policies whose predictions are needed.
        guidance_scale: of the rollout, for a model that embeds it.
        reference_guidance_scale: of the reference, where that differs.
        seed, iteration: the key of the noise besides the samples' ids.

    Returns:
        B x L rows, sample by sample.
    """
    model = policies.model
    num_levels = samples.rows_per_sample
    shape = samples.latents.shape[1:]
    ids = on_host(samples.noise_ids).tolist()
    noise = [keyed_normal(shape, seed, f"noise {k}", iteration, ids, model.device) for k in range(num_levels)]
    # [B x L, ...], sample by sample; the name is bound anew so that the parts are freed before the forward passes
    noise = torch.stack(noise, dim=1).flatten(0, 1)
    sigma = samples.sigmas.flatten()
    x0 = samples.latents.repeat_interleave(num_levels, dim=0)
    conditioning = conditioning.repeat_interleave(num_levels)
    noisy = add_noise(x0, noise, sigma)

    trained_scale = guidance_scale if model.embeds_guidance else 1.0
    scales = dict.fromkeys(sorted(compared), trained_scale)
    if "reference" in scales and reference_guidance_scale is not None:
        scales["reference"] = reference_guidance_scale
    same = {name for name, scale in scales.items() if scale == trained_scale and policies.equals_trained(name)}
    velocities: dict[str, torch.Tensor] = {}
    for name in (name for name in scales if name not in same):  # sorted: ranks that share a model compute together
        with torch.no_grad(), policies.active(name) as other:
            velocities[f"{name}_velocity"] = other.predict_velocity(noisy, sigma, conditioning, scales[name])
    # last, since the weights of other policies are put into the same model for their passes
    velocity = model.predict_velocity(noisy, sigma, conditioning, trained_scale)
    velocities |= {f"{name}_velocity": velocity.detach() for name in same}
    return NoisedSamples(
        x0=x0,
        noise=noise,
        sigma=sigma,
        velocity=velocity,
        group_ids=to_device(on_host(samples.group_ids).repeat_interleave(num_levels), model.device, remember=True),
        levels=to_device(torch.arange(num_levels).repeat(len(samples.latents)), model.device, remember=True),
        error_weight=model.loss_weight(sigma),
        **velocities,
    )
