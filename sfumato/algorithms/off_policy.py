"""Off-policy corrections: samples of an older policy (behaviour) train the newest one (proximal, then new).

From log-ratios of the proximal policy to the behaviour policy to a weight of each row's loss (metrics of the distance
between the two policies: ``mismatch.py``). Log-ratios are log proximal - log behaviour, as the objective that clips
ratios defines them.

Shapes: R rows, each a decision: a (sample, trained step) pair of a trajectory, or a token of an answer; ... latent
dimensions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import torch

from sfumato.algorithms.dynamics import GaussianStep
from sfumato.algorithms.mismatch import Correction, Mismatch
from sfumato.algorithms.objectives import RatioObjective, SampledSteps
from sfumato.algorithms.sequences import Sequences
from sfumato.algorithms.token_kl import estimate

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32, Float64, Int64
    from torch import Tensor

Level = Literal["step", "trajectory", "trajectory_mean", "token", "sequence", "sequence_mean"]
"""Over which rows a ratio is formed: ``step``, each row by itself; ``trajectory``, the product over all rows of its
trajectory; ``trajectory_mean``, their geometric mean. For text, whose rows are tokens, ``token``, ``sequence`` and
``sequence_mean`` mean the same."""


class AtLevel(Protocol):
    """A function from a level to the log-ratios of the rows that are corrected."""

    def __call__(self, level: Level, of: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Log-ratios, float64 ``[R]``, at a level; with ``of`` the sum or mean of that function of each row's."""
        ...


class OffPolicy:
    """Base of every correction."""

    type: ClassVar[str]
    uses_proximal: ClassVar[bool]
    """Whether the objective's ratio is taken to the proximal policy, and its loss weighted; else to the behaviour
    policy."""

    def correct(
        self,
        log_ratio: Float[Tensor, "rows"],
        sample_of_row: Int64[Tensor, "rows"] | Sequences,
        mask: Bool[Tensor, "rows"] | None = None,
    ) -> Correction:
        """Weights of R rows.

        Args:
            log_ratio: ``[R]``, exactly 0 where both policies are the same. NaN stays NaN, so that the loss shows it.
            sample_of_row: int64 ``[R]``, any numbers, equal for the rows of one trajectory. All rows of a trajectory
                must be given, except for level ``step``. Where ranks share trajectories it is ``Sequences``, which
                sums over these ranks.
            mask: bool ``[R]``: rows that count; the others have a log-ratio of 0 and do not contribute to that of
                their trajectory. None is all.
        """
        return self._correct(
            lambda level, of=None: log_ratio_of(log_ratio if of is None else of(log_ratio), sample_of_row, level, mask)
        )

    def _correct(self, at: AtLevel) -> Correction:
        """The correction, from log-ratios ``[R]`` at any level as ``log_ratio_of`` computes them."""
        raise NotImplementedError


@dataclass(frozen=True)
class NoCorrection(OffPolicy):
    """The ratio is taken to the policy that made the sample, and the clip range bounds the distance to that one."""

    type: ClassVar[str] = "none"
    uses_proximal: ClassVar[bool] = False

    def _correct(self, at: AtLevel) -> Correction:
        log_weights = at("step")
        none_of_rows = torch.zeros_like(log_weights, dtype=torch.bool)
        return Correction(torch.ones_like(log_weights, dtype=torch.float32), log_weights, none_of_rows, none_of_rows)


@dataclass(frozen=True)
class Decoupled(OffPolicy):
    """Decoupled PPO (arXiv 2110.00641, 2505.24298): min(proximal / behaviour, cap) times the loss of new / proximal.

    The clip bounds the distance to the policy at the start of the update, whichever policy sampled. Truncated
    importance weights, without gradients, account for the policy that sampled.
    """

    type: ClassVar[str] = "decoupled"
    uses_proximal: ClassVar[bool] = True

    level: Level = "step"
    """Ratio of each step, of a whole trajectory (the product over its steps), or their geometric mean over it. Of text
    the words are token, sequence and sequence_mean."""
    cap: float | None = 2.0
    """Largest weight; null truncates none."""
    floor: float = 0.0
    """Smallest weight: 0.5 in OpenRLHF; 0 raises none."""

    def __post_init__(self) -> None:
        _check_cap(self.cap)
        if not 0 <= self.floor <= 1:
            raise ValueError(
                f"floor {self.floor} must lie between 0 and 1, the weight of a sample that the policy itself has made"
            )

    def _correct(self, at: AtLevel) -> Correction:
        log_weights = at(self.level)
        weights, truncated = _truncate(log_weights, self.cap, self.floor)
        return Correction(weights, log_weights, truncated, torch.zeros_like(truncated))


