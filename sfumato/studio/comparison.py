"""Two steps of a run, or several runs, beside each other: what the pages Why and Compare show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from sfumato.config.characters import printable
from sfumato.errors import UserError
from sfumato.studio.gallery import JSON, summarise_sample
from sfumato.studio.runs import RunReader
from sfumato.studio.secrets import hide_secrets
from sfumato.studio.tail import Record
from sfumato.tracking.compare import (
    Difference,
    EvalRows,
    RunRecord,
    compare_records,
    name_folders,
    pair_samples,
    paired_rewards,
    read_run,
    reward_of,
    rewards_of,
)
from sfumato.tracking.reward_hacking import OPTIMISED, evaluation_only, signs_of_hacking

MOVERS = 6
"""Samples that rose most which are shown, and as many of those that fell most."""
MOST_DIFFERENCES = 400


def explain_change(reader: RunReader, first: int, last: int) -> JSON:
    """What an evaluation says of the change between two steps.

    Evaluations keep prompt, seed and noise, so that a sample of one step has a partner in the other.

    Returns:
        ``differences``: the total reward and each part with its interval over prompts; ``prompts``: the change of each
        prompt; ``movers``: the samples that changed most as pairs; ``watched``: rewards that only watch; ``signs``.
    """
    before, after = (_evaluation_samples(reader, step) for step in (first, last))
    differences, num_unpaired = paired_rewards(before, after)
    pairs = pair_samples(before, after)
    changes = [
        (new - old, row, other)
        for row, other in pairs
        if (old := reward_of(row, "total")) is not None and (new := reward_of(other, "total")) is not None
    ]
    changes.sort(key=lambda change: -change[0])
    risen = [change for change in changes[:MOVERS] if change[0] > 0]
    fallen = [change for change in reversed(changes[-MOVERS:]) if change[0] < 0]
    metrics = reader.metrics.series()
    unoptimised = {name.removeprefix("eval/reward/") for name in evaluation_only(metrics)}
    return {
        "first": first,
        "last": last,
        "differences": [
            {**asdict(difference), "is_watched": difference.reward in unoptimised} for difference in differences
        ],
        "num_unpaired": num_unpaired,
        "prompts": _changes_of_prompts(pairs),
        "risen": [_describe_mover(*change) for change in risen],
        "fallen": [_describe_mover(*change) for change in fallen],
        "signs": [printable(sign.text) for sign in signs_of_hacking(metrics)],
        "has_optimised": OPTIMISED in metrics,
        "versions": {str(step): entry.version for step in (first, last) if (entry := reader.samples.entry(step))},
        "num_evaluated": _num_evaluated(reader),
        "num_saved": len(after),
    }


def _evaluation_samples(reader: RunReader, step: int) -> list[Record]:
    return [row for row in reader.samples.rows(step) if row.get("kind") == "eval"]


def _num_evaluated(reader: RunReader) -> int | None:
    """Prompts of an evaluation, of which the run folder may hold fewer."""
    config = reader.config()
    section = config.get("eval") if isinstance(config, dict) else None
    number = section.get("num_prompts") if isinstance(section, dict) else None
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def _changes_of_prompts(pairs: Sequence[tuple[Mapping[str, object], Mapping[str, object]]]) -> list[JSON]:
    """The mean change of each prompt and of each part of its reward, the largest first."""
    by_prompt: dict[str, list[tuple[Mapping[str, object], Mapping[str, object]]]] = {}
    for row, other in pairs:
        by_prompt.setdefault(str(row.get("prompt", "")), []).append((row, other))
    lines = []
    for prompt, members in by_prompt.items():
        names = ["total", *dict.fromkeys(name for row, _ in members for name in rewards_of(row))]
        parts = {}
        for name in names:
            values = [(reward_of(row, name), reward_of(other, name)) for row, other in members]
            scored = [(before, after) for before, after in values if before is not None and after is not None]
            if scored:
                parts[printable(name)] = [
                    sum(before for before, _ in scored) / len(scored),
                    sum(after for _, after in scored) / len(scored),
                ]
        lines.append({"prompt": printable(prompt[:400]), "num_samples": len(members), "parts": parts})

    def total_change(line: JSON) -> float:
        parts = line["parts"]
        total = parts.get("total") if isinstance(parts, dict) else None
        return abs(total[1] - total[0]) if total else 0.0

    return sorted(lines, key=total_change, reverse=True)[:200]


def _describe_mover(change: float, row: Mapping[str, object], other: Mapping[str, object]) -> JSON:
    return {"change": change, "before": summarise_sample(row), "after": summarise_sample(other)}


def describe_comparison(readers: Sequence[RunReader], step: int | None) -> JSON:
    """What differs between runs, their results, and paired differences of their evaluations.

    The first run is the one that the others are compared with.
    """
    try:
        records = [
            # what the studio has read already: reading it anew took seconds at each step of a long run
            read_run(
                reader.folder,
                name,
                reader.metrics.series(),
                reader.metrics.last_step,
                EvalRows(reader.samples.steps, reader.samples.rows),
            )
            for reader, name in zip(readers, name_folders([reader.folder for reader in readers]), strict=True)
        ]
        comparison = compare_records(records, step)
    except UserError as error:
        return {"problem": printable(str(error))}
    names = [reader.name for reader in readers]
    return {
        "runs": [_describe_record(reader, run) for reader, run in zip(readers, comparison.runs, strict=True)],
        "config": _describe_differences(comparison.config),
        "environment": _describe_differences(comparison.environment),
        "results": {
            printable(name): [None if result is None else asdict(result) for result in results]
            for name, results in comparison.results.items()
        },
        "paired": [
            {
                "run": name,
                "steps": paired.steps,
                "differences": [asdict(difference) for difference in paired.differences],
                "num_unpaired": paired.num_unpaired,
                "notes": [printable(note) for note in paired.notes],
            }
            for name, paired in zip(names[1:], comparison.paired, strict=True)
        ],
        "notes": [printable(note) for note in comparison.notes],
        "problem": "",
    }


def _describe_record(reader: RunReader, run: RunRecord) -> JSON:
    problems = [printable(text) for text in (*run.problems, *reader.problems)]
    return {"run": reader.name, "task": run.task, "state": run.state, "problems": problems}


def _describe_differences(differences: Sequence[Difference]) -> list[JSON]:
    shown: list[JSON] = []
    for difference in differences[:MOST_DIFFERENCES]:
        place = tuple(difference.name.split("."))
        values = [printable(str(hide_secrets(value, place))) for value in difference.values]
        shown.append({"name": printable(difference.name), "values": values})
    return shown
