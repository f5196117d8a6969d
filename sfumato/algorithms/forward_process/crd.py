"""Centred reward distillation: the policy's implicit rewards are fitted to the rewards (arXiv 2603.14128)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from sfumato.algorithms.dynamics.step import mean_over_sample
from sfumato.algorithms.forward_process.noised import Loss, NoisedSamples, distance, reward_probability


@dataclass(frozen=True)
class CRD:
    """clip (beta (r - mean r) - (q - mean q))^2 / beta, r = mean((v_old - u)^2 / w_old) - mean((v - u)^2 / w).

    q = clamp(A / 2 clip + 1/2, 0, 1); w = mean |v - u| without gradient; the means over r carry none either. They are
    weighted: uniform; or, with a temperature, twice, towards the good and towards the bad samples, and the loss is
    the mean of both. As Flow-Factory computes it, where the rows of all prompts are centred together.
    """

    type: ClassVar[str] = "crd"
    needs: ClassVar[frozenset[str]] = frozenset({"old"})
    whole_groups: ClassVar[bool] = True
    shared_noise: ClassVar[bool] = False

    beta: float = 1.0
    """Scale of the implicit reward."""
    form: Literal["mse", "bce"] = "mse"
    """Squared difference, or cross-entropy of sigmoid(beta centred r) and sigmoid(centred q)."""
    temperature: float | None = None
    """null weights uniformly; above 0 by softmax(q / T) and softmax(-q / T); 0 by softmax(q), over q above 0."""
    centre: Literal["group", "batch"] = "group"
    """Rows that are centred together: a group at a noise level, or all of the micro-batch at it."""
    adaptive: bool = True
    """Divide errors by w; false by 1."""
    advantage_clip: float = 5.0
    """The advantage that makes q 1."""

    def __post_init__(self) -> None:
        if not self.beta > 0 or not self.advantage_clip > 0 or (self.temperature or 0) < 0:
            raise ValueError("beta and advantage_clip must be above 0, and temperature not below 0")

    def implicit_reward(self, batch: NoisedSamples) -> torch.Tensor:
        """r above: float32 ``[R]``, with gradients."""
        return self._error(batch, batch.velocity_of("old")) - self._error(batch, batch.velocity)

    def loss(self, batch: NoisedSamples, advantages: torch.Tensor) -> Loss:
        """As ``ForwardProcessObjective.loss``."""
        q = reward_probability(advantages, self.advantage_clip)
        r = self.implicit_reward(batch)
        cells = batch.cells() if self.centre == "group" else batch.levels
        directions = [self._fit(r, q, weights) for weights in self._weights(q, cells)]
        loss = torch.stack(directions).mean(dim=0) * self.advantage_clip / self.beta
        return loss, {"crd/implicit_reward": r.detach().sum()}

    def _error(self, batch: NoisedSamples, velocity: torch.Tensor) -> torch.Tensor:
        squared = (velocity - batch.target) ** 2
        return mean_over_sample(squared / distance(velocity, batch.target) if self.adaptive else squared)

    def _weights(self, q: torch.Tensor, cells: torch.Tensor) -> list[torch.Tensor]:
        """Matrices ``[R, R]`` whose row i holds the weights of the mean that row i is centred by."""
        same = cells[:, None] == cells
        if self.temperature is None:
            return [_softmax(torch.zeros_like(q), same)]
        if self.temperature > 0:
            return [_softmax(sign * q / self.temperature, same) for sign in (1, -1)]
        good = same & (q > 0)
        good = torch.where(good.any(dim=1, keepdim=True), good, same)
        return [_softmax(q, good), _softmax(torch.zeros_like(q), same)]  # no q is below 0: uniform

    def _fit(self, r: torch.Tensor, q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        implicit, wanted = self.beta * (r - weights @ r.detach()), q - weights @ q
        if self.form == "bce":
            return torch.nn.functional.binary_cross_entropy_with_logits(
                implicit, torch.sigmoid(wanted), reduction="none"
            )
        return (implicit - wanted) ** 2


def _softmax(scores: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Softmax of ``scores`` ``[R]`` over the allowed columns of each row, of which there must be one: ``[R, R]``."""
    return torch.softmax(scores.expand_as(allowed).masked_fill(~allowed, -torch.inf), dim=1)
