"""Denoising trajectories: samples them with the data that an update needs, and replays them with gradients.

Rollout and replay use the same step function, so that they agree to the bit where the model's outputs do. Latents,
sigmas and noise are float32 in it, and the very latent whose log-probability is computed is the one that is stored.

Shapes: B samples, W trained steps, ... latent dimensions, T denoising steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sfumato.algorithms.device import on_host, to_device
from sfumato.algorithms.dynamics import Dynamics, EulerODE, GaussianStep
from sfumato.algorithms.noise import keyed_normal
from sfumato.algorithms.objectives import SampledSteps
from sfumato.algorithms.rows import by_row
from sfumato.models.diffusion.base import Conditioning, DiffusionModel
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.batch import Passes
from sfumato.rollout.diffusion.trajectory_sampler import DiffusionRollout, ReplayData, start_latents

if TYPE_CHECKING:
    from sfumato.config.diffusion_rl import TrajectoryRLConfig


@dataclass(frozen=True)
class Trajectories(ReplayData):
    """The trained steps of B sampled trajectories, which an update needs."""

    steps: list[int]
    """The W trained denoising steps."""
    sigmas: torch.Tensor
    """float32 ``[T + 1]``: the noise levels of the whole schedule."""
    latents: torch.Tensor = by_row()
    """float32 ``[B, W, ...]``: the latent before each trained step."""
    next_latents: torch.Tensor = by_row()
    """float32 ``[B, W, ...]``: the latent that was drawn in the step."""
    means: torch.Tensor = by_row()
    """float32 ``[B, W, ...]``: the mean of the distribution that it was drawn from."""
    log_probs: torch.Tensor = by_row()
    """float32 ``[B, W]``: the log-probability of the latent that was drawn."""
    proximal_means: torch.Tensor | None = by_row(None)
    """float32 ``[B, W, ...]``: the means of the policy at the start of an update, where that is not the one that
    sampled."""

    @property
    def rows_per_sample(self) -> int:
        """W."""
        return len(self.steps)

    @property
    def proximal_rows(self) -> torch.Tensor | None:
        """``proximal_means`` of the B x W rows, sample by sample."""
        return None if self.proximal_means is None else self.proximal_means.flatten(0, 1)

    def levels(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        """What the dynamics take of the B x W rows beside the velocity, sample by sample.

        Returns:
            The latents float32 ``[B x W, ...]``; the noise level before the step and after it, float32 ``[B x W]``; the
            first level of the schedule below that of pure noise.
        """
        steps = torch.tensor(self.steps).repeat(len(self.latents))
        sigma, sigma_next = (self.sigmas[to_device(index, self.sigmas.device)] for index in (steps, steps + 1))
        return self.latents.flatten(0, 1), sigma, sigma_next, float(on_host(self.sigmas)[1])

    def sampled_steps(self) -> SampledSteps:
        """The B x W rows, sample by sample, as an objective takes them."""
        steps = torch.tensor(self.steps)
        first, last = (to_device(index, self.sigmas.device) for index in (steps, steps + 1))
        return SampledSteps(
            next_latents=self.next_latents.flatten(0, 1),
            log_probs=self.log_probs.flatten(),
            step_sizes=(self.sigmas[first] - self.sigmas[last]).repeat(len(self.latents)),
            means=self.means.flatten(0, 1),
        )


@torch.no_grad()
def sample_trajectories(
    model: DiffusionModel,
    conditioning: Conditioning,
    sample_ids: Sequence[int],
    *,
    dynamics: Dynamics,
    trained_steps: Sequence[int],
    size: tuple[int, ...],
    num_steps: int,
    guidance_scale: float,
    seed: int,
    iteration: int,
    latent_ids: Sequence[int] | None = None,
    observe: Callable[[torch.Tensor], object] | None = None,
) -> tuple[torch.Tensor, Trajectories | None]:
    """Denoises B samples; steps outside ``trained_steps`` are deterministic.

    Args:
        model: the policy.
        conditioning: B rows.
        sample_ids: B integers that key the noise.
        dynamics: the stochastic step.
        trained_steps: indices of the steps that are stochastic and stored, ascending; may be empty.
        size: height and width in pixels, and of videos the number of frames.
        num_steps: denoising steps T.
        guidance_scale: classifier-free guidance; 1 is none.
        seed, iteration: the rest of the noise's key.
        latent_ids: keys of the initial latents where they differ from ``sample_ids`` (groups that share one).
        observe: called with the velocity ``[B, ...]`` of each step.

    Returns:
        The final latents ``[B, ...]``, and the trajectories; None without trained steps.
    """
    latents, sigmas = start_latents(model, size, num_steps, seed, iteration, latent_ids or sample_ids)
    # the first level below that of pure noise, where the noise of some dynamics would be infinite
    sigma_max = float(on_host(sigmas)[1])
    ode = EulerODE()
    trained = []
    for index in range(num_steps):
        sigma, sigma_next = (sigmas[i].expand(len(latents)) for i in (index, index + 1))
        velocity = model.predict_velocity(latents, sigma, conditioning, guidance_scale)
        if observe is not None:
            observe(velocity)
        if index not in trained_steps:
            latents = ode.step(velocity, latents, sigma, sigma_next, sigma_max).mean
            continue
        step = dynamics.step(velocity, latents, sigma, sigma_next, sigma_max)
        noise = keyed_normal(latents.shape[1:], seed, f"step noise {index}", iteration, sample_ids, model.device)
        next_latents = step.draw(noise)
        trained.append((latents, next_latents, step.mean, step.log_prob(next_latents)))
        latents = next_latents
    if not trained:
        return latents, None
    before, after, means, log_probs = (torch.stack(steps, dim=1) for steps in zip(*trained, strict=True))
    return latents, Trajectories(list(trained_steps), sigmas, before, after, means, log_probs)


def replay_trajectories(
    model: DiffusionModel,
    trajectories: Trajectories,
    conditioning: Conditioning,
    dynamics: Dynamics,
    guidance_scale: float,
) -> GaussianStep:
    """The distribution of every trained step by the policy of now: all steps and guidance branches in one forward pass.

    Args:
        model: the policy; gradients flow into it.
        trajectories: B samples of W steps.
        conditioning: B rows.
        dynamics, guidance_scale: as in the rollout.

    Returns:
        The distribution of B x W rows, sample by sample.
    """
    conditioning = conditioning.repeat_interleave(len(trajectories.steps))
    latents, sigma, sigma_next, sigma_max = trajectories.levels()
    velocity = model.predict_velocity(latents, sigma, conditioning, guidance_scale)
    return dynamics.step(velocity, latents, sigma, sigma_next, sigma_max)


def sampled_on_policy(batch: DiffusionRollout, config: TrajectoryRLConfig, mesh: Mesh, step: int) -> bool:
    """Whether the processes that train drew all samples of all ranks, with the weights that they have now.

    Args:
        batch: this rank's samples of iteration ``step``.
        config, mesh: of the run.
        step: finished iterations.
    """
    return config.rollout.hybrid_engine and mesh.max(step - min(batch.versions)) == 0


def sampled_by_other_graphs(
    batch: DiffusionRollout, config: TrajectoryRLConfig, mesh: Mesh, step: int, device: str
) -> bool:
    """Whether the weights of now drew all samples, but in compiled graphs, which round otherwise than those of an
    update, by more than a narrow clip range.

    Where another process drew them and the off-policy correction takes the proximal policy, that sees to it.

    Args:
        batch, config, mesh, step: as in ``sampled_on_policy``.
        device: type of device of the policy.
    """
    if not config.train.compiles(device):
        return False
    corrects = not config.rollout.hybrid_engine and config.algorithm.off_policy.uses_proximal
    return mesh.max(step - min(batch.versions)) == 0 and not corrects


def with_proximal_means(
    model: DiffusionModel,
    batch: DiffusionRollout,
    passes: Sequence[Passes],
    config: TrajectoryRLConfig,
    is_on_policy: bool,
    rounds_apart: bool,
) -> DiffusionRollout:
    """The batch with ``proximal_means`` for optimiser steps after the first, in which the trained policy still is the
    proximal one.

    They are computed where the off-policy correction needs them, and some samples are older; and where the samples
    come from graphs that round otherwise: then by the graphs of the update.

    Args:
        model: the policy, before any optimiser step of the update.
        batch: this rank's samples of an iteration.
        passes: this rank's micro-batches by optimiser step, of ``optimizer_passes``.
        config: of the run.
        is_on_policy: see ``sampled_on_policy``. A separate sampler never is: it may be sharded otherwise, or compute
            otherwise.
        rounds_apart: see ``sampled_by_other_graphs``.
    """
    if not rounds_apart and (is_on_policy or not config.algorithm.off_policy.uses_proximal):
        return batch
    later = [rows for optimizer_step in passes[1:] for rows in optimizer_step.parts]
    dynamics = config.algorithm.dynamics
    guidance_scale = config.rollout.guidance_scale
    means = proximal_means(model, batch, later, dynamics, guidance_scale, with_gradients=rounds_apart)
    return replace(batch, kept=replace(batch.kept, proximal_means=means))


def proximal_means(
    model: DiffusionModel,
    batch: DiffusionRollout,
    micro_batches: Sequence[torch.Tensor],
    dynamics: Dynamics,
    guidance_scale: float,
    with_gradients: bool = False,
) -> torch.Tensor:
    """Means of the policy as it is now, for the samples that later optimiser steps of an update learn from.

    The first optimiser step needs no such pass: there the trained policy still is the proximal one. The micro-batches
    must be those of the update, so that both passes have the same batch shape and hence the same bits.

    Args:
        model: the policy, before any optimiser step of the update.
        batch: B samples with trajectories.
        micro_batches: int64 rows of each pass, perhaps none; all ranks must give the same number of passes.
        dynamics, guidance_scale: as in the rollout.
        with_gradients: whether the graph of an update is run, though nothing is learned from it.

    Returns:
        float32 ``[B, W, ...]``, without gradients. Samples that are in no micro-batch have the means of the policy that
        sampled them.
    """
    means = batch.kept.means.clone()
    for rows in micro_batches:
        index = rows if len(rows) else torch.zeros(1, dtype=torch.long)  # a pass that other ranks need
        part = batch.rows(index)
        with torch.set_grad_enabled(with_gradients):
            mean = replay_trajectories(model, part.kept, part.row_conditioning, dynamics, guidance_scale).mean.detach()
        if len(rows):
            means[to_device(rows, means.device)] = mean.unflatten(0, (len(rows), -1))
    return means
