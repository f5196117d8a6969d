"""The report of a run in one HTML file: what training changed, curves, samples over training, config, timing."""

from __future__ import annotations

import json
import re
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from sfumato.config.writing import write_atomically
from sfumato.config.yaml_text import parse_yaml
from sfumato.errors import ConfigError, DataError
from sfumato.tracking.charts import choose_stretch, timeline_svg
from sfumato.tracking.headlines import list_headlines, reward_weights
from sfumato.tracking.idle import idle_summary
from sfumato.tracking.json_lines import Series, finite_points, has_run_file, is_step, read_jsonl, series_of
from sfumato.tracking.page import render_page
from sfumato.tracking.report_answers import render_answers
from sfumato.tracking.report_curves import SEARCH, curve_sections, render_figure
from sfumato.tracking.report_samples import evaluation_grid, training_samples
from sfumato.tracking.report_tables import failed_rewards, last_values, render_section, time_per_phase
from sfumato.tracking.reward_hacking import OPTIMISED, VELOCITY, evaluation_only, relative_to_first, signs_of_hacking
from sfumato.tracking.samples import read_samples
from sfumato.tracking.timeline import read_events

MOST_BYTES = 2**28
"""Size of the largest text file of a run that is read."""
MOST_FACTS = 60
"""Most facts about the environment that are shown."""

_SIGNS = r"^diversity/|(^|/)velocity/|groups_without_spread$"  # shown among the signs of reward hacking
_ROLES = r"^(utilisation|staleness)/"  # shown with the timeline of the roles


def write_report(output_dir: Path, ending: str = "") -> Path:
    """Builds ``report.html`` in a run folder: one file that opens offline and refers to nothing outside itself.

    A run may have begun a second ago: sections without data are left out. The file is replaced atomically.

    Args:
        output_dir: a run folder with any of metrics.jsonl, timings.jsonl, timeline.jsonl, samples/, config.yaml,
            log.txt, environment.json.
        ending: why the run ended before its last step; empty where it did not.

    Returns:
        The path of the report.

    Raises:
        DataError: a line of a .jsonl file, other than the last, is broken.
    """
    output_dir = Path(output_dir)
    metrics = series_of(read_jsonl(output_dir / "metrics.jsonl"))
    timings = series_of(read_jsonl(output_dir / "timings.jsonl"))
    samples = read_samples(output_dir)
    config = _read_text(output_dir, "config.yaml")
    series = metrics | timings
    curves, has_search = curve_sections(
        {name: points for name, points in series.items() if not re.search(f"{_SIGNS}|{_ROLES}", name)}
    )
    parts = [
        _render_header(output_dir, metrics, samples, config, ending),
        _render_headlines(metrics, reward_weights(_parse_config(config))),
        failed_rewards(_read_text(output_dir, "log.txt")),
        _render_idle(metrics),
        _render_signs(metrics),
        evaluation_grid(output_dir, samples),
        curves,
        _render_roles(output_dir, series),
        training_samples(output_dir, samples),
        render_answers(samples, output_dir),
        config and f"<details><summary>Configuration</summary><pre>{escape(config)}</pre></details>",
        last_values(metrics),
        time_per_phase(timings),
    ]
    page = render_page(output_dir.resolve().name, [part for part in parts if part], SEARCH if has_search else "")
    path = output_dir / "report.html"
    write_atomically(path, page.encode("utf-8"))
    return path


def _read_text(folder: Path, name: str) -> str:
    """The text of a file in a run folder; empty when it is absent. Raises DataError for a link, pipe or huge file."""
    path = folder / name
    return path.read_text(encoding="utf-8", errors="replace") if has_run_file(path, MOST_BYTES) else ""


def _parse_config(config: str) -> Any:
    """The parsed configuration, of whatever shape; None when it is no YAML. A report needs no valid configuration."""
    try:
        return parse_yaml(config, "config.yaml")
    except ConfigError:
        return None


def _render_header(
    output_dir: Path, metrics: Series, samples: dict[int, list[dict[str, object]]], config: str, ending: str
) -> str:
    steps = [step for points in metrics.values() for step in points] + list(samples)
    last = max(steps, default=0)
    total = _planned_steps(config)
    state = f"step {last}" + (f" of {total}" if total else "")
    kind = "open"
    if not steps:
        state = "nothing logged yet"
    elif total and last >= total:
        state = f"all {total} steps finished"
        kind = "done"
    bar = f'<progress max="{total}" value="{last}">{last} of {total}</progress>' if total else ""
    versions = "".join(
        f"<span><b>{escape(k)}</b> {escape(v)}</span>" for k, v in _environment_facts(output_dir).items()
    )
    ended = f'<p class="state ended">{escape(ending)}</p>' if ending and kind == "open" else ""
    written = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return (
        f'<header><p class="brand">sfumato run report</p><h1>{escape(output_dir.resolve().name)}</h1>'
        f'<p class="state"><span class="badge {kind}">{state}</span>{bar}<span>written {escape(written)}</span></p>'
        f'{ended}<p class="state versions">{versions}</p></header>'
    )


