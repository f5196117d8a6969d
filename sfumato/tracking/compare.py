"""Runs beside each other: what differs in their configurations, their results, and differences with intervals.

Plain data: ``sfumato compare`` prints it, and pages draw it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sfumato.config.base import flatten
from sfumato.config.file_checks import file_problem, outside_problem
from sfumato.config.open_mappings import JsonObject
from sfumato.config.secrets import secret_problem
from sfumato.config.yaml_text import read_yaml
from sfumato.errors import ConfigError, DataError
from sfumato.tracking.bootstrap import paired_bootstrap
from sfumato.tracking.folder import ENVIRONMENT, OWN_FOLDER, read_environment
from sfumato.tracking.json_lines import SeriesView, finite_points, is_number, is_step, read_jsonl, series_of
from sfumato.tracking.lock import read_owner
from sfumato.tracking.samples import read_step, sample_steps

ABSENT = "(absent)"
"""The value of a field that a run's configuration does not have."""
HIDDEN = "(hidden)"
"""The value of a field that holds a key or a password."""
NOT_COMPARED = ("run_id", "forked_from", "finished", "total_steps", "command", "date", "task", "slurm_job")
"""Entries of ``environment.json`` that differ between any two runs, or are shown elsewhere."""
RESULTS = ("eval/", "reward/total", "loss", "train/loss")
"""Beginnings of metrics that say how good a run is."""
NO_RESULTS = ("std", "failed")
"""Ends of metrics that only describe how a result was measured."""

SampleRow = JsonObject


