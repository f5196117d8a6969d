"""By which tokens an engine that fuses or quantises its weights is verified; ``rescoring.py`` says how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rescoring:
    """How a receiver that fuses or quantises its weights is verified."""

    tokens: torch.Tensor | Sequence[Sequence[int]]
    """int64 ``[N, T]``; or beginnings of texts, which the sampler's engine goes on from when it is connected: a model
    is sure of what it draws itself, so that rounding moves those log-probs less than others."""
    tolerance: float | None = None
    """Largest difference between the log-probs of actor and sampler, in nats; None is measured."""
