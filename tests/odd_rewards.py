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
        if any(sample.prompt == "no row" for sample in samples):
            raise DataError("the row of 'no row' is broken")
        time.sleep(0.05)
        return [float(os.getpid())] * len(samples)


@dataclass(frozen=True, kw_only=True)
class Rank(Reward):
    """Brightness above that of the group's mean."""

    groupwise: ClassVar[bool] = True

    def score(self, samples):
        means = np.array([sample.image.mean() for sample in samples])
        return means - means.mean()


def redness(sample: Sample) -> np.float32:
    """A reward of one's own: a float32 that no short decimal equals."""
    return np.float32(sample.image[..., 0].mean() / 3)


@dataclass(frozen=True, kw_only=True)
class Spoiler(Reward):
    """Changes all that it is given, in every way that needs no ill will, and gives 1."""

    groupwise: ClassVar[bool] = True
    takes_video: ClassVar[bool] = True

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        metadata.clear()

    def score(self, samples):
        import torch

        values = [1.0] * len(samples)
        for sample in samples:
            sample.image[:] = 0
            torch.from_numpy(sample.image).add_(7)
            if sample.source is not None:
                sample.source.fill(0)
            sample.metadata["target"] = "spoiled"
            sample.metadata["list"].append("spoiled")
            object.__setattr__(sample, "prompt", "spoiled")
        samples.clear()
        return values


def spoil(values: dict[str, np.ndarray], metadata: list[dict[str, Any]]) -> np.ndarray:
    """A combination of one's own that changes what it is given."""
    for array in values.values():
        array += 100
    for row in metadata:
        row["list"].append("spoiled")
    return np.ones(len(metadata))


@dataclass(frozen=True, kw_only=True)
class Blackener(Reward):
    """Writes into the pictures of any prompt."""

    def score(self, samples):
        for sample in samples:
            sample.image[:] = 0
        return [0.0] * len(samples)


@dataclass(frozen=True, kw_only=True)
class Fails(Reward):
    """Gives the first sample of a call no value, as a service that is overloaded may."""

    def score(self, samples):
        return [float("nan")] + [1.0] * (len(samples) - 1)
