"""Windows: which denoising steps are stochastic and trained. The last step (sigma' = 0) never is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
        if self.range[1] > num_steps - 1:
            raise ValueError(
                f"window range {list(self.range)} reaches the last of {num_steps} steps, which is never trained: "
                f"its end must be at most {num_steps - 1}"
            )
