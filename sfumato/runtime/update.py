"""The optimiser steps of one iteration: which samples each learns from, and what the log says of them.

Nothing here knows what is learned. That stands in the task, between ``optimizer_steps`` and ``metrics``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sfumato.algorithms.advantages import Advantages
from sfumato.algorithms.off_policy import Mismatch, mismatch_metrics
from sfumato.parallel.gradients import check_finite
from sfumato.parallel.parallelize import accumulate
from sfumato.rollout.batch import Part, RolloutBatch, join
from sfumato.rollout.diffusion import check_replay
from sfumato.rollout.monitors import group_diversity
from sfumato.rollout.update_order import optimizer_passes
from sfumato.runtime.diffusion_states import Actor


@dataclass(frozen=True)
class MicroBatch:
    """B samples of one forward and backward pass, with R rows, sample by sample, that are learned from."""

    samples: RolloutBatch
    """B samples."""
    advantages: torch.Tensor
    """float32 ``[R]`` on the model's device."""
    rows_in_step: float
    """Rows of the optimiser step, over all ranks and micro-batches."""
    is_counted: bool
    """False for a pass on a rank that has no samples left, which computes because the others do and adds nothing."""
    is_first: bool
    """The first of the update that is counted: the policy still is the one at the update's start."""
    where: str
    """Step, rank and samples, for messages."""

    @property
    def sample_of_row(self) -> torch.Tensor:
        """int64 ``[R]``: which of the B samples a row is of."""
        return torch.arange(len(self.samples)).repeat_interleave(self.samples.kept.rows_per_sample)

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """This micro-batch's part of the mean over all rows of the optimiser step, from losses ``[R]``.

        Raises:
            NonFiniteError: when a loss is NaN or infinite; names step, rank and samples.
        """
        check_finite(losses, self.where)
        return losses.sum() * self.is_counted / self.rows_in_step


class Update:
    """One iteration's samples in the order in which they are learned from, and sums for the log."""

    def __init__(self, actor: Actor, part: Part, advantages: Advantages, config: Any, step: int) -> None:
        """Orders the samples. All ranks make it, and take all of its steps.

        Args:
            actor: is told that an update begins.
            part: the samples of this rank.
            advantages: of the samples of all ranks, in the order of their ids.
            config: of the task.
            step: finished iterations.
        """
        self.actor, self.config, self.step = actor, config, step
        self.batch = join(part, actor.model.device)
        self.grad_norms: list[float] = []
        """Norms before clipping, one for each optimiser step; the task adds them."""
        self._advantages = advantages.rows(self.batch.sample_ids)
        self._lr = actor.state.schedule.get_last_lr()[0]
        self._sums: dict[str, float] = {}
        self._rows, self._replay_error = 0.0, 0.0
        useful = self._advantages.useful(keep_no_spread=not config.algorithm.drop_no_spread)
        actor.begin_update()
        rows_per_sample = self.batch.kept.rows_per_sample
        self.passes = optimizer_passes(self.batch.requests, useful, rows_per_sample, config, actor.mesh, step)
        """Of each optimiser step its rows over all ranks, and the samples of this rank's micro-batches."""

    def optimizer_steps(self) -> Iterator[Iterator[MicroBatch]]:
        """The micro-batches of each optimiser step, which is to be taken when they are through."""
        for rows_in_step, micro_batches in self.passes:
            self._rows += rows_in_step
            yield self._micro_batches(rows_in_step, micro_batches)

    def _micro_batches(self, rows_in_step: float, micro_batches: Sequence[torch.Tensor]) -> Iterator[MicroBatch]:
        for number, rows in enumerate(accumulate(self.actor.model.denoiser, micro_batches)):
            is_counted = len(rows) > 0
            index = rows if is_counted else torch.zeros(1, dtype=torch.long)
            samples = self.batch.rows(index)
            advantages = (self._advantages.values[index] * is_counted).repeat_interleave(samples.kept.rows_per_sample)
            yield MicroBatch(
                samples,
                advantages.to(self.actor.model.device),
                rows_in_step,
                is_counted,
                is_first=is_counted and number == 0 and not self.grad_norms,
                where=f"step {self.step + 1}, rank {self.actor.mesh.rank}, samples {samples.sample_ids}",
            )

    def check_first_ratio(self, micro: MicroBatch, log_ratio: torch.Tensor) -> None:
        """Compares replay and rollout while the policy still is the one that sampled, if the samples are its own.

        Args:
            micro: the first micro-batch.
            log_ratio: ``[R]``, of the policy to the one that sampled.

        Raises:
            SelfCheckError: when they differ by more than rounding.
        """
        algorithm, dtype = self.config.algorithm, self.actor.model.compute_dtype
        is_own = algorithm.self_check and set(micro.samples.versions) == {self.step}
        tolerance = algorithm.objective.replay_tolerance
        bound = self.actor.rows.bound(len(log_ratio), tolerance, dtype) if is_own else None
        self._replay_error = check_replay(log_ratio.detach(), micro.samples.kept.steps, dtype, bound)

    def record(self, micro: MicroBatch, sums: Mapping[str, torch.Tensor]) -> None:
        """Adds sums over a micro-batch's rows, by metric."""
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value) * micro.is_counted

    def metrics(self, mismatch: Mismatch | None = None) -> dict[str, float]:
        """Means over the trained rows of all ranks, which all call it.

        Args:
            mismatch: of what was replayed on this rank; None where nothing is.
        """
        mesh, steps = self.actor.mesh, len(self.grad_norms)
        found = {name: value / self._rows for name, value in mesh.sum_dict(self._sums).items()}
        found |= {"grad_norm": sum(self.grad_norms) / max(steps, 1), "lr": self._lr}
        if mismatch is not None:
            found["ratio/replay_error"] = mesh.max(self._replay_error)
            found |= mismatch_metrics(mesh.sum_dict(mismatch.sums), mesh.max(mismatch.largest))
        return found | {"rows": self._rows, "updates": float(steps)} | group_diversity(self.batch, mesh)
