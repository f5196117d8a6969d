"""Policy objectives on tokens: from log-ratios of R tokens and their advantages to a loss per token.

``loss(log_ratio, advantages, mask, sequences) -> (losses [R], stats)``: the caller weights the losses by
``aggregation.row_weights``; ``stats`` are detached sums over rows for the log. Outside the mask losses are 0 without a
gradient, for any values there.

GRPO, Dr. GRPO, RLOO, REINFORCE++ and PPO differ in their advantages and share ``ppo_clip``. On-policy distillation has
an advantage too (``token_advantages.Distillation``).

Shapes: R rows, each a token that the policy drew; N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import torch

from sfumato.algorithms.objectives import check_clip_ranges, clipped_surrogate, ratio_sums
from sfumato.algorithms.row_losses import RowLosses, masked
from sfumato.algorithms.sequences import Sequences

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


class TokenObjective(Protocol):
    """A policy objective on tokens."""

    def loss(
        self,
        log_ratio: Float[Tensor, "rows"],
        advantages: Float[Tensor, "rows"],
        mask: Bool[Tensor, "rows"],
        sequences: Sequences,
    ) -> RowLosses:
        """The loss ``[R]`` (lower is better) and its statistics.

        Args:
            log_ratio: ``[R]``, with gradients: log p - log p_old, exactly 0 while both are one policy.
            advantages: ``[R]``.
            mask: bool ``[R]``: tokens that are learned from; the others have a loss of 0 and no part in the statistics.
            sequences: of the rows.
        """
        ...


@dataclass(frozen=True)
class _Clipped:
    """Fields of objectives that bound a ratio."""

    clip_range: float = 0.2
    """The ratio is clipped to [1 - clip_range, 1 + clip_range_high]."""
    clip_range_high: float | None = None
    """Upper clip range where it differs from the lower one, such as 0.28 (DAPO's clip-higher)."""
    log_ratio_clamp: float | None = 20.0
    """Largest absolute log-ratio, beyond which there is no gradient, so that exp stays finite; null clamps none."""

    def __post_init__(self) -> None:
        check_clip_ranges(self.clip_range, self.clip_range_high)
        _check_clamp(self.log_ratio_clamp)

    @property
    def _high(self) -> float:
        return self.clip_range if self.clip_range_high is None else self.clip_range_high


@dataclass(frozen=True)
class PPOClip(_Clipped):
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (PPO, arXiv 1707.06347, eq. 7), with dual clip if wanted."""

    type: ClassVar[str] = "ppo_clip"

    dual_clip: float | None = None
    """Where the advantage is below 0 the loss is at most this times ``abs(A)``, so that no ratio is too large (arXiv
    1912.09729); null has no such bound. verl takes 3."""
    max_drift: float | None = None
    """Leave out tokens with an advantage below 0 in sequences whose mean of log p_old - log p is above this
    (off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556); null leaves out none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_dual_clip(self.dual_clip)
        if self.max_drift is not None and not self.max_drift > 0:
            raise ValueError(f"max_drift {self.max_drift} must be above 0, or null")

    def loss(
        self,
        log_ratio: Float[Tensor, "rows"],
        advantages: Float[Tensor, "rows"],
        mask: Bool[Tensor, "rows"],
        sequences: Sequences,
    ) -> RowLosses:
        """As ``TokenObjective.loss``."""
        log_ratio = masked(log_ratio, mask)
        bounded = _clamp_log_ratio(log_ratio, self.log_ratio_clamp)
        losses, stats = _clip_surrogate(bounded, advantages, mask, self.clip_range, self._high, self.dual_clip)
        if self.max_drift is None:
            return losses, stats
        with torch.no_grad():
            drift = sequences.spread(sequences.means(-log_ratio, mask))
            left_out = mask & (advantages < 0) & (drift > self.max_drift)
            stats["ratio/drifted"] = left_out.float().sum()
        return masked(losses, ~left_out), stats


@dataclass(frozen=True)
class GSPO(_Clipped):
    """The clipped surrogate of each sequence's ratio, the geometric mean of its tokens' (GSPO, arXiv 2507.18071).

    Its aggregation is seq-mean-token-mean: every sequence counts alike.
    """

    type: ClassVar[str] = "gspo"

    clip_range: float = 3e-4
    """The sequence's ratio is clipped to [1 - clip_range, 1 + clip_range_high]."""
    clip_range_high: float | None = 4e-4
    """Upper clip range where it differs from the lower one; the paper takes 3e-4 and 4e-4."""
    log_ratio_clamp: float | None = 10.0
    """Largest absolute mean log-ratio of a sequence, beyond which there is no gradient; null clamps none."""
    gradient: Literal["token", "sequence"] = "token"
    """token: through each token's own log-probability with its own advantage (the paper's GSPO-token); sequence:
    through the mean of all tokens of the sequence. They agree where all tokens of a sequence have one advantage."""
    dual_clip: float | None = None
    """As of ppo_clip."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_dual_clip(self.dual_clip)

    def loss(
        self,
        log_ratio: Float[Tensor, "rows"],
        advantages: Float[Tensor, "rows"],
        mask: Bool[Tensor, "rows"],
        sequences: Sequences,
    ) -> RowLosses:
        """As ``TokenObjective.loss``."""
        log_ratio = sequence_log_ratio(log_ratio, mask, sequences, self.gradient)
        log_ratio = _clamp_log_ratio(log_ratio, self.log_ratio_clamp)
        return _clip_surrogate(log_ratio, advantages, mask, self.clip_range, self._high, self.dual_clip)


@dataclass(frozen=True)
class GMPO(_Clipped):
    """-A exp(mean of the tokens' clipped log-ratios): their geometric mean, clipped token by token (arXiv 2507.20673).

    A token's log-ratio is bounded on the side that its advantage asks for; the sequence's advantage is the mean of its
    tokens'. Its aggregation is seq-mean-token-mean.
    """

    type: ClassVar[str] = "gmpo"

    clip_range: float = 0.4
    """Log-ratios are held above -clip_range where the advantage is below 0."""
    clip_range_high: float | None = None
    """Log-ratios are held below it where the advantage is above 0; null: the same."""

    def loss(
        self,
        log_ratio: Float[Tensor, "rows"],
        advantages: Float[Tensor, "rows"],
        mask: Bool[Tensor, "rows"],
        sequences: Sequences,
    ) -> RowLosses:
        """As ``TokenObjective.loss``."""
        log_ratio = _clamp_log_ratio(masked(log_ratio, mask), self.log_ratio_clamp)
        bounded = log_ratio.clamp(-self.clip_range, self._high)
        sign = torch.sign(masked(advantages, mask))
        least = sign * torch.minimum(sign * log_ratio, sign * bounded)
        ratio = torch.exp(sequence_log_ratio(least, mask, sequences, "sequence"))
        mean_advantage = sequences.spread(sequences.means(advantages, mask))
        stats = ratio_sums(log_ratio, torch.exp(log_ratio), mask)
        stats["ratio/clipped"] = masked((least != log_ratio).float(), mask).sum().detach()
        return masked(-mean_advantage * ratio, mask), stats


@dataclass(frozen=True)
class CISPO:
    """-sg(clip(r)) A log p: the bounded ratio is a weight, and no token loses its gradient (arXiv 2506.13585).

    The value that is returned is -clip(r) A, with the gradient of the formula, for log p itself is not known here.
    """

    type: ClassVar[str] = "cispo"

    clip_range: float = 1.0
    """The ratio is held above 1 - clip_range; 1 sets no lower bound, as in the paper."""
    clip_range_high: float = 0.2
    """Upper bound of the ratio, read as ``bound`` says."""
    bound: Literal["one_plus", "absolute"] = "one_plus"
    """one_plus: the ratio is held below 1 + clip_range_high (verl, slime, AReaL); absolute: below clip_range_high
    itself (TRL), which is then to be at least 1."""
    log_ratio_clamp: float | None = 20.0
    """Largest absolute log-ratio, so that exp stays finite; null clamps none. Tokens beyond keep their gradient."""

    def __post_init__(self) -> None:
        check_clip_ranges(self.clip_range, self.clip_range_high)
        _check_clamp(self.log_ratio_clamp)
        if self.bound == "absolute" and self.clip_range_high < 1:
            raise ValueError(
                f"clip_range_high {self.clip_range_high} is the bound itself with bound absolute and must be at least "
                "1, the ratio of a token that the policy itself has drawn; or set bound to one_plus"
            )

    def loss(
        self,
        log_ratio: Float[Tensor, "rows"],
        advantages: Float[Tensor, "rows"],
        mask: Bool[Tensor, "rows"],
        sequences: Sequences,
    ) -> RowLosses:
        """As ``TokenObjective.loss``."""
        del sequences
        log_ratio = masked(log_ratio, mask)
        high = self.clip_range_high + (1 if self.bound == "one_plus" else 0)
        with torch.no_grad():
            ratio = torch.exp(_clamp_log_ratio(log_ratio, self.log_ratio_clamp))
            weights = ratio.clamp(1 - self.clip_range, high)
            stats = ratio_sums(log_ratio, ratio, mask)
            stats["ratio/clipped_high"] = masked((ratio > high).float(), mask).sum()
            stats["ratio/clipped_low"] = masked((ratio < 1 - self.clip_range).float(), mask).sum()
        return masked(-advantages * weights * _score(log_ratio), mask), stats


@dataclass(frozen=True)
class SAPO:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft gate in the place of the clip (SAPO, arXiv 2511.20347).

    Its slope is 1 at r = 1 and falls off on both sides, the faster the larger tau.
    """

    type: ClassVar[str] = "sapo"

    tau_pos: float = 1.0
    """Tau of tokens whose advantage is above 0."""
    tau_neg: float = 1.05
    """Tau of the others, larger since their gradients are less stable."""
    level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or of its sequence: the geometric mean, with the gradient of GSPO's sequence."""
    log_ratio_clamp: float | None = 20.0
    """Largest absolute log-ratio, beyond which there is no gradient, so that exp stays finite; null clamps none."""

    def __post_init__(self) -> None:
        if not (self.tau_pos > 0 and self.tau_neg > 0):
            raise ValueError("tau_pos and tau_neg must be above 0")
        _check_clamp(self.log_ratio_clamp)

    def loss(
        self,
        log_ratio: Float[Tensor, "rows"],
        advantages: Float[Tensor, "rows"],
        mask: Bool[Tensor, "rows"],
        sequences: Sequences,
    ) -> RowLosses:
        """As ``TokenObjective.loss``."""
        log_ratio = masked(log_ratio, mask)
        if self.level == "sequence":
            log_ratio = sequence_log_ratio(log_ratio, mask, sequences, "sequence")
        log_ratio = _clamp_log_ratio(log_ratio, self.log_ratio_clamp)
        ratio = torch.exp(log_ratio)
        tau = torch.full_like(ratio, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
        return masked(-advantages * gate, mask), ratio_sums(log_ratio, ratio, mask)


@dataclass(frozen=True)
class PolicyGradient:
    """-A log p, without a ratio (REINFORCE, Williams 1992): only correct for samples of the newest policy.

    The value that is returned is -A, with the gradient of the formula, for log p itself is not known here.
    """

    type: ClassVar[str] = "policy_gradient"

    def loss(
        self,
        log_ratio: Float[Tensor, "rows"],
        advantages: Float[Tensor, "rows"],
        mask: Bool[Tensor, "rows"],
        sequences: Sequences,
    ) -> RowLosses:
        """As ``TokenObjective.loss``."""
        del sequences
        log_ratio = masked(log_ratio, mask)
        with torch.no_grad():
            stats = ratio_sums(log_ratio, torch.exp(log_ratio), mask)
        return masked(-advantages * _score(log_ratio), mask), stats


def sequence_log_ratio(
    log_ratio: Float[Tensor, "rows"],
    mask: Bool[Tensor, "rows"],
    sequences: Sequences,
    gradient: Literal["token", "sequence"],
) -> Float[Tensor, "rows"]:
    """The mean log-ratio of each row's sequence, ``[R]``, as GSPO has it; 0 outside the mask.

    Args:
        log_ratio: ``[R]``.
        mask: bool ``[R]``.
        sequences: of the rows.
        gradient: as of ``GSPO``: of each row's own log-ratio, straight through, or of the mean.
    """
    log_ratio = masked(log_ratio, mask)
    if gradient == "sequence":
        return masked(sequences.spread(sequences.means(log_ratio, mask)), mask)
    with torch.no_grad():
        means = sequences.spread(sequences.means(log_ratio, mask))
    return masked(means + (log_ratio - log_ratio.detach()), mask)


def _clip_surrogate(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float, dual_clip: float | None
) -> RowLosses:
    """``clipped_surrogate``, with losses bounded by ``dual_clip * abs(A)`` where the advantage is below 0.

    The statistics also count the rows that the clip leaves without a gradient, and those at the bound.
    """
    losses, stats = clipped_surrogate(log_ratio, advantages, low, high, mask)
    with torch.no_grad():
        ratio = torch.exp(log_ratio)
        is_clipped = ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
        stats["ratio/clipped"] = masked(is_clipped.float(), mask).sum()
    if dual_clip is None:
        return losses, stats
    bound = -advantages * dual_clip
    with torch.no_grad():
        is_bound = mask & (advantages < 0) & (losses > bound)
        stats["ratio/dual_clipped"] = is_bound.float().sum()
    return torch.where(is_bound, bound, losses), stats


def _score(log_ratio: Tensor) -> Tensor:
    """Exactly 1, with the gradient of the log-probability: the score function, as a factor of a loss."""
    return 1 + (log_ratio - log_ratio.detach())


def _clamp_log_ratio(log_ratio: Tensor, largest: float | None) -> Tensor:
    return log_ratio if largest is None else log_ratio.clamp(-largest, largest)


def _check_clamp(largest: float | None) -> None:
    if largest is not None and not largest > 0:
        raise ValueError(f"log_ratio_clamp {largest} must be above 0, or null")


def _check_dual_clip(dual_clip: float | None) -> None:
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip {dual_clip} must be above 1, or null")
