"""A Python function as a reward, in a process that can be ended."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sfumato.config.trust import SWITCH, trusts_code
from sfumato.config.user_functions import import_function
from sfumato.errors import ConfigError, UserError
from sfumato.rewards.base import Failure, Reward, Sample
from sfumato.rewards.function_signature import check_signature, place_of
from sfumato.rewards.scoring.calls import TIMED_OUT, describe_error

CALL_OVERHEAD_S = 1.0
"""Seconds that a call of many coroutines may take beyond their own timeouts, before its process is taken to hang."""


@dataclass(frozen=True, kw_only=True)
class FunctionReward(Reward):
    """What a function of your own returns for a sample, or for all samples of a group."""

    type: ClassVar[str] = "function"
    cached: ClassVar[bool] = True

    path: str
    """Where it stands: my_module:my_function, or folder/file.py:my_function. It is called with a Sample and returns a
    number; it may be async."""
    groupwise: bool = False  # type: ignore[misc]  # the same for all objects of other classes
    """Call it with the list of a group's samples instead; it returns as many numbers."""
    concurrency: int = 1
    """Samples that an async function is working on at the same time."""
    memory_mib: int = 0  # type: ignore[misc]
    """Address space that its process may take, the 0.2 GiB of Python itself included; 0 is no limit."""
    timeout_s: float = 30.0
    """Seconds that a sample, or a group, may take; then it has no reward."""
    process: bool = True
    """Run in a process of its own, which a timeout ends; false runs in a thread, which a timeout leaves behind."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.concurrency < 1 or (self.concurrency > 1 and self.groupwise):
            raise ConfigError(
                f"concurrency of reward {self.label!r} must be at least 1, and 1 with groupwise, not {self.concurrency}"
            )
        if self.memory_mib < 0 or (self.memory_mib and not self.process):
            raise ConfigError(f"memory_mib of reward {self.label!r} must be at least 0, and 0 without process")

    def seen(self, sample: Sample) -> list[Sample]:
        """As ``Reward.seen``; a video with sound is given whole."""
        return [sample] if sample.sound is not None else super().seen(sample)

    def scores(self, modality: str) -> bool:
        """Any kind: the function is given the whole sample."""
        return True

    @property
    def label(self) -> str:
        """``name``, else that of the function."""
        return self.name or self.path.rpartition(":")[2]

    @property
    def source_file(self) -> str | None:
        """Where the function stands."""
        place = place_of(import_function(self.path))
        return None if place is None else place[0]

    def prepare(self) -> None:
        """Imports the function. Raises ConfigError when there is none, or when it cannot be called as it would be."""
        try:
            function = import_function(self.path)
            check_signature(function, self.path, self.groupwise)
            is_async = inspect.iscoroutinefunction(function)
        except ConfigError as error:
            raise ConfigError(f"reward {self.label!r}: {error}") from error
        if self.concurrency > 1 and not is_async:
            raise ConfigError(
                f"concurrency of reward {self.label!r} is {self.concurrency}, but {self.path} is no async function: "
                "leave it out"
            )

    def check_installed(self) -> str:
        """See ``Reward``."""
        if not trusts_code():
            return f"{self.path}, which is imported with {SWITCH} alone"
        self.prepare()
        return ""

    def plan_calls(self, samples: Sequence[Sample]) -> list[list[int]]:
        """One sample after the other, unless they are worked on together."""
        # each call has a timeout of its own, so that a sample that takes too long costs no other its value
        if self.groupwise or self.concurrency > 1:
            return super().plan_calls(samples)
        return [[index] for index in range(len(samples))]

    def call_timeout_s(self, num_samples: int) -> float:
        """The timeout of one sample, or, of many together, what they may take in turns."""
        if self.concurrency == 1:
            return self.timeout_s
        return math.ceil(num_samples / self.concurrency) * self.timeout_s + CALL_OVERHEAD_S

    def score(self, samples: list[Sample]) -> Sequence[Any]:
        """What the function returns."""
        function = import_function(self.path)
        if self.concurrency > 1:
            return asyncio.run(self._score_together(function, samples))
        # an async function returns coroutines, which are run one by one; who calls score checks the values
        results = [function(samples)] if self.groupwise else [function(sample) for sample in samples]
        results = [asyncio.run(result) if inspect.iscoroutine(result) else result for result in results]
        return results[0] if self.groupwise else results

    async def _score_together(self, function: Callable[..., Any], samples: list[Sample]) -> list[Any]:
        """What the async function returns for each sample, ``concurrency`` at a time; a Failure where it raised."""
        free = asyncio.Semaphore(self.concurrency)

        async def score_one(sample: Sample) -> object:
            async with free:
                limit = asyncio.timeout(self.timeout_s)
                try:
                    async with limit:
                        return await function(sample)
                except UserError:  # a mistake that a person has to mend stops the run
                    raise
                except Exception as error:
                    # an expired limit shows as TimeoutError, which the function itself may raise as well
                    if limit.expired():
                        return Failure(f"{TIMED_OUT} after {self.timeout_s:g} s")
                    return Failure(describe_error(error, self.source_file))

        return await asyncio.gather(*map(score_one, samples))
