"""What the pages Gallery, Group and sample, and the scrubber show: cells, groups and single samples of a run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

from sfumato.config.characters import printable
from sfumato.studio.runs import RunReader
from sfumato.studio.samples import IN_MATRIX, SNIPPET, text_of, whole_number
from sfumato.studio.tail import Record
from sfumato.tracking.json_lines import is_number
from sfumato.tracking.report_answers import shorten_text

JSON = dict[str, object]

INDEX_S = 0.7
"""How long a page waits for steps to be looked at; the rest is looked at when it asks again."""
FIRST_INDEX_S = 0.1
"""The same where none has been looked at: enough for the newest, which are seen first."""
MOST_PROMPT = 400
"""Characters of a prompt in a list of samples."""
MOST_TEXT = 20_000
"""Characters of a text that a page gets: the beginning and the end of a longer one."""
MOST_ITEMS = 16_384
"""Items of a list in a row, such as values of tokens; what is beyond is counted."""
MOST_DEPTH = 6


def describe_gallery(reader: RunReader) -> JSON:
    """The rows and columns of the matrix of evaluations, and the steps that have training samples."""
    index = reader.samples
    is_complete = index.index(INDEX_S if index.num_indexed else FIRST_INDEX_S)
    totals = [cell.total for step in index.repeated_steps() if (entry := index.entry(step)) for cell in entry.repeated]
    totals = [total for total in totals if math.isfinite(total)]
    return {
        "repeated_steps": index.repeated_steps(),
        "train_steps": index.train_steps(),
        "num_steps": len(index.steps),
        "num_indexed": index.num_indexed,
        "is_complete": is_complete,
        "generation": index.generation,
        "prompts": [
            {
                "kind": kind,
                "id": sample_id,
                "prompt": printable(prompt[:MOST_PROMPT]),
                "prompt_key": key_of_prompt(prompt),
                "seed": seed,
            }
            for kind, sample_id, prompt, seed in index.keys
        ],
        "low": min(totals, default=None),
        "high": max(totals, default=None),
        "problems": [printable(f"step {step}: {problem}") for step, problem in list(index.problems.items())[:5]],
    }


def describe_cells(reader: RunReader, steps: Sequence[int]) -> JSON:
    """The cells of some columns of the matrix: by step, the version of its files and its cells."""
    columns: JSON = {}
    for step in steps:
        entry = reader.samples.entry(step)
        if entry is not None:
            cells = [cell.as_json() for cell in entry.repeated]
            columns[str(step)] = {
                "version": entry.version,
                "cells": [[*cell[:3], printable(str(cell[3]))] for cell in cells],
            }
    return columns


def describe_step(reader: RunReader, step: int) -> JSON:
    """The samples of a step by group: samples of one group stand together, and know their group's mean."""
    entry = reader.samples.entry(step)
    rows = reader.samples.rows(step)
    groups: dict[str, list[Record]] = {}
    for row in rows:
        if row.get("kind") == "train":
            groups.setdefault(group_of(row), []).append(row)
    return {
        "step": step,
        "version": entry.version if entry else "",
        "groups": [_describe_group(name, members) for name, members in groups.items()],
        "evaluation": [summarise_sample(row) for row in rows if row.get("kind") in IN_MATRIX],
        "problem": printable(reader.samples.problems.get(step, "")),
    }


def _describe_group(name: str, members: Sequence[Record]) -> JSON:
    totals = [total for row in members if (total := number_of(row, "total")) is not None]
    mean = sum(totals) / len(totals) if totals else None
    std = math.sqrt(sum((total - mean) ** 2 for total in totals) / len(totals)) if mean is not None else None
    first = members[0]
    return {
        "group": name,
        "prompt": printable(text_of(first, "prompt")[:MOST_PROMPT]),
        "source": text_of(first, "source"),
        # what the run has computed over all members counts more than what the samples that were saved give
        "mean": number_of(first, "group_mean", mean),
        "std": number_of(first, "group_std", std),
        "is_computed": number_of(first, "group_mean") is not None,
        "samples": [summarise_sample(row) for row in members],
    }


def group_of(row: Record) -> str:
    """What samples of one group share: its id, or in runs that did not write it the prompt and its picture."""
    group = row.get("group_id")
    if isinstance(group, int) and not isinstance(group, bool):
        return str(group)
    return f"{text_of(row, 'prompt')[:MOST_PROMPT]} {text_of(row, 'source')}".strip()


