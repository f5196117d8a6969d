"""Parts of an algorithm that take their time at random, and compute what the ones do that they stand for."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from sfumato.algorithms.dynamics import FlowSDE
from sfumato.rewards.pixels import Brightness


@dataclass(frozen=True)
class SlowSDE(FlowSDE):
    """Flow-SDE that waits now and then, in generation and in the update."""

    type: ClassVar[str] = "slow_sde"

    most_s: float = 0.1

    def step(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(random.Random(time.time_ns()).uniform(0, self.most_s))
        return super().step(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class SlowBrightness(Brightness):
    """Brightness that comes late."""

    type: ClassVar[str] = "slow_brightness"

    most_s: float = 0.1

    def score(self, samples: list) -> list:
        time.sleep(random.Random(time.time_ns()).uniform(0, self.most_s))
        return super().score(samples)
