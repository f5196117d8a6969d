"""The optimiser steps of one iteration: which samples each learns from, and the sums for the log.

This file does not know the objective: the task computes losses between ``optimizer_steps`` and ``metrics``. A unit is a
set of samples that must stay together: one sample or, if the objective needs whole groups, all useful samples of a
group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
from sfumato.runtime.decisions import Decisions, rows_with_gradient
from sfumato.runtime.states import Actor

if TYPE_CHECKING:
    from sfumato.algorithms.objectives import Ratio, RatioObjective


@dataclass(frozen=True)
class MicroBatch:
    """B samples of one forward and backward pass. Their R rows (decisions) to learn from follow sample by sample."""

    samples: Any
    """The ``Rollout`` of B samples."""
    advantages: torch.Tensor
    """float32 ``[R]`` on the model's device."""
    rows_in_step: float
    """Number of rows of the optimiser step, over all ranks and micro-batches."""
    samples_in_step: float
    """Number of samples of the optimiser step, over all ranks and micro-batches."""
    is_counted: bool
    """False for a pass on a rank without further samples: it runs because other ranks' passes need it in collectives,
    and must add nothing to the gradient."""
    is_first: bool
    """Whether it is the first counted one of the update, when the policy still is the one at the update's start."""
    where: str
    """Step, rank and samples, for messages."""
    all_losses: Numbers
    """Sums of the losses of all micro-batches of the update, for ``reduce_and_clip``."""

    @property
    def sample_of_row(self) -> torch.Tensor:
        """int64 ``[R]``: which of the B samples each row belongs to."""
        return torch.arange(len(self.samples)).repeat_interleave(torch.tensor(self.samples.num_rows))

    def note(self, losses: torch.Tensor) -> None:
        """Records losses of any shape, so that ``reduce_and_clip`` checks that they are finite."""
        # A float64 sum of float32 numbers is finite exactly if all of them are: it cannot overflow.
        self.all_losses.add(losses.detach().double().sum(), self.where)

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """This micro-batch's part of the mean over all rows of the optimiser step; ``losses`` is ``[R]``."""
        self.note(losses)
        return losses.sum() * self.is_counted / self.rows_in_step


class Update:
    """One iteration's samples in the order in which they are learned from, and sums for the log."""

    def __init__(
        self, actor: Actor[Any], rank_batch: RankBatch, advantages: Advantages, config: RLConfig, step: int
    ) -> None:
        """Orders the samples. All ranks must create it, and take all of its optimiser steps.

        Args:
            actor: its ``begin_update`` is called.
            rank_batch: the samples of this rank.
            advantages: of the samples of all ranks, in the order of their ids.
            config: of the task.
            step: finished iterations.
        """
        self.actor = actor
        self.config = config
        self.step = step
        self.batch = join_rollouts(rank_batch, actor.mesh.device)
        """The ``Rollout`` of this rank's samples."""
        self.grad_norms: list[float] = []
        """Gradient norms before clipping, one for each optimiser step; the task appends them."""
        self.advantages = advantages.rows(list(rank_batch.sample_ids.values()))
        """Advantages of this rank's samples."""
        self._lr = actor.state.schedule.get_last_lr()[0]
        self._losses = Numbers()
        self._sums = Numbers()
        self.pending = [self._losses, self._sums]
        """Losses of micro-batches and sums for the log, which ``reduce_and_clip`` reads together with the norm."""
        self._rows = 0.0  # rows of the optimiser steps so far, over all ranks
        useful = self.advantages.useful(keep_no_spread=not config.algorithm.drop_no_spread)
        useful &= config.rollout.is_learned_from
        saves_samples = step + 1 == config.train.max_steps or (step + 1) % config.eval.every_steps == 0
        self.decisions = Decisions(saves_samples, {self.batch.sample_ids[row] for row in useful.nonzero().flatten()})
        """What the update makes of decisions, where samples are saved after it."""
        actor.decisions = self.decisions
        actor.begin_update()
        self.passes = optimizer_passes(self.batch, useful, config, actor.mesh, step)
        """The optimiser steps of the iteration."""

    def optimizer_steps(self) -> Iterator[Iterator[MicroBatch]]:
        """For each optimiser step its micro-batches; take the step when these are used up."""
        for passes in self.passes:
            self._rows += passes.num_rows
            yield self._micro_batches(passes)

    def _micro_batches(self, passes: Passes) -> Iterator[MicroBatch]:
        """The micro-batches of one optimiser step. A rank without samples gets its first one, which is not counted."""
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
        """Adds the sums of metrics over a micro-batch's rows."""
        self._sums.add_all(**{name: value * micro.is_counted for name, value in sums.items()})

    def metrics(self, common_metrics: Mapping[str, float] | None = None) -> dict[str, float]:
        """Metrics of the update: means over the trained rows of all ranks, all of which must call it.

        Args:
            common_metrics: further metrics, equal on all ranks.
        """
        steps = len(self.grad_norms)
        metrics = {name: value / self._rows for name, value in self.actor.mesh.sum_dict(self._sums.sums()).items()}
        metrics |= {"grad_norm": sum(self.grad_norms) / max(steps, 1), "lr": self._lr} | dict(common_metrics or {})
        return metrics | {"rows": self._rows, "updates": float(steps)}


