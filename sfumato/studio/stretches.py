"""What the page Timeline shows: the work of each process in some steps."""

from __future__ import annotations

import math

from sfumato.config.characters import in_one_line
from sfumato.errors import DataError
from sfumato.studio.gallery import JSON
from sfumato.studio.runs import RunReader
from sfumato.tracking.charts import choose_stretch
from sfumato.tracking.timeline import RUN, read_events, step_windows, union_seconds

TAIL_BYTES = 2**26
"""How much is read of the end of ``timeline.jsonl``: some hundred thousand events."""


def describe_timeline(reader: RunReader, last: int) -> JSON:
    """The events of the last steps up to one, by process, in seconds from the beginning of the picture.

    Args:
        reader: of the run.
        last: the last step that is shown; below 0 the newest.
    """
    try:
        events = read_events(reader.folder, TAIL_BYTES)
    except DataError as error:
        return {"rows": [], "steps": [], "ends": {}, "problem": str(error)}
    windows = step_windows(events)
    steps = list(windows)
    if last >= 0 and steps:
        chosen = max((step for step in steps if step <= last), default=steps[0])
        end = windows[chosen][1]
        events = [event for event in events if event.start < end and (event.role != RUN or event.step <= chosen)]
    stretch = choose_stretch(events)
    if stretch is None:
        return {"rows": [], "steps": steps, "ends": {}, "problem": ""}
    seconds = stretch.end - stretch.start
    if not math.isfinite(seconds):
        return {"rows": [], "steps": steps, "ends": {}, "problem": "timeline.jsonl holds times that no run has written"}
    rows = []
    for (role, rank), members in stretch.rows.items():
        spans = [(max(event.start, stretch.start), min(event.end, stretch.end)) for event in members]
        bars = [
            [event.kind[:40], event.version, start - stretch.start, end - stretch.start, event.step]
            for event, (start, end) in zip(members, spans, strict=True)
        ]
        rows.append({"name": f"{in_one_line(role)[:40]} {rank}", "bars": bars, "busy": union_seconds(spans) / seconds})
    return {
        "rows": rows,
        "seconds": seconds,
        "ends": {str(step): end - stretch.start for step, end in stretch.ends.items()},
        "steps": steps,
        "left_out": dict(stretch.left_out.items()),
        "problem": "",
    }
