"""Timelines for pages: SVG of matplotlib figures, in the light or dark theme of the reader's browser."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from sfumato.config.characters import in_one_line
from sfumato.tracking.samples import choose_evenly
from sfumato.tracking.timeline import KINDS, RUN, Event, step_windows, union_seconds

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


def stand_in(name: str) -> str:
    """A colour for matplotlib that ``inline_svg`` replaces by the page's colour of this name."""
    return f"#01{list(LIGHT).index(name):02x}03"


MUTED, LINE = (stand_in(name) for name in ("muted", "line"))


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


MAX_STEPS, MAX_BARS, MAX_RANKS = 4, 600, 8
_ROLES = ("actor", "sampler", "scorer")  # these come first, in this order
_LEAST_LABEL = 0.035  # of the picture: a narrower bar carries no version
_NARROW = 0.0004  # of the picture: what is narrower cannot be seen
_SAME_S = 2e-6  # the file holds microseconds

Process = tuple[str, int]


@dataclass(frozen=True)
class Stretch:
    """The stretch of a run's time that a picture shows."""

    start: float
    """Begin of the stretch in wall-clock seconds."""
    end: float
    """End of the stretch, after ``start``."""
    rows: dict[Process, list[Event]]
    """Events that reach into the stretch by process, top to bottom; a process that did nothing has none."""
    ends: dict[int, float]
    """Wall-clock seconds at which the steps within the stretch ended, by step."""
    left_out: dict[str, tuple[int, int]]
    """Processes that are shown and that there are, of roles that have too many."""


def choose_stretch(events: Sequence[Event], max_steps: int = MAX_STEPS) -> Stretch | None:
    """Chooses the last steps of a run, fewer where they hold too many calls, and some processes of each role.

    Args:
        events: of the run.
        max_steps: at most so many steps.

    Returns:
        None where nothing can be shown: no step has ended, or no process worked in one.
    """
    work = [event for event in events if event.role != RUN]
    spans = step_windows(events)
    windows = {step: span for step, span in spans.items() if any(_overlaps(event, *span) for event in work)}
    if not windows:
        return None
    shown, left_out = _choose_processes({(event.role, event.rank) for event in work})
    end = list(windows.values())[-1][1]
    for count in range(min(max_steps, len(windows)), 0, -1):
        start = list(windows.values())[-count][0]
        rows: dict[Process, list[Event]] = {process: [] for process in shown}
        for event in sorted(work, key=lambda event: event.start):
            if (event.role, event.rank) in rows and _overlaps(event, start, end):
                rows[event.role, event.rank].append(event)
        if sum(len(bars) for bars in rows.values()) <= MAX_BARS:
            break
    # The loop has run at least once, since there is a window.
    ends = {step: span[1] for step, span in list(windows.items())[-count:]}  # pyright: ignore
    return Stretch(start, end, rows, ends, left_out)


def _overlaps(event: Event, start: float, end: float) -> bool:
    """Whether an event overlaps a stretch of time."""
    return event.start < end and event.end > start


def _choose_processes(processes: Iterable[Process]) -> tuple[list[Process], dict[str, tuple[int, int]]]:
    """At most ``MAX_RANKS`` processes of each role, in the order of rows; and ``Stretch.left_out``."""
    by_role: dict[str, list[int]] = {}
    for role, rank in sorted(processes):
        by_role.setdefault(role, []).append(rank)
    order = sorted(by_role, key=lambda role: (_ROLES.index(role) if role in _ROLES else len(_ROLES), role))
    shown = {role: choose_evenly(by_role[role], MAX_RANKS) for role in order}
    left_out = {role: (len(some), len(by_role[role])) for role, some in shown.items() if len(some) < len(by_role[role])}
    return [(role, rank) for role in order for rank in shown[role]], left_out