def optimizer_passes(
    batch: Rollout, useful: torch.Tensor, config: RLConfig, mesh: Mesh, iteration: int
) -> list[Passes]:
    """Plans the optimiser steps of an iteration; steps for which no rank has useful samples are left out.

    Args:
        batch: this rank's B samples.
        useful, config, iteration: as in ``optimizer_batches``.
        mesh: of the ranks that take part.
    """
    num_rows = torch.tensor(batch.num_rows)
    passes: list[Passes] = []
    for units in optimizer_batches(batch.requests, useful, config, iteration):
        # Collective: a rank without useful samples comes here as often as the others.
        rows = mesh.sum(sum(int(num_rows[unit].sum()) for unit in units))
        if rows > 0:
            samples = mesh.sum(sum(int((num_rows[unit] > 0).sum()) for unit in units))
            passes.append(Passes(rows, samples, micro_batches(units, config, mesh, batch.lengths)))
    return passes


def optimizer_batches(
    requests: Sequence[SampleRequest], useful: torch.Tensor, config: RLConfig, iteration: int
) -> Iterator[list[torch.Tensor]]:
    """This rank's units for each optimiser step: the units of all ranks are shuffled and divided into equal parts.

    The parts do not depend on how samples are distributed over ranks. A group that was drawn to replace another
    (dynamic sampling) takes that one's place here too: the ids of its samples are those of the other plus a multiple of
    the number of samples of an iteration.

    Args:
        requests: this rank's B samples; over all ranks they are numbered group by group.
        useful: bool ``[B]``: the samples to train on; others are left out.
        config: batch and group sizes, the objective, and the seed.
        iteration: together with the seed the key of the order.

    Yields:
        For each optimiser step the units, int64 indices of samples each; no unit is empty.
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
    """Divides units into micro-batches as even as possible. All ranks get equally many, some of which may be empty.

    Args:
        units: int64 indices of samples that stay together.
        config: how many samples, or tokens (``max_tokens_per_micro_batch``), fit into a micro-batch.
        mesh: of the ranks that take part.
        lengths: tokens of all of the rank's samples; needed with ``max_tokens_per_micro_batch``.

    Returns:
        int64 indices of the samples of each micro-batch.
    """
    empty = torch.zeros(0, dtype=torch.long)
    units = sorted(units, key=lambda unit: int(unit[0]))  # puts samples of a group side by side
    capacity = getattr(config.train, "max_tokens_per_micro_batch", None)
    if capacity is not None:
        sizes = [sum(lengths[row] for row in unit.tolist()) for unit in units]
        # As many as the rank with the most needs: every pass has collectives.
        num_passes = int(mesh.max(len(pack(sizes, sizes, capacity, 1)[0])))
        (bins,) = pack(sizes, sizes, capacity, 1, minimum=num_passes)
        return [torch.cat([empty, *(units[index] for index in members)]) for members in bins]
    unit_size = config.algorithm.samples_per_group(config.rollout.n) if config.algorithm.whole_groups else 1
    num_passes = int(mesh.max(math.ceil(len(units) / (config.train.micro_batch_size // unit_size))))
    parts = torch.arange(len(units)).tensor_split(num_passes)
    return [torch.cat([empty, *(units[index] for index in part.tolist())]) for part in parts]


def note_rows(
    decisions: Decisions, micro: MicroBatch, objective: RatioObjective, ratio: Ratio, **about: object
) -> None:
    """Takes the ratios of a micro-batch's R rows, where samples are saved after the update."""
    if not (decisions.is_wanted and micro.is_counted):
        return
    advantages = micro.advantages
    has_gradient = rows_with_gradient(
        lambda log_ratio: objective.loss(replace(ratio, log_ratio=log_ratio), advantages)[0],
        ratio.log_ratio,
        advantages,
    )
    decisions.add(micro.samples.sample_ids, micro.sample_of_row, ratio.log_ratio, has_gradient, **about)