class EvalRows(Mapping[int, list[SampleRow]]):
    """Samples of evaluations by step, as ``samples.jsonl`` has them; read when they are asked for, since a comparison
    needs those of one step, and a long run has thousands.

    Args:
        steps: with samples, ascending.
        read: the rows of one of them, of all kinds.
    """

    def __init__(self, steps: Sequence[int], read: Callable[[int], list[SampleRow]]) -> None:
        self._steps = dict.fromkeys(steps)
        self._read = read
        self._rows: dict[int, list[SampleRow]] = {}

    def __getitem__(self, step: int) -> list[SampleRow]:
        if step not in self._steps:
            raise KeyError(step)
        if step not in self._rows:
            self._rows[step] = [row for row in self._read(step) if row.get("kind") == "eval"]
        if not self._rows[step]:
            raise KeyError(step)
        return self._rows[step]

    def __iter__(self) -> Iterator[int]:
        return (step for step in self._steps if step in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def newest_step(self, other: EvalRows | None = None) -> int | None:
        """The newest step with samples of an evaluation, in another run, too, where one is given; None for none."""
        steps = reversed(self._steps)
        return next((step for step in steps if (other is None or step in other) and step in self), None)


@dataclass(frozen=True)
class RunRecord:
    """A run folder as it was read."""

    folder: Path
    name: str
    """Tells it from the other runs that are compared."""
    task: str
    state: str
    """A few words: finished, at work, stopped, and at which step."""
    run_id: str
    config: dict[str, object]
    """Values by dotted name; those that are secrets are ``HIDDEN``."""
    environment: dict[str, object]
    """Versions, commit and hardware, by name."""
    metrics: SeriesView
    eval_rows: EvalRows = field(repr=False)
    problems: tuple[str, ...] = ()
    """What could not be read and is therefore not compared."""


@dataclass(frozen=True)
class Difference:
    """A field in which runs differ."""

    name: str
    values: tuple[object, ...]
    """One for each run, ``ABSENT`` where it does not have the field."""


@dataclass(frozen=True)
class Result:
    """What became of a metric in one run."""

    first_step: int
    first: float
    last_step: int
    last: float
    best_step: int
    best: float
    """The smallest value where less is better, the largest where more is; NaN where it is not known which."""


@dataclass(frozen=True)
class PairedDifference:
    """The difference of a reward between two evaluations that drew the same prompts with the same seeds."""

    reward: str
    before: float
    """Mean over the pairs."""
    after: float
    """Mean over the pairs."""
    mean: float
    low: float
    """Bounds of the 95 % interval of ``mean``; NaN where only one prompt was evaluated."""
    high: float
    num_prompts: int
    num_pairs: int
    num_failed: int
    """Pairs of which one sample has no reward; they are left out."""


@dataclass(frozen=True)
class PairedRun:
    """A run's evaluation against that of the first run."""

    name: str
    steps: tuple[int, int] | None
    """The steps whose samples are compared: of the first run and of this one."""
    differences: tuple[PairedDifference, ...]
    num_unpaired: int
    """Samples of either run without a partner of the same prompt and seed; they are left out."""
    notes: tuple[str, ...]
    """Why there is no difference, or what limits it."""


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other; the first is the one that the others are compared with."""

    runs: tuple[RunRecord, ...]
    config: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    results: dict[str, tuple[Result | None, ...]]
    """By metric, one for each run; None where it does not have the metric."""
    paired: tuple[PairedRun, ...]
    notes: tuple[str, ...]


def compare_runs(folders: Sequence[Path], step: int | None = None, seed: int = 0) -> Comparison:
    """Reads run folders and compares them.

    Args:
        folders: two or more; the first is the one that the others are compared with.
        step: of the evaluations whose samples are compared; None takes the newest step that both runs evaluated.
        seed: of the bootstrap.

    Raises:
        DataError: a folder is no run folder, or a file in it is damaged.
    """
    if len(folders) < 2:
        raise DataError("two run folders are needed to compare: sfumato compare runs/a runs/b")
    runs = [read_run(Path(folder), name) for folder, name in zip(folders, name_folders(folders), strict=True)]
    return compare_records(runs, step, seed)


def compare_records(runs: Sequence[RunRecord], step: int | None = None, seed: int = 0) -> Comparison:
    """The same of runs that have been read. Raises DataError where samples that are compared are damaged."""
    tasks = list(dict.fromkeys(run.task for run in runs))
    config = differing_fields([run.config for run in runs])
    notes = []
    if len({run.run_id for run in runs}) < len(runs):
        notes.append("some of these folders hold the same run (equal run ids)")
    if len(tasks) > 1:
        notes.append(f"the tasks differ ({', '.join(tasks)}): only metrics of one name are set beside each other")
    if any(difference.name.startswith("reward.") for difference in config):
        notes.append(
            "the rewards differ in configuration: reward/total and eval/reward/total are not the same quantity"
        )
    names = list(dict.fromkeys(name for run in runs for name in run.metrics if _is_result(name)))
    results = {name: tuple(summarise_metric(name, run) for run in runs) for name in names}
    return Comparison(
        runs=tuple(runs),
        config=config,
        environment=differing_fields([run.environment for run in runs]),
        results={name: values for name, values in results.items() if any(values)},
        paired=tuple(pair_runs(runs[0], run, step, seed) for run in runs[1:]),
        notes=tuple(notes),
    )


def read_run(
    folder: Path,
    name: str = "",
    metrics: SeriesView | None = None,
    last_step: int = 0,
    eval_rows: EvalRows | None = None,
) -> RunRecord:
    """Reads what is compared of a run, which may be at work.

    Args:
        folder: of the run.
        name: of the run; empty takes that of the folder.
        metrics: where they have been read already.
        last_step: of these metrics.
        eval_rows: where they are read by somebody else.

    Raises:
        DataError: it is no run folder, or its metrics are damaged.
    """
    if problem := file_problem(folder, or_folder=True):
        raise DataError(f"{folder} {problem}: name the folder of a run (train.output_dir)")
    has_files = any((folder / file).exists() for file in ("config.yaml", "metrics.jsonl", ENVIRONMENT))
    if not folder.is_dir() or not has_files:
        inner = next((path.parent.parent for path in sorted(folder.glob("*/*/config.yaml"))[:1]), None)
        runs = ", ".join(str(path.parent) for path in sorted(folder.glob("*/config.yaml"))[:4])
        hint = f"; it holds runs: {runs}" if runs else f"; runs lie deeper, such as in {inner}" if inner else ""
        raise DataError(f"{folder} is no run folder: it has neither config.yaml nor metrics.jsonl{hint}")
    problems = []
    config: dict[str, object] = {}
    try:
        if problem := outside_problem(folder, "config.yaml"):
            raise ConfigError(f"config.yaml {problem}")
        config = flatten_config(read_yaml(folder / "config.yaml"))
    except ConfigError as error:
        problems.append(f"the configuration is not compared: {error}")
    environment = read_environment(folder)
    if not environment:
        problems.append(f"versions and hardware are not compared: {ENVIRONMENT} is missing or damaged")
    if metrics is None:
        metrics = series_of(read_jsonl(folder / "metrics.jsonl"))
        last_step = max((step for points in metrics.values() for step in points), default=0)
    if eval_rows is None:
        eval_rows = EvalRows(sample_steps(folder), lambda step: read_step(folder, step))
    return RunRecord(
        folder=folder,
        name=name or folder.resolve().name,
        task=str(environment.get("task") or "unknown task"),
        state=_describe_state(folder, environment, last_step),
        run_id=str(environment.get("run_id") or folder.resolve()),
        config={key: HIDDEN if secret_problem(key.split("."), value) else value for key, value in config.items()},
        environment={
            key: value for key, value in flatten(environment).items() if key not in _names_not_compared(environment)
        },
        metrics=metrics,
        eval_rows=eval_rows,
        problems=tuple(problems),
    )


def flatten_config(config: object) -> dict[str, object]:
    """The leaves of a configuration by dotted name; those of lists of mappings as ``rewards[0].weight``."""
    leaves: dict[str, object] = {}
    for name, value in flatten(config).items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                inner = flatten_config(item)
                leaves |= {f"{name}[{index}].{key}": leaf for key, leaf in inner.items()}
        else:
            leaves[str(name)] = value
    return leaves


def differing_fields(configs: Sequence[Mapping[str, object]]) -> tuple[Difference, ...]:
    """The fields whose values are not the same in all, in the order in which they stand; an empty one is left out."""
    names = dict.fromkeys(name for config in configs for name in config if name not in OWN_FOLDER)
    differences = []
    for name in names:
        values = tuple(config.get(name, ABSENT) if config else ABSENT for config in configs)
        compared = [value for value, config in zip(values, configs, strict=True) if config]
        # a whole number and the float of its value are one setting, True and 1 are not
        if any(value != compared[0] or (type(value) is bool) != (type(compared[0]) is bool) for value in compared[1:]):
            differences.append(Difference(name, values))
    return tuple(differences)


def summarise_metric(name: str, run: RunRecord) -> Result | None:
    """The first, last and best value of a metric; None where the run has none that is finite."""
    points = list(finite_points(run.metrics.get(name, {})).items())
    if not points:
        return None
    direction = direction_of(name, run.config)
    best_step = points[-1][0]
    best = math.nan
    if direction:
        best_step, best = (max if direction > 0 else min)(points, key=lambda point: point[1])
    return Result(*points[0], *points[-1], best_step, best)


def direction_of(name: str, config: Mapping[str, object]) -> int:
    """1 for a metric of which more is better, -1 where less is, 0 where it is not known.

    Args:
        name: of the metric.
        config: by dotted name, with the weights of rewards.
    """
    last = name.rsplit("/", 1)[-1]
    if "loss" in last or last in ("perplexity", "bits_per_byte", "fid", "kid"):
        return -1
    if last in ("accuracy", "exact_match") or name in ("reward/total", "eval/reward/total"):
        return 1
    if not name.startswith(("eval/reward/", "reward/")):
        return 0
    for key in config:
        if not (place := re.fullmatch(r"(reward\.rewards\[\d+\])\.type", key)):
            continue
        fields = [config.get(f"{place[1]}.{field}") for field in ("name", "path", "type")]
        label = next((value for value in fields if isinstance(value, str)), "")
        if label.rpartition(":")[2] == last:
            weight = config.get(f"{place[1]}.weight", 1.0)
            return (weight > 0) - (weight < 0) if is_number(weight) else 0
    return 0


def pair_runs(first: RunRecord, other: RunRecord, step: int | None = None, seed: int = 0) -> PairedRun:
    """Differences of rewards between a run and the first one, at one step of both if they have one in common."""
    notes = []
    newest = (first.eval_rows.newest_step(), other.eval_rows.newest_step())
    for run, newest_step in zip((first, other), newest, strict=True):
        if newest_step is None:
            notes.append(f"{run.name} has no samples of an evaluation")
        elif step is not None and step not in run.eval_rows:
            notes.append(f"{run.name} has no evaluation at step {step}, but at {_list_steps(list(run.eval_rows))}")
    if newest[0] is None or newest[1] is None or notes:
        return PairedRun(other.name, None, (), 0, tuple(notes))
    chosen = step if step is not None else first.eval_rows.newest_step(other.eval_rows)
    if chosen is None:
        notes.append("the runs evaluated no step in common, so the last evaluation of each is taken")
    steps = (newest[0], newest[1]) if chosen is None else (chosen, chosen)
    if step is None and chosen is not None and max(newest[0], newest[1]) > chosen:
        notes.append(f"step {chosen} is the newest that both evaluated")
    before = first.eval_rows[steps[0]]
    after = other.eval_rows[steps[1]]
    differences, num_unpaired = paired_rewards(before, after, seed)
    if not differences:
        has_rewards = all(any(row.get("rewards") for row in rows) for rows in (before, after))
        notes.append(
            "no sample has a partner of the same prompt and seed: the evaluations differ"
            if num_unpaired
            else "no reward is in both"
            if has_rewards
            else "the samples have no rewards"
        )
    for run, rows in ((first, before), (other, after)):
        evaluated = run.config.get("eval.num_prompts")
        if is_step(evaluated) and len(rows) < evaluated:
            notes.append(
                f"{run.name} kept {len(rows)} of its {evaluated} evaluation samples; --eval.num_saved {evaluated} "
                "keeps all"
            )
    return PairedRun(other.name, steps, differences, num_unpaired, tuple(notes))


def paired_rewards(
    before: Sequence[SampleRow], after: Sequence[SampleRow], seed: int = 0
) -> tuple[tuple[PairedDifference, ...], int]:
    """Differences of every reward between two evaluations, of two runs or of two steps of one run.

    Args:
        before: rows of ``samples.jsonl``.
        after: rows of another evaluation, whose samples of the same prompt, seed and number are their partners.
        seed: of the bootstrap.

    Returns:
        The differences of rewards that both have, the total first; and how many samples have no partner.
    """
    partners = pair_samples(before, after)
    num_unpaired = len(before) + len(after) - 2 * len(partners)
    names = ["total", *dict.fromkeys(name for row, _ in partners for name in rewards_of(row))]
    differences = []
    for name in names:
        pairs = [(row, reward_of(row, name), reward_of(other, name)) for row, other in partners]
        scored = [
            ((row.get("prompt"), row.get("source")), value, other_value)
            for row, value, other_value in pairs
            if value is not None and other_value is not None
        ]
        if not scored:
            continue
        clusters = [cluster for cluster, _, _ in scored]
        changes = [other_value - value for _, value, other_value in scored]
        interval = paired_bootstrap(changes, seed, clusters=clusters)
        differences.append(
            PairedDifference(
                reward=name,
                before=math.fsum(value for _, value, _ in scored) / len(scored),
                after=math.fsum(value for _, _, value in scored) / len(scored),
                mean=interval.mean,
                low=interval.low,
                high=interval.high,
                num_prompts=len(set(clusters)),
                num_pairs=len(scored),
                num_failed=sum(name in rewards_of(row) or name == "total" for row, _, _ in pairs) - len(scored),
            )
        )
    return tuple(differences), num_unpaired


def pair_samples(before: Sequence[SampleRow], after: Sequence[SampleRow]) -> list[tuple[SampleRow, SampleRow]]:
    """Samples of two evaluations that were drawn alike: of the same prompt, source picture, seed and number."""
    by_key = {_sample_key(row): row for row in after}
    return [(row, by_key[_sample_key(row)]) for row in before if _sample_key(row) in by_key]


def _sample_key(row: SampleRow) -> tuple[object, ...]:
    # the number is part of what keys a sample's noise; equal prompts with other pictures are other prompts
    return row.get("prompt"), row.get("source"), row.get("seed"), row.get("sample_id")


def rewards_of(row: Mapping[str, object]) -> Mapping[str, object]:
    """The rewards of a sample by name; empty where it has none."""
    rewards = row.get("rewards")
    return rewards if isinstance(rewards, Mapping) else {}


def reward_of(row: Mapping[str, object], name: str) -> float | None:
    """A reward of a sample, or its ``total``; None where it is missing or not finite."""
    value = row.get("total") if name == "total" else rewards_of(row).get(name)
    return float(value) if is_number(value) and math.isfinite(value) else None


def _is_result(name: str) -> bool:
    return name.startswith(RESULTS) and name.rsplit("/", 1)[-1] not in NO_RESULTS


def name_folders(folders: Sequence[Path]) -> list[str]:
    """Names that tell runs apart: of their folders, with as many parents as that takes, or with numbers."""
    paths = [Path(folder).resolve() for folder in folders]
    for depth in range(1, 4):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(paths, start=1)]


def _names_not_compared(environment: Mapping[str, object]) -> set[str]:
    """Names of entries that are not compared, flattened."""
    entries = {name: value for name, value in environment.items() if name in NOT_COMPARED}
    return set(flatten(entries))


def _describe_state(folder: Path, environment: Mapping[str, object], step: int) -> str:
    """How far a run is."""
    total = environment.get("total_steps")
    progress = f"step {step} of {total}" if is_step(total) else f"step {step}"
    if environment.get("finished"):
        return f"finished, {progress}"
    owner = read_owner(folder)
    if owner is None or (owner.is_visible and not owner.is_alive):
        return f"unfinished, {progress}"
    return f"at work, {progress}" if owner.is_visible else f"at work on {owner.host}, {progress}"


def _list_steps(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 6 else f"{steps[0]}, {steps[1]}, ... {steps[-1]}"
