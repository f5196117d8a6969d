"""The timeline as a picture: a row for each process, a bar for each call, over the last few steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sfumato.tracking.drawing import LINE, MUTED, inline_svg, stand_in
from sfumato.tracking.samples import choose_evenly
from sfumato.tracking.timeline import KINDS, RUN, Event, step_windows, utilisation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_STEPS, MAX_BARS, MAX_RANKS = 4, 600, 8
_ROLES = ("actor", "sampler", "scorer")  # these come first, in this order
_LABEL_WIDTH = 0.035  # of the picture: a narrower bar carries no version
_NARROW = 0.0004  # of the picture: what is narrower cannot be seen
_SAME_S = 2e-6  # the file holds microseconds

Process = tuple[str, int]


@dataclass(frozen=True)
class Stretch:
    """What a picture shows."""

    start: float
    """Wall-clock seconds."""
    end: float
    """After ``start``."""
    rows: dict[Process, list[Event]]
    """Events that reach into the stretch by process, top to bottom; a process that did nothing has none."""
    ends: dict[int, float]
    """When the steps within it ended."""
    left_out: dict[str, tuple[int, int]]
    """Processes that are shown and that there are, of roles that have too many."""


def choose_stretch(events: Sequence[Event], max_steps: int = MAX_STEPS) -> Stretch | None:
    """The last steps, fewer where they hold many calls, of some processes of each role.

    Returns:
        None where nothing can be shown: no step has ended, or nothing was done in it.
    """
    work = [event for event in events if event.role != RUN]
    spans = step_windows(events)
    windows = {step: span for step, span in spans.items() if any(_reaches(event, *span) for event in work)}
    if not windows:
        return None
    shown, left_out = _choose_processes({(event.role, event.rank) for event in work})
    end = list(windows.values())[-1][1]
    for count in range(min(max_steps, len(windows)), 0, -1):
        start = list(windows.values())[-count][0]
        rows: dict[Process, list[Event]] = {process: [] for process in shown}
        for event in sorted(work, key=lambda event: event.start):
            if (event.role, event.rank) in rows and _reaches(event, start, end):
                rows[event.role, event.rank].append(event)
        if sum(len(bars) for bars in rows.values()) <= MAX_BARS:
            break
    ends = {step: span[1] for step, span in list(windows.items())[-count:]}
    return Stretch(start, end, rows, ends, left_out)


def _reaches(event: Event, start: float, end: float) -> bool:
    return event.start < end and event.end > start


def _choose_processes(processes: Iterable[Process]) -> tuple[list[Process], dict[str, tuple[int, int]]]:
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

    patches = [Patch(color=_colour(kind), label=kind) for kind in kinds]
    font = {"size": 9}
    figure.legend(
        handles=patches, loc="outside lower center", ncols=8, frameon=False, labelcolor=stand_in("ink"), prop=font
    )


def draw_rows(axes: Axes, stretch: Stretch) -> list[str]:
    """Draws a stretch, its first second at 0, with the share of time that each process worked at the right.

    Returns:
        The kinds of work that are to be seen.
    """
    labels, shares = [], []
    for row, ((role, rank), events) in enumerate(stretch.rows.items()):
        for (lane, lanes), members in _lanes(events).items():
            _draw_lane(axes, members, stretch, row - 0.4 + 0.8 * lane / lanes, 0.8 / lanes)
        labels.append(f"{role} {rank}")
        busy = utilisation(events, stretch.start, stretch.end) if events else {}
        shares.append(f"{100 * busy.get(f'utilisation/{role}', 0.0):.0f} %")
    seconds = stretch.end - stretch.start
    axes.set(xlim=(0, seconds), ylim=(len(labels) - 0.4, -0.6))
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(length=0, labelsize=9, labelcolor=MUTED)
    for row, share in enumerate(shares):
        axes.text(1.006, row, share, transform=axes.get_yaxis_transform(), va="center", color=MUTED, fontsize=8)
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


def _lanes(events: Sequence[Event]) -> dict[tuple[int, int], list[Event]]:
    """Events, which are in order of time, by lane and number of lanes: calls beside each other share the row."""
    found: dict[tuple[int, int], list[Event]] = {}
    together: list[list[Event]] = []  # lanes of calls that overlap, directly or through others
    for event in [*events, None]:
        if event is None or all(event.start >= lane[-1].end - _SAME_S for lane in together):
            for number, members in enumerate(together):
                found.setdefault((number, len(together)), []).extend(members)
            together = []
        if event is not None:
            lane = next((lane for lane in together if event.start >= lane[-1].end - _SAME_S), None)
            if lane is None:
                together.append(lane := [])
            lane.append(event)
    return found


def _draw_lane(axes: Axes, events: Sequence[Event], stretch: Stretch, top: float, height: float) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path
    from matplotlib.transforms import Affine2D

    by_kind: dict[str, list[tuple[float, float]]] = {}
    bars = _bars(events, stretch)
    for kind, _, start, end in bars:
        by_kind.setdefault(kind, []).append((start, end - start))
    for kind, spans in by_kind.items():
        boxes = [Path.unit_rectangle().transformed(Affine2D().scale(w, height).translate(x, top)) for x, w in spans]
        style = {"facecolor": _colour(kind), "edgecolor": stand_in("card"), "linewidth": 0.5}
        axes.add_patch(PathPatch(Path.make_compound_path(*boxes), **style))  # one path: a file of half the size
    if height < 0.5:
        return
    for at, version in _version_labels(bars, stretch.end - stretch.start):
        style = {"ha": "center", "va": "center", "color": stand_in("card"), "fontsize": 8}
        axes.text(at, top + height / 2, f"v{version}", **style)


Bar = tuple[str, int | None, float, float]
"""Kind, version, and seconds from the start of the picture."""


def _bars(events: Sequence[Event], stretch: Stretch) -> list[Bar]:
    """What is drawn: many calls too short to be seen become one bar, a lonely one is as wide as can be seen."""
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
    groups: list[list[Bar]] = []
    for bar in bars:
        if groups and groups[-1][0][:2] == bar[:2]:
            groups[-1].append(bar)
        else:
            groups.append([bar])
    labels = []
    for group in groups:
        kind, version, start, _ = group[0]
        if kind != "generate" or version is None:
            continue
        end, widest = group[-1][3], max(group, key=lambda bar: bar[3] - bar[2])
        filled = sum(bar[3] - bar[2] for bar in group) > 0.9 * (end - start)
        left, right = (start, end) if filled else widest[2:]  # never on the gap between two bars
        if right - left >= _LABEL_WIDTH * width:
            labels.append(((left + right) / 2, version))
    return labels


def _colour(kind: str) -> str:
    return stand_in(kind if kind in KINDS else "other")
