"""How far the policy that drew samples (behaviour) is from that at the start of an update (proximal).

Metrics that are always on, and the weights by which a correction (``off_policy.py``) makes up for the distance.

Shapes: R rows, each a decision: a (sample, trained step) pair of a trajectory, or a token of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sfumato.algorithms.reading import Numbers

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32, Float64
    from torch import Tensor


@dataclass(frozen=True)
class Correction:
    """Weights of R rows, and which of them were cut or left out."""

    weights: Float32[Tensor, "rows"]
    """float32 ``[R]``, without gradients: factors of the policy loss, 0 for rows that are left out. The loss is divided
    by the number of all rows, those left out included: divided by the number of the remaining rows the step would grow
    the fewer rows are trustworthy."""
    log_weights: Float64[Tensor, "rows"]
    """float64 ``[R]``: the logarithms before truncation and rejection, whose spread ``mismatch/ess`` measures."""
    truncated: Bool[Tensor, "rows"]
    """bool ``[R]``: whether the weight is the cap, or the floor, instead of the ratio."""
    rejected: Bool[Tensor, "rows"]
    """bool ``[R]``: left out."""


LARGEST = 300.0
"""Bound of absolute log-weights in the effective sample size, so that squares stay finite in float64."""


class Mismatch:
    """Accumulates statistics of a rank's log-ratios and weights: sums over rows, and the largest log-ratio."""

    def __init__(self) -> None:
        self.numbers = Numbers()
        """Sums, and largest log-ratios, as they are on the device."""

    @property
    def sums(self) -> dict[str, float]:
        """Sums that are to be added over ranks; empty without rows."""
        sums = self.numbers.sums()
        sums.pop("largest", None)
        return sums

    @property
    def largest(self) -> float:
        """This rank's largest absolute log-ratio; the caller takes the maximum over ranks."""
        return max([0.0, *(value for name, value in self.numbers.named() if name == "largest")])

    def add(
        self,
        log_ratio: Float[Tensor, "rows"],
        correction: Correction,
        log_prob_ratio: Float[Tensor, "rows"] | None = None,
        kl: Float[Tensor, "rows"] | None = None,
        mask: Bool[Tensor, "rows"] | None = None,
    ) -> None:
        """Counts R rows.

        Args:
            log_ratio: ``[R]``: proximal to behaviour, from which the correction was computed.
            correction: of these rows.
            log_prob_ratio: ``[R]``: difference of log-probabilities, where ``log_ratio`` is something else
                (objective guard).
            kl: ``[R]``: KL(behaviour, proximal) of each row, where it is known exactly.
            mask: bool ``[R]``: rows that count; None is all.
        """
        with torch.no_grad():
            rows = (log_ratio if log_prob_ratio is None else log_prob_ratio).double()
            weights = correction.log_weights.clamp(-LARGEST, LARGEST).exp().masked_fill(correction.rejected, 0.0)
            row_values = {
                "rows": torch.ones_like(rows),
                "k1": -rows,
                "k3": torch.expm1(rows) - rows,
                "w": weights,
                "w2": weights.square(),
                "weight": correction.weights.double(),
                "truncated": correction.truncated.double(),
                "rejected": correction.rejected.double(),
            }
            row_values |= {} if kl is None else {"kl": kl.double()}
            for name, values in row_values.items():
                self.numbers.add((values if mask is None else torch.where(mask, values, 0.0)).sum(), name)
            if len(log_ratio):
                sizes = log_ratio.abs()
                self.numbers.add((sizes if mask is None else torch.where(mask, sizes, 0.0)).max(), "largest")


def mismatch_metrics(sums: Mapping[str, float], largest: float) -> dict[str, float]:
    """Metrics of the rows of all ranks; none without rows.

    Args:
        sums: of ``Mismatch.sums`` over ranks.
        largest: the maximum of ``Mismatch.largest`` over ranks.

    Returns:
        ``mismatch/kl``, the exact KL(behaviour, proximal) where it was given; ``mismatch/kl_k1`` and
        ``mismatch/kl_k3``, estimates of KL(behaviour, proximal) as mean(-l) and
        mean(exp(l) - 1 - l) of log-ratios l; ``mismatch/log_ratio_max``, the largest absolute one; ``mismatch/ess``,
        (sum w)^2 / (R sum w^2) of weights before truncation; ``mismatch/weight``, the mean weight of the loss;
        ``mismatch/truncated`` and ``mismatch/rejected``, shares of rows. For samples that the proximal policy itself
        drew all are exactly 0, but ``ess`` and ``weight``, which are 1.
    """
    if not sums.get("rows"):
        return {}
    rows = sums["rows"]
    exact = {"mismatch/kl": sums["kl"] / rows} if "kl" in sums else {}
    return exact | {
        "mismatch/kl_k1": sums["k1"] / rows + 0.0,  # turns -0.0 into 0.0
        "mismatch/kl_k3": sums["k3"] / rows,
        "mismatch/log_ratio_max": largest,
        "mismatch/ess": sums["w"] ** 2 / (rows * sums["w2"]) if sums["w2"] else 0.0,
        "mismatch/weight": sums["weight"] / rows,
        "mismatch/truncated": sums["truncated"] / rows,
        "mismatch/rejected": sums["rejected"] / rows,
    }
