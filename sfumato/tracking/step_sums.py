"""Sums over the micro-batches of a step and over all ranks: losses by source, and what preference pairs looked like."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from sfumato.algorithms.reading import Numbers
from sfumato.parallel.mesh import Mesh


class SourceLosses:
    """Losses of the sources that a step's tokens come from; nothing is kept when there is one source."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._sums: list[torch.Tensor] = []

    def add(self, losses: torch.Tensor, source_ids: torch.Tensor, loss_mask: torch.Tensor) -> None:
        """Counts a micro-batch.

        Args:
            losses: float ``[B, T]``, the loss of each token, without graph.
            source_ids: int64 ``[B, T]``, the number of each token's source.
            loss_mask: bool ``[B, T]``: tokens that count.
        """
        if len(self.names) < 2:
            return
        sums = torch.zeros(2, len(self.names), dtype=torch.float64, device=losses.device)
        sources = source_ids.where(loss_mask, 0).flatten()  # and no picking, which would wait for the device
        sums[0].index_add_(0, sources, losses.where(loss_mask, 0.0).flatten().double())
        sums[1].index_add_(0, sources, loss_mask.flatten().double())
        self._sums.append(sums)

    def total(self) -> torch.Tensor | None:
        """Sums of the losses and counts of this rank so far, float64 ``[2, sources]`` where the losses are, not read;
        None without micro-batches."""
        return torch.stack(self._sums).sum(dim=0) if self._sums else None

    @cached_property
    def numbers(self) -> Numbers:
        """``total`` when all micro-batches have been counted, as it is on the device."""
        total = self.total()
        return Numbers() if total is None else Numbers(total)

    def means(self, mesh: Mesh) -> dict[str, float]:
        """``loss/NAME`` and ``tokens/NAME`` of each source over all ranks; a source without tokens has no loss."""
        if len(self.names) < 2:
            return {}
        size = len(self.names)
        values = list(self.numbers)
        local = {"sums": values[:size], "counts": values[size:]} if values else {}
        parts = [part for stage in mesh.gather(mesh.gather(local, over="loss"), over="pp") for part in stage if part]
        metrics: dict[str, float] = {}
        for index, name in enumerate(self.names):
            count = sum(part["counts"][index] for part in parts)
            metrics[f"tokens/{name}"] = count
            if count:
                metrics[f"loss/{name}"] = sum(part["sums"][index] for part in parts) / count
        return metrics


class MeanSums:
    """What the pairs, answers or steps of an optimiser's step or an evaluation looked like."""

    def __init__(self) -> None:
        self.numbers = Numbers()
        """The sums, as they are on the device."""

    def add(self, count: int | torch.Tensor, **sums: torch.Tensor) -> None:
        """Counts some of this rank; ``sums`` are scalars by the metric's name, each the sum over these."""
        self.numbers.add_all(count=count, **sums)

    def means(self, mesh: Mesh, prefix: str, over: str = "data") -> dict[str, float]:
        """Means over what the ranks of a view have counted, each of which has counted other samples.

        Args:
            mesh: the ranks.
            prefix: of the metrics' names.
            over: name of the view, such as "data".
        """
        # Only the last pipeline stage sees losses: summing over "pp" brings its sums to the other stages.
        total = mesh.sum_dict(mesh.sum_dict(self.numbers.sums(), over), over="pp")
        count = max(total.pop("count", 0.0), 1)
        return {f"{prefix}{name}": value / count for name, value in total.items()}


class PairSums(MeanSums):
    """What the preference pairs of a step or an evaluation looked like."""

    def means(self, mesh: Mesh, prefix: str, over: str = "data") -> dict[str, float]:
        """Means over the pairs of all ranks, and the margin: how much higher the better answer's reward is."""
        means = super().means(mesh, prefix, over)
        return means | {f"{prefix}margin": means[f"{prefix}reward_chosen"] - means[f"{prefix}reward_rejected"]}
