"""Mean losses of the sources that a step's tokens come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh


class SourceLosses:
    """Sums over the micro-batches of one step; nothing is kept when there is one source."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._sums: list[torch.Tensor] = []

    def add(self, losses: torch.Tensor, row: Mapping[str, torch.Tensor]) -> None:
        """Counts a micro-batch.

        Args:
            losses: of each token, ``[B, T]``, without graph.
            row: ``labels`` and ``sources``, the number of each token's source, ``[B, T]``.
        """
        if len(self.names) < 2:
            return
        learned = row["labels"] != IGNORED
        sums = torch.zeros(2, len(self.names), dtype=torch.float64, device=losses.device)
        sources = row["sources"][learned]
        sums[0].index_add_(0, sources, losses[learned].double())
        sums[1].index_add_(0, sources, torch.ones_like(sources, dtype=torch.float64))
        self._sums.append(sums)

    def means(self, mesh: Mesh) -> dict[str, float]:
        """``loss/NAME`` and ``tokens/NAME`` of each source over all ranks; a source without tokens has no loss."""
        if len(self.names) < 2:
            return {}
        total = sum(self._sums, torch.zeros(2, len(self.names), dtype=torch.float64)).tolist() if self._sums else None
        local = {} if total is None else {"sums": total[0], "counts": total[1]}
        found = [part for stage in mesh.gather(mesh.gather(local, over="loss"), over="pp") for part in stage if part]
        metrics: dict[str, float] = {}
        for index, name in enumerate(self.names):
            count = sum(part["counts"][index] for part in found)
            metrics[f"tokens/{name}"] = count
            if count:
                metrics[f"loss/{name}"] = sum(part["sums"][index] for part in found) / count
        return metrics
