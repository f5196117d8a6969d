"""How fast a second set of weights follows the policy: copy <- d copy + (1 - d) policy, with d = decay.at(step).

Old policies, sampling policies, references and moving averages differ in this schedule alone. ``step`` is the number
of iterations (for a moving average: of optimiser steps) before this one, so a resumed run needs nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol


class Decay(Protocol):
    """A schedule of the decay d over steps."""

    def at(self, step: int) -> float:
        """The decay d in [0, 1] at ``step`` (0 is the first)."""
        ...


@dataclass(frozen=True)
class Constant:
    """The same decay always: 1 is a frozen copy, 0 the policy itself (DiffusionNFT's type 0)."""

    type: ClassVar[str] = "constant"

    value: float = 1.0
    """The decay."""

    def __post_init__(self) -> None:
        if not 0 <= self.value <= 1:
            raise ValueError(f"value must be from 0 to 1, not {self.value}")

    def at(self, step: int) -> float:
        """As ``Decay.at``."""
        del step
        return self.value


FROZEN = Constant(1.0)
"""A copy that never changes: the default of the reference."""


@dataclass(frozen=True)
class Linear:
    """min(first + slope (step - start), limit), and ``first`` before ``start``.

    DiffusionNFT's type 1 is (slope 0.001, limit 0.5), its type 2 (start 75, slope 0.0075, limit 0.999); AWM's and
    DGPO's second policy is (slope 0.001, limit 0.3).
    """

    type: ClassVar[str] = "linear"

    slope: float = 0.001
    """Rise with each step."""
    limit: float = 0.5
    """Largest decay, in [0, 1]."""
    start: int = 0
    """Step at which the rise begins."""
    first: float = 0.0
    """Decay up to then, in [0, 1]."""

    def __post_init__(self) -> None:
        if not (0 <= self.first <= 1 and 0 <= self.limit <= 1 and self.slope >= 0):
            raise ValueError("first and limit must be from 0 to 1, and slope not below 0")

    def at(self, step: int) -> float:
        """As ``Decay.at``."""
        return self.first if step < self.start else min(self.first + self.slope * (step - self.start), self.limit)


@dataclass(frozen=True)
class WarmUp:
    """min((1 + step) / (10 + step), limit): flow_grpo's moving average (flow_grpo, ema.py)."""

    type: ClassVar[str] = "warm_up"

    limit: float = 0.9
    """Largest decay, in [0, 1)."""

    def __post_init__(self) -> None:
        if not 0 <= self.limit < 1:
            raise ValueError(f"limit must be at least 0 and below 1, not {self.limit}")

    def at(self, step: int) -> float:
        """As ``Decay.at``."""
        return min((1 + step) / (10 + step), self.limit)


@dataclass(frozen=True)
class Refresh:
    """A frozen copy that is replaced by the policy every so many steps: online DPO's reference (flow_grpo,
    ref_update_step)."""

    type: ClassVar[str] = "refresh"

    every: int = 40
    """Steps from one copy to the next."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1, not {self.every}")

    def at(self, step: int) -> float:
        """As ``Decay.at``."""
        return 0.0 if (step + 1) % self.every == 0 else 1.0
