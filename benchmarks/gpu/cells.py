"""What a stage of the GPU suite is made of: cells, each measured by itself, and what all of them are told."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


class NotHereError(Exception):
    """This machine cannot do it, or need not: says what is missing. The cell is left out, which is no failure."""


@dataclass(frozen=True)
class Setting:
    """What every cell is told."""

    device: str
    """cuda or cpu."""
    tiny: bool
    """Sizes that a CPU computes in seconds: whether the suite works, and no figure."""
    output: Path
    """Where files that are kept go, beside the results."""
    scratch: Path
    """A folder for run folders, which is removed."""
    until: float
    """``time.monotonic()`` at which the stage is ended."""

    @property
    def left_s(self) -> float:
        """Seconds that the stage has left."""
        return self.until - time.monotonic()

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def size(self, real: Any, tiny: Any) -> Any:
        """One of two sizes."""
        return tiny if self.tiny else real

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any], repeats: int, warm_up: int = 3) -> float:
        """Mean seconds of one call of ``work`` out of ``repeats``, after some that do not count."""
        for _ in range(warm_up):
            work()
        self.wait()
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        self.wait()
        return (time.perf_counter() - started) / repeats


Cell = Callable[[Setting], dict[str, Any]]
"""Returns figures by name. An exception is a failure of this cell alone."""


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference by the norm of what is expected, in float64 on the CPU."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-300))


def bounded(values: dict[str, float], most: float) -> dict[str, float]:
    """The values, none of which may be above ``most`` (or NaN).

    Raises:
        AssertionError: names those that are, with all values.
    """
    wrong = [name for name, value in values.items() if not value <= most]
    assert not wrong, f"{', '.join(wrong)} above {most:g}: {values}"
    return values
