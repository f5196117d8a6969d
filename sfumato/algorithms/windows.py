"""Windows: which denoising steps are stochastic and trained. The last step (sigma' = 0) never is.

A window is a function of (seed, iteration) alone, so a resumed run needs no state for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from sfumato.algorithms.noise import keyed_generator


@dataclass(frozen=True)
class AllSteps:
    """Every step but the last (Flow-GRPO)."""

    type: ClassVar[str] = "all"

    def steps(self, num_steps: int, seed: int, iteration: int) -> list[int]:
        """Indices of the trained steps, ascending."""
        del seed, iteration
        return list(range(num_steps - 1))

    def check(self, num_steps: int) -> None:
        """Raises ValueError when the schedule is too short."""
        if num_steps < 2:
            raise ValueError(
                f"num_inference_steps is {num_steps}: at least 2 are needed, since the last is never trained"
            )


@dataclass(frozen=True)
class RandomWindow:
    """A run of consecutive steps at a random place, drawn anew each iteration (Flow-GRPO-Fast)."""

    type: ClassVar[str] = "random"

    size: int = 3
    """Number of trained steps."""
    range: tuple[int, int] = (0, 5)
    """The window lies within steps range[0] .. range[1] - 1."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.range[0] < 0 or self.range[1] - self.range[0] < self.size:
            raise ValueError(f"a window of size {self.size} does not fit into the range {list(self.range)}")

    def starts(self) -> list[int]:
        """Every place at which the window may start."""
        return list(range(self.range[0], self.range[1] - self.size + 1))

    def steps(self, num_steps: int, seed: int, iteration: int) -> list[int]:
        """Indices of the trained steps, ascending: a function of (seed, iteration)."""
        self.check(num_steps)
        starts = self.starts()
        choice = torch.randint(len(starts), (), generator=keyed_generator(seed, "window", iteration))
        start = starts[int(choice)]
        return list(range(start, start + self.size))

    def check(self, num_steps: int) -> None:
        """Raises ValueError when the window may reach the last step, which is never trained."""
        _check_end(self.range, num_steps)


