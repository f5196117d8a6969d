"""Which samples each optimiser step and each micro-batch learns from, the same however ranks share them.

A unit is what must stay together: one sample, or where the objective needs whole groups, all useful ones of a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from sfumato.algorithms.noise import keyed_permutation
from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.batch import SampleRequest


def optimizer_batches(
    requests: Sequence[SampleRequest], useful: torch.Tensor, config: DiffusionRLConfig, iteration: int
) -> Iterator[list[torch.Tensor]]:
    """This rank's rows for each optimiser step: the samples of all ranks, shuffled, in equal parts.

    Args:
        requests: this rank's B samples; over all ranks they are numbered group by group.
        useful: bool ``[B]``: those to train on; the others are left out.
        config: batch and group sizes, the objective, and the seed.
        iteration: the rest of the order's key.

    Yields:
        int64 rows of each unit; none is empty.
    """
    num_samples = config.rollout.num_prompts * config.rollout.n
    unit_size = config.rollout.n if config.algorithm.whole_groups else 1
    row_of = {each.sample_id: row for row, each in enumerate(requests) if useful[row]}
    order = keyed_permutation(num_samples // unit_size, config.train.seed, "update", iteration)
    for part in order.split((config.train.global_batch_size or num_samples) // unit_size):
        units = [range(unit * unit_size, (unit + 1) * unit_size) for unit in part.tolist()]
        rows = [[row_of[sample] for sample in unit if sample in row_of] for unit in units]
        yield [torch.tensor(each, dtype=torch.long) for each in rows if each]


def optimizer_passes(
    requests: Sequence[SampleRequest],
    useful: torch.Tensor,
    rows_per_sample: int,
    config: DiffusionRLConfig,
    mesh: Mesh,
    iteration: int,
) -> list[tuple[float, list[torch.Tensor]]]:
    """The optimiser steps of an iteration: rows of all ranks that each learns from, and this rank's micro-batches.

    Steps for which no rank has anything to learn from are left out. Args are those of ``optimizer_batches``.
    """
    passes = []
    for units in optimizer_batches(requests, useful, config, iteration):
        num_rows = mesh.sum(sum(len(each) for each in units) * rows_per_sample)
        if num_rows > 0:
            passes.append((num_rows, micro_batches(units, config, mesh)))
    return passes


def micro_batches(units: Sequence[torch.Tensor], config: DiffusionRLConfig, mesh: Mesh) -> list[torch.Tensor]:
    """Rows of each micro-batch, as even as possible. All ranks get equally many, some perhaps empty."""
    unit_size = config.algorithm.samples_per_group(config.rollout.n) if config.algorithm.whole_groups else 1
    num_passes = int(mesh.max(math.ceil(len(units) / (config.train.micro_batch_size // unit_size))))
    empty = torch.zeros(0, dtype=torch.long)
    parts = torch.arange(len(units)).tensor_split(num_passes)
    return [torch.cat([empty, *(units[index] for index in part.tolist())]) for part in parts]
