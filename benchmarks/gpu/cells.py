"""What a stage of the GPU suite is made of: cells, each measured by itself, and what all of them are told."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
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
    """cuda or cpu; cpu:0 is the device that the tests pretend."""
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


@dataclass(frozen=True)
class Bound:
    """What a figure should be, and what to do when it is not. A stage has them in its ``BOUNDS``."""

    figure: str
    """Name of the value."""
    limit: float
    """The largest value that is right; with ``least`` the smallest."""
    remedy: str
    least: bool = False
    cells: str = ""
    """Regular expression that the names of the cells contain for which it holds; empty: all that have the figure."""
    real: bool = False
    """Whether it holds for real sizes on a GPU alone, as those of speed and memory do."""

    def text(self) -> str:
        """The bound as a table shows it."""
        return f"{'>=' if self.least else '<='} {self.limit:g}"

    def is_met_by(self, value: float) -> bool:
        """Whether a value is right; NaN is not."""
        return value >= self.limit if self.least else value <= self.limit

    def judge(self, value: float) -> dict[str, Any]:
        """The entry of a line of results."""
        met = self.is_met_by(value)
        return {"figure": self.figure, "bound": self.text(), "met": met, "remedy": self.remedy}


def judge(bounds: Iterable[Bound], cell: str, values: dict[str, Any], setting: Setting) -> list[dict[str, Any]]:
    """What the bounds of a stage say of a cell's figures."""
    in_earnest = setting.on_gpu and not setting.tiny
    return [
        bound.judge(float(values[bound.figure]))
        for bound in bounds
        if bound.figure in values and re.search(bound.cells, cell) and (in_earnest or not bound.real)
    ]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference by the norm of what is expected, in float64 on the CPU."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-300))
