"""What ``sfumato compare`` has found, as tables for people and as JSON for programs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sfumato.config.characters import in_one_line, printable
from sfumato.tracking.compare import Comparison, Difference, Result
from sfumato.tracking.compare_page import format_change, format_setting
from sfumato.tracking.json_lines import finite_points, strict_json

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 24
"""Characters of a curve in the terminal."""


def comparison_json(comparison: Comparison) -> str:
    """The comparison without curves and samples, NaN as null."""
    runs = [
        {
            "folder": str(run.folder),
            "name": run.name,
            "task": run.task,
            "state": run.state,
            "run_id": run.run_id,
            "problems": run.problems,
        }
        for run in comparison.runs
    ]
    results = {
        name: [None if result is None else asdict(result) for result in values]
        for name, values in comparison.results.items()
    }
    return strict_json(
        {
            "runs": runs,
            "config": {difference.name: difference.values for difference in comparison.config},
            "environment": {difference.name: difference.values for difference in comparison.environment},
            "results": results,
            "paired": [asdict(paired) for paired in comparison.paired],
            "notes": comparison.notes,
        }
    )


def show_comparison(comparison: Comparison, console: Console, page: Path | None) -> None:
    """Prints runs, notes, settings that differ, results and differences on the same prompts."""
    names = [run.name for run in comparison.runs]
    runs = _new_table("", "task", "state", "folder")
    for run in comparison.runs:
        runs.add_row(*map(_without_markup, (run.name, run.task, run.state, str(run.folder))))
    console.print(runs)
    for note in comparison.notes:
        _print(console, f"note: {note}")
    for run in comparison.runs:
        for problem in run.problems:
            _print(console, f"note: {run.name}: {problem}")
    _show_differences(console, "settings that differ", names, comparison.config)
    _show_differences(console, "versions and hardware that differ", names, comparison.environment)
    _show_results(console, comparison)
    _show_paired(console, comparison)
    if page is None:
        folders = " ".join(str(run.folder) for run in comparison.runs)
        _print(console, f"\ncurves over each other: sfumato compare {folders} --html compare.html")
    else:
        _print(console, f"\nwritten: {page}")


def draw_sparkline(values: Sequence[float], low: float, high: float) -> str:
    """A curve in one line of characters, each the mean of its share of the values, between two limits."""
    if not values:
        return ""
    width = min(SPARK_WIDTH, len(values))
    bounds = [round(index * len(values) / width) for index in range(width + 1)]
    means = [math.fsum(values[start:stop]) / (stop - start) for start, stop in itertools.pairwise(bounds)]
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def _show_differences(console: Console, title: str, names: Sequence[str], differences: Sequence[Difference]) -> None:
    if not differences:
        _print(console, f"\n{title}: none")
        return
    table = _new_table(title, *names)
    for difference in differences:
        table.add_row(*map(_without_markup, (difference.name, *map(format_setting, difference.values))))
    console.print()
    console.print(table)


def _show_results(console: Console, comparison: Comparison) -> None:
    if not comparison.results:
        _print(console, "\nresults: no run has logged a metric of eval/, a reward or a loss")
        return
    table = _new_table("results", "run", "first", "last", "best", "over steps")
    for name, results in comparison.results.items():
        curves = [list(finite_points(run.metrics.get(name, {})).values()) for run in comparison.runs]
        together = [value for curve in curves for value in curve]
        for number, (run, result) in enumerate(zip(comparison.runs, results, strict=True)):
            label = name if number == 0 else ""
            line = draw_sparkline(curves[number], min(together), max(together))
            table.add_row(*map(_without_markup, (label, run.name, *_format_result(result), line)))
    console.print()
    console.print(table)


def _format_result(result: Result | None) -> tuple[str, str, str]:
    if result is None:
        return "absent", "", ""
    best = "" if math.isnan(result.best) else f"{result.best:.4g} at {result.best_step}"
    return f"{result.first:.4g} at {result.first_step}", f"{result.last:.4g} at {result.last_step}", best


def _show_paired(console: Console, comparison: Comparison) -> None:
    first = comparison.runs[0].name
    for paired in comparison.paired:
        console.print()
        if paired.differences and paired.steps is not None:
            here, there = paired.steps
            steps = (
                f"at step {here}" if here == there else f"at step {here} of {first} and step {there} of {paired.name}"
            )
            title = f"{paired.name} against {first}, {steps}"
            table = _new_table(title, "means", "difference [95 %]", "prompts", "pairs")
            for difference in paired.differences:
                means = f"{difference.before:.4g} → {difference.after:.4g}"
                counts = (str(difference.num_prompts), str(difference.num_pairs))
                table.add_row(*map(_without_markup, (difference.reward, means, format_change(difference), *counts)))
            console.print(table)
            if failed := max(difference.num_failed for difference in paired.differences):
                _print(console, f"note: up to {failed} pairs are left out, since a sample has no reward")
            if paired.num_unpaired:
                _print(console, f"note: {paired.num_unpaired} samples have no partner and are left out")
        else:
            _print(console, f"{paired.name} against {first}: held-out results were not compared")
        for note in paired.notes:
            _print(console, f"note: {note}")


def _new_table(title: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(_without_markup(title), overflow="fold")
    for column in columns:
        table.add_column(_without_markup(column), overflow="fold")
    return table


def _without_markup(value: str) -> Text:
    # a Text takes no markup from what a run has logged
    return Text(in_one_line(value))


def _print(console: Console, line: str) -> None:
    console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
