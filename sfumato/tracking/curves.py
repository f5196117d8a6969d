"""Curves of metrics as SVG, in the colours of ``charts.py``.

A report has up to hundreds of curves and is written again and again while a run waits, so they are written as text:
a figure of matplotlib takes 150 times as long.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from html import escape

import numpy as np

from sfumato.config.characters import in_one_line

WIDTH, HEIGHT = 331, 180
TOP, BOTTOM, LEFT, RIGHT = 12, 36, 44, 8
"""Widths of the margins around the plotted area; the left one grows with the labels."""
FONT_SIZE = 10
DIGIT_WIDTH, LABEL_WIDTH = 6.2, 24
"""Widths of a digit beside the y axis, and of the axis' own label with the gaps around it."""
MAX_X_TICKS, MAX_Y_TICKS = 6, 5
MAX_COLUMNS = 600
"""Of a curve with more points than twice this, the smallest and the largest of each column are drawn."""
LARGEST_DRAWN = 1e100
"""Larger values are left out of a curve: the limits of its axes would overflow a float."""
SMOOTH_FROM = 30  # a curve with more points than this gets a smoothed line over the raw one

Limits = tuple[float, float]


def curve_svg(name: str, values: dict[int, float], beside: dict[int, float] | None = None) -> str:
    """Draws one curve as an ``<svg>`` element for a page with ``theme_css``.

    Args:
        name: of the metric.
        values: by step.
        beside: another curve, dashed, with an axis of its own that is not labelled.
    """
    steps, ys = _drawable_points(values)
    axes = _Axes(_axis_limits(steps), _axis_limits(ys))
    drawn = []
    if beside:
        other_steps, other_ys = _drawable_points(beside)
        places = axes.to_page(other_steps, other_ys, _axis_limits(other_ys))
        drawn.append(_draw_line(places, "muted", 1.0, "stroke-dasharray:4 3"))
    if _is_smoothed(name, ys):
        drawn.append(_draw_line(axes.to_page(steps, ys), "faint", 1.0))
        drawn.append(_draw_line(axes.to_page(steps, smooth_values(ys)), "accent", 1.9))
    else:
        drawn.append(_draw_line(axes.to_page(steps, ys), "accent", 1.7))
        if len(ys) <= SMOOTH_FROM:
            drawn += [_draw_dot(x, y) for x, y in axes.to_page(steps, ys) if math.isfinite(y)]
    return axes.svg(name, drawn)


def overlaid_curves_svg(name: str, curves: Sequence[dict[int, float]]) -> str:
    """Draws a metric of several runs in one picture, as ``curve_svg`` does; colours as ``line_style`` gives them.

    Args:
        name: of the metric.
        curves: values by step, one for each run; an empty one is not drawn.
    """
    points = [_drawable_points(values) for values in curves]
    steps, ys = (np.concatenate(column) for column in zip(*points, strict=True))
    axes = _Axes(_axis_limits(steps), _axis_limits(ys))
    drawn = []
    for number, (run_steps, run_ys) in enumerate(points):
        if not len(run_steps):
            continue
        colour, dash = line_style(number)
        shown = smooth_values(run_ys) if _is_smoothed(name, run_ys) else run_ys
        places = axes.to_page(run_steps, shown)
        drawn.append(_draw_line(places, colour, 1.7, dash))
        if len(run_ys) <= SMOOTH_FROM:
            drawn += [_draw_dot(x, y, colour) for x, y in places if math.isfinite(y)]
    return axes.svg(name, drawn)


COLOURS = ("generate", "score", "update", "sync", "evaluate", "save")
"""Colours of ``charts.LIGHT`` for the curves of several runs, in their order."""
DASHES = ("", "stroke-dasharray:6 3", "stroke-dasharray:2 2")


