"""What the pages Runs, Overview, and Configuration and log show of a run."""

from __future__ import annotations

import time
from dataclasses import asdict, replace

import yaml

from sfumato.config.characters import printable
from sfumato.errors import DataError
from sfumato.studio.runs import RunReader, read_part, read_text
from sfumato.studio.secrets import hide_in_text, hide_secrets
from sfumato.tracking.alerts import find_alerts
from sfumato.tracking.headlines import list_headlines, reward_weights
from sfumato.tracking.idle import idle_summary
from sfumato.tracking.report_tables import count_failed_rewards
from sfumato.tracking.reward_hacking import OPTIMISED, evaluation_only, signs_of_hacking

MOST_FACTS = 60
LOG_BYTES = 2**16
"""Bytes of the log that are sent at once."""
LONGEST_LINE = 600
"""Characters of the last line of a log that the overview shows."""
KEY_CURVES = (
    "reward/total",
    "eval/reward/total",
    "eval/loss",
    "eval/exact_match",
    "eval/accuracy",
    "loss",
    "policy/loss",
    "kl",
    "policy/kl",
    "grad_norm",
    "lr",
    "time/step_s",
)
"""Curves of the overview, those of them that a run has."""
MOST_KEY_CURVES = 6

JSON = dict[str, object]


def describe_run(reader: RunReader) -> JSON:
    """A line of the list of runs, as the page Runs shows it."""
    environment = reader.environment()
    state = reader.state(environment)
    step = reader.metrics.last_step
    total = reader.total_steps(environment)
    step_s = reader.step_s
    is_going_on = state.is_alive and not state.text  # neither paused nor standing still
    is_predictable = is_going_on and total is not None and step_s is not None
    return {
        "run": reader.name,
        "state": state.state,
        "is_alive": state.is_alive,
        "state_text": hide_in_text(printable(state.text)),
        "step": step,
        "total_steps": total,
        "step_s": step_s,
        "eta_s": max((total or 0) - step, 0) * (step_s or 0.0) if is_predictable else None,
        "task": printable(str(environment.get("task", ""))[:60]),
        "run_id": printable(str(environment.get("run_id", ""))[:60]),
        "date": printable(str(environment.get("date", ""))[:40]),
        "figures": _headline_figures(reader)[:3],
    }


def describe_overview(reader: RunReader) -> JSON:
    """Everything that the page Overview shows beside its curves."""
    metrics = reader.metrics.series()
    signs = [{"metric": sign.metric, "text": printable(sign.text)} for sign in signs_of_hacking(metrics)]
    names = reader.curves.curves
    chosen = [name for name in KEY_CURVES if name in names]
    chosen += [name for name in evaluation_only(metrics) if name not in chosen]
    chosen += [name for name in names if name.startswith(("reward/", "eval/reward/")) and name not in chosen]
    try:
        log = read_text(reader.folder, "log.txt")
    except DataError as error:
        log = ""
        log_problem = str(error)
    else:
        log_problem = ""
    line = describe_run(reader)
    last_lines = log.rstrip().rsplit("\n", 1) if line["state"] in ("stopped", "died") else []
    return {
        **line,
        "last_line": hide_in_text(printable(last_lines[-1][:LONGEST_LINE])) if last_lines else "",
        "figures": _headline_figures(reader),
        "signs": signs,
        "has_signs": any(name.startswith("diversity/") for name in metrics) or bool(evaluation_only(metrics)),
        "idle": idle_summary(metrics),
        "failed": [
            {
                "reason": hide_in_text(printable(reason)),
                "train": train,
                "eval": evaluation,
                "first": first,
                "last": last,
            }
            for reason, train, evaluation, first, last in count_failed_rewards(log)
        ],
        "curves": chosen[:MOST_KEY_CURVES],
        "beside": OPTIMISED if OPTIMISED in names else None,
        "problems": [printable(problem) for problem in [*reader.problems, log_problem] if problem],
        "facts": list_facts(reader.environment()),
        "steps_with_samples": len(reader.samples.steps),
        "last_sample_step": max(reader.samples.steps, default=None),
        "samples_generation": reader.samples.generation,
        "time": time.time(),
    }


def describe_status(reader: RunReader) -> JSON:
    """What the run is doing, and what a person should be told of."""
    return {**describe_run(reader), "alerts": list_alerts(reader)}


def list_alerts(reader: RunReader) -> list[JSON]:
    """What a person should be told of: a run that died or stands still, signs of reward hacking, values that are no
    numbers. ``text`` tells a trouble from another, so that each is told once."""
    state = reader.state(reader.environment())
    alerts = find_alerts(reader.metrics.series(), state.state, state.text)
    return [
        {"kind": alert.kind, "text": hide_in_text(printable(alert.text)), "details": printable(alert.details)}
        for alert in alerts
    ]


def _headline_figures(reader: RunReader) -> list[JSON]:
    """The headline figures of a run."""
    figures = list_headlines(reader.metrics.series(), reward_weights(reader.config()))
    return [asdict(replace(figure, name=printable(figure.name))) for figure in figures]


def list_facts(environment: JSON) -> list[tuple[str, str]]:
    """Names and values of environment.json, without secrets, at most ``MOST_FACTS``."""
    pending: list[tuple[str, object]] = [("", hide_secrets(environment))]
    facts: list[tuple[str, str]] = []
    while pending and len(facts) < MOST_FACTS:
        name, value = pending.pop(0)
        if isinstance(value, dict):
            pending[:0] = [(f"{name} {key}".strip(), item) for key, item in value.items()]
        elif value is not None:
            text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            facts.append((printable(name), printable(text[:400])))
    return facts


def describe_files(reader: RunReader) -> JSON:
    """Configuration and environment, without secrets."""
    config = reader.config()
    if config is None:
        try:
            text = hide_in_text(read_text(reader.folder, "config.yaml"))
        except DataError as error:
            text = str(error)
    else:
        text = yaml.safe_dump(hide_secrets(config), sort_keys=False, allow_unicode=True, width=120)
    return {"config": printable(text), "facts": list_facts(reader.environment())}


def read_log(reader: RunReader, before: int | None, after: int | None = None) -> JSON:
    """A part of the log that ends before a byte, by default its end.

    Args:
        reader: of the run.
        before: the byte.
        after: a byte from which on the end is wanted alone; where that is too much, or the file is shorter now, the
            part is what it is without.

    Returns:
        ``text``; ``first`` and ``last``, the bytes that it spans, at whole lines.
    """
    try:
        size = (reader.folder / "log.txt").stat().st_size
    except OSError:  # not written yet
        size = 0
    last = size if before is None else max(0, min(before, size))
    first = max(0, last - LOG_BYTES)
    goes_on = after is not None and first <= after <= last
    first = after if goes_on and after is not None else first
    try:
        content = read_part(reader.folder, "log.txt", first, last - first)
    except DataError as error:
        return {"text": str(error), "first": 0, "last": 0}
    if first and not goes_on:
        cut, newline, rest = content.partition(b"\n")
        if newline:
            first += len(cut) + 1
            content = rest
    text = content.decode("utf-8", errors="replace")
    return {"text": printable(hide_in_text(text)), "first": first, "last": last}
