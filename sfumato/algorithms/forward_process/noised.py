"""What objectives on the forward process share: final samples with fresh noise, and the velocities predicted there.

Shapes: R rows, each a (sample, noise level) pair; ... latent dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import torch

from sfumato.algorithms.device import on_host, to_device
from sfumato.algorithms.dynamics import mean_over_sample, per_sample
from sfumato.algorithms.flow_matching import add_noise
from sfumato.algorithms.row_losses import RowLosses

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Int64
    from torch import Tensor

AdvantageMode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]
SMALLEST_WEIGHT = 1e-5
"""Least distance that an error is divided by."""


@dataclass(frozen=True)
class NoisedSamples:
    """Final samples at noise levels, and the velocities that the policies predict there."""

    x0: Float32[Tensor, "rows *latent"]
    """float32 ``[R, ...]``: the samples."""
    noise: Float32[Tensor, "rows *latent"]
    """float32 ``[R, ...]``: eps."""
    sigma: Float32[Tensor, "rows"]
    """float32 ``[R]`` in [0, 1]."""
    velocity: Float32[Tensor, "rows *latent"]
    """float32 ``[R, ...]``: the policy's prediction, with gradients."""
    group_ids: Int64[Tensor, "rows"]
    """int64 ``[R]``: rows of one prompt."""
    levels: Int64[Tensor, "rows"]
    """int64 ``[R]``: index of a row's noise level among those of its sample; 0 where there is one."""
    old_velocity: Float32[Tensor, "rows *latent"] | None = None
    """float32 ``[R, ...]``: the old policy's, where ``needs`` names ``old``."""
    reference_velocity: Float32[Tensor, "rows *latent"] | None = None
    """float32 ``[R, ...]``: the reference's, where ``needs`` names ``reference``."""
    ema_velocity: Float32[Tensor, "rows *latent"] | None = None
    """float32 ``[R, ...]``: the averaged policy's, where ``needs`` names ``ema``."""
    error_weight: Float32[Tensor, "rows"] | None = None
    """float32 ``[R]``: factor of squared errors where the network predicts something else; None is 1."""

    @property
    def target(self) -> Tensor:
        """u = eps - x0, float32 ``[R, ...]``."""
        return self.noise - self.x0

    @property
    def noisy(self) -> Tensor:
        """x_sigma = (1 - sigma) x0 + sigma eps, float32 ``[R, ...]``."""
        return add_noise(self.x0, self.noise, self.sigma)

    def velocity_of(self, policy: Literal["old", "reference", "ema"]) -> Float32[Tensor, "rows *latent"]:
        """Another policy's prediction, without gradients. Raises ValueError where it is missing."""
        velocity = getattr(self, f"{policy}_velocity")
        if velocity is None:
            raise ValueError(f"this objective needs the velocity of the {policy} policy")
        return velocity.detach()

    def predicted_x0(self, velocity: Float32[Tensor, "rows *latent"]) -> Float32[Tensor, "rows *latent"]:
        """x_sigma - sigma v, float32 ``[R, ...]``."""
        return self.noisy - per_sample(self.sigma, velocity) * velocity

    def error(self, velocity: Float32[Tensor, "rows *latent"]) -> Float32[Tensor, "rows"]:
        """mean((v - u)^2) of each row, times its weight: float32 ``[R]``."""
        error = mean_over_sample((velocity - self.target) ** 2)
        return error if self.error_weight is None else error * self.error_weight

    def cells(self) -> Int64[Tensor, "rows"]:
        """int64 ``[R]`` from 0: rows with the same number are one group at one noise level."""
        rows = torch.stack([on_host(self.group_ids), on_host(self.levels)])
        return to_device(torch.unique(rows, dim=1, return_inverse=True)[1], self.group_ids.device, remember=True)


class ForwardProcessObjective(Protocol):
    """Base of every objective. It draws no random numbers: noise and levels come with the batch."""

    whole_groups: ClassVar[bool] = False
    """All rows of a group and level must be in one batch."""
    shared_noise: ClassVar[bool] = False
    """Rows of a group and level must have the same noise and the same sigma."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """The policies whose velocities the batch must hold besides the trained one's: of old, reference, ema."""

    def loss(self, batch: NoisedSamples, advantages: Float[Tensor, "rows"]) -> RowLosses:
        """The loss ``[R]`` (lower is better) and its statistics, for advantages ``[R]``."""
        ...


def reward_probability(
    advantages: Float[Tensor, "rows"], clip: float, mode: AdvantageMode = "all"
) -> Float[Tensor, "rows"]:
    """clamp(A / 2 clip + 1/2, 0, 1): how good a sample is, in [0, 1], as DiffusionNFT has it.

    Args:
        advantages: ``[R]``.
        clip: the advantage that is mapped to 1.
        mode: how A is changed before: not at all; negative values become 0; positive values become 0; 1 where it is
            above 0, else 0; its sign.

    Returns:
        ``[R]``.
    """
    advantages = advantages.clamp(-clip, clip)
    if mode == "positive_only":
        advantages = advantages.clamp(min=0)
    elif mode == "negative_only":
        advantages = advantages.clamp(max=0)
    elif mode == "one_only":
        advantages = (advantages > 0).to(advantages)
    elif mode == "binary":
        advantages = advantages.sign()
    return (advantages / clip / 2 + 0.5).clamp(0, 1)


def row_distances(
    prediction: Float[Tensor, "rows *latent"], target: Float[Tensor, "rows *latent"]
) -> Float[Tensor, "rows *ones"]:
    """mean |prediction - target| of each row, at least 1e-5 and without gradients: ``[R, 1, ...]``."""
    with torch.no_grad():
        mean = mean_over_sample((prediction.double() - target.double()).abs())
        return per_sample(mean.clamp(min=SMALLEST_WEIGHT), prediction)
