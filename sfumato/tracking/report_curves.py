"""The curves of a page: in sections, by the beginnings of their names where they are many, and a field to search."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from sfumato.tracking.curves import curve_svg, line_style, overlaid_curves_svg
from sfumato.tracking.json_lines import SeriesView, finite_points
from sfumato.tracking.report_tables import render_section

# The first pattern that is found in a metric's name decides; the order of the sections on the page is SECTIONS.
_GROUPS = (
    ("Evaluation", r"^eval/"),
    ("Reward", r"^(train/)?(reward|advantage)"),
    ("Time and memory", r"^(time|memory|throughput|mfu|tokens_per|scoring)"),
    ("Policy ratio, KL and clipping", r"^policy/|(^|[/_])(ratio|kl|clip|clipped|clipfrac|clip_frac|entropy)($|[/_])"),
)
_OTHER = "Loss and optimisation"
SECTIONS = ("Evaluation", "Reward", _OTHER, "Policy ratio, KL and clipping", "Time and memory")

SHOWN_TOGETHER = 12
"""Most curves of a section, or of a beginning within it, that stand open; and of a page without a search field."""
FEWEST_OF_PREFIX = 3
"""Curves that a beginning of a name needs for a fold of its own."""
FEWEST_FLAT = 3
"""Values that must all be equal for a curve to count as flat."""

SEARCH = """
const field = document.querySelector("#search");
field.parentElement.hidden = false;
field.addEventListener("input", () => {
  const words = field.value.toLowerCase().split(/\\s+/).filter(Boolean);
  const isMatch = (element) => words.every((word) => element.dataset.metric.toLowerCase().includes(word));
  for (const element of document.querySelectorAll(".searched [data-metric]")) element.hidden = !isMatch(element);
  for (const fold of document.querySelectorAll(".searched details")) {
    fold.dataset.was ??= fold.open ? "open" : "";
    fold.open = words.length ? true : fold.dataset.was === "open";
    fold.hidden = !fold.querySelector("[data-metric]:not([hidden])");
  }
});
"""
"""The one script of a page: it shows the curves whose names hold all words. ``page.render_page`` lets no other run."""


def curve_sections(series: SeriesView) -> tuple[str, bool]:
    """Curves of metrics as HTML, those that do not change as a table; and whether the page needs ``SEARCH``."""
    shown = {name: finite_points(points) for name, points in series.items() if finite_points(points)}
    flat = {name: values for name, values in shown.items() if is_flat(values)}
    figures = {}
    for name, values in shown.items():
        missing = len(series[name]) - len(values)
        note = f'<span class="warn">{missing} not finite</span>' if missing else ""
        if name not in flat or missing:
            figures[name] = render_figure(name, values, note)
    flat_rows = {name: f"{next(iter(values.values())):.6g}" for name, values in flat.items() if name not in figures}
    return lay_out(figures, flat_rows)


def overlaid_sections(names: Sequence[str], runs: Mapping[str, SeriesView]) -> tuple[str, bool]:
    """Curves of several runs over each other as HTML, a metric in a picture; and whether the page needs ``SEARCH``.

    Args:
        names: of the metrics.
        runs: metrics by the name of the run, in the order of ``line_style``.
    """
    figures = {}
    flat_rows = {}
    for name in names:
        curves = [finite_points(series.get(name, {})) for series in runs.values()]
        values = {value for curve in curves for value in curve.values()}
        if len(values) == 1 and any(map(is_flat, curves)):
            flat_rows[name] = f"{values.pop():.6g}"
        elif values:
            latest = "".join(
                f'<i style="color:var(--{line_style(number)[0]})">{list(curve.values())[-1]:.6g}</i> '
                for number, curve in enumerate(curves)
                if curve
            )
            figures[name] = (
                f'<figure data-metric="{escape(name)}"><figcaption><b>{escape(name)}</b><span>{latest}</span>'
                f"</figcaption>{overlaid_curves_svg(name, curves)}</figure>"
            )
    return lay_out(figures, flat_rows)


def render_figure(name: str, values: dict[int, float], note: str, beside: dict[int, float] | None = None) -> str:
    """A curve with its caption; arguments as of ``curve_svg``, and HTML that follows the name."""
    latest = f"{list(values.values())[-1]:.6g}" if values else ""
    return (
        f'<figure data-metric="{escape(name)}"><figcaption><b>{escape(name)}</b>{note}'
        f"<span>{latest}</span></figcaption>{curve_svg(name, values, beside)}</figure>"
    )


def is_flat(values: Mapping[int, float]) -> bool:
    """Whether a curve has several values that are all equal."""
    return len(values) >= FEWEST_FLAT and len(set(values.values())) == 1


def lay_out(figures: Mapping[str, str], flat_rows: Mapping[str, str]) -> tuple[str, bool]:
    """Figures by metric in their sections, and the values of flat curves in a fold below."""
    html = []
    for title in SECTIONS:
        names = [name for name in figures if section_of(name) == title]
        if not names:
            continue
        html.append(f"<h3>{title}</h3>")
        if len(names) <= SHOWN_TOGETHER:
            html.append(_render_grid(figures, names))
            continue
        for prefix, members in group_by_prefix(names).items():
            is_open = " open" if len(members) <= SHOWN_TOGETHER else ""
            summary = f"<summary>{escape(prefix or 'others')} <small>{len(members)} curves</small></summary>"
            html.append(f'<details class="fold"{is_open}>{summary}{_render_grid(figures, members)}</details>')
    if flat_rows:
        rows = "".join(
            f'<tr data-metric="{escape(name)}"><td>{escape(name)}</td><td>{value}</td></tr>'
            for name, value in flat_rows.items()
        )
        html.append(
            f'<details class="fold"><summary>Unchanged <small>{len(flat_rows)} metrics have one value throughout'
            f'</small></summary><table class="numbers"><tbody>{rows}</tbody></table></details>'
        )
    if not html:
        return "", False
    has_search = len(figures) > SHOWN_TOGETHER
    field = '<p hidden><input id="search" type="search" placeholder="search curves" aria-label="search curves"></p>'
    body = f'{field if has_search else ""}<div class="searched">{"".join(html)}</div>'
    return render_section("Curves", "", body), has_search


def section_of(name: str) -> str:
    """The section in which a metric's curve stands."""
    return next((title for title, pattern in _GROUPS if re.search(pattern, name)), _OTHER)


