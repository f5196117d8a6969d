"""KL penalties on tokens, estimated from the log-probabilities of the tokens that were drawn.

Shapes: R rows, each a token that the policy drew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Estimator = Literal["k1", "abs", "k2", "k3"]
"""Of KL(policy, reference), from l = log p - log p_reference: ``l, abs(l), l^2 / 2, exp(-l) - 1 + l``, which is never
below 0 (Schulman, "Approximating KL divergence", 2020)."""


@dataclass(frozen=True)
class TokenKL:
    """Penalty that keeps a policy near its reference, token by token."""

    type: ClassVar[str] = "token"

    coef: float = 0.0
    """Factor of the penalty; 0 computes no reference."""
    estimator: Estimator = "k3"
    """From l = log p - log p_reference: k1 is ``l``, abs ``abs(l)``, k2 ``l^2 / 2``, k3 ``exp(-l) - 1 + l``."""
    where: Literal["loss", "reward"] = "loss"
    """loss adds the penalty, with its gradient, to a token's loss; reward takes it from the reward, without one."""
    gradient: Literal["estimator", "k2"] = "estimator"
    """Gradient of the penalty in the loss: the estimator's own, or k2's, whose expectation is the gradient of
    KL(policy, reference) where the policy drew the token. k1's own gradient does not depend on the reference."""
    importance_weighted: bool = False
    """Multiply by p / p_old of the policy that drew the token, gradient included (DeepSeek-V3.2's unbiased form)."""
    log_ratio_clamp: float | None = None
    """Largest absolute l, beyond which there is no gradient; null clamps none."""
    clamp: float | None = None
    """Largest absolute value of the estimate, beyond which there is no gradient; null clamps none."""

    def __post_init__(self) -> None:
        if not self.coef >= 0:
            raise ValueError(f"coef {self.coef} must be at least 0")
        for name in ("log_ratio_clamp", "clamp"):
            largest = getattr(self, name)
            if largest is not None and not largest > 0:
                raise ValueError(f"{name} {largest} must be above 0, or null")
        if self.where == "reward" and (self.gradient != "estimator" or self.importance_weighted):
            raise ValueError("gradient and importance_weighted are about the loss: leave them out with where: reward")

    def penalty(
        self,
        log_probs: Float[Tensor, "rows"],
        reference_log_probs: Float[Tensor, "rows"],
        log_ratio: Float[Tensor, "rows"] | None = None,
    ) -> Float[Tensor, "rows"]:
        """The estimate of each token, without ``coef``.

        Args:
            log_probs: ``[R]``, with gradients where the penalty is in the loss.
            reference_log_probs: ``[R]``.
            log_ratio: ``[R]``: log p - log p_old with gradients, for ``importance_weighted``.

        Returns:
            ``[R]``; the caller masks it, as it does losses.

        Raises:
            ValueError: when it is to be importance-weighted and there is no ``log_ratio``.
        """
        log_to_reference = log_probs - reference_log_probs.detach()
        value = self._clamp_value(estimate(log_to_reference, self.estimator, self.log_ratio_clamp))
        if self.gradient == "k2":
            slope = estimate(log_to_reference, "k2", None)  # the value of the estimator, with the gradient of k2
            value = value.detach() + (slope - slope.detach())
        if not self.importance_weighted:
            return value
        if log_ratio is None:
            raise ValueError("an importance-weighted penalty needs the log-ratio to the policy that drew the tokens")
        return value * torch.exp(log_ratio)

    def _clamp_value(self, value: Tensor) -> Tensor:
        return value if self.clamp is None else value.clamp(-self.clamp, self.clamp)


def estimate(
    log_to_reference: Float[Tensor, "rows"], estimator: Estimator, log_ratio_clamp: float | None = None
) -> Float[Tensor, "rows"]:
    """The estimate of KL(policy, reference) of each token.

    Args:
        log_to_reference: ``[R]``: l = log p - log p_reference.
        estimator: which.
        log_ratio_clamp: largest absolute l; None clamps none.

    Returns:
        ``[R]``.

    Raises:
        ValueError: for an unknown estimator.
    """
    if log_ratio_clamp is not None:
        log_to_reference = log_to_reference.clamp(-log_ratio_clamp, log_ratio_clamp)
    if estimator == "k1":
        return log_to_reference
    if estimator == "abs":
        return log_to_reference.abs()
    if estimator == "k2":
        return log_to_reference.square() / 2
    if estimator == "k3":
        return torch.expm1(-log_to_reference) + log_to_reference
    raise ValueError(f"unknown estimator {estimator!r}; known: k1, abs, k2, k3")
