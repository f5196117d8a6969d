"""What an update made of each decision of the samples that are saved: its log-ratio, and whether it had a gradient.

The values are those of the passes that are made anyway. They stay on the device until the samples are written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

MOST_DECISIONS = 4096
"""Most decisions of a sample that are written, so that a line of ``samples.jsonl`` stays bounded."""


@dataclass
class Decisions:
    """Of one update. A sample takes part in one optimiser step of it."""

    is_wanted: bool
    """Whether samples of this iteration are saved."""
    trained_ids: set[int] = field(default_factory=set)
    """Samples that the update learned from."""
    _parts: list[tuple[Sequence[int], torch.Tensor, torch.Tensor, torch.Tensor, dict[str, object]]] = field(
        default_factory=list
    )

    def add(
        self,
        sample_ids: Sequence[int],
        sample_of_row: torch.Tensor,
        log_ratio: torch.Tensor,
        has_gradient: torch.Tensor,
        **about: object,
    ) -> None:
        """Takes the R rows of a micro-batch.

        Args:
            sample_ids: of the B samples.
            sample_of_row: int64 ``[R]``: which of the B samples a row belongs to, -1 for none; rows of a sample in
                their order.
            log_ratio: ``[R]``.
            has_gradient: bool ``[R]``.
            about: what is written of each of the samples besides.
        """
        self._parts.append((list(sample_ids), sample_of_row, log_ratio.detach(), has_gradient, about))

    def by_sample(self) -> dict[int, dict[str, object]]:
        """The values to write by sample id. Waits for the device."""
        written: dict[int, dict[str, object]] = {}
        for sample_ids, sample_of_row, log_ratio, has_gradient, about in self._parts:
            samples = sample_of_row.cpu()
            ratios = log_ratio.cpu()
            gradients = has_gradient.cpu()
            for number, sample_id in enumerate(sample_ids):
                is_here = samples == number
                # JSON has no NaN and no infinity.
                values = [value if math.isfinite(value) else None for value in ratios[is_here].tolist()]
                clipped = (~gradients[is_here]).tolist()
                cut = {"cut": len(values) - MOST_DECISIONS} if len(values) > MOST_DECISIONS else {}
                lists = {"log_ratio": values[:MOST_DECISIONS], "clipped": clipped[:MOST_DECISIONS]}
                written[sample_id] = {**about, **lists, **cut}
        return written


def rows_with_gradient(
    loss: Callable[[torch.Tensor], torch.Tensor], log_ratio: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """Whether an objective moves each decision, bool ``[R]``.

    A decision whose advantage is 0 counts as moved: it is not its ratio that keeps it.

    Args:
        loss: the losses ``[R]`` of log-ratios ``[R]``.
        log_ratio: ``[R]``.
        advantages: ``[R]``.
    """
    # Objectives clip in different ways; the gradient of the loss alone, a few rows, shows the outcome of any of them.
    leaf = log_ratio.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf).sum(), leaf)
    return (gradient != 0) | (advantages == 0)
