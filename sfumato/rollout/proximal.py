"""What the policy at the start of an update says of steps that an older one has drawn.

Shapes: B samples, W trained steps, ... latent dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sfumato.algorithms.dynamics import Dynamics
from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.batch import RolloutBatch
from sfumato.rollout.diffusion import replay_trajectories


def with_proximal_means(
    model: DiffusionModel,
    batch: RolloutBatch,
    passes: Sequence[tuple[float, list[torch.Tensor]]],
    config: DiffusionRLConfig,
    mesh: Mesh,
    step: int,
) -> RolloutBatch:
    """The batch with ``proximal_means``, where the correction of older samples needs them and some are older.

    Args:
        model: the policy, before any optimiser step of the update.
        batch: of iteration ``step``.
        passes: of ``optimizer_passes``: this rank's micro-batches by optimiser step.
        config, mesh: of the run.
        step: finished iterations.
    """
    is_same = config.rollout.hybrid_engine and mesh.max(step - min(batch.versions)) == 0
    if not config.algorithm.off_policy.uses_proximal or is_same:
        return batch  # a sampler of its own may be cut otherwise, or compute otherwise
    later = [rows for _, parts in passes[1:] for rows in parts]  # in the first step the policy is the proximal one
    means = proximal_means(model, batch, later, config.algorithm.dynamics, config.rollout.guidance_scale)
    return replace(batch, kept=replace(batch.kept, proximal_means=means))


@torch.no_grad()
def proximal_means(
    model: DiffusionModel,
    batch: RolloutBatch,
    micro_batches: Sequence[torch.Tensor],
    dynamics: Dynamics,
    guidance_scale: float,
) -> torch.Tensor:
    """Means of the policy as it is now, for the samples that later optimiser steps of an update will look at.

    Those of the first optimiser step need no pass of their own: there the trained policy still is the proximal one.
    Take the very micro-batches of the update, so that both have one batch shape and hence the same bits.

    Args:
        model: the policy, before any optimiser step of the update.
        batch: B samples with trajectories.
        micro_batches: int64 rows of each pass; all ranks must give equally many, of which some may be empty.
        dynamics, guidance_scale: as in the rollout.

    Returns:
        float32 ``[B, W, ...]``; of samples in no micro-batch those of the policy that made them.
    """
    means = batch.kept.means.clone()
    for rows in micro_batches:
        index = rows if len(rows) else torch.zeros(1, dtype=torch.long)  # a pass that keeps other ranks company
        part = batch.rows(index)
        step = replay_trajectories(model, part.kept, part.row_conditioning, dynamics, guidance_scale)
        if len(rows):
            means[rows] = step.mean.unflatten(0, (len(rows), -1))
    return means
