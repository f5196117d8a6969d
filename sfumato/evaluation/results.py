"""Values of samples by model and metric, their means with intervals, and paired differences between models."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from sfumato.tracking.bootstrap import Interval, paired_bootstrap

Key = tuple[Hashable, int]
"""A sample's prompt and seed, by which samples of several models are paired."""

Values = Mapping[Key, float]
"""Values of a metric by sample, NaN where it failed."""

SampleValues = dict[Key, float]
"""The same, while it is filled."""


@dataclass(frozen=True)
class MetricResult:
    """One metric of one model."""

    model: str
    metric: str
    mean: float
    """Over the samples that have a value; NaN where none has."""
    low: float
    high: float
    """Bounds of its 95 % bootstrap interval over prompts; NaN where there are none."""
    num_values: int | None = None
    """Samples with a value; None for a metric of all samples together."""
    num_failed: int = 0
    """Samples without one."""


@dataclass(frozen=True)
class PairedResult:
    """A model's metric minus that of the reference on the same prompts and seeds."""

    model: str
    reference: str
    metric: str
    difference: float
    low: float
    high: float
    num_pairs: int
    num_unpaired: int
    """Samples of the two without a partner, or without a value."""


@dataclass
class Evaluation:
    """Results of several models, the first of which is the reference of the others."""

    models: list[str]
    results: list[MetricResult] = field(default_factory=list)
    differences: list[PairedResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> list[str]:
        """Names of all metrics, in order."""
        return list(dict.fromkeys(result.metric for result in self.results))

    def add_metric(self, metric: str, by_model: Mapping[str, Values]) -> None:
        """Adds the results of a metric of single samples.

        Args:
            metric: its name.
            by_model: values of the models that have it.
        """
        for model, values in by_model.items():
            finite = {key: value for key, value in values.items() if math.isfinite(value)}
            interval = _mean_with_interval(finite)
            failed = len(values) - len(finite)
            self.results.append(MetricResult(model, metric, *interval, len(finite), failed))
        reference = next((model for model in self.models if model in by_model), None)
        for model, values in by_model.items():
            if reference is None or model == reference:
                continue
            other = by_model[reference]
            pairs = {
                key: values[key] - other[key]
                for key in values
                if key in other and math.isfinite(values[key]) and math.isfinite(other[key])
            }
            unpaired = len(values) + len(other) - 2 * len(pairs)
            interval = _mean_with_interval(pairs)
            self.differences.append(PairedResult(model, reference, metric, *interval, len(pairs), unpaired))

    def add_value(self, model: str, metric: str, value: float) -> None:
        """Adds a metric that all samples of a model have together, such as FID."""
        self.results.append(MetricResult(model, metric, value, math.nan, math.nan))

    def result(self, model: str, metric: str) -> MetricResult | None:
        """The result of a model; None where it has none."""
        return next((result for result in self.results if (result.model, result.metric) == (model, metric)), None)

    def difference(self, model: str, metric: str) -> PairedResult | None:
        """The difference from the reference; None where there is none."""
        return next((pair for pair in self.differences if (pair.model, pair.metric) == (model, metric)), None)


def _mean_with_interval(values: Values) -> Interval:
    """The mean with its interval over prompts; NaN without values."""
    if not values:
        return Interval(math.nan, math.nan, math.nan)
    return paired_bootstrap(list(values.values()), clusters=[prompt for prompt, _ in values])


def format_interval(mean: float, low: float, high: float, signed: bool = False) -> str:
    """A mean with its bounds as tables show them."""
    if math.isnan(mean):
        return "failed"
    sign = "+" if signed else ""
    shown = f"{mean:{sign}.4g}"
    return shown if math.isnan(low) else f"{shown} [{low:{sign}.3g}, {high:{sign}.3g}]"


def rows_of(evaluation: Evaluation) -> tuple[list[str], list[list[str]]]:
    """The table as texts: its columns, and a row for each metric."""
    reference, *others = evaluation.models
    columns = ["metric", reference]
    for model in others:
        columns += [model, f"{model} - {reference}"]
    rows = []
    for metric in evaluation.metrics:
        row = [metric]
        for model in evaluation.models:
            result = evaluation.result(model, metric)
            cell = "" if result is None else format_interval(result.mean, result.low, result.high)
            if result is not None and result.num_failed:
                cell += f" ({result.num_failed} failed)"
            row.append(cell)
            if model != reference:
                pair = evaluation.difference(model, metric)
                row.append("" if pair is None else format_interval(pair.difference, pair.low, pair.high, signed=True))
        rows.append(row)
    return columns, rows


def as_markdown(evaluation: Evaluation) -> str:
    """The table and the notes in markdown."""
    columns, rows = rows_of(evaluation)

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    table = [line(columns), line(["---"] * len(columns)), *map(line, rows)]
    notes = [f"- {note}" for note in evaluation.notes]
    return "\n".join([*table, "", *notes, ""])


def as_json(evaluation: Evaluation) -> dict[str, object]:
    """Everything as plain values; what is not finite becomes null when it is written."""
    return {
        "models": evaluation.models,
        "results": [vars(result) for result in evaluation.results],
        "differences": [vars(pair) for pair in evaluation.differences],
        "notes": evaluation.notes,
    }
