"""The numbers of a run in memory, and what of a curve a screen can show."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from sfumato.tracking.curves import SMOOTH_FROM, smooth
from sfumato.tracking.json_lines import Series, is_number, is_step

MOST_METRICS = 5000
"""Names of metrics that are held: a run has some hundreds, and a file from elsewhere must not fill the memory."""


@dataclass
class Curve:
    """The values of one metric, in the order in which they were logged.

    Attributes:
        steps: float64 [n], ascending.
        values: float64 [n], NaN where a value was not finite.
    """

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Adds a value; one of a step that has a value replaces it."""
        if self.steps and step <= self.steps[-1]:
            index = int(np.searchsorted(np.frombuffer(self.steps), step))
            if self.steps[index] == step:
                self.values[index] = value
            else:
                self.steps.insert(index, step)
                self.values.insert(index, value)
            return
        self.steps.append(step)
        self.values.append(value)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of steps and values; another thread may go on adding to them meanwhile."""
        # tobytes, since an array whose buffer numpy looks at cannot grow
        steps, values = np.frombuffer(self.steps.tobytes()), np.frombuffer(self.values.tobytes())
        length = min(len(steps), len(values))
        return steps[:length], values[:length]

    @property
    def is_flat(self) -> bool:
        """Whether all values are the same one."""
        values = self.arrays()[1]
        values = values[np.isfinite(values)]
        return len(values) == 0 or bool((values == values[0]).all())

    @property
    def last(self) -> float | None:
        """The newest value; None where it is not finite."""
        return as_json(self.values[-1]) if self.values else None


class MetricTable:
    """All curves of a file of metrics."""

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.num_left_out = 0
        """Values of metrics beyond ``MOST_METRICS``."""

    def clear(self) -> None:
        """Forgets everything."""
        self.curves.clear()
        self.num_left_out = 0

    def add(self, record: Mapping[str, object]) -> None:
        """Takes a line of ``metrics.jsonl`` or ``timings.jsonl``; what is no number is left out."""
        step = record.get("step")
        if not is_step(step):
            return
        for name, value in record.items():
            if name == "step" or not (value is None or is_number(value)):
                continue
            curve = self.curves.get(name)
            if curve is None:
                if len(self.curves) >= MOST_METRICS:
                    self.num_left_out += 1
                    continue
                curve = self.curves[name] = Curve()
            curve.add(step, math.nan if value is None else float(value))

    @property
    def last_step(self) -> int:
        """The newest step of any metric; 0 where there is none."""
        return int(max((curve.steps[-1] for curve in list(self.curves.values())), default=0))

    def series(self, names: Iterable[str] | None = None) -> Series:
        """The values by name and step, as ``series_of`` gives them."""
        chosen = self.curves if names is None else {name: self.curves[name] for name in names if name in self.curves}
        return {
            name: {int(step): as_json(float(value)) for step, value in zip(*curve.arrays(), strict=True)}
            for name, curve in sorted(chosen.items())
        }


def reduce_curve(curve: Curve, width: int, first: float = -math.inf, last: float = math.inf) -> dict[str, object]:
    """What a picture of so many pixels can show of a curve: the lowest and the highest value of each pixel.

    Args:
        curve: the metric.
        width: pixels of the picture.
        first: the first step that is shown.
        last: the last one.

    Returns:
        ``x`` and ``y``, at most ``2 * width`` points in the order of steps; ``smooth``, values of the moving mean at
        the same steps, where the curve is long enough for one, else None; ``total``, the number of points in the range.
    """
    steps, values = curve.arrays()
    smoothed = smooth(values) if len(values) > SMOOTH_FROM and bool(np.isfinite(values).all()) else None
    in_range = np.flatnonzero((steps >= first) & (steps <= last))
    if len(in_range) > 2 * width:
        in_range = in_range[_extremes(steps[in_range], values[in_range], width)]
    return {
        "x": steps[in_range].tolist(),
        "y": [as_json(value) for value in values[in_range].tolist()],
        "smooth": None if smoothed is None else [as_json(value) for value in smoothed[in_range].tolist()],
        "total": int(((steps >= first) & (steps <= last)).sum()),
    }


def _extremes(steps: np.ndarray, values: np.ndarray, width: int) -> np.ndarray:
    """Indices of the lowest and the highest value of each of ``width`` columns, and of the first and the last point."""
    span = max(steps[-1] - steps[0], 1.0)
    columns = np.minimum((steps - steps[0]) / span * width, width - 1).astype(np.int64)
    # the order within a column: by value, NaN last, so that the first of a column is its lowest
    lowest_first = np.lexsort((np.where(np.isfinite(values), values, np.inf), columns))
    highest_first = np.lexsort((np.where(np.isfinite(values), -values, np.inf), columns))
    starts = np.flatnonzero(np.diff(columns[lowest_first], prepend=-1))
    return np.unique(np.concatenate([lowest_first[starts], highest_first[starts], [0, len(steps) - 1]]))


def as_json(value: float) -> float | None:
    """A number as JSON has it: None for one that is not finite."""
    return value if math.isfinite(value) else None