def line_style(number: int) -> tuple[str, str]:
    """The colour's name and the dashes of a run's curve, by the run's number from 0 on."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def _is_smoothed(name: str, ys: np.ndarray) -> bool:
    """Whether a curve has noise to smooth away, which a schedule has not."""
    return len(ys) > SMOOTH_FROM and not re.search(r"(^|/)lr", name)


class _Axes:
    """The axes of a picture: the places of its points, rules and labels."""

    def __init__(self, x_limits: Limits, y_limits: Limits) -> None:
        self.x_limits = x_limits
        self.y_limits = y_limits
        self._x_ticks = find_ticks(*x_limits, MAX_X_TICKS, smallest_step=1.0)
        self._y_ticks = find_ticks(*y_limits, MAX_Y_TICKS)
        self._y_labels = format_ticks(self._y_ticks)
        self._left = max(LEFT, DIGIT_WIDTH * max(map(len, self._y_labels), default=0) + LABEL_WIDTH)

    def to_page(self, x: np.ndarray, y: np.ndarray, y_limits: Limits | None = None) -> np.ndarray:
        """Places ``[n, 2]`` in the picture."""
        limits = self.y_limits if y_limits is None else y_limits
        x_low, x_high = self.x_limits
        across = self._left + (x - x_low) / (x_high - x_low) * (WIDTH - RIGHT - self._left)
        down = HEIGHT - BOTTOM - (y - limits[0]) / (limits[1] - limits[0]) * (HEIGHT - BOTTOM - TOP)
        return np.stack([across, down], axis=-1)

    def svg(self, name: str, drawn: Sequence[str]) -> str:
        """The whole picture, with these lines and dots."""
        left = self._left
        x_places = self.to_page(np.array(self._x_ticks), np.full(len(self._x_ticks), self.y_limits[0]))[:, 0]
        y_places = self.to_page(np.full(len(self._y_ticks), self.x_limits[0]), np.array(self._y_ticks))[:, 1]
        rules = [_draw_rule(x, TOP, x, HEIGHT - BOTTOM) for x in x_places]
        rules += [_draw_rule(left, y, WIDTH - RIGHT, y) for y in y_places]
        rules += [
            _draw_rule(left, TOP, left, HEIGHT - BOTTOM),
            _draw_rule(left, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM),
        ]
        labels = [
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 13}" text-anchor="middle">{label}</text>'
            for x, label in zip(x_places, format_ticks(self._x_ticks), strict=True)
        ]
        labels += [
            f'<text class="y" x="{left - 5:.1f}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>'
            for y, label in zip(y_places, self._y_labels, strict=True)
        ]
        labels.append(f'<text x="{(left + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
        labels.append(
            f'<text transform="translate(11 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
            f"{escape(in_one_line(unit_of(name)))}</text>"
        )
        return (
            f'<svg role="img" aria-label="{escape(f"{name} over steps")}" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'font-size="{FONT_SIZE}">{"".join(rules)}<g style="fill:var(--muted)">{"".join(labels)}</g>'
            f"{''.join(drawn)}</svg>"
        )


def _drawable_points(values: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values float64 ``[n]``, those that are too large for the axes as NaN."""
    ys = np.array(list(values.values()), dtype=float)
    ys[np.abs(ys) > LARGEST_DRAWN] = np.nan
    return np.array(list(values), dtype=float), ys


