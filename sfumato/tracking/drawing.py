"""Drawings for pages: SVG of matplotlib figures whose colours follow the light and the dark theme of the reader."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIGHT: Mapping[str, str] = {
    **{"page": "#f7f7f5", "card": "#ffffff", "ink": "#1d2129", "muted": "#667080", "line": "#e4e5e8"},
    **{"accent": "#2f6db3", "faint": "#a9c5e4", "good": "#1b7f4b", "bad": "#b3372f"},
    **{"generate": "#2f6db3", "score": "#e0912a", "update": "#1b8a50", "sync": "#a33fb5"},
    **{"evaluate": "#25a3b0", "save": "#8b5e3c", "load": "#667080", "other": "#a4abb5"},
}
"""Colours by name on a light page; a style sheet has each as ``--<name>``."""

DARK: Mapping[str, str] = {
    **{"page": "#14161a", "card": "#1c1f25", "ink": "#e6e8ec", "muted": "#98a1b0", "line": "#30353e"},
    **{"accent": "#6fa8e8", "faint": "#3b5878", "good": "#5cc58f", "bad": "#ee8279"},
    **{"generate": "#6fa8e8", "score": "#f0b75e", "update": "#58c48d", "sync": "#d58be6"},
    **{"evaluate": "#5fd3df", "save": "#c79a75", "load": "#98a1b0", "other": "#69717d"},
}
"""The same on a dark page."""

CURVE_SIZE = (4.6, 2.5)
"""Inches of a curve's picture."""
CURVE_AREA = (0.2, 0.2, 0.98, 0.92)
"""Left, bottom, right and top of a curve's axes in its picture: a layout fitted to each doubles the time."""
DIGIT_WIDTH, LABEL_WIDTH = 0.09, 0.3
"""Inches of a digit beside the y axis, and of the axis' own label."""
SMOOTH_FROM = 30  # a curve with more points than this gets a smoothed line over the raw one


def stand_in(name: str) -> str:
    """The colour that matplotlib draws with where the page is to have its colour of this name."""
    return f"#01{list(LIGHT).index(name):02x}03"


MUTED, LINE, ACCENT, FAINT = (stand_in(name) for name in ("muted", "line", "accent", "faint"))


def theme_css(selector: str = ":root") -> str:
    """Rules that define the colours on ``selector``, for both themes."""
    light, dark = (";".join(f"--{name}:{value}" for name, value in colours.items()) for colours in (LIGHT, DARK))
    return f"{selector}{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{{selector}{{{dark}}}}}"


def inline_svg(figure: Figure, prefix: str, label: str) -> str:
    """A figure as an ``<svg>`` element for a page with ``theme_css``.

    Args:
        figure: drawn with ``stand_in`` colours.
        prefix: keeps the ids of several drawings on one page apart.
        label: what the picture shows, for those who do not see it.
    """
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    svg = "<svg" + buffer.getvalue().split("<svg", 1)[1]
    for name in LIGHT:
        svg = svg.replace(stand_in(name), f"var(--{name})")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
    svg = re.sub(r"<!--.*?-->|\n\s*(?=<)", "", svg, flags=re.DOTALL)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def whole_svg(figure: Figure, label: str) -> str:
    """A figure as a file of its own: an image on a page follows the theme of its reader too."""
    svg = inline_svg(figure, "", label)
    background = '<rect width="100%" height="100%" fill="var(--card)"/>'
    head, body = svg.split(">", 1)
    return f"{head}><style>{theme_css('svg')}</style>{background}{body}\n"


def plain_axes(axes: Axes) -> None:
    """Quiet axes: a grid, muted labels, no frame but two lines."""
    axes.grid(True, color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=10, labelcolor=MUTED)
    for side, spine in axes.spines.items():
        spine.set(visible=side in ("left", "bottom"), edgecolor=LINE)


def curve_svg(name: str, values: dict[int, float], prefix: str, beside: dict[int, float] | None = None) -> str:
    """Draws one curve.

    Args:
        name: of the metric.
        values: by step.
        prefix: keeps the ids of several drawings on one page apart.
        beside: another curve, dashed, with an axis of its own that is not labelled.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps, ys = np.array(list(values), dtype=float), np.array(list(values.values()), dtype=float)
    left, bottom, right, top = CURVE_AREA
    figure = Figure(figsize=CURVE_SIZE)
    axes = figure.add_axes((left, bottom, right - left, top - bottom))
    if len(ys) > SMOOTH_FROM and not re.search(r"(^|/)lr", name):  # a schedule has no noise to smooth away
        axes.plot(steps, ys, color=FAINT, linewidth=1.0, clip_on=False)
        axes.plot(steps, smooth(ys), color=ACCENT, linewidth=1.9, clip_on=False)
    else:
        marker = "o" if len(ys) <= SMOOTH_FROM else None
        axes.plot(steps, ys, color=ACCENT, linewidth=1.7, marker=marker, markersize=3.2, clip_on=False)
    if beside:
        other = axes.twinx()
        other.plot(list(beside), list(beside.values()), color=MUTED, linewidth=1.0, linestyle="--")
        other.set_axis_off()
    axes.set_xlabel("step", color=MUTED, fontsize=10)
    axes.set_ylabel(unit_of(name), color=MUTED, fontsize=10, parse_math=False)
    plain_axes(axes)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5), useOffset=False)
    shown = axes.yaxis.get_major_formatter().format_ticks(axes.yaxis.get_majorticklocs())
    left = max(left, (DIGIT_WIDTH * max(map(len, shown)) + LABEL_WIDTH) / CURVE_SIZE[0])
    axes.set_position((left, bottom, right - left, top - bottom))
    axes.yaxis.get_offset_text().set(color=MUTED, fontsize=10)
    return inline_svg(figure, prefix, f"{name} over steps")


def unit_of(name: str) -> str:
    """What stands beside the axis of a metric's curve."""
    last = name.rsplit("/", 1)[-1]
    if last.endswith(("_mib", "_gib")):
        return last[-3].upper() + "iB"
    if "_per_s" in last:
        counted, _, of = last.partition("_per_s")
        return f"{counted.rpartition('_')[2].replace('flops', 'FLOP')}/s{of.replace('_', ' ')}"
    return "seconds" if last.endswith("_s") else last[:28]


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving mean over about a fifteenth of the points; at the ends over the points that there are."""
    half = max(2, len(values) // 30)
    window = np.ones(2 * half + 1)
    return np.convolve(values, window)[half:-half] / np.convolve(np.ones_like(values), window)[half:-half]
