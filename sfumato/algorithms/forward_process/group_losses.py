"""Objectives that compare the final samples of a group, all of which must be in one batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from sfumato.algorithms.device import on_host, to_device
from sfumato.algorithms.dynamics import mean_over_sample
from sfumato.algorithms.forward_process.noised import (
    ForwardProcessObjective,
    NoisedSamples,
    reward_probability,
    row_distances,
)
from sfumato.algorithms.objectives import check_clip_ranges
from sfumato.algorithms.preference import preference_loss
from sfumato.algorithms.row_losses import RowLosses

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True)
class CRD(ForwardProcessObjective):
    """clip (beta (r - mean r) - (q - mean q))^2 / beta, r = mean((v_old - u)^2 / w_old) - mean((v - u)^2 / w).

    q = clamp(A / 2 clip + 1/2, 0, 1); w = mean |v - u| without gradient; the means over r carry none either. They are
    weighted: uniform; or, with a temperature, twice, towards the good and towards the bad samples, and the loss is
    the mean of both. As Flow-Factory computes it, where the rows of all prompts are centred together.
    """

    type: ClassVar[str] = "crd"
    needs: ClassVar[frozenset[str]] = frozenset({"old"})
    whole_groups: ClassVar[bool] = True

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

    def implicit_reward(self, batch: NoisedSamples) -> Float[Tensor, "rows"]:
        """r of the class's formula: float32 ``[R]``, with gradients."""
        return self._error(batch, batch.velocity_of("old")) - self._error(batch, batch.velocity)

    def loss(self, batch: NoisedSamples, advantages: Float[Tensor, "rows"]) -> RowLosses:
        q = reward_probability(advantages, self.advantage_clip)
        r = self.implicit_reward(batch)
        cells = batch.cells() if self.centre == "group" else batch.levels
        directions = [self._fit(r, q, weights) for weights in self._weights(q, cells)]
        loss = torch.stack(directions).mean(dim=0) * self.advantage_clip / self.beta
        return loss, {"crd/implicit_reward": r.detach().sum()}

    def _error(self, batch: NoisedSamples, velocity: Tensor) -> Tensor:
        squared = (velocity - batch.target) ** 2
        return mean_over_sample(squared / row_distances(velocity, batch.target) if self.adaptive else squared)

    def _weights(self, q: Tensor, cells: Tensor) -> list[Tensor]:
        """Matrices ``[R, R]`` whose row i holds the weights of the mean that row i is centred by."""
        same = cells[:, None] == cells
        if self.temperature is None:
            return [_masked_softmax(torch.zeros_like(q), same)]
        if self.temperature > 0:
            return [_masked_softmax(sign * q / self.temperature, same) for sign in (1, -1)]
        good = same & (q > 0)
        good = torch.where(good.any(dim=1, keepdim=True), good, same)
        return [_masked_softmax(q, good), _masked_softmax(torch.zeros_like(q), same)]  # no q is below 0: uniform

    def _fit(self, r: Tensor, q: Tensor, weights: Tensor) -> Tensor:
        """Losses ``[R]`` of centred implicit rewards against centred q; ``weights`` ``[R, R]`` as of ``_weights``."""
        implicit = self.beta * (r - weights @ r.detach())
        target = q - weights @ q
        if self.form == "bce":
            return torch.nn.functional.binary_cross_entropy_with_logits(
                implicit, torch.sigmoid(target), reduction="none"
            )
        return (implicit - target) ** 2


