"""The numbers of a run in memory, and what of a curve a screen can show."""

from __future__ import annotations

import itertools
import math
import operator
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sfumato.tracking.curves import SMOOTH_FROM, smooth_at
from sfumato.tracking.json_lines import is_number, is_step

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

    def extend(self, steps: array[float], values: Sequence[float]) -> None:
        """Adds values; one of a step that has a value replaces it."""
        is_later = not self.steps or not steps or steps[0] > self.steps[-1]
        if is_later and all(map(operator.lt, steps, steps[1:])):
            self.steps.extend(steps)
            self.values.extend(values)
            return
        for step, value in zip(steps, values, strict=True):
            self.add(step, value)

    def add(self, step: float, value: float) -> None:
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
        """Whether all values are the same one, or none is finite."""
        values = self.arrays()[1]
        return not np.isfinite(values).any() or bool((values == values[0]).all())

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

    def add(self, records: Sequence[Mapping[str, object]]) -> None:
        """Takes lines of ``metrics.jsonl`` or ``timings.jsonl`` in their order; what is no number is left out."""
        for names, block in itertools.groupby(records, tuple):
            self._add_block(names, list(block))

    def _add_block(self, names: tuple[str, ...], records: Sequence[Mapping[str, object]]) -> None:
        """Takes lines with the same names. A long run has millions of values, so columns are taken as a whole."""
        columns = dict(zip(names, zip(*(record.values() for record in records), strict=True), strict=True))
        all_steps = columns.pop("step", ())
        is_counted = [is_step(step) for step in all_steps]
        steps = array("d", itertools.compress(all_steps, is_counted))
        if not steps:
            return
        for name, column in columns.items():
            values = column if all(is_counted) else tuple(itertools.compress(column, is_counted))
            if set(map(type, values)) == {float}:
                self._extend_series(name, steps, values)
                continue
            numbers = {
                step: math.nan if value is None else float(value)
                for step, value in zip(steps, values, strict=True)
                if value is None or is_number(value)
            }
            self._extend_series(name, array("d", numbers), tuple(numbers.values()))

    def _extend_series(self, name: str, steps: array[float], values: Sequence[float]) -> None:
        if not steps:
            return
        curve = self.curves.get(name)
        if curve is None:
            if len(self.curves) >= MOST_METRICS:
                self.num_left_out += len(values)
                return
            curve = self.curves[name] = Curve()
        curve.extend(steps, values)

    @property
    def last_step(self) -> int:
        """The newest step of any metric; 0 where there is none."""
        return int(max((curve.steps[-1] for curve in list(self.curves.values())), default=0))

    def series(self) -> CurvesView:
        """The values by name and step, as ``series_of`` gives them."""
        return CurvesView(dict(sorted(self.curves.items())))


class CurvesView(Mapping[str, Mapping[int, float | None]]):
    """Curves as mappings of steps to values, each made when it is asked for: of 200 metrics a page needs some."""

    def __init__(self, curves: Mapping[str, Curve]) -> None:
        self._curves = curves
        self._made: dict[str, dict[int, float | None]] = {}

    def __getitem__(self, name: str) -> dict[int, float | None]:
        if name not in self._made:
            steps, values = self._curves[name].arrays()
            self._made[name] = dict(zip(map(int, steps.tolist()), map(as_json, values.tolist()), strict=True))
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._curves

    def __iter__(self) -> Iterator[str]:
        return iter(self._curves)

    def __len__(self) -> int:
        return len(self._curves)


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
    in_range = np.flatnonzero((steps >= first) & (steps <= last))
    total = len(in_range)
    if total > 2 * width:
        in_range = in_range[_extreme_indices(steps[in_range], values[in_range], width)]
    is_smoothed = len(values) > SMOOTH_FROM and bool(np.isfinite(values).all())
    return {
        "x": steps[in_range].tolist(),
        "y": [as_json(value) for value in values[in_range].tolist()],
        "smooth": [as_json(value) for value in smooth_at(values, in_range).tolist()] if is_smoothed else None,
        "total": total,
    }


def _extreme_indices(steps: np.ndarray, values: np.ndarray, width: int) -> np.ndarray:
    """Indices of the lowest and the highest value of each of ``width`` columns, and of the first and the last point."""
    span = max(steps[-1] - steps[0], 1.0)
    columns = np.minimum((steps - steps[0]) / span * width, width - 1).astype(np.int64)
    starts = np.flatnonzero(np.diff(columns, prepend=-1))
    lowest = _first_lowest(np.where(np.isfinite(values), values, np.inf), starts)
    highest = _first_lowest(np.where(np.isfinite(values), -values, np.inf), starts)
    return np.unique(np.concatenate([lowest, highest, [0, len(steps) - 1]]))


def _first_lowest(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Indices [m] of the first of the lowest values [n] of each stretch that begins at one of ``starts`` [m]."""
    lengths = np.diff(starts, append=len(values))
    is_lowest = np.flatnonzero(values == np.repeat(np.minimum.reduceat(values, starts), lengths))
    return is_lowest[np.searchsorted(is_lowest, starts)]


def as_json(value: float) -> float | None:
    """A number as JSON has it: None for one that is not finite."""
    return value if math.isfinite(value) else None
