"""How an engine that fuses or quantises its weights is verified: by the log-probs that it gives to fixed tokens.

Engine and actor never agree exactly, since their kernels and precisions differ. How far they may be apart is measured
on the model itself: the actor scores the tokens once more with every layer's result off by up to half a unit in the
last place of the precision (``rounded``), which is what rounding does to this model, on these tokens, now.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sfumato.errors import WeightSyncError
from sfumato.runtime.roles import Future

if TYPE_CHECKING:
    from sfumato.runtime.weight_sync.sender import Sent

FACTOR = 3.0
"""What an engine may be away, in distances that rounding alone causes. SmolLM2-135M in vLLM is 0.8 to 1.9 away, with
two neighbouring layers swapped 7 (docs/text_rl/engines.md)."""

FLOOR = 1e-5
"""Nats below which a distance is not told from none: kernels of float32 differ by as much."""

MOVED = 0.01
"""Part of the distance that rounding causes, by which the actor's mean log-prob must have moved before an engine that
gives all tokens exactly the log-probs of before is said to have missed a version."""

MISSING = 0.25
"""Part of a change of log-probs that an engine may lack or have too much of, beside four standard errors of measuring
it. A single matrix of many that keeps its old weights, too little for the distance, shows here."""

QUANTILE = 0.95
"""Quantile of the distances of single tokens that is bounded beside their mean: a fault of some tokens alone, as of one
expert, raises it first. The maximum is not bounded, which rounding alone makes several times as large."""


@dataclass(frozen=True)
class Distance:
    """How far log-probs of single tokens are apart, in nats."""

    mean: float
    quantile: float
    largest: float

    @classmethod
    def measure(cls, log_probs: torch.Tensor, expected: torch.Tensor) -> Distance:
        """Of two tensors of one shape; what is not finite is infinitely far."""
        differences = (log_probs - expected).abs().nan_to_num(torch.inf).flatten().double()
        return cls(float(differences.mean()), float(differences.quantile(QUANTILE)), float(differences.max()))

    def is_within(self, rounding: Distance) -> bool:
        """Whether it is no more than ``FACTOR`` times what rounding causes."""
        mean, quantile = (FACTOR * max(value, FLOOR) for value in (rounding.mean, rounding.quantile))
        return self.mean <= mean and self.quantile <= quantile

    def __str__(self) -> str:
        percent = f"{QUANTILE:.0%}".rstrip("%")
        return f"{self.mean:.3g} in the mean, {self.quantile:.3g} at the {percent}th percentile"


@dataclass(frozen=True)
class RescoredTexts:
    """Log-probs that both sides gave to the fixed tokens by one version."""

    sent: Sent
    """The version, with the actor's log-probs ``[N, T - 1]``."""
    engines: Sequence[torch.Tensor]
    """float32 ``[N, T - 1]`` of the engine of each rank of the sampler."""

    def problem(self, tolerance: float | None, before: RescoredTexts | None, first: RescoredTexts | None) -> str:
        """What shows that an engine lacks the weights that were sent; empty if nothing does.

        Args:
            tolerance: see ``Rescoring``.
            before: of the version that was applied before, if one was.
            first: of the first version that was applied, if one was before.
        """
        expected = self.sent.log_probs
        assert expected is not None, "the actor has rescored the tokens, too"
        for rank, log_probs in enumerate(self.engines):
            where = f" (rank {rank} of the sampler)" if len(self.engines) > 1 else ""
            if log_probs.shape != expected.shape:
                return f"have shape {tuple(log_probs.shape)} instead of {tuple(expected.shape)}{where}"
            if problem := self._distance_problem(log_probs, expected, tolerance):
                return problem + where
            if before is not None and self._has_missed(log_probs, before.engines[rank], before.sent):
                return (
                    f"are exactly those of version {before.sent.version}, though the actor's have moved by "
                    f"{Distance.measure(expected, _log_probs(before.sent)).mean:.3g} in the mean{where}"
                )
            if first is not None and (problem := self._change_problem(log_probs, first.engines[rank], first.sent)):
                return problem + where
        return ""

    def _distance_problem(self, log_probs: torch.Tensor, expected: torch.Tensor, tolerance: float | None) -> str:
        distance = Distance.measure(log_probs, expected)
        differences = (log_probs - expected).abs().nan_to_num(torch.inf)
        sequence, token = divmod(int(differences.argmax()), differences.shape[1])
        example = (
            f"sequence {sequence}, token {token + 1}: {log_probs[sequence, token]:.6g} instead of "
            f"{expected[sequence, token]:.6g}"
        )
        if tolerance is not None:
            if distance.largest <= tolerance:
                return ""
            return f"differ by up to {distance.largest:.3g} nats, {tolerance:g} are allowed ({example})"
        assert self.sent.rounded is not None, "the actor has measured what rounding does"
        rounding = Distance.measure(self.sent.rounded, expected)
        if distance.is_within(rounding):
            return ""
        return (
            f"differ by {distance} nats, {FACTOR:g} times what rounding does to this model ({rounding}) is allowed; by "
            f"up to {distance.largest:.3g} ({example})"
        )

    def _has_missed(self, log_probs: torch.Tensor, log_probs_before: torch.Tensor, sent_before: Sent) -> bool:
        """Whether an engine gives what it gave before, though it was sent other weights: it did not take them.

        A distance does not show that while updates are smaller than rounding.
        """
        if self.sent.checksums == sent_before.checksums or not torch.equal(log_probs, log_probs_before):
            return False
        moved = Distance.measure(_log_probs(self.sent), _log_probs(sent_before)).mean
        return moved > MOVED * max(self._rounding_mean(), FLOOR)

    def _change_problem(self, log_probs: torch.Tensor, first_log_probs: torch.Tensor, first: Sent) -> str:
        """Whether the engine has moved as the actor has since the first version, once that is more than rounding."""
        if self.sent.rounded is None:
            return ""
        expected = _log_probs(self.sent).double()
        first_expected = _log_probs(first).double()
        change = expected - first_expected
        if change.abs().mean() <= max(self._rounding_mean(), FLOOR):
            return ""
        # least squares of (change of the engine) = share x (change of the actor) + rounding of two versions
        share = float(((log_probs.double() - first_log_probs) * change).sum() / change.square().sum())
        rounding = (self.sent.rounded - expected).square().mean().sqrt()
        standard_error = float(math.sqrt(2) * rounding / change.square().sum().sqrt())
        if abs(share - 1) <= MISSING + 4 * standard_error:
            return ""
        return (
            f"have moved by {share:.0%} (give or take {standard_error:.0%}) of what the actor's have since version "
            f"{first.version}, so that some weights are of another version, or rounding to the engine's dtype loses "
            "updates (rollout.engine.dtype)"
        )

    def _rounding_mean(self) -> float:
        return 0.0 if self.sent.rounded is None else Distance.measure(self.sent.rounded, _log_probs(self.sent)).mean