@dataclass(frozen=True)
class SlidingWindow:
    """A run of consecutive steps that moves from noise to image, and starts again at the end (MixGRPO, 2507.21802).

    At the end of the range the window shrinks. Upstream also spends iterations on an empty window there; here a window
    is never empty.
    """

    type: ClassVar[str] = "sliding"

    size: int = 4
    """Number of trained steps."""
    range: tuple[int, int] | None = None
    """Steps range[0] .. range[1] - 1 are slid over; null is every step but the last. MixGRPO: [0, steps - 2]."""
    strategy: Literal["progressive", "random", "decay", "exp_decay"] = "progressive"
    """How long it stays: equally long everywhere, anywhere anew each iteration, or shorter towards the image."""
    iters_per_group: int = 25
    """Iterations that the window stays in one place (the first, where it decays)."""
    stride: int | None = 1
    """Steps that it moves by; null is its size, so that windows do not overlap."""
    roll_back: bool = True
    """Start again after the last place; false stays there."""
    min_iters: int | None = None
    """decay: iterations towards which they fall linearly; null is a quarter of iters_per_group."""
    decay_after: int = 13
    """exp_decay: ceil(iters_per_group exp(-decay_rate max(0, start - decay_after))) iterations."""
    decay_rate: float = 0.1
    """exp_decay: the rate above."""

    def __post_init__(self) -> None:
        counts = (self.size, self.iters_per_group, self.stride, self.min_iters)
        if min(number for number in counts if number is not None) < 1:
            raise ValueError("size, iters_per_group, stride and min_iters must be at least 1")
        if self.range is not None and not 0 <= self.range[0] < self.range[1]:
            raise ValueError(f"range {list(self.range)} holds no step")

    def steps(self, num_steps: int, seed: int, iteration: int) -> list[int]:
        """Indices of the trained steps, ascending: a function of (seed, iteration)."""
        self.check(num_steps)
        first, end = self._window_range(num_steps)
        if self.strategy == "random":
            places = max(end - self.size - first, 0) + 1  # a range shorter than the window has one place
            start = first + int(torch.randint(places, (), generator=keyed_generator(seed, "window", iteration)))
        else:
            start = self._start(iteration, self.places(num_steps))
        return list(range(start, min(start + self.size, end)))

    def places(self, num_steps: int) -> list[tuple[int, int]]:
        """Every start of the moving window and the iterations that it stays there, in order."""
        first, end = self._window_range(num_steps)
        return [(start, self._count_iterations(start, end)) for start in range(first, end, self.stride or self.size)]

    def check(self, num_steps: int) -> None:
        """Raises ValueError when the window may reach the last step, or no step is left for it."""
        first, end = self._window_range(num_steps)
        _check_end((first, end), num_steps)
        if end - first < 1:
            raise ValueError(f"num_inference_steps is {num_steps}: no step is left to train, since the last never is")

    def _window_range(self, num_steps: int) -> tuple[int, int]:
        return (0, num_steps - 1) if self.range is None else self.range

    def _start(self, iteration: int, places: list[tuple[int, int]]) -> int:
        period = sum(stay for _, stay in places)
        remaining = iteration % period if self.roll_back else min(iteration, period - 1)
        for start, stay in places:
            if remaining < stay:
                return start
            remaining -= stay
        raise AssertionError(f"iteration {iteration} lies beyond the period {period}")

    def _count_iterations(self, start: int, end: int) -> int:
        if self.strategy == "decay":
            least = max(1, self.iters_per_group // 4) if self.min_iters is None else self.min_iters
            progress = start / end
            return max(least, int(self.iters_per_group * (1 - progress) + least * progress))
        if self.strategy == "exp_decay":
            return math.ceil(self.iters_per_group * math.exp(-self.decay_rate * max(0, start - self.decay_after)))
        return self.iters_per_group


@dataclass(frozen=True)
class RandomSubset:
    """Some steps anywhere, drawn anew each iteration (Flow-Factory, sde_steps; DanceGRPO trains 60 % of the steps)."""

    type: ClassVar[str] = "subset"

    size: int = 1
    """Number of trained steps."""
    among: tuple[int, ...] | None = None
    """Steps to draw from; null is every step but the last."""

    def __post_init__(self) -> None:
        among = self.among
        if among is not None and (min(among, default=0) < 0 or len(set(among)) != len(among)):
            raise ValueError(f"among {list(among)} must hold different steps from 0")
        if self.size < 1 or (among is not None and self.size > len(among)):
            raise ValueError(f"cannot draw {self.size} of the steps {list(among or [])}")

    def steps(self, num_steps: int, seed: int, iteration: int) -> list[int]:
        """Indices of the trained steps, ascending: drawn as Flow-Factory does, by randperm(seed + iteration)."""
        self.check(num_steps)
        among = tuple(range(num_steps - 1)) if self.among is None else self.among
        order = torch.randperm(len(among), generator=torch.Generator().manual_seed(seed + iteration))
        return sorted(among[place] for place in order[: self.size].tolist())

    def check(self, num_steps: int) -> None:
        """Raises ValueError when the last step may be drawn, or there are too few."""
        if self.among is not None:
            _check_end((min(self.among), max(self.among) + 1), num_steps)
        elif self.size > num_steps - 1:
            raise ValueError(f"cannot draw {self.size} of {num_steps} steps, of which the last is never trained")


def _check_end(bounds: tuple[int, int], num_steps: int) -> None:
    if bounds[1] > num_steps - 1:
        raise ValueError(
            f"window range {list(bounds)} reaches the last of {num_steps} steps, which is never trained: "
            f"its end must be at most {num_steps - 1}"
        )