def _planned_steps(config: str) -> int | None:
    """Steps of the whole run by its configuration; None where it does not say."""
    try:
        steps = _parse_config(config)["train"]["max_steps"]
    except (TypeError, KeyError, IndexError):
        return None
    return steps if is_step(steps) and steps > 0 else None


def _environment_facts(output_dir: Path) -> dict[str, str]:
    """The scalars of environment.json, at most ``MOST_FACTS``, by their last key where no other has the same."""
    try:
        pending = [("", json.loads(_read_text(output_dir, "environment.json")))]
    except DataError:
        raise
    except (ValueError, RecursionError):  # absent, or being written at this moment
        return {}
    facts: dict[str, str] = {}
    while pending and len(facts) < MOST_FACTS:
        name, value = pending.pop(0)
        if isinstance(value, dict):
            pending.extend((f"{name} {key}" if key in facts else key, item) for key, item in value.items())
        elif name and value is not None and not isinstance(value, list) and len(str(value)) <= 60:
            facts[name] = str(value)[:12] if "commit" in name else str(value)
    return facts


def _render_headlines(metrics: Series, weights: dict[str, float]) -> str:
    """Cards with the first, the last and the best value of each evaluation's metric."""
    cards = []
    for headline in list_headlines(metrics, weights):
        (first_step, first), (last_step, last), (best_step, best) = headline.first, headline.last, headline.best
        if headline.is_single:
            numbers = f"<b>{first:.3f}</b>"
            note = f"one evaluation so far, at step {first_step}"
            if headline.lost_at is not None:
                note = f"step {first_step} alone has a value"
        else:
            numbers = (
                f'<span class="first">{first:.3f}</span><span class="arrow">→</span><b>{last:.3f}</b>'
                f'<span class="change {headline.change}">{last - first:+.3f}</span>'
            )
            which = "best" if headline.has_direction else "highest"
            note = f"before: step {first_step} · after: {last_step} · {which}: {best:.3f} at {best_step}"
        if headline.lost_at is not None:
            note += f' · <span class="warn">not finite at step {headline.lost_at}</span>'
        name = escape(headline.name)
        cards.append(
            f'<div class="card" data-metric="{name}"><p class="note">{name.removeprefix("eval/")}</p>'
            f'<p class="numbers">{numbers}</p><p class="note">{note}</p></div>'
        )
    return (
        render_section("Evaluation: before and after", "", f'<div class="cards">{"".join(cards)}</div>')
        if cards
        else ""
    )


def _render_idle(metrics: Series) -> str:
    """Whether most iterations learned nothing."""
    text = idle_summary(metrics)
    return render_section("Nothing learned", "", f'<p class="warn">{escape(text)}</p>') if text else ""


def _render_signs(metrics: Series) -> str:
    """Signs of reward hacking with their curves; empty where the run has not measured diversity."""
    shown = {name: finite_points(points) for name, points in metrics.items() if re.search(_SIGNS, name)}
    if not any(name.startswith("diversity/") for name in shown):
        return ""
    figures = [
        render_figure(
            name,
            finite_points(metrics[name]),
            f"<small>beside {OPTIMISED}</small>",
            finite_points(metrics.get(OPTIMISED, {})),
        )
        for name in evaluation_only(metrics)
    ]
    for name, values in shown.items():
        note = ""
        if name == VELOCITY:
            values = finite_points(relative_to_first(values))
            note = "<small>relative to the first</small>"
        figures.append(render_figure(name, values, note) if values else "")
    signs = [f'<li data-sign="{escape(sign.metric)}">{escape(sign.text)}</li>' for sign in signs_of_hacking(metrics)]
    text = f'<ul class="warn">{"".join(signs)}</ul>' if signs else "<p>None found.</p>"
    return render_section("Signs of reward hacking", "", f'{text}<div class="curves">{"".join(figures)}</div>')


def _render_roles(output_dir: Path, series: Series) -> str:
    """The timeline of each process in the last steps, and curves of the roles' utilisation and samples' staleness."""
    stretch = choose_stretch(read_events(output_dir))
    shown = {name: finite_points(points) for name, points in series.items() if re.search(_ROLES, name)}
    figures = [render_figure(name, values, "") for name, values in shown.items() if values]
    picture = ""
    note = ""
    if stretch is not None:
        picture = f'<figure class="timeline"><div class="scroll">{timeline_svg(stretch, "timeline-")}</div></figure>'
        hidden = "".join(f" · {shown} of {total} {role} rows" for role, (shown, total) in stretch.left_out.items())
        note = f"v3: samples of the policy after 3 iterations; no bar: idle{hidden}"
    curves = f'<div class="curves">{"".join(figures)}</div>' if figures else ""
    return render_section("What each role did", note, picture + curves) if picture or curves else ""