def group_by_prefix(names: Sequence[str]) -> dict[str, list[str]]:
    """Names by what they begin with, up to their second slash; rare beginnings by their first part, or together."""
    groups = {name: "/".join(name.split("/")[:-1][:2]) for name in names}
    for shorten in (lambda prefix: prefix.partition("/")[0], lambda _: ""):
        counts = {prefix: list(groups.values()).count(prefix) for prefix in groups.values()}
        groups = {
            name: prefix if counts[prefix] >= FEWEST_OF_PREFIX else shorten(prefix) for name, prefix in groups.items()
        }
    by_prefix: dict[str, list[str]] = {}
    for name, prefix in groups.items():
        by_prefix.setdefault(prefix, []).append(name)
    return dict(sorted(by_prefix.items(), key=lambda item: (not item[0], item[0])))


def _render_grid(figures: Mapping[str, str], names: Sequence[str]) -> str:
    return f'<div class="curves">{"".join(figures[name] for name in names)}</div>'


CURVES_CSS = """
.fold{margin:8px 0}.fold>summary{font-size:14px;font-weight:600;margin:6px 0}.fold>.curves{margin-bottom:14px}
#search{font:inherit;width:min(100%,420px);padding:6px 12px;border:1px solid var(--line);border-radius:8px;
background:var(--card);color:var(--ink);margin:6px 0}[hidden]{display:none!important}figcaption i{font-style:normal}
"""
