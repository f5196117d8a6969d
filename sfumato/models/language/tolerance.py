"""How far rounding moves the results of a language model: bounds that hold for all, and the noise of one model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sfumato.models.language.packed_model import PackedModel

NOISES = 4
"""Times its measured noise by which a result may differ."""
DRAWS = 3
"""Passes in which noise is measured."""


@dataclass(frozen=True)
class Noise:
    """What rounding changes, measured by ``rounding_noise``."""

    log_probs: float
    """The largest change of a short document's log-probability, in nats."""
    relative: float
    """The change of loss or gradient norm, whichever is larger, as a fraction: the root of the mean square."""


@dataclass(frozen=True)
class Tolerance:
    """The largest differences that rounding explains. Where one is beyond the first bound, the noise of the model is
    measured."""

    log_probs: tuple[float, float]
    """The tolerance of one token's log-probability, in nats, is at least the first and at most the second."""
    size: float
    """Between these bounds, the tolerance in nats for each nat of the largest log-probability, since logits are rounded
    in proportion to their size: those of a Qwen3 in float32, down to -141, were off by 2.5e-4."""
    relative: tuple[float, float]
    """The tolerance of loss and gradient norm, as a fraction of their values, at least and at most."""

    def log_prob_tolerance(self, log_probs: Tensor, noise: float = 0.0) -> float:
        """Nats by which any of these log-probabilities may differ, with ``Noise.log_probs``."""
        least, most = self.log_probs
        return min(max(NOISES * noise, self.size * float(log_probs.abs().max()), least), most)

    def training_tolerance(self, noise: float = 0.0) -> float:
        """The fraction by which loss and gradient norm may differ, with ``Noise.relative``."""
        least, most = self.relative
        return min(max(NOISES * noise, least), most)


FLOAT32 = Tolerance((2e-5, 5e-4), size=4e-6, relative=(5e-4, 5e-4))
HALF = Tolerance((0.15, 5.0), size=0.01, relative=(0.05, 0.5))


def coarsest_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The least precise of some floating point dtypes."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def dtype_of(model: PackedModel) -> torch.dtype:
    """The dtype in which a model computes: that of autocast, or the least precise one of its weights."""
    if model.autocast_dtype is not None:
        return model.autocast_dtype
    return coarsest_dtype(parameter.dtype for parameter in model.module.parameters() if parameter.is_floating_point())


def tolerance_of(model: PackedModel) -> Tolerance:
    """The tolerance for the dtype in which a model computes."""
    return HALF if dtype_of(model) in (torch.bfloat16, torch.float16) else FLOAT32
