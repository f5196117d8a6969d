"""From the advantages or rewards of samples to advantages of their tokens.

The classes of this file take a step's sample advantages from ``algorithms.advantages`` (with ``type: raw`` the rewards
themselves) and compute an advantage for every token:

=========== =========== ================================================================
of tokens   of samples  together
=========== =========== ================================================================
``sample``  ``group``   GRPO, Dr. GRPO
``sample``  ``rloo``    RLOO
``sample``  ``group``   REINFORCE++-baseline, with ``std: none`` and ``whiten`` true
``returns`` ``raw``     REINFORCE++
``gae``     ``raw``     PPO with a critic
=========== =========== ================================================================

All rows of a sequence are on one rank, next to each other and in order. Rows outside the mask (prompts, answers of
tools) are skipped, as if the sequence did not have them, and get an advantage of 0.

Shapes: R rows, each a token; N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from sfumato.algorithms.row_losses import masked
from sfumato.algorithms.sequences import Reduce, Sequences, sum_of_one_rank

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@dataclass(frozen=True)
class TokenAdvantages:
    """The result of ``compute``, in the dtype of its arguments."""

    values: Float[Tensor, "rows"]
    """``[R]``; 0 outside the mask."""
    returns: Float[Tensor, "rows"]
    """``[R]``: targets of a critic, from advantages before whitening; 0 outside the mask."""


@dataclass(frozen=True)
class TokenAdvantage:
    """Base of token advantages.

    A subclass declares ``type``, ``takes_rewards`` and ``needs_values``, and implements ``_token_advantages``.
    """

    takes_rewards: ClassVar[bool]
    """Whether it takes rewards (``advantage.type: raw``) and penalties of tokens; else advantages of samples, from
    whose rewards penalties are taken before."""
    needs_values: ClassVar[bool] = False
    """Needs a critic's values."""

    whiten: bool = True
    """Standardise over all tokens of the step."""
    whiten_ddof: Literal[0, 1] = 1
    """Divisor N - ddof of the variance: 1 as in verl and slime, 0 as in OpenRLHF."""

    def compute(
        self,
        of_samples: Float[Tensor, "sequences"],
        sequences: Sequences,
        mask: Bool[Tensor, "rows"],
        penalties: Float[Tensor, "rows"] | None = None,
        values: Float[Tensor, "rows"] | None = None,
        reduce: Reduce = sum_of_one_rank,
    ) -> TokenAdvantages:
        """Advantages of the tokens of a step.

        Args:
            of_samples: ``[N]``: the advantage or the reward of each sequence's sample.
            sequences: of the rows.
            mask: bool ``[R]``: tokens that the policy drew and that are learned from.
            penalties: ``[R]``: taken from each token's reward, such as ``coef`` times an estimate of the KL.
            values: ``[R]`` of a critic.
            reduce: sums a tensor over the ranks that have the other sequences of the step, for whitening; ranks
                without sequences compute, too.

        Raises:
            ValueError: when values are missing, penalties come too late, rows are out of order, or shapes differ.
        """
        if penalties is not None and not self.takes_rewards:
            raise ValueError("penalties belong into the samples' rewards before their advantages: see penalised")
        if values is None and self.needs_values:
            raise ValueError("a critic's values are needed for these advantages")
        if self.takes_rewards:
            token_terms = token_rewards(of_samples, sequences, mask, penalties)
        else:
            token_terms = masked(sequences.spread(of_samples), mask)
        advantages = self._token_advantages(token_terms, sequences, mask, values)
        returns = advantages if values is None else masked(advantages + values.detach(), mask)
        return TokenAdvantages(
            whitened(advantages, mask, reduce, self.whiten_ddof) if self.whiten else advantages, returns
        )

    def _token_advantages(
        self, token_terms: Tensor, sequences: Sequences, mask: Tensor, values: Tensor | None
    ) -> Tensor:
        """Advantages ``[R]`` before whitening, from each token's reward or its sample's advantage, ``[R]``."""
        raise NotImplementedError


@dataclass(frozen=True)
class SampleAdvantage(TokenAdvantage):
    """Each token has its sample's advantage; whitened with group baselines it is REINFORCE++-baseline."""

    type: ClassVar[str] = "sample"
    takes_rewards: ClassVar[bool] = False

    whiten: bool = False
    """Standardise over all tokens of the step."""

    def _token_advantages(
        self, token_terms: Tensor, sequences: Sequences, mask: Tensor, values: Tensor | None
    ) -> Tensor:
        return token_terms