def timeline_svg(stretch: Stretch, prefix: str) -> str:
    """The picture as an ``<svg>`` element; see ``inline_svg``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.15 + 0.27 * len(stretch.rows)), layout="constrained")
    axes = figure.add_subplot()
    kinds = draw_rows(axes, stretch)
    axes.set_xlabel("seconds", color=MUTED, fontsize=9)
    draw_legend(figure, kinds)
    first, last = min(stretch.ends), max(stretch.ends)
    return inline_svg(figure, prefix, f"what each process did in steps {first} to {last}")


def draw_legend(figure: Figure, kinds: Iterable[str]) -> None:
    """Names the colours of these kinds below the figure."""
    from matplotlib.patches import Patch

    patches = [Patch(color=_colour_of_kind(kind), label=kind) for kind in kinds]
    font = {"size": 9}
    figure.legend(
        handles=patches, loc="outside lower center", ncols=8, frameon=False, labelcolor=stand_in("ink"), prop=font
    )


def draw_rows(axes: Axes, stretch: Stretch) -> list[str]:
    """Draws a stretch, from second 0 on, with each process's fraction of busy time beside its row.

    Returns:
        The kinds of work that are visible, for the legend.
    """
    labels = []
    fractions = []
    for row, ((role, rank), events) in enumerate(stretch.rows.items()):
        for (lane, lanes), members in _assign_lanes(events).items():
            _draw_lane(axes, members, stretch, row - 0.4 + 0.8 * lane / lanes, 0.8 / lanes)
        labels.append(f"{in_one_line(role)[:40]} {rank}")
        within = [(max(event.start, stretch.start), min(event.end, stretch.end)) for event in events]
        fractions.append(f"{100 * union_seconds(within) / (stretch.end - stretch.start):.0f} %")
    seconds = stretch.end - stretch.start
    axes.set(xlim=(0, seconds), ylim=(len(labels) - 0.4, -0.6))
    axes.set_yticks(range(len(labels)), labels)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.tick_params(length=0, labelsize=9, labelcolor=MUTED)
    for row, fraction in enumerate(fractions):
        axes.text(1.006, row, fraction, transform=axes.get_yaxis_transform(), va="center", color=MUTED, fontsize=8)
    axes.text(1.006, -0.75, "busy", transform=axes.get_yaxis_transform(), va="bottom", color=MUTED, fontsize=8)
    before = 0.0
    for step, end in stretch.ends.items():
        at = end - stretch.start
        axes.axvline(at, color=MUTED, linewidth=0.9, linestyle=(0, (3, 3)))
        axes.text((before + at) / 2, -0.75, f"step {step}", ha="center", va="bottom", color=MUTED, fontsize=9)
        before = at
    for side, spine in axes.spines.items():
        spine.set(visible=side == "bottom", edgecolor=LINE)
    seen = {event.kind for events in stretch.rows.values() for event in events}
    return [kind for kind in KINDS if kind in seen] + (["other"] if seen - set(KINDS) else [])


def _assign_lanes(events: Sequence[Event]) -> dict[tuple[int, int], list[Event]]:
    """Divides the row of a process into lanes, so that calls at the same time are drawn one above the other.

    Args:
        events: of one process, in order of time.

    Returns:
        The events by lane and number of lanes of their group; a group is calls that overlap, directly or through
        others.
    """
    events_by_lane: dict[tuple[int, int], list[Event]] = {}
    overlapping_lanes: list[list[Event]] = []  # lanes of the group that has not ended
    for event in [*events, None]:  # None ends the last group
        if event is None or all(event.start >= lane[-1].end - _SAME_S for lane in overlapping_lanes):
            for number, members in enumerate(overlapping_lanes):
                events_by_lane.setdefault((number, len(overlapping_lanes)), []).extend(members)
            overlapping_lanes = []
        if event is not None:
            lane = next((lane for lane in overlapping_lanes if event.start >= lane[-1].end - _SAME_S), None)
            if lane is None:
                overlapping_lanes.append(lane := [])
            lane.append(event)
    return events_by_lane


def _draw_lane(axes: Axes, events: Sequence[Event], stretch: Stretch, top: float, height: float) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path
    from matplotlib.transforms import Affine2D

    by_kind: dict[str, list[tuple[float, float]]] = {}
    bars = _merge_short_bars(events, stretch)
    for kind, _, start, end in bars:
        by_kind.setdefault(kind, []).append((start, end - start))
    for kind, spans in by_kind.items():
        boxes = [Path.unit_rectangle().transformed(Affine2D().scale(w, height).translate(x, top)) for x, w in spans]
        style = {"facecolor": _colour_of_kind(kind), "edgecolor": stand_in("card"), "linewidth": 0.5}
        axes.add_patch(PathPatch(Path.make_compound_path(*boxes), **style))  # one path: a file of half the size
    if height < 0.5:
        return
    for at, version in _version_labels(bars, stretch.end - stretch.start):
        style = {"ha": "center", "va": "center", "color": stand_in("card"), "fontsize": 8}
        axes.text(at, top + height / 2, f"v{version}", **style)


Bar = tuple[str, int | None, float, float]
"""Kind, version, and seconds from the start of the picture."""


def _merge_short_bars(events: Sequence[Event], stretch: Stretch) -> list[Bar]:
    """The bars of a lane: neighbouring calls too short to be seen become one bar, a single one is widened."""
    least = (stretch.end - stretch.start) * _NARROW
    bars: list[Bar] = []
    for event in events:
        start = max(event.start, stretch.start) - stretch.start
        end = max(min(event.end, stretch.end) - stretch.start, start + least)
        last = bars[-1] if bars else None
        if last and last[:2] == (event.kind, event.version) and start - last[3] < least and end - start < 4 * least:
            bars[-1] = (*last[:3], max(end, last[3]))
        else:
            bars.append((event.kind, event.version, start, end))
    return bars


def _version_labels(bars: Sequence[Bar], width: float) -> list[tuple[float, int]]:
    """Where to write the version of calls of ``generate``: once for calls in a row that share it."""
    labels = []
    for (kind, version), bars_of_version in itertools.groupby(bars, key=lambda bar: bar[:2]):
        if kind != "generate" or version is None:
            continue
        group = list(bars_of_version)
        start = group[0][2]
        end = group[-1][3]
        widest = max(group, key=lambda bar: bar[3] - bar[2])
        filled = sum(bar[3] - bar[2] for bar in group) > 0.9 * (end - start)
        label_start, label_end = (start, end) if filled else widest[2:]  # never on the gap between two bars
        if label_end - label_start >= _LEAST_LABEL * width:
            labels.append(((label_start + label_end) / 2, version))
    return labels


def _colour_of_kind(kind: str) -> str:
    return stand_in(kind if kind in KINDS else "other")
