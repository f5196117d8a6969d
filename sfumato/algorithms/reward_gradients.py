"""Through which denoising steps the gradient of a reward flows: the parts of RL by differentiable rewards.

A sample is drawn with steps 0 to T - 1. Each part chooses consecutive ones that are differentiated; all earlier ones
are computed without gradient, and later ones are left out: the image is then the prediction x0 = x - sigma v of the
last one computed. Which steps these are is a function of (seed, iteration) alone, so that the samples of an iteration
can be computed together, and a resumed run needs no state for it.

``DirectAlign`` differentiates no step of the sampling: it draws samples without gradient, noises them, and recovers
them by one step of the network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from sfumato.algorithms.flow_matching import per_sample
from sfumato.algorithms.noise import keyed_generator, keyed_uniform


class DifferentiatedSteps(Protocol):
    """A choice of denoising steps."""

    num_passes: ClassVar[int] = 1
    """Backward passes of each sample in an iteration."""

    def steps(self, num_steps: int, seed: int, iteration: int) -> range:
        """The differentiated steps of an iteration, ascending and never empty; none after them is computed."""
        ...

    def max_differentiated(self, num_steps: int) -> int:
        """The largest number of differentiated steps. Raises ValueError when the schedule is too short."""
        ...


@dataclass(frozen=True)
class LastSteps:
    """The last K steps (DRaFT-K, arXiv 2309.17400, section 4); K = T differentiates all of them (DRaFT)."""

    type: ClassVar[str] = "last"
    num_passes: ClassVar[int] = 1

    k: int = 1
    """Number of differentiated steps."""

    def __post_init__(self) -> None:
        _check_positive("k", self.k)

    def steps(self, num_steps: int, seed: int, iteration: int) -> range:
        """As ``DifferentiatedSteps.steps``."""
        del seed, iteration
        return range(num_steps - self.max_differentiated(num_steps), num_steps)

    def max_differentiated(self, num_steps: int) -> int:
        """As ``DifferentiatedSteps.max_differentiated``."""
        return _check_fits("k", self.k, num_steps)


@dataclass(frozen=True)
class RandomLastSteps:
    """The last K steps, K uniform in 1 .. max_k and drawn anew each iteration (AlignProp, arXiv 2310.03739)."""

    type: ClassVar[str] = "random_last"
    num_passes: ClassVar[int] = 1

    max_k: int = 5
    """Largest number of differentiated steps. Published: all steps, of which there are 50."""

    def __post_init__(self) -> None:
        _check_positive("max_k", self.max_k)

    def steps(self, num_steps: int, seed: int, iteration: int) -> range:
        """As ``DifferentiatedSteps.steps``."""
        k = 1 + _draw(self.max_differentiated(num_steps), seed, iteration)
        return range(num_steps - k, num_steps)

    def max_differentiated(self, num_steps: int) -> int:
        """As ``DifferentiatedSteps.max_differentiated``."""
        return _check_fits("max_k", self.max_k, num_steps)


@dataclass(frozen=True)
class PredictedImage:
    """One step, uniform among the last ones and drawn anew each iteration, whose x0 is scored (ReFL, arXiv 2304.05977).

    Steps after it are not computed.
    """

    type: ClassVar[str] = "predicted"
    num_passes: ClassVar[int] = 1

    last: int = 10
    """How many of the last steps it is drawn from. Published: 10 of 40."""

    def __post_init__(self) -> None:
        _check_positive("last", self.last)

    def steps(self, num_steps: int, seed: int, iteration: int) -> range:
        """As ``DifferentiatedSteps.steps``."""
        last = _check_fits("last", self.last, num_steps)
        step = num_steps - last + _draw(last, seed, iteration)
        return range(step, step + 1)

    def max_differentiated(self, num_steps: int) -> int:
        """As ``DifferentiatedSteps.max_differentiated``."""
        _check_fits("last", self.last, num_steps)
        return 1


@dataclass(frozen=True)
class NoiseJump:
    """A step of B noised samples between two noise levels, and how the recovered samples are scored."""

    start: torch.Tensor
    """float32 ``[B]``: the noise level at which the network predicts."""
    end: torch.Tensor
    """float32 ``[B]``: the level that its step leads to, below 1."""
    gains: torch.Tensor
    """float32 ``[B]``: k of the relative reward ``(1 + k) r_1 - r_2``."""
    is_inversion: bool
    """Whether the step goes towards more noise. The control words then change places."""


@dataclass(frozen=True)
class DirectAlign:
    """Samples are drawn, noised by their own first noise, and recovered by one step (SRPO, arXiv 2509.06942).

    A sample is recovered twice from the same level: after a step towards less noise, and after one towards more, an
    inversion. Differs from the published code in that levels are drawn for each sample, and are not rounded to a
    thousandth of the range.
    """

    type: ClassVar[str] = "direct_align"

    sigmas: tuple[float, float] = (0.75, 0.9643)
    """Lowest and highest noise level. Published for FLUX.1: steps 25 and 5 of 50 with a shift of 3."""
    distance: float = 0.1
    """Length of a step, as a part of the range; shorter at its ends."""
    denoise_gain: tuple[float, float] = (0.1, 0.25)
    """Weight k of the reward of the positive words after a step towards less noise, at the lowest and highest level;
    between them it is linear."""
    inversion_gain: tuple[float, float] = (0.3, 0.01)
    """The same of the negative words after a step towards more noise, which holds the reward back."""
    num_levels: int = 1
    """Noise levels drawn for each sample in an iteration."""

    def __post_init__(self) -> None:
        low, high = self.sigmas
        if not 0 <= low < high < 1:
            raise ValueError(f"sigmas must be two levels [low, high] with 0 <= low < high < 1, not {list(self.sigmas)}")
        if not 0 < self.distance <= 0.5:
            raise ValueError(f"distance must be above 0 and at most 0.5, not {self.distance}")
        if not all(math.isfinite(gain) for gain in (*self.denoise_gain, *self.inversion_gain)):
            raise ValueError("denoise_gain and inversion_gain must be finite numbers")
        _check_positive("num_levels", self.num_levels)

    @property
    def num_passes(self) -> int:
        """Two for each level."""
        return 2 * self.num_levels

    def steps(self, num_steps: int, seed: int, iteration: int) -> range:
        """Passes of the network that are differentiated, counted on from the denoising steps, which are not."""
        del seed, iteration
        return range(num_steps, num_steps + self.num_passes)

    def max_differentiated(self, num_steps: int) -> int:
        """One: each pass has a backward pass of its own."""
        del num_steps
        return 1

    def jumps(self, seed: int, iteration: int, sample_ids: Sequence[int]) -> list[NoiseJump]:
        """The steps of B samples: for each level one towards less noise and one towards more.

        Args:
            seed, iteration, sample_ids: what keys the levels.
        """
        low, high = self.sigmas
        jumps: list[NoiseJump] = []
        for level in range(self.num_levels):
            place = keyed_uniform(seed, f"direct align {level}", iteration, sample_ids)  # within the range
            distance = torch.minimum(place, 1 - place).clamp(max=self.distance)
            for is_inversion, gain in ((False, self.denoise_gain), (True, self.inversion_gain)):
                start = place - distance if is_inversion else place + distance
                gains = gain[0] + (gain[1] - gain[0]) * (start if is_inversion else place)
                start = low + (high - low) * start
                end = low + (high - low) * place
                jumps.append(NoiseJump(start.float(), end.float(), gains.float(), is_inversion))
        return jumps


def recover_sample(
    noisy: torch.Tensor, velocity: torch.Tensor, noise: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    """``(x + (end - start) v - end noise) / (1 - end)``: the sample after one step, with the noise known.

    Args:
        noisy: x ``(1 - start) x0 + start noise``, float32 ``[B, ...]``.
        velocity: v ``[B, ...]`` that the network predicts for x; of the right one, noise - x0, x0 is the result.
        noise: ``[B, ...]``.
        start, end: noise levels, ``[B]``; end below 1.

    Returns:
        float32 ``[B, ...]``.
    """
    start = per_sample(start, noisy)
    end = per_sample(end, noisy)
    return (noisy + (end - start) * velocity.float() - end * noise) / (1 - end)


def reward_loss(rewards: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """The loss of each sample, ``[B]``: minus its reward, and no gradient for rewards of ``limit`` or more.

    Args:
        rewards: float ``[B]``.
        limit: max(limit - reward, 0) takes the place of -reward; ReFL's loss for ImageReward has 2.
    """
    return -rewards if limit is None else torch.relu(limit - rewards)


def _draw(count: int, seed: int, iteration: int) -> int:
    """A number below ``count``."""
    return int(torch.randint(count, (), generator=keyed_generator(seed, "differentiated steps", iteration)))


def _check_positive(name: str, number: int) -> None:
    if number < 1:
        raise ValueError(f"{name} must be at least 1, not {number}")


def _check_fits(name: str, number: int, num_steps: int) -> int:
    if number > num_steps:
        raise ValueError(f"{name} {number} is more than the {num_steps} denoising steps of a sample")
    return number