@dataclass(frozen=True)
class Returns(TokenAdvantage):
    """The discounted sum of the rewards from a token on, whitened over the step: REINFORCE++ (arXiv 2501.03262)."""

    type: ClassVar[str] = "returns"
    takes_rewards: ClassVar[bool] = True

    gamma: float = 1.0
    """Discount of each token's reward for the one before."""

    def __post_init__(self) -> None:
        _check_share("gamma", self.gamma)

    def _token_advantages(
        self, token_terms: Tensor, sequences: Sequences, mask: Tensor, values: Tensor | None
    ) -> Tensor:
        return discounted_returns(token_terms, sequences, mask, self.gamma)


@dataclass(frozen=True)
class GAE(TokenAdvantage):
    """Generalised advantage estimation from a critic's values (arXiv 1506.02438, eq. 16), whitened over the step."""

    type: ClassVar[str] = "gae"
    takes_rewards: ClassVar[bool] = True
    needs_values: ClassVar[bool] = True

    gamma: float = 1.0
    """Discount of each token's reward, and of the value after it."""
    lam: float = 1.0
    """Lambda: 1 compares whole returns with the value, 0 single steps; 0.95 in ROLL."""

    def __post_init__(self) -> None:
        _check_share("gamma", self.gamma)
        _check_share("lam", self.lam)

    def _token_advantages(
        self, token_terms: Tensor, sequences: Sequences, mask: Tensor, values: Tensor | None
    ) -> Tensor:
        assert values is not None  # needs_values: ``compute`` refuses to run without
        return gae(token_terms, values, sequences, mask, self.gamma, self.lam)


@dataclass(frozen=True)
class Distillation(TokenAdvantage):
    """log p_teacher - log p of each token: rewards are logged, but not learned from.

    The penalty is ``coef`` times the k1 estimate of the KL to the teacher. With ``policy_gradient`` or ``ppo_clip`` the
    expected gradient is that of KL(student, teacher) of each token.
    """

    type: ClassVar[str] = "distillation"
    takes_rewards: ClassVar[bool] = True

    whiten: bool = False
    """Standardise over all tokens of the step."""

    def compute(
        self,
        of_samples: Float[Tensor, "sequences"],
        sequences: Sequences,
        mask: Bool[Tensor, "rows"],
        penalties: Float[Tensor, "rows"] | None = None,
        values: Float[Tensor, "rows"] | None = None,
        reduce: Reduce = sum_of_one_rank,
    ) -> TokenAdvantages:
        """As ``TokenAdvantage.compute``. Raises ValueError without penalties."""
        if penalties is None:
            raise ValueError("distillation needs what a teacher says of each token: algorithm.kl with where: reward")
        return super().compute(torch.zeros_like(of_samples), sequences, mask, penalties, values, reduce)

    def _token_advantages(
        self, token_terms: Tensor, sequences: Sequences, mask: Tensor, values: Tensor | None
    ) -> Tensor:
        return token_terms


def token_rewards(
    rewards: Float[Tensor, "sequences"],
    sequences: Sequences,
    mask: Bool[Tensor, "rows"],
    penalties: Float[Tensor, "rows"] | None = None,
) -> Float[Tensor, "rows"]:
    """-penalty at each masked-in row, plus the reward at the last one of each sequence.

    Args:
        rewards: ``[N]``; the reward of a sequence without masked-in rows is dropped.
        sequences: of the rows.
        mask: bool ``[R]``.
        penalties: ``[R]``; None is 0.

    Returns:
        ``[R]``; 0 outside the mask.
    """
    per_token = torch.zeros(len(mask), dtype=rewards.dtype, device=mask.device)
    if penalties is not None:
        per_token = per_token - masked(penalties, mask).to(per_token)
    rows, is_last = _select_rows(sequences, mask)
    ends = rows[is_last]
    return per_token.index_put((ends,), rewards[sequences.of_row.to(mask.device)[ends]], accumulate=True)


def subtract_token_penalties(
    rewards: Float[Tensor, "sequences"],
    penalties: Float[Tensor, "rows"],
    sequences: Sequences,
    mask: Bool[Tensor, "rows"],
) -> Float[Tensor, "sequences"]:
    """Rewards minus the sum of their tokens' penalties, ``[N]``: a KL in the reward of group baselines (verl, TRL).

    Args:
        rewards: ``[N]``.
        penalties: ``[R]``.
        sequences: of the rows.
        mask: bool ``[R]``.
    """
    return rewards - sequences.sums(penalties.detach(), mask).to(rewards)


def discounted_returns(
    rewards: Float[Tensor, "rows"], sequences: Sequences, mask: Bool[Tensor, "rows"], gamma: float
) -> Float[Tensor, "rows"]:
    """G_t = r_t + gamma G_t+1 over the masked-in rows of each sequence, ``[R]``; 0 elsewhere.

    Args:
        rewards: ``[R]``; values outside the mask are ignored.
        sequences: of the rows.
        mask: bool ``[R]``.
        gamma: discount.
    """
    rows, is_last = _select_rows(sequences, mask)
    returns = _scan_backwards(rewards[rows], is_last, gamma)
    return torch.zeros_like(rewards).index_put((rows,), returns)


