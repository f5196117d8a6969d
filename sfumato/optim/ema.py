"""Exponential moving average of trained weights.

diffusers' EMAModel averages all parameters and starts its decay one step later than flow_grpo; this one averages only
what is trained and follows flow_grpo's schedule, so that published settings mean the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from sfumato.algorithms.decay import Decay, WarmUp
from sfumato.parallel.shards import local_shard, trainable_parameters

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Ema:
    """Float32 averages of a module's trainable parameters.

    They are the moving average of a run, or one of the policies that RL derives from the trained one (old, ema,
    reference).
    """

    def __init__(self, module: nn.Module, decay: float | Decay, interval: int = 1) -> None:
        """Starts at the module's weights.

        Args:
            module: what is averaged.
            decay: a schedule, or the largest decay of flow_grpo's.
            interval: calls of ``update`` from one move to the next.
        """
        self.decay = WarmUp(decay) if isinstance(decay, float | int) else decay
        self.interval = interval
        self.num_updates = 0
        """Optimiser steps that were reported."""
        self.module = module
        self.averages = {name: weight.clone() for name, weight in self._weights().items()}
        """This rank's shard of the average of each trainable parameter, by name."""

    @torch.no_grad()
    def update(self) -> None:
        """Call it after every optimiser step; moves the averages towards the weights when it is due."""
        step = self.num_updates
        self.num_updates += 1
        if self.num_updates % self.interval:
            return
        weights = self._weights()
        share = 1 - self.decay.at(step)
        torch._foreach_lerp_(  # pyright: ignore[reportPrivateImportUsage]
            list(self.averages.values()), [weights[name] for name in self.averages], share
        )

    @property
    def has_caught_up(self) -> bool:
        """Whether the averages equal the weights as of the last ``update``, or of the beginning before the first."""
        return self.num_updates == 0 or (self.interval == 1 and self.decay.at(self.num_updates - 1) == 0)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the module has the averaged weights; afterwards it has the trained ones again."""
        weights = self._weights()
        trained_weights = {name: weight.clone() for name, weight in weights.items()}
        for name, average in self.averages.items():
            weights[name].copy_(average)
        try:
            yield
        finally:
            # Looked up again, since that has FSDP put away the weights that it gathered for what ran inside.
            for name, weight in self._weights().items():
                weight.copy_(trained_weights[name])

    def _weights(self) -> dict[str, Tensor]:
        return {name: local_shard(parameter.detach()) for name, parameter in trainable_parameters(self.module).items()}


def averaged_weights(ema: Ema | None) -> AbstractContextManager[None]:
    """A context with the averaged weights in the module; without an average the weights stay as they are."""
    return nullcontext() if ema is None else ema.applied()


def with_averages(ema: Ema | None, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function that does what ``function`` does, each time with the averaged weights in the module."""

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with averaged_weights(ema):
            return function(*args, **kwargs)

    return call
