"""Through which denoising steps the gradient of a reward flows: the parts of RL by differentiable rewards.

A sample is drawn with steps 0 to T - 1. Each part chooses consecutive ones that are differentiated; all earlier ones
are computed without gradient, and later ones are left out: the image is then the prediction x0 = x - sigma v of the
last one computed. Which steps these are is a function of (seed, iteration) alone, so that the samples of an iteration
can be computed together, and a resumed run needs no state for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from sfumato.algorithms.noise import keyed_generator


class DifferentiatedSteps(Protocol):
    """A choice of denoising steps."""

    def steps(self, num_steps: int, seed: int, iteration: int) -> range:
        """The differentiated steps of an iteration, ascending and never empty; none after them is computed."""
        ...

    def most(self, num_steps: int) -> int:
        """The largest number of differentiated steps. Raises ValueError when the schedule is too short."""
        ...


@dataclass(frozen=True)
class LastSteps:
    """The last K steps (DRaFT-K, arXiv 2309.17400, section 4); K = T differentiates all of them (DRaFT)."""

    type: ClassVar[str] = "last"

    k: int = 1
    """Number of differentiated steps."""

    def __post_init__(self) -> None:
        _check_positive("k", self.k)

    def steps(self, num_steps: int, seed: int, iteration: int) -> range:
        """As ``DifferentiatedSteps.steps``."""
        del seed, iteration
        return range(num_steps - self.most(num_steps), num_steps)

    def most(self, num_steps: int) -> int:
        """As ``DifferentiatedSteps.most``."""
        return _check_fits("k", self.k, num_steps)


@dataclass(frozen=True)
class RandomLastSteps:
    """The last K steps, K uniform in 1 .. max_k and drawn anew each iteration (AlignProp, arXiv 2310.03739)."""

    type: ClassVar[str] = "random_last"

    max_k: int = 5
    """Largest number of differentiated steps. Published: all steps, of which there are 50."""

    def __post_init__(self) -> None:
        _check_positive("max_k", self.max_k)

    def steps(self, num_steps: int, seed: int, iteration: int) -> range:
        """As ``DifferentiatedSteps.steps``."""
        k = 1 + _draw(self.most(num_steps), seed, iteration)
        return range(num_steps - k, num_steps)

    def most(self, num_steps: int) -> int:
        """As ``DifferentiatedSteps.most``."""
        return _check_fits("max_k", self.max_k, num_steps)


@dataclass(frozen=True)
class PredictedImage:
    """One step, uniform among the last ones and drawn anew each iteration, whose x0 is scored (ReFL, arXiv 2304.05977).

    Steps after it are not computed.
    """

    type: ClassVar[str] = "predicted"

    last: int = 10
    """How many of the last steps it is drawn from. Published: 10 of 40."""

    def __post_init__(self) -> None:
        _check_positive("last", self.last)

    def steps(self, num_steps: int, seed: int, iteration: int) -> range:
        """As ``DifferentiatedSteps.steps``."""
        last = _check_fits("last", self.last, num_steps)
        step = num_steps - last + _draw(last, seed, iteration)
        return range(step, step + 1)

    def most(self, num_steps: int) -> int:
        """As ``DifferentiatedSteps.most``."""
        _check_fits("last", self.last, num_steps)
        return 1


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
