"""How far the policy has moved away from the one that made its samples: metrics that are always on.

They need sums over all rows of all ranks, and one maximum, before they are anything: ``Mismatch`` collects a rank's,
``mismatch_metrics`` makes the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sfumato.algorithms.off_policy.corrections import Correction

LARGEST = 300.0
"""Log-weights beyond are taken as this in the effective sample size, so that squares stay finite in float64."""


class Mismatch:
    """Sums over a rank's rows, and the largest log-ratio."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        """To be added over ranks; empty without rows."""
        self.largest = 0.0
        """Of which the maximum over ranks is to be taken."""

    def add(
        self,
        log_ratio: torch.Tensor,
        correction: Correction,
        log_prob_ratio: torch.Tensor | None = None,
        kl: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Counts R rows.

        Args:
            log_ratio: ``[R]``: proximal to behaviour, as it was corrected by.
            correction: what became of it.
            log_prob_ratio: ``[R]``: difference of log-probabilities, where ``log_ratio`` is something else
                (objective guard).
            kl: ``[R]``: KL(behaviour, proximal) of each row, where it is known exactly.
            mask: bool ``[R]``: rows that count; None is all.
        """
        if mask is not None:
            log_ratio, correction = log_ratio[mask], correction.rows(mask)
            log_prob_ratio, kl = (None if each is None else each[mask] for each in (log_prob_ratio, kl))
        with torch.no_grad():
            rows = (log_ratio if log_prob_ratio is None else log_prob_ratio).double()
            weights = correction.log_weights.clamp(-LARGEST, LARGEST).exp().masked_fill(correction.rejected, 0.0)
            found = torch.stack(
                [
                    torch.ones_like(rows).sum(),
                    -rows.sum(),
                    (torch.expm1(rows) - rows).sum(),
                    weights.sum(),
                    weights.square().sum(),
                    correction.weights.double().sum(),
                    correction.truncated.double().sum(),
                    correction.rejected.double().sum(),
                ]
            ).tolist()
            if kl is not None:
                self.sums["kl"] = self.sums.get("kl", 0.0) + float(kl.double().sum())
            names = ("rows", "k1", "k3", "w", "w2", "weight", "truncated", "rejected")
            for name, value in zip(names, found, strict=True):
                self.sums[name] = self.sums.get(name, 0.0) + value
            if len(log_ratio):
                self.largest = max(self.largest, float(log_ratio.abs().max()))


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
        ``mismatch/truncated`` and ``mismatch/rejected``, shares of rows. Of samples that the proximal policy itself
        made they are exactly 0, and ``ess`` and ``weight`` 1.
    """
    if not sums.get("rows"):
        return {}
    rows = sums["rows"]
    exact = {"mismatch/kl": sums["kl"] / rows} if "kl" in sums else {}
    return exact | {
        "mismatch/kl_k1": sums["k1"] / rows + 0.0,  # no minus before a zero
        "mismatch/kl_k3": sums["k3"] / rows,
        "mismatch/log_ratio_max": largest,
        "mismatch/ess": sums["w"] ** 2 / (rows * sums["w2"]) if sums["w2"] else 0.0,
        "mismatch/weight": sums["weight"] / rows,
        "mismatch/truncated": sums["truncated"] / rows,
        "mismatch/rejected": sums["rejected"] / rows,
    }
