"""The reward that a sample's environment or agent gave while it was drawn."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from sfumato.rewards.base import Failure, Reward, Sample


@dataclass(frozen=True, kw_only=True)
class EnvironmentReward(Reward):
    """What the environment or the agent of the rollout gave: the sum over its steps."""

    type: ClassVar[str] = "environment"
    modality: ClassVar[str] = "text"

    key: str = "environment_reward"
    """What of the rollout's findings is the reward, such as tool_errors."""

    def score(self, samples: list[Sample]) -> Sequence[float | Failure]:
        """The values; a Failure where the rollout has found none."""
        return [self._read_value(sample) for sample in samples]

    def _read_value(self, sample: Sample) -> float | Failure:
        value = sample.metadata.get(self.key)
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            columns = ", ".join(sorted(sample.metadata)) or "none"
            return Failure(f"the rollout gave no number {self.key!r}; what it gave is {columns}")
        # whoever calls score checks it: of an integer beyond the largest float only its own sample has no value
        return cast(float, value)
