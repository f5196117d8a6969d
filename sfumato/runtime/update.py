"""The optimiser steps of one iteration: which samples each learns from, and what the log says of them.

Nothing here knows what is learned. That stands in the task, between ``optimizer_steps`` and ``metrics``. A unit is what
must stay together: one sample, or where the objective needs whole groups, all useful ones of a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sfumato.algorithms.advantages import Advantages
from sfumato.algorithms.device import to_device
from sfumato.algorithms.noise import keyed_permutation
from sfumato.algorithms.reading import Numbers
from sfumato.config.rl import RLConfig
from sfumato.parallel.bin_packing import pack
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.parallelize import accumulate
from sfumato.rollout.batch import Passes, RankBatch, Rollout, SampleRequest, join_rollouts
from sfumato.runtime.states import Actor


@dataclass(frozen=True)
class MicroBatch:
    """B samples of one forward and backward pass, with R rows, sample by sample, that are learned from."""

    samples: Any
    """The ``Rollout`` of B samples."""
    advantages: torch.Tensor
    """float32 ``[R]`` on the model's device."""
    rows_in_step: float
    """Rows of the optimiser step, over all ranks and micro-batches."""
    samples_in_step: float
    """The same of its samples."""
    is_counted: bool
    """False for a pass on a rank that has no samples left, which computes because the others do and adds nothing."""
    is_first: bool
    """Whether it is the first of the update that is counted: the policy still is the one at the update's start."""
    where: str
    """Step, rank and samples, for messages."""
    all_losses: Numbers
    """Of the update's micro-batches, for ``reduce_and_clip``."""

    @property
    def sample_of_row(self) -> torch.Tensor:
        """int64 ``[R]``: which of the B samples a row is of."""
        return torch.arange(len(self.samples)).repeat_interleave(torch.tensor(self.samples.num_rows))

    def note(self, losses: torch.Tensor) -> None:
        """Has ``reduce_and_clip`` look whether losses of any shape are finite."""
        self.all_losses.add(losses.detach().double().sum(), self.where)  # finite just where all float32 ones are

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """This micro-batch's part of the mean over all rows of the optimiser step, from losses ``[R]``."""
        self.note(losses)
        return losses.sum() * self.is_counted / self.rows_in_step


class Update:
    """One iteration's samples in the order in which they are learned from, and sums for the log."""

    def __init__(
        self, actor: Actor[Any], rank_batch: RankBatch, advantages: Advantages, config: RLConfig, step: int
    ) -> None:
        """Orders the samples. All ranks make it, and take all of its steps.

        Args:
            actor: is told that an update begins.
            rank_batch: the samples of this rank.
            advantages: of the samples of all ranks, in the order of their ids.
            config: of the task.
            step: finished iterations.
        """
        self.actor, self.config, self.step = actor, config, step
        self.batch = join_rollouts(rank_batch, actor.mesh.device)
        """The ``Rollout`` of this rank's samples."""
        self.grad_norms: list[float] = []
        """Norms before clipping, one for each optimiser step; the task adds them."""
        self.advantages = advantages.rows(list(rank_batch.sample_ids.values()))
        """Of this rank's samples."""
        self._lr = actor.state.schedule.get_last_lr()[0]
        self._losses, self._sums = Numbers(), Numbers()
        self.pending = [self._losses, self._sums]
        """Losses of micro-batches, and other numbers, which ``reduce_and_clip`` reads with the norm."""
        self._rows = 0.0
        useful = self.advantages.useful(keep_no_spread=not config.algorithm.drop_no_spread)
        useful &= config.rollout.is_learned_from
        actor.begin_update()
        self.passes = optimizer_passes(self.batch, useful, config, actor.mesh, step)
        """The optimiser steps of the iteration."""

    def optimizer_steps(self) -> Iterator[Iterator[MicroBatch]]:
        """The micro-batches of each optimiser step, which is to be taken when they are through."""
        for passes in self.passes:
            self._rows += passes.num_rows
            yield self._micro_batches(passes)

    def _micro_batches(self, passes: Passes) -> Iterator[MicroBatch]:
        for number, rows in enumerate(accumulate(self.actor.model.trained, passes.parts)):
            is_counted = len(rows) > 0
            index = rows if is_counted else torch.zeros(1, dtype=torch.long)
            samples = self.batch.rows(index)
            advantages = self.advantages.values[index] * is_counted
            counts = torch.tensor(samples.num_rows)
            yield MicroBatch(
                samples,
                to_device(advantages.repeat_interleave(counts), self.actor.mesh.device, remember=True),
                passes.num_rows,
                passes.num_samples,
                is_counted,
                is_first=is_counted and number == 0 and not self.grad_norms,
                where=f"step {self.step + 1}, rank {self.actor.mesh.rank}, samples {samples.sample_ids}",
                all_losses=self._losses,
            )

    def record(self, micro: MicroBatch, sums: Mapping[str, torch.Tensor]) -> None:
        """Adds sums over a micro-batch's rows, by metric."""
        self._sums.add_all(**{name: value * micro.is_counted for name, value in sums.items()})

    def metrics(self, common_metrics: Mapping[str, float] | None = None) -> dict[str, float]:
        """Means over the trained rows of all ranks, which all call it.

        Args:
            further: metrics that all ranks agree on already.
        """
        steps = len(self.grad_norms)
        metrics = {name: value / self._rows for name, value in self.actor.mesh.sum_dict(self._sums.sums()).items()}
        metrics |= {"grad_norm": sum(self.grad_norms) / max(steps, 1), "lr": self._lr} | dict(common_metrics or {})
        return metrics | {"rows": self._rows, "updates": float(steps)}