def _axis_limits(values: np.ndarray) -> Limits:
    """The ends of an axis: those of the values and a twentieth more; of equal values, a range around them."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return 0.0, 1.0
    low = float(finite.min())
    high = float(finite.max())
    margin = 0.05 * (high - low)
    if high - low <= 1e-13 * max(abs(low), abs(high)):
        margin = 0.05 * abs(low) or 1.0
    return low - margin, high + margin


def find_ticks(low: float, high: float, most: int, smallest_step: float = 0.0) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten between two limits, at most so many."""
    raw_step = max((high - low) / most, smallest_step)
    power = 10.0 ** math.floor(math.log10(raw_step))
    # 2.5 steps would not be integers where these are asked for
    factors = (1, 2, 5, 10) if smallest_step else (1, 2, 2.5, 5, 10)
    step = power * next(factor for factor in factors if factor * power >= raw_step * (1 - 1e-9))
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def format_ticks(ticks: Sequence[float]) -> list[str]:
    """The labels of an axis, with as many digits as tell them apart; powers of ten for large and small numbers."""
    largest = max(map(abs, ticks), default=0.0)
    spacing = min((b - a for a, b in itertools.pairwise(ticks)), default=largest)
    if largest and not 1e-3 <= largest < 1e5 and spacing > 1e-6 * largest:
        exponent = math.floor(math.log10(largest))
        scaled = [tick / 10.0**exponent for tick in ticks]
        digits = _count_digits(scaled, spacing / 10.0**exponent)
        return [f"{tick:.{digits}f}e{exponent}" if tick else "0" for tick in scaled]
    return [f"{tick:.{_count_digits(ticks, spacing)}f}" for tick in ticks]


def _count_digits(ticks: Sequence[float], spacing: float) -> int:
    """The fewest digits behind the point that say each tick to a thousandth of the distance between two."""
    for digits in range(16):
        if all(abs(round(tick, digits) - tick) <= 1e-3 * spacing for tick in ticks):
            return digits
    return 16


def _draw_line(places: np.ndarray, colour: str, width: float, style: str = "") -> str:
    """A line through ``[n, 2]``, interrupted where a value is missing."""
    finite = np.isfinite(places).all(axis=-1)
    pieces = np.split(places, np.flatnonzero(~finite))
    paths = []
    for piece in pieces:
        piece = piece[np.isfinite(piece).all(axis=-1)]
        if len(piece) > 1:
            paths.append("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in _thin_line(piece)))
    return (
        f'<path d="{"".join(paths)}" style="fill:none;stroke: var(--{colour});stroke-width:{width};'
        f'stroke-linejoin:round;{style}"/>'
    )


def _thin_line(piece: np.ndarray) -> np.ndarray:
    """Of a long line, the lowest and the highest point of each column: it looks the same."""
    if len(piece) <= 2 * MAX_COLUMNS:
        return piece
    chosen = {0, len(piece) - 1}
    for column in np.array_split(np.arange(len(piece)), MAX_COLUMNS):
        chosen |= {int(column[piece[column, 1].argmin()]), int(column[piece[column, 1].argmax()])}
    return piece[sorted(chosen)]


def _draw_dot(x: float, y: float, colour: str = "accent") -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.8" style="fill:var(--{colour})"/>'


def _draw_rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" style="stroke:var(--line);stroke-width:0.8"/>'
    )


def unit_of(name: str) -> str:
    """The unit of a metric, for the axis of its curve, from the metric's name."""
    last = name.rsplit("/", 1)[-1]
    if last.endswith(("_mib", "_gib")):
        return last[-3].upper() + "iB"
    if "_per_s" in last:
        counted, _, divisor = last.partition("_per_s")
        return f"{counted.rpartition('_')[2].replace('flops', 'FLOP')}/s{divisor.replace('_', ' ')}"
    return "seconds" if last.endswith("_s") else last[:28]


def smooth_values(values: np.ndarray) -> np.ndarray:
    """Centred moving mean ``[n]`` over about a fifteenth of the points; near the ends, over fewer points."""
    half = max(2, len(values) // 30)
    window = np.ones(2 * half + 1)
    return np.convolve(values, window)[half:-half] / np.convolve(np.ones_like(values), window)[half:-half]


def smooth_at(values: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """``smooth_values(values)[indices]`` but for rounding, at the cost of these points alone.

    Args:
        values: finite floats [n], at least one.
        indices: integers [m].
    """
    half = max(2, len(values) // 30)
    starts = np.maximum(indices - half, 0)
    ends = np.minimum(indices + half + 1, len(values))
    # reduceat takes no end behind the last value, so there is a zero behind it
    slices = np.stack([starts, ends], axis=1).ravel()
    return np.add.reduceat(np.append(values, 0.0), slices)[::2] / (ends - starts)