def _masked_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax of ``scores`` ``[R]`` over the allowed columns of each row, of which there must be one: ``[R, R]``."""
    return torch.softmax(scores.expand_as(allowed).masked_fill(~allowed, -torch.inf), dim=1)


@dataclass(frozen=True)
class DGPO(ForwardProcessObjective):
    """w A e with e = mean((v - u)^2) and w = sigmoid(sum over the group of A beta (e - e_ref) / K), without gradient.

    K is the number of the group's rows at a noise level. As Flow-Factory computes it. A row whose exp(e_old - e) has
    left [1 - clip_range, 1 + clip_range_high] in the direction of its advantage has no gradient.
    """

    type: ClassVar[str] = "dgpo"
    whole_groups: ClassVar[bool] = True
    shared_noise: ClassVar[bool] = True

    beta: float = 10.0
    """How fast a group's weight saturates. Published: 10 to 100; 2000 to 5000 with an averaged reference."""
    clip_range: float | None = 5e-2
    """Trust region around the old policy; null has none and needs no old policy."""
    clip_range_high: float | None = None
    """Upper clip range where it differs from the lower one."""

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError("beta must be above 0")
        if self.clip_range is not None:
            check_clip_ranges(self.clip_range, self.clip_range_high)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The reference; the old policy where there is a clip range."""
        return frozenset({"reference"} if self.clip_range is None else {"reference", "old"})

    def loss(self, batch: NoisedSamples, advantages: Float[Tensor, "rows"]) -> RowLosses:
        error = batch.error(batch.velocity)
        cells = batch.cells()
        with torch.no_grad():
            gain = advantages * self.beta * (error - batch.error(batch.velocity_of("reference")))
            sums = torch.zeros(len(gain), device=gain.device).index_add(0, cells, gain)
            counts = torch.bincount(on_host(cells), minlength=len(gain)).clamp(min=1)
            weight = torch.sigmoid(sums / to_device(counts, gain.device))[cells]
            clipped = self._clip_error(batch, error, advantages)
        loss = weight * advantages * torch.where(clipped, error.detach(), error)
        stats = {"dgpo/group_weight": weight.sum(), "dgpo/clipped": clipped.float().sum()}
        return loss, stats

    def _clip_error(self, batch: NoisedSamples, error: Tensor, advantages: Tensor) -> Tensor:
        if self.clip_range is None:
            return torch.zeros_like(advantages, dtype=torch.bool)
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        ratio = torch.exp(batch.error(batch.velocity_of("old")) - error)
        return torch.where(advantages > 0, ratio > 1 + high, ratio < 1 - self.clip_range)


@dataclass(frozen=True)
class DPO(ForwardProcessObjective):
    """-log sigmoid(-beta / 2 [(e_w - e_w_ref) - (e_l - e_l_ref)]), e = mean((v - u)^2), for a winner w and a loser l.

    Winners are the rows of a group and level with an advantage above 0, losers those below; each is paired with all
    rows of the other side, and a row's loss is the mean over its pairs. Rows with advantage 0 have none.
    """

    type: ClassVar[str] = "dpo"
    needs: ClassVar[frozenset[str]] = frozenset({"reference"})
    whole_groups: ClassVar[bool] = True
    shared_noise: ClassVar[bool] = True
    takes_both_signs: ClassVar[bool] = True

    beta: float = 100.0
    """Strength of the pull towards the reference. flow_grpo: 100; Flow-Factory and Diffusion-DPO: 2000."""
    form: Literal["sigmoid", "hinge"] = "sigmoid"
    """Function of beta times the margin."""
    label_smoothing: float = 0.0
    """Share of wrong pairs that is assumed, below 0.5; for sigmoid."""

    def __post_init__(self) -> None:
        if not self.beta > 0 or not 0 <= self.label_smoothing < 0.5:
            raise ValueError("beta must be above 0, and label_smoothing at least 0 and below 0.5")

    def implicit_reward(self, batch: NoisedSamples) -> Float[Tensor, "rows"]:
        """beta / 2 (e_ref - e): ``[R]``, with gradients. The loss compares those of winners and losers."""
        return self.beta * self._error_reduction(batch)

    def loss(self, batch: NoisedSamples, advantages: Float[Tensor, "rows"]) -> RowLosses:
        """As ``ForwardProcessObjective.loss``. Raises ValueError for a row that has no partner in the batch."""
        gain = self._error_reduction(batch)
        cells = on_host(batch.cells())
        signs = on_host(advantages)
        same = cells[:, None] == cells
        pairs = same & (signs > 0)[:, None] & (signs < 0)
        partners = pairs.sum(dim=0) + pairs.sum(dim=1)
        if bool(((signs != 0) & (partners == 0)).any()):
            row = int(((signs != 0) & (partners == 0)).nonzero()[0])
            group = int(on_host(batch.group_ids)[row])
            raise ValueError(
                f"a row of group {group} has no partner of the other side: keep the winners and losers of a group in "
                "one micro-batch"
            )
        winners, losers = (to_device(index, gain.device) for index in pairs.nonzero(as_tuple=True))
        partners = to_device(partners, gain.device)

        def mean_over_pairs(pair_values: Tensor) -> Tensor:
            sums = torch.zeros_like(gain).index_add(0, winners, pair_values).index_add(0, losers, pair_values)
            return sums / partners.clamp(min=1)

        losses = preference_loss(gain[winners], gain[losers], self.beta, self.form, self.label_smoothing)
        margin = self.beta * (gain[winners] - gain[losers]).detach()
        stats = {
            "dpo/margin": mean_over_pairs(margin).sum(),
            "dpo/accuracy": mean_over_pairs((margin > 0).to(margin)).sum(),
        }
        return mean_over_pairs(losses), stats

    def _error_reduction(self, batch: NoisedSamples) -> Tensor:
        return (batch.error(batch.velocity_of("reference")) - batch.error(batch.velocity)) / 2