@dataclass(frozen=True)
class Rejection(OffPolicy):
    """As ``decoupled``, but rows whose proximal / behaviour lies outside of bounds get the weight 0."""

    type: ClassVar[str] = "rejection"
    uses_proximal: ClassVar[bool] = True

    level: Level = "step"
    """The ratio that is bounded: of each step, of a whole trajectory, or the geometric mean over it. The last two leave
    out whole trajectories."""
    min_ratio: float = 0.5
    """Rows below are left out."""
    max_ratio: float = 2.0
    """Rows above are left out."""
    weight_level: Level | None = "step"
    """Level of the weights of the rows that are not left out; null weights them by 1."""
    cap: float | None = 2.0
    """Largest weight; null truncates none."""

    def __post_init__(self) -> None:
        _check_cap(self.cap)
        if not 0 <= self.min_ratio <= 1 <= self.max_ratio:
            raise ValueError(
                f"min_ratio {self.min_ratio} and max_ratio {self.max_ratio} must lie on either side of 1, the ratio of "
                "a sample that the policy itself has made"
            )

    def _correct(self, at: AtLevel) -> Correction:
        bounded = at(self.level)
        lowest = math.log(self.min_ratio) if self.min_ratio > 0 else -math.inf
        rejected = (bounded < lowest) | (bounded > math.log(self.max_ratio))  # false for NaN, which then stays visible
        return _reject_rows(rejected, bounded, None if self.weight_level is None else at(self.weight_level), self.cap)


@dataclass(frozen=True)
class KLRejection(OffPolicy):
    """As ``rejection``, but by an estimate of KL(behaviour, proximal), in which no signs cancel: k2 and k3 are >= 0.

    From log-ratios l of rows: k2 is l^2 / 2, k3 is exp(l) - 1 - l.
    """

    type: ClassVar[str] = "kl_rejection"
    uses_proximal: ClassVar[bool] = True

    level: Level = "sequence_mean"
    """The estimate that is bounded: of each row, or the sum or the mean over its sequence."""
    estimator: Literal["k2", "k3"] = "k3"
    """How it is estimated."""
    max_kl: float = 0.05
    """Rows above are left out."""
    weight_level: Level | None = "step"
    """Level of the weights of the rows that are not left out; null weights them by 1."""
    cap: float | None = 2.0
    """Largest weight; null truncates none."""

    def __post_init__(self) -> None:
        _check_cap(self.cap)
        if not self.max_kl > 0:
            raise ValueError(f"max_kl {self.max_kl} must be above 0")

    def _correct(self, at: AtLevel) -> Correction:
        # KL(behaviour, proximal) of rows that the behaviour policy drew
        kl = at(self.level, lambda log_ratio: estimate(-log_ratio.double(), self.estimator))
        return _reject_rows(
            kl > self.max_kl, kl, None if self.weight_level is None else at(self.weight_level), self.cap
        )


