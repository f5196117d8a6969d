"""Metrics that show over-optimisation without a reward: differences within groups, and norms of velocities.

Shapes: n samples of a group, R rows, ... latent dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import adaptive_avg_pool2d

from sfumato.algorithms.device import to_device
from sfumato.algorithms.dynamics import mean_over_sample
from sfumato.algorithms.reading import Numbers
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.diffusion.trajectory_sampler import DiffusionRollout

LONGEST_SIDE = 32
MOST_FRAMES = 8
"""Pixels of a side, and frames, to which images and videos are reduced before their pixels are compared."""


def group_diversity(batch: DiffusionRollout, mesh: Mesh) -> dict[str, float]:
    """Means over the groups of all ranks of ``pixel_distance`` and ``latent_distance``; all ranks call it.

    Damaged samples do not count, nor do groups with fewer than two other samples.

    Args:
        batch: this rank's samples, whole groups.
        mesh: the ranks.
    """
    assert batch.samples is not None
    groups: dict[int, list[int]] = {}
    for row, (request, sample) in enumerate(zip(batch.requests, batch.samples, strict=True)):
        if not sample.damage:
            groups.setdefault(request.group_id, []).append(row)
    groups = {group: rows for group, rows in groups.items() if len(rows) > 1}
    sums = {"groups": float(len(groups)), "diversity/pixels": 0.0, "diversity/latents": 0.0}
    distances = Numbers()
    for rows in groups.values():
        sums["diversity/pixels"] += pixel_distance([batch.samples[row].shown for row in rows])
        distances.add(latent_distance(batch.latents[to_device(torch.tensor(rows), batch.latents.device)]))
    sums["diversity/latents"] = sum(distances, 0.0)
    sums = mesh.sum_dict(sums)
    count = sums.pop("groups")
    return {name: value / count if count else math.nan for name, value in sums.items()}


def pixel_distance(images: Sequence[np.ndarray]) -> float:
    """Mean absolute difference between the pixels of two samples, from 0 (all equal) to 1 (black against white).

    Args:
        images: n >= 2 images, uint8 ``[H, W, 3]``, or videos, ``[F, H, W, 3]``. They are averaged down to 32 pixels a
            side; of a video 8 frames count.

    Returns:
        The mean over all pairs, pixels and colours.
    """
    ordered = torch.stack([_downscale_pixels(image) for image in images]).sort(dim=0).values
    count = len(ordered)
    # of sorted values, the sum over pairs |a - b| is the sum of rank x value with these ranks: no loop over pairs
    ranks = 2 * torch.arange(count, dtype=torch.float64) - (count - 1)
    return float((ranks @ ordered).mean() / (count * (count - 1) / 2)) / 255


def _downscale_pixels(image: np.ndarray) -> torch.Tensor:
    """The pixels of a sample, averaged down: float64, flat."""
    frames = image.reshape(-1, *image.shape[-3:])
    chosen_frames = torch.linspace(0, len(frames) - 1, min(len(frames), MOST_FRAMES)).round().long()
    height, width = image.shape[-3:-1]
    size = (min(height, LONGEST_SIDE), min(width, LONGEST_SIDE))
    pixels = torch.from_numpy(frames[chosen_frames.numpy()])
    return adaptive_avg_pool2d(pixels.movedim(-1, 1).to(torch.float64), size).flatten()


def latent_distance(latents: torch.Tensor) -> torch.Tensor:
    """Mean over all pairs of 1 - cosine of two latents, a scalar: 0 where all have one direction, 1 where unrelated.

    Args:
        latents: ``[n, ...]``, n >= 2.
    """
    directions = torch.nn.functional.normalize(latents.flatten(1).to(torch.float32), dim=1)
    count = len(directions)
    cosines = directions @ directions.T
    # the trace is that of each latent with itself, which is no pair
    return 1 - ((cosines.sum() - cosines.trace()) / (count * (count - 1))).double()


def velocity_norms(velocity: torch.Tensor, reference: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Sums over rows of the velocity's root mean square, and of its ratio to the reference's.

    Norms that grow beyond the reference's go along with images that a reward prefers and people do not
    (arXiv 2606.27771).

    Args:
        velocity: the policy's prediction ``[R, ...]``.
        reference: the reference's at the same points, if it was computed.
    """
    norms = root_mean_square(velocity.detach())
    sums = {"velocity/rms": norms.sum()}
    if reference is not None:
        sums["velocity/norm_ratio"] = (norms / root_mean_square(reference)).sum()
    return sums


def root_mean_square(velocity: torch.Tensor) -> torch.Tensor:
    """The root mean square of each row: float32 ``[R, ...]`` to ``[R]``."""
    return mean_over_sample(velocity.square()).sqrt()


class VelocityNorms:
    """The root mean square of each sample's velocities over the ``num_steps`` steps of its sampling.

    Where latents and prompts are always the same, it changes with the policy alone, so no reference is needed.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._squares: list[torch.Tensor] = []

    def __call__(self, velocity: torch.Tensor) -> None:
        """Takes one step's velocity of the samples that are denoised together: ``[B, ...]``."""
        self._squares.append(mean_over_sample(velocity.square()))

    def per_sample(self) -> list[float]:
        """One number for each sample, in the order in which they were sampled."""
        starts = range(0, len(self._squares), self._num_steps)
        mean_squares = [torch.stack(self._squares[start : start + self._num_steps]).mean(dim=0) for start in starts]
        return torch.cat(mean_squares).sqrt().tolist()