def gae(
    rewards: Float[Tensor, "rows"],
    values: Float[Tensor, "rows"],
    sequences: Sequences,
    mask: Bool[Tensor, "rows"],
    gamma: float,
    lam: float,
) -> Float[Tensor, "rows"]:
    """A_t = d_t + gamma lambda A_t+1 with d_t = r_t + gamma V_t+1 - V_t over the masked-in rows of each sequence.

    After the last one V is 0.

    Args:
        rewards: ``[R]``; values outside the mask are ignored.
        values: ``[R]``.
        sequences: of the rows.
        mask: bool ``[R]``.
        gamma: discount.
        lam: lambda.

    Returns:
        ``[R]``, without gradients; 0 outside the mask.
    """
    rows, is_last = _select_rows(sequences, mask)
    row_values = values.detach()[rows]
    next_values = torch.cat([row_values[1:], row_values[:1]]).masked_fill(is_last, 0.0)
    advantages = _scan_backwards(rewards[rows] + gamma * next_values - row_values, is_last, gamma * lam)
    return torch.zeros_like(rewards).index_put((rows,), advantages.to(rewards.dtype))


def whitened(
    values: Float[Tensor, "rows"],
    mask: Bool[Tensor, "rows"],
    reduce: Reduce = sum_of_one_rank,
    ddof: int = 1,
    eps: float = 1e-8,
    shift_mean: bool = True,
) -> Float[Tensor, "rows"]:
    """(value - mean) / sqrt(variance + eps) over the masked-in rows of all ranks.

    Args:
        values: ``[R]``.
        mask: bool ``[R]``.
        reduce: sums a tensor over ranks; it is called twice on every rank, also on those without rows.
        ddof: divisor N - ddof of the variance.
        eps: added to the variance.
        shift_mean: false adds the mean again.

    Returns:
        ``[R]``, 0 outside the mask; not divided where there are at most ``ddof`` rows, which have no variance.
    """
    wide = masked(values.double(), mask)
    count, total = reduce(torch.stack([mask.sum().double(), wide.sum()]))
    mean = total / count.clamp(min=1)
    centred = masked(wide - mean, mask)
    (squares,) = reduce(centred.square().sum().reshape(1))
    variance = squares / (count - ddof).clamp(min=1)
    scaled = torch.where(count > ddof, centred * torch.rsqrt(variance + eps), centred)
    return masked(scaled if shift_mean else scaled + mean, mask).to(values.dtype)


def _select_rows(sequences: Sequences, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the masked-in rows, int64 ``[K]``, and whether each is the last of its sequence, bool ``[K]``.

    Raises:
        ValueError: when the shapes differ, or rows of a sequence are not next to each other.
    """
    of_row = sequences.of_row.to(mask.device)
    if mask.shape != of_row.shape:
        raise ValueError(f"mask {tuple(mask.shape)} and the rows of sequences {tuple(of_row.shape)} must both be [R]")
    rows = mask.nonzero().flatten()
    sequence_ids = of_row[rows]
    is_last = torch.ones_like(sequence_ids, dtype=torch.bool)
    is_last[:-1] = sequence_ids[1:] != sequence_ids[:-1]
    if int(is_last.sum()) != len(torch.unique(sequence_ids)):
        raise ValueError("rows of a sequence must stand next to each other, in the order in which they were drawn")
    return rows, is_last


def _scan_backwards(terms: Tensor, is_last: Tensor, factor: float) -> Tensor:
    """y_t = x_t + factor y_t+1 within each run of rows that ends where ``is_last`` is true; ``[K]``.

    A parallel scan in float64: log2 K rounds over all rows instead of a loop over tokens.
    """
    # After each round ``sums`` holds the discounted sums over the next ``distance`` rows, and ``carry`` the factor
    # (0 beyond the end of a sequence) of the rows behind these.
    sums = terms.detach().double()
    carry = torch.full_like(sums, factor).masked_fill(is_last, 0.0)
    distance = 1
    while distance < len(sums) and bool(carry.any()):
        later_sums, later_carry = torch.zeros_like(sums), torch.zeros_like(carry)
        later_sums[:-distance], later_carry[:-distance] = sums[distance:], carry[distance:]
        sums = sums + carry * later_sums
        carry = carry * later_carry
        distance *= 2
    return sums.to(terms.dtype)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} {value} must lie between 0 and 1")