class Rescored:
    """The future of a version that is being applied; its ``result`` compares the log-probs of both sides."""

    def __init__(
        self,
        applying: Future,
        sent: Sent,
        tolerance: float | None,
        before: RescoredTexts | None = None,
        first: RescoredTexts | None = None,
    ) -> None:
        """
        Args:
            applying: gives the log-probs ``[N, T - 1]`` of each rank of the sampler.
            sent: the version.
            tolerance: see ``Rescoring``.
            before: of the version that was applied before, if one was.
            first: of the first version that was applied, if one was before.
        """
        self.applying = applying
        self.sent = sent
        self.tolerance = tolerance
        self.before = before
        self.first = first
        self.scores: RescoredTexts | None = None
        """Set when they have been compared, and agree."""

    def done(self) -> bool:
        """Whether it has been applied."""
        return self.applying.done()

    def result(self) -> None:
        """Raises WeightSyncError when the sampler gives the tokens other log-probs than the actor did."""
        scores = RescoredTexts(self.sent, self.applying.result())
        if problem := scores.problem(self.tolerance, self.before, self.first):
            raise WeightSyncError(
                f"version {self.sent.version}: the log-probs of fixed tokens in the sampler's engine and in the actor: "
                f"they {problem}: the engine does not have the weights that were sent. Look at how it fuses, casts or "
                "quantises them, whether both were built from one model, whether another run has sent it weights since "
                "it was started, and whether it keeps values of the weights before"
            )
        self.scores = scores


def _log_probs(sent: Sent) -> torch.Tensor:
    assert sent.log_probs is not None
    return sent.log_probs
