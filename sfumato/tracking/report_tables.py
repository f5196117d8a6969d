"""Tables of a report: last values, where the time went, and why samples have no reward."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape

import numpy as np

from sfumato.tracking.json_lines import Series, finite_points
from sfumato.tracking.timeline import Phase

MAX_REASONS = 20
OVERLAP = 1.02
"""Share of the time of all steps; phases that add up to more have run at the same time."""

# The message of the RL tasks in log.txt; a reason may have several lines.
_FAILED = re.compile(r"^(evaluation at )?step (\d+): reward failed: (.*?) \((\d+) of \d+ samples\)$", re.M | re.S)


def render_section(title: str, note: str, body: str) -> str:
    """A section of the page: a heading, a line of note below it, and HTML."""
    return f'<section><h2>{title}</h2><p class="note">{note}</p>{body}</section>'


def numbers_table(columns: Iterable[str], rows: str) -> str:
    """A table of numbers, which scrolls where it is too wide. ``columns`` and ``rows`` are HTML."""
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    return (
        f'<div class="scroll"><table class="numbers"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def last_values(metrics: Series) -> str:
    """The newest value of every metric."""
    rows = []
    for name, points in metrics.items():
        step, value = list(points.items())[-1]
        shown = "not finite" if value is None else f"{value:.6g}"  # six digits: a ratio of 1.00001 is not 1
        rows.append((name, shown, str(step)))
    return _render_table("Last values", "", ("metric", "value", "step"), rows)


def time_per_phase(timings: Series) -> str:
    """The table of the time that each phase took, summed over all steps."""
    seconds = {name: list(finite_points(points).values()) for name, points in timings.items()}
    steps = seconds.get("time/step_s", [])
    phases = {phase: values for phase in Phase if (values := seconds.get(phase.metric, []))}
    whole = sum(steps)
    unattributed = max(sum(steps) - sum(map(sum, phases.values())), 0.0)
    # generation by a sampler of its own goes on while the policy learns; nobody waits for it then
    is_beside = sum(map(sum, phases.values())) > OVERLAP * whole and Phase.GENERATE in phases
    if is_beside:
        unattributed = max(whole - sum(sum(values) for phase, values in phases.items() if phase != Phase.GENERATE), 0.0)
    rows = []
    for phase, values in sorted(phases.items(), key=lambda item: -sum(item[1])):
        share = "beside the others" if is_beside and phase == Phase.GENERATE else _format_share(sum(values), whole)
        rows.append((phase.replace("_", " "), *_measure_spread(values, len(steps)), share))
    if rows and steps:
        rest_of = "everything else" if Phase.UPDATE in phases else "training, and everything else"
        rows.append((rest_of, "", "", "", _format_share(unattributed, whole)))
    beside = {name: values for name, values in seconds.items() if re.fullmatch(r"time/(scoring|reward_.+)_s", name)}
    for name, values in sorted(beside.items(), key=lambda item: -sum(item[1])):
        label = name.removeprefix("time/").removesuffix("_s").replace("_", " ", 1)
        rows.append((label, *_measure_spread(values, len(steps)), "beside the others"))
    if steps:
        rows.append(("whole step", *_measure_spread(steps, len(steps)), "100 %"))
    columns = ("part of a step", "in steps", "median there (s)", "90th percentile (s)", "share of all time")
    note = "Checkpoints, exports and reports after the last step are not in it."
    return _render_table("Where the time went", note, columns, rows)


def failed_rewards(log: str) -> str:
    """The table of reasons why samples have no reward, from the messages in the log."""
    ordered = count_failed_rewards(log)
    rows = [
        (reason, str(train), str(evaluation), f"{first} to {last}")
        for reason, train, evaluation, first, last in ordered[:MAX_REASONS]
    ]
    hidden = f"{len(ordered) - MAX_REASONS} more reasons are in log.txt." if len(ordered) > MAX_REASONS else ""
    columns = ("reward and reason", "training samples", "evaluation samples", "steps")
    return _render_table("Samples without a reward", hidden, columns, rows)


def count_failed_rewards(log: str) -> list[tuple[str, int, int, int, int]]:
    """Reasons why samples have no reward, the most frequent first, from the messages in the log.

    A resumed run repeats steps, and their messages: the last message about a step and reason counts.

    Returns:
        For each reason: its text, training samples, evaluation samples, and the first and the last step.
    """
    failures: dict[tuple[bool, int, str], int] = {}
    for is_evaluation, step, reason, count in _FAILED.findall(log):
        failures[bool(is_evaluation), int(step), reason] = int(count)
    reasons: dict[str, _Failed] = {}
    for (is_evaluation, step, reason), count in failures.items():
        failure = reasons.setdefault(reason, _Failed())
        failure.samples[is_evaluation] += count
        failure.steps.add(step)
    ordered = sorted(reasons.items(), key=lambda item: -item[1].samples.total())
    return [
        (reason, failed.samples[False], failed.samples[True], min(failed.steps), max(failed.steps))
        for reason, failed in ordered
    ]


@dataclass
class _Failed:
    """Samples that failed for one reason, counted for evaluations (True) and training (False), and the steps."""

    samples: Counter[bool] = field(default_factory=Counter)
    steps: set[int] = field(default_factory=set)


def _measure_spread(values: list[float], num_steps: int) -> tuple[str, str, str]:
    """In how many steps a phase was measured, and the median and 90th percentile of its seconds."""
    return (
        f"{len(values)} of {num_steps}",
        f"{statistics.median(values):.3g}",
        f"{float(np.percentile(values, 90)):.3g}",
    )


def _format_share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


def _render_table(title: str, note: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table with its texts escaped; nothing without rows."""
    if not rows:
        return ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return render_section(title, note, numbers_table(columns, body))