def optimizer_passes(
    batch: Rollout, useful: torch.Tensor, config: RLConfig, mesh: Mesh, iteration: int
) -> list[Passes]:
    """The optimiser steps of an iteration. Those for which no rank has anything to learn from are left out.

    Args:
        batch: this rank's B samples.
        useful, config, iteration: as in ``optimizer_batches``.
        mesh: of the ranks that take part.
    """
    num_rows, passes = torch.tensor(batch.num_rows), []
    for units in optimizer_batches(batch.requests, useful, config, iteration):
        rows = mesh.sum(sum(int(num_rows[unit].sum()) for unit in units))
        if rows > 0:
            samples = mesh.sum(sum(int((num_rows[unit] > 0).sum()) for unit in units))
            passes.append(Passes(rows, samples, micro_batches(units, config, mesh, batch.lengths)))
    return passes


def optimizer_batches(
    requests: Sequence[SampleRequest], useful: torch.Tensor, config: RLConfig, iteration: int
) -> Iterator[list[torch.Tensor]]:
    """This rank's rows for each optimiser step: the samples of all ranks, shuffled, in equal parts.

    They are the same however ranks share them. A group that was drawn in the place of another (dynamic sampling), whose
    samples' ids are those of the other and a multiple of the samples of an iteration, takes its place here, too.

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
    row_of = {request.sample_id % num_samples: row for row, request in enumerate(requests) if useful[row]}
    order = keyed_permutation(num_samples // unit_size, config.train.seed, "update", iteration)
    for part in order.split((config.train.global_batch_size or num_samples) // unit_size):
        units = [range(unit * unit_size, (unit + 1) * unit_size) for unit in part.tolist()]
        rows = [[row_of[sample] for sample in unit if sample in row_of] for unit in units]
        yield [torch.tensor(unit, dtype=torch.long) for unit in rows if unit]


def micro_batches(
    units: Sequence[torch.Tensor], config: RLConfig, mesh: Mesh, lengths: Sequence[int] = ()
) -> list[torch.Tensor]:
    """Rows of each micro-batch, in order, as even as possible. All ranks get equally many, some perhaps empty.

    Args:
        units: rows that stay together.
        config: how many samples, or where it says so tokens, fit into one.
        mesh: of the ranks that take part.
        lengths: of all of the rank's samples, where they are not alike.
    """
    empty = torch.zeros(0, dtype=torch.long)
    units = sorted(units, key=lambda unit: int(unit[0]))  # samples of a group side by side
    capacity = getattr(config.train, "max_tokens_per_micro_batch", None)
    if capacity is not None:
        sizes = [sum(lengths[row] for row in unit.tolist()) for unit in units]
        num_passes = int(mesh.max(len(pack(sizes, sizes, capacity, 1)[0])))
        (bins,) = pack(sizes, sizes, capacity, 1, minimum=num_passes)
        return [torch.cat([empty, *(units[index] for index in members)]) for members in bins]
    unit_size = config.algorithm.samples_per_group(config.rollout.n) if config.algorithm.whole_groups else 1
    num_passes = int(mesh.max(math.ceil(len(units) / (config.train.micro_batch_size // unit_size))))
    parts = torch.arange(len(units)).tensor_split(num_passes)
    return [torch.cat([empty, *(units[index] for index in part.tolist())]) for part in parts]
