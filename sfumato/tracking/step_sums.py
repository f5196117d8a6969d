"""Sums over the micro-batches of a step and over all ranks: losses by source, and statistics of preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from sfumato.algorithms.reading import Numbers
from sfumato.parallel.mesh import Mesh


class SourceLosses:
    """Mean losses of the sources that a step's tokens come from; with a single source nothing is counted."""

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
        # Tokens outside of the mask count 0 for source 0: selecting the others would wait for the device.
        sources = source_ids.where(loss_mask, 0).flatten()
        sums[0].index_add_(0, sources, losses.where(loss_mask, 0.0).flatten().double())
        sums[1].index_add_(0, sources, loss_mask.flatten().double())
        self._sums.append(sums)

    def total(self) -> torch.Tensor | None:
        """Sums of losses and counts of tokens of this rank so far, float64 ``[2, sources]`` on the losses' device;
        None without micro-batches."""
        return torch.stack(self._sums).sum(dim=0) if self._sums else None

    @cached_property
    def numbers(self) -> Numbers:
        """``total``, on the device. To be asked for once all micro-batches have been counted: it is cached."""
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
    """Means of statistics of the pairs, answers or steps of an optimiser's step or an evaluation."""

    def __init__(self) -> None:
        self.numbers = Numbers()
        """The sums, on the device."""

    def add(self, count: int | torch.Tensor, **sums: torch.Tensor) -> None:
        """Counts some items of this rank.

        Args:
            count: how many items.
            sums: scalars by the metric's name, each the sum over these items.
        """
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
    """Means of statistics of the preference pairs of a step or an evaluation."""

    def means(self, mesh: Mesh, prefix: str, over: str = "data") -> dict[str, float]:
        """Means over the pairs of all ranks, and the margin: how much higher the better answer's reward is."""
        means = super().means(mesh, prefix, over)
        return means | {f"{prefix}margin": means[f"{prefix}reward_chosen"] - means[f"{prefix}reward_rejected"]}
