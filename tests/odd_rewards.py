"""Rewards that tests send to processes; this file imports little, since every one of them imports it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sfumato.errors import DataError, MissingDependencyError
from sfumato.rewards.base import Reward, Sample


@dataclass(frozen=True, kw_only=True)
class Awkward(Reward):
    """What goes wrong while a reward is loaded or sent; ``fine`` is the number of its process."""

    how: Any = "fine"

    def prepare(self):
        if self.how == "missing":
            raise MissingDependencyError("pip install it")
        if self.how == "broken":
            raise RuntimeError("out of luck")
        if self.how == "gone":
            os._exit(7)

    def score(self, samples):
        if any(each.prompt == "no row" for each in samples):
            raise DataError("the row of 'no row' is broken")
        time.sleep(0.05)
        return [float(os.getpid())] * len(samples)


@dataclass(frozen=True, kw_only=True)
class Rank(Reward):
    """Brightness above that of the group's mean."""

    groupwise: ClassVar[bool] = True

    def score(self, samples):
        means = np.array([each.image.mean() for each in samples])
        return means - means.mean()


def redness(sample: Sample) -> np.float32:
    """A reward of one's own: a float32 that no short decimal equals."""
    return np.float32(sample.image[..., 0].mean() / 3)
