"""A picture of curves over seeds, for the benchmarks that compare algorithms."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.tracking.charts import theme_css

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = Sequence[tuple[int, float]]
"""Places on the x axis, and values."""


def draw_seed_curves(
    curves_of: Mapping[str, Sequence[Curve]],
    path: Path,
    labels: tuple[str, str],
    panel_height: float = 2.2,
    value_range: tuple[float, float] | None = None,
    rows_of: int | None = None,
) -> None:
    """Draws mean and range over the seeds, a panel for each algorithm.

    Args:
        curves_of: for each title the curves of its seeds, which share their places on the x axis.
        path: of the SVG file, whose bytes depend on the curves alone.
        labels: of the x axis and of the y axis.
        panel_height: in inches.
        value_range: of the y axis; None fits it to the values.
        rows_of: panels in a row, which then has a y axis of its own; None puts 4 into a row, with one axis for all.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    style = {"svg.fonttype": "none", "svg.hashsalt": "sfumato", "font.size": 9, "font.family": "sans-serif"}
    columns = min(rows_of or 4, len(curves_of))
    rows = -(-len(curves_of) // columns)
    with plt.rc_context(style):
        figure, panels = plt.subplots(
            rows,
            columns,
            figsize=(2.6 * columns, panel_height * rows),
            sharex=True,
            sharey="row" if rows_of else "all",
            layout="constrained",
            squeeze=False,
        )
        for panel, (title, curves) in zip(panels.flat, curves_of.items(), strict=False):
            places = [place for place, _ in curves[0]]
            values = list(zip(*([value for _, value in curve] for curve in curves), strict=True))
            panel.fill_between(places, list(map(min, values)), list(map(max, values)), alpha=0.25, linewidth=0)
            panel.plot(places, list(map(statistics.mean, values)), marker="o", markersize=3)
            panel.set_title(title)
            if value_range is not None:
                panel.set_ylim(*value_range)
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
        for panel in list(panels.flat)[len(curves_of) :]:
            panel.set_visible(False)
        figure.supxlabel(labels[0])
        figure.supylabel(labels[1])
        save_figure(figure, path)
        plt.close(figure)


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure as SVG that follows the light or dark theme of its reader, also as an image on a page."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(follow_theme(drawn.getvalue()), encoding="utf-8")


def follow_theme(svg: str) -> str:
    """The text of an SVG file of matplotlib with white, black and the grey of grids in the colours of the theme."""
    for colour, name in (("#ffffff", "card"), ("#000000", "ink"), ("#b0b0b0", "muted")):
        svg = svg.replace(colour, f"var(--{name})")
    # texts have no colour of their own where they are black
    return svg.replace("<defs>", f"<defs>\n  <style>{theme_css('svg')}text{{fill:var(--ink)}}</style>", 1)
