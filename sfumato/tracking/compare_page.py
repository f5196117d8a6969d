"""Runs beside each other on one page that opens offline: results, settings that differ, curves, samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from sfumato.config.characters import in_one_line
from sfumato.config.writing import write_atomically
from sfumato.tracking.compare import Comparison, Difference, PairedDifference, SampleRow, pair_samples
from sfumato.tracking.curves import line_style
from sfumato.tracking.page import render_page
from sfumato.tracking.report_curves import SEARCH, overlaid_sections
from sfumato.tracking.report_samples import RewardChips, grid_table, prompt_rows, sample_cell, sample_source
from sfumato.tracking.report_tables import numbers_table, render_section

MAX_PROMPTS = 12
"""Prompts whose samples are shown beside each other: those whose reward changed most."""


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Writes the page atomically."""
    runs = {run.name: run.metrics for run in comparison.runs}
    names = sorted({name for series in runs.values() for name in series})
    curves, has_search = overlaid_sections(names, runs)
    parts = [
        _render_header(comparison),
        _render_results(comparison),
        _render_paired_rewards(comparison),
        _render_differences("Settings that differ", comparison, comparison.config),
        _render_differences("Versions and hardware that differ", comparison, comparison.environment),
        curves,
        *(_render_samples(comparison, number) for number in range(len(comparison.paired))),
    ]
    title = " · ".join(runs)
    page = render_page(title, [part for part in parts if part], SEARCH if has_search else "")
    write_atomically(path, page.encode("utf-8"))


def format_change(difference: PairedDifference) -> str:
    """A difference with its interval, and whether the interval excludes 0."""
    if math.isnan(difference.low):
        return f"{difference.mean:+.4g} (one prompt: no interval)"
    return f"{difference.mean:+.4g} [{difference.low:+.4g}, {difference.high:+.4g}]"


def format_setting(value: object) -> str:
    """A value of a configuration in one line."""
    return in_one_line("null" if value is None else str(value))


def _render_header(comparison: Comparison) -> str:
    rows = "".join(
        f"<tr><td>{_render_name(number, run.name)}</td><td>{escape(run.task)}</td><td>{escape(run.state)}</td>"
        f"<td>{escape(str(run.folder))}</td></tr>"
        for number, run in enumerate(comparison.runs)
    )
    problems = [f"{run.name}: {problem}" for run in comparison.runs for problem in run.problems]
    notes = "".join(f"<li>{escape(note)}</li>" for note in [*comparison.notes, *problems])
    return (
        f'<header><p class="brand">sfumato compare</p><h1>{len(comparison.runs)} runs</h1><div class="scroll">'
        f'<table class="numbers"><tbody>{rows}</tbody></table></div>{f"<ul>{notes}</ul>" if notes else ""}</header>'
    )


def _render_results(comparison: Comparison) -> str:
    rows = []
    for name, results in comparison.results.items():
        for number, (run, result) in enumerate(zip(comparison.runs, results, strict=True)):
            label = f'<td rowspan="{len(results)}">{escape(name)}</td>' if number == 0 else ""
            cells = "<td>absent</td><td></td><td></td>"
            if result is not None:
                best = "" if math.isnan(result.best) else f"{result.best:.4g} <small>at {result.best_step}</small>"
                cells = (
                    f"<td>{result.first:.4g} <small>at {result.first_step}</small></td><td><b>{result.last:.4g}</b> "
                    f"<small>at {result.last_step}</small></td><td>{best}</td>"
                )
            rows.append(f"<tr>{label}<td>{_render_name(number, run.name)}</td>{cells}</tr>")
    if not rows:
        return ""
    return render_section("Results", "", numbers_table(("metric", "run", "first", "last", "best"), "".join(rows)))


def _render_paired_rewards(comparison: Comparison) -> str:
    first = comparison.runs[0].name
    rows = []
    notes = []
    for number, paired in enumerate(comparison.paired, start=1):
        notes += [f"{paired.name}: {note}" for note in paired.notes]
        for difference in paired.differences:
            kind = ""
            if not math.isnan(difference.low) and not difference.low <= 0 <= difference.high:
                kind = ' class="clear"'
            values = f"{difference.before:.4g} → {difference.after:.4g}"
            rows.append(
                f"<tr><td>{_render_name(number, paired.name)}</td><td>{escape(difference.reward)}</td><td>{values}</td>"
                f"<td{kind}>{escape(format_change(difference))}</td><td>{difference.num_prompts}</td></tr>"
            )
    table = numbers_table(("run", "reward", "means", "difference [95 %]", "prompts"), "".join(rows)) if rows else ""
    lines = "".join(f"<li>{escape(note)}</li>" for note in notes)
    note = f"Against {escape(first)}, over evaluation samples of the same prompts and seeds; paired bootstrap."
    return render_section(
        "Differences on the same prompts", note, table + (f'<ul class="note">{lines}</ul>' if lines else "")
    )


def _render_differences(title: str, comparison: Comparison, differences: Sequence[Difference]) -> str:
    if not differences:
        return render_section(title, "", "<p>None.</p>")
    names = [_render_name(number, run.name) for number, run in enumerate(comparison.runs)]
    rows = "".join(
        f"<tr><td>{escape(difference.name)}</td>"
        f"{''.join(f'<td>{escape(format_setting(value))}</td>' for value in difference.values)}</tr>"
        for difference in differences
    )
    return render_section(title, "", numbers_table(("", *names), rows))


def _render_samples(comparison: Comparison, number: int) -> str:
    """The samples of the prompts whose reward differs most between a run and the first one."""
    paired = comparison.paired[number]
    if paired.steps is None:
        return ""
    runs = (comparison.runs[0], comparison.runs[number + 1])
    pairs = pair_samples(*(run.eval_rows[step] for run, step in zip(runs, paired.steps, strict=True)))
    shown = sorted(pairs, key=_reward_change)[:MAX_PROMPTS]
    if not shown:
        return ""
    chips = RewardChips([row for pair in shown for row in pair])
    body = []
    for pair in shown:
        cells = [
            sample_cell(run.folder, step, row, chips) for run, step, row in zip(runs, paired.steps, pair, strict=True)
        ]
        source = sample_source(runs[0].folder, paired.steps[0], pair[0])
        body.append(prompt_rows(str(pair[0].get("prompt", "")), pair[0].get("seed", ""), source, cells))
    head = "".join(
        f"<th>{_render_name(place, run.name)} <small>step {step}</small></th>"
        for place, run, step in zip((0, number + 1), runs, paired.steps, strict=True)
    )
    has_texts = any("text" in row for pair in shown for row in pair)
    table = grid_table(head, body, 480 if has_texts else 256, has_texts)
    note = f"{len(shown)} of {len(pairs)} pairs, those whose reward differs most first"
    return render_section(f"Same prompts and seeds: {escape(runs[0].name)} and {escape(runs[1].name)}", note, table)


def _reward_change(pair: tuple[SampleRow, SampleRow]) -> float:
    """Orders pairs by how much the reward differs; those without come last."""
    before, after = (row.get("total") for row in pair)
    if isinstance(before, (int, float)) and isinstance(after, (int, float)):
        return -abs(after - before)
    return 1.0


def _render_name(number: int, name: str) -> str:
    """The name of a run in the colour and the dashes of its curves."""
    colour, dash = line_style(number)
    line = (
        f'<svg width="22" height="6"><path d="M0 3L22 3" style="stroke:var(--{colour});stroke-width:3;{dash}"/></svg>'
    )
    return f'<span class="run">{line} {escape(name)}</span>'