def log_ratio_of(
    log_ratio: Float[Tensor, "rows"],
    sample_of_row: Int64[Tensor, "rows"] | Sequences,
    level: Level,
    mask: Bool[Tensor, "rows"] | None = None,
) -> Float64[Tensor, "rows"]:
    """Log-ratios at a level: of each step, or of its trajectory as the sum or the mean over all steps of it.

    Args:
        log_ratio: ``[R]``.
        sample_of_row: int64 ``[R]``, or ``Sequences`` where ranks share trajectories.
        level: which.
        mask: bool ``[R]``: rows that count; None is all.

    Returns:
        float64 ``[R]``, without gradients; rows of a trajectory have the same, unless the level is ``step``.

    Raises:
        ValueError: when the shapes differ.
    """
    of_row = sample_of_row.of_row if isinstance(sample_of_row, Sequences) else sample_of_row
    if log_ratio.ndim != 1 or log_ratio.shape != of_row.shape:
        shapes = f"{tuple(log_ratio.shape)} and {tuple(of_row.shape)}"
        raise ValueError(f"log_ratio and sample_of_row must both be [R], and are {shapes}")
    values = log_ratio.detach().double()
    if mask is not None:
        values = torch.where(mask, values, 0.0)
    if level in ("step", "token"):
        return values
    sequences = sample_of_row if isinstance(sample_of_row, Sequences) else Sequences.named(of_row)
    is_mean = level in ("trajectory_mean", "sequence_mean")
    return sequences.spread(sequences.means(values, mask) if is_mean else sequences.sums(values, mask))


def _reject_rows(rejected: Tensor, bounded: Tensor, log_weights: Tensor | None, cap: float | None) -> Correction:
    """A correction that leaves out the rejected rows.

    Args:
        rejected: bool ``[R]``.
        bounded: float64 ``[R]``: the values that were compared with bounds; where they are NaN the weight is, too.
        log_weights: float64 ``[R]``; None weights by 1.
        cap: largest weight; None truncates none.
    """
    if log_weights is None:
        log_weights = torch.where(bounded.isnan(), bounded, torch.zeros_like(bounded))
    weights, truncated = _truncate(log_weights, cap)
    return Correction(weights.masked_fill(rejected, 0.0), log_weights, truncated & ~rejected, rejected)


def _truncate(log_weights: Tensor, cap: float | None, floor: float = 0.0) -> tuple[Tensor, Tensor]:
    """Weights, float32 ``[R]``, and whether each was cut to the cap or the floor, bool ``[R]``."""
    weights = log_weights.exp()
    highest = math.inf if cap is None else cap
    return weights.clamp(floor, highest).float(), (weights > highest) | (weights < floor)


def _check_cap(cap: float | None) -> None:
    if cap is not None and not cap >= 1:
        raise ValueError(f"cap {cap} must be at least 1, the weight of a sample that the policy itself has made")


def old_policy(
    objective: RatioObjective,
    off_policy: OffPolicy,
    behaviour: SampledSteps,
    proximal: GaussianStep | None,
    sample_of_row: Int64[Tensor, "rows"],
    mismatch: Mismatch | None = None,
) -> tuple[SampledSteps, Float32[Tensor, "rows"]]:
    """The old policy that an objective's ratio is taken to, and factors of its loss.

    Args:
        objective: defines the ratio.
        off_policy: the correction.
        behaviour: the R steps as they were sampled.
        proximal: the policy at the start of the update. None where it is the behaviour policy, or is not computed: the
            behaviour policy is then the old one, and nothing is measured.
        sample_of_row: int64 ``[R]``: equal for the rows of one sample, all of which must be given.
        mismatch: counts the rows; None counts none.

    Returns:
        The steps with the old policy's probabilities and means; and factors of the losses, float32 ``[R]`` without
        gradients, 0 for rows that are left out. The sum of losses is still divided by the number of all rows.
    """
    if proximal is None:
        return behaviour, torch.ones_like(behaviour.log_probs)
    log_ratio = objective.ratio(proximal, behaviour).log_ratio.detach()
    correction = off_policy.correct(log_ratio, sample_of_row)
    if mismatch is not None:
        kl = None if behaviour.means is None else proximal.kl(behaviour.means)
        mismatch.add(log_ratio, correction, behaviour.log_ratio(proximal), kl)
    return redrawn(behaviour, proximal) if off_policy.uses_proximal else behaviour, correction.weights


def redrawn(behaviour: SampledSteps, proximal: GaussianStep) -> SampledSteps:
    """The same latents as if the proximal policy had drawn them."""
    log_probs = proximal.log_prob(behaviour.next_latents).detach()
    return dataclasses.replace(behaviour, log_probs=log_probs, means=proximal.mean.detach())
