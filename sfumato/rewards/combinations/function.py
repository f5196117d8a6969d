"""A function of one's own of all rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sfumato.errors import ConfigError
from sfumato.rewards.combinations.combination import Combination
from sfumato.rewards.scoring.calls import describe_error
from sfumato.rewards.scoring.import_path import import_function


@dataclass(frozen=True)
class FunctionCombination(Combination):
    """What a function of your own makes of the values."""

    type: ClassVar[str] = "function"
    takes_metadata: ClassVar[bool] = True

    path: str
    """Where it stands: my_module:my_function, or folder/file.py:my_function. It is called with {label: float64 [B]} and
    B rows of metadata, and returns B numbers."""

    def prepare(self) -> None:
        """Imports the function. Raises ConfigError when there is none."""
        import_function(self.path)

    def combine(
        self, values: Mapping[str, np.ndarray], weights: Mapping[str, float], metadata: Sequence[dict[str, Any]] | None
    ) -> np.ndarray:
        """What the function returns, [B]; weights are its own business.

        Raises:
            ConfigError: it raised, or returned something else.
        """
        del weights
        function, num_samples = import_function(self.path), len(next(iter(values.values())))
        try:
            total = np.asarray(function({name: each.copy() for name, each in values.items()}, metadata), np.float64)
        except Exception as error:
            where = getattr(getattr(function, "__code__", None), "co_filename", None)
            raise ConfigError(f"reward.combination {self.path}: {describe_error(error, where)}") from error
        if total.shape != (num_samples,):
            raise ConfigError(
                f"reward.combination {self.path} returned shape {list(total.shape)} for {num_samples} samples"
            )
        return total