def summarise_sample(row: Mapping[str, object]) -> JSON:
    """What a list of samples shows of one."""
    return {
        "kind": text_of(row, "kind"),
        "id": whole_number(row.get("sample_id")),
        "file": text_of(row, "file"),
        "text": printable(text_of(row, "text")[:SNIPPET]),
        "damage": printable(text_of(row, "damage")[:SNIPPET]),
        "prompt": printable(text_of(row, "prompt")[:MOST_PROMPT]),
        "seed": whole_number(row.get("seed")),
        "total": number_of(row, "total"),
        "advantage": number_of(row, "advantage"),
        "rewards": {printable(name): value for name, value in _row_rewards(row).items()},
    }


def describe_sample(reader: RunReader, step: int, row: Record) -> JSON:
    """Everything that is known of a sample, and its neighbours in its step and over the steps."""
    entry = reader.samples.entry(step)
    rows = reader.samples.rows(step)
    alike = [other for other in rows if other.get("kind") == row.get("kind") and group_of(other) == group_of(row)]
    kind = text_of(row, "kind")
    neighbours = [other for other in rows if other.get("kind") == kind] if kind in IN_MATRIX else alike
    index = reader.samples
    index.look_around(step, is_train=kind not in IN_MATRIX)
    steps = index.repeated_steps() if kind in IN_MATRIX else index.train_steps()
    advantages = [abs(value) for other in alike if (value := number_of(other, "advantage")) is not None]
    return {
        "step": step,
        "version": entry.version if entry else "",
        "sample": shorten_value(row),
        "prompt_key": key_of_prompt(text_of(row, "prompt")),
        "group": group_of(row) if kind == "train" else None,
        "ids": [whole_number(other.get("sample_id")) for other in neighbours],
        "steps": steps,
        "largest_advantage": max(advantages, default=None),
    }


def key_of_prompt(prompt: str) -> str:
    """A short text that tells a prompt from others, also from those with the same beginning, and in other runs."""
    return hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def describe_frames(reader: RunReader, kind: str, sample_id: int, seed: int | None, prompt_key: str | None) -> JSON:
    """The samples of one prompt and seed over all evaluations, for the scrubber.

    Args:
        reader: of the run.
        kind: "eval" or "watched".
        sample_id: of the sample.
        seed: of the sample; None takes the first seed of that id.
        prompt_key: ``key_of_prompt``; None takes the first prompt of that id. Another run's prompt of that number, or
            that of an evaluation of other prompts, is another prompt, whose pictures must not stand beside these.
    """
    index = reader.samples
    is_complete = index.index(INDEX_S)
    matching = [
        number
        for number, (key_kind, key_id, key_prompt, key_seed) in enumerate(index.keys)
        if (key_kind, key_id) == (kind, sample_id)
        and seed in (None, key_seed)
        and prompt_key in (None, key_of_prompt(key_prompt))
    ]
    frames = []
    for step in index.repeated_steps() if matching else []:
        entry = index.entry(step)
        for cell in entry.repeated if entry else ():
            if entry is not None and cell.key == matching[0]:
                _, file, total, text = cell.as_json()
                content = {"file": file, "sound": cell.sound, "total": total, "text": text}
                frames.append({"step": step, "version": entry.version, **content})
    key = index.keys[matching[0]] if matching else None
    return {
        "frames": frames,
        "prompt": printable(key[2][:MOST_PROMPT]) if key else "",
        "seed": key[3] if key else None,
        "id": sample_id,
        "is_complete": is_complete,
    }


def shorten_value(value: object, depth: int = 0) -> object:
    """A value of a row with long texts cut to their beginning and end, and long lists to their beginning."""
    if isinstance(value, str):
        return printable(shorten_text(value, MOST_TEXT))
    if depth >= MOST_DEPTH and isinstance(value, Mapping | list):
        return "…"
    if isinstance(value, Mapping):
        return {printable(str(name)): shorten_value(item, depth + 1) for name, item in list(value.items())[:1000]}
    if isinstance(value, list):
        return [shorten_value(item, depth + 1) for item in value[:MOST_ITEMS]]
    return value


def number_of(row: Mapping[str, object], name: str, default: float | None = None) -> float | None:
    """A field of a row that is a finite number."""
    value = row.get(name)
    return float(value) if is_number(value) and math.isfinite(value) else default


def _row_rewards(row: Mapping[str, object]) -> dict[str, float | None]:
    rewards = row.get("rewards")
    if not isinstance(rewards, dict):
        return {}
    return {str(name): number_of(rewards, name) for name in list(rewards)[:100]}
