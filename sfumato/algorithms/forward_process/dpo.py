"""Diffusion-DPO, online from the best and the worst of a group or offline from given pairs (arXiv 2311.12908)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from sfumato.algorithms.forward_process.noised import Loss, NoisedSamples
from sfumato.algorithms.preference import preference_loss


@dataclass(frozen=True)
class DPO:
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

    def implicit_reward(self, batch: NoisedSamples) -> torch.Tensor:
        """beta / 2 (e_ref - e): ``[R]``, with gradients. The loss compares those of winners and losers."""
        return self.beta * self._gain(batch)

    def loss(self, batch: NoisedSamples, advantages: torch.Tensor) -> Loss:
        """As ``ForwardProcessObjective.loss``. Raises ValueError for a row that has no partner in the batch."""
        gain = self._gain(batch)
        cells = batch.cells()
        same = cells[:, None] == cells
        pairs = same & (advantages > 0)[:, None] & (advantages < 0)
        partners = pairs.sum(dim=0) + pairs.sum(dim=1)
        if bool(((advantages != 0) & (partners == 0)).any()):
            row = int(((advantages != 0) & (partners == 0)).nonzero()[0])
            raise ValueError(
                f"a row of group {int(batch.group_ids[row])} has no partner of the other side: keep the winners and "
                "losers of a group in one micro-batch"
            )
        winners, losers = pairs.nonzero(as_tuple=True)

        def of_rows(of_pairs: torch.Tensor) -> torch.Tensor:
            sums = torch.zeros_like(gain).index_add(0, winners, of_pairs).index_add(0, losers, of_pairs)
            return sums / partners.clamp(min=1)

        losses = preference_loss(gain[winners], gain[losers], self.beta, self.form, self.label_smoothing)
        margin = self.beta * (gain[winners] - gain[losers]).detach()
        stats = {"dpo/margin": of_rows(margin).sum(), "dpo/accuracy": of_rows((margin > 0).to(margin)).sum()}
        return of_rows(losses), stats

    def _gain(self, batch: NoisedSamples) -> torch.Tensor:
        return (batch.error(batch.velocity_of("reference")) - batch.error(batch.velocity)) / 2
