"""Noise levels at which an objective on final samples is trained: L per sample, as a function of (seed, iteration, id).

For an objective with ``shared_noise`` ids of groups take the place of sample ids, so that a group shares its levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from sfumato.algorithms.flow_matching import draw_sigma
from sfumato.algorithms.noise import keyed_permutation, keyed_uniform

if TYPE_CHECKING:
    from torch import Tensor


class Timesteps(Protocol):
    """A choice of noise levels."""

    of_schedule: ClassVar[bool]
    """Whether levels come from the sampler's schedule; those of a density a model may map (its ``training_sigma``)."""

    def num_levels(self, num_steps: int) -> int:
        """L, the levels per sample, for a sampler of ``num_steps`` steps. Raises ValueError when none can be drawn."""
        ...

    def draw(self, sigmas: Tensor, seed: int, iteration: int, ids: Sequence[int]) -> Tensor:
        """Noise levels, float32 ``[B, L]`` on the CPU.

        Args:
            sigmas: ``[T + 1]``, the sampler's schedule, descending to 0.
            seed, iteration: the key that the samples share.
            ids: B integers, of samples or of their groups.
        """
        ...


@dataclass(frozen=True)
class SamplerGrid:
    """Levels of the sampler's own schedule, in random order without repetition (DiffusionNFT)."""

    type: ClassVar[str] = "sampler_grid"
    of_schedule: ClassVar[bool] = True

    num: int | None = None
    """Levels per sample, fewer where there are not as many; null is all of them."""
    first: int = 0
    """Step from which levels are taken; 1 leaves out pure noise."""
    fraction: float = 1.0
    """Levels are taken from the noisy share of the schedule that ends here, in (0, 1]."""
    stratified: bool = False
    """Cut the steps into ``num`` equal pieces and take one of each (AWM) instead of any."""

    def __post_init__(self) -> None:
        if self.first < 0 or not 0 < self.fraction <= 1 or (self.num is not None and self.num < 1):
            raise ValueError("first must not be below 0, fraction in (0, 1], and num at least 1")

    def steps(self, num_steps: int) -> list[int]:
        """The steps of a schedule whose levels are drawn from. Raises ValueError when none is left."""
        # 1e-9 keeps a product that should be whole, such as 0.29 * 100, from being rounded down.
        steps = list(range(self.first, int(self.fraction * num_steps + 1e-9)))
        if not steps:
            raise ValueError(
                f"no level is left of a schedule of {num_steps} steps from step {self.first} and with fraction "
                f"{self.fraction}"
            )
        return steps

    def num_levels(self, num_steps: int) -> int:
        """As ``Timesteps.num_levels``."""
        available = len(self.steps(num_steps))
        return min(self.num or available, available)

    def draw(self, sigmas: Tensor, seed: int, iteration: int, ids: Sequence[int]) -> Tensor:
        """As ``Timesteps.draw``. Raises ValueError when no step is left."""
        steps = self.steps(len(sigmas) - 1)
        num = self.num_levels(len(sigmas) - 1)
        if self.stratified:
            positions = _draw_stratified_uniforms(num, seed, iteration, ids) * len(steps)
            chosen = positions.long().clamp(max=len(steps) - 1)
        else:
            order = [keyed_permutation(len(steps), seed, "timesteps", iteration, sample_id)[:num] for sample_id in ids]
            chosen = torch.stack(order)
        return sigmas.to("cpu", torch.float32)[torch.tensor(steps)[chosen]]


class _Density:
    """Base of levels from a density, whatever the sampler's schedule is."""

    of_schedule: ClassVar[bool] = False
    num: int

    def num_levels(self, num_steps: int) -> int:
        """As ``Timesteps.num_levels``: any schedule does."""
        del num_steps
        return self.num

    def draw(self, sigmas: Tensor, seed: int, iteration: int, ids: Sequence[int]) -> Tensor:
        """As ``Timesteps.draw``; the sampler's schedule is not looked at."""
        del sigmas
        return self._levels(_draw_stratified_uniforms(self.num, seed, iteration, ids))

    def _levels(self, strata: Tensor) -> Tensor:
        """Levels, float32 ``[B, L]``, from uniform numbers, float64 ``[B, L]``, by inverse transform."""
        raise NotImplementedError


@dataclass(frozen=True)
class UniformTimesteps(_Density):
    """Levels uniform in [low, high), then shifted; of several, one in each equal piece of the range."""

    type: ClassVar[str] = "uniform"

    num: int = 1
    """Levels per sample."""
    low: float = 0.0
    """Smallest level before the shift."""
    high: float = 1.0
    """Largest level before the shift."""
    shift: float = 1.0
    """s in s sigma / (1 + (s - 1) sigma); above 1 moves levels towards noise."""

    def __post_init__(self) -> None:
        if self.num < 1 or not 0 <= self.low < self.high <= 1 or not self.shift > 0:
            raise ValueError("num must be at least 1, 0 <= low < high <= 1, and shift above 0")

    def _levels(self, strata: Tensor) -> Tensor:
        return draw_sigma(self.low + (self.high - self.low) * strata, "uniform", 0.0, 1.0, self.shift)


@dataclass(frozen=True)
class LogitNormalTimesteps(_Density):
    """Levels sigmoid(normal), then shifted (arXiv 2403.03206); of several, one in each equally likely piece."""

    type: ClassVar[str] = "logit_normal"

    num: int = 1
    """Levels per sample."""
    mean: float = 0.0
    """Mean of the normal variable."""
    std: float = 1.0
    """Standard deviation of the normal variable."""
    shift: float = 1.0
    """s in s sigma / (1 + (s - 1) sigma); above 1 moves levels towards noise."""

    def __post_init__(self) -> None:
        if self.num < 1 or not self.std > 0 or not self.shift > 0:
            raise ValueError("num must be at least 1, std and shift above 0")

    def _levels(self, strata: Tensor) -> Tensor:
        return draw_sigma(strata, "logit_normal", self.mean, self.std, self.shift)


def _draw_stratified_uniforms(num: int, seed: int, iteration: int, ids: Sequence[int]) -> Tensor:
    """Stratified uniform numbers, float64 ``[B, num]``: the k-th lies in [k / num, (k + 1) / num)."""
    pieces = [k + keyed_uniform(seed, f"timestep {k}", iteration, ids) for k in range(num)]
    return torch.stack(pieces, dim=1) / num
