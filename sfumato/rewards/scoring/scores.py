"""The scores of a batch, and the metrics and records that are logged of them."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sfumato.config.open_mappings import JsonObject
from sfumato.rewards.base import Sample
from sfumato.tracking.samples import SampleRecord


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of a batch of B samples."""

    total: np.ndarray
    """What is optimised, float64 [B]; NaN where a reward of non-zero weight failed."""
    level: np.ndarray
    """The total without standardising within groups or the iteration, float64 [B]: comparable over time."""
    components: dict[str, np.ndarray]
    """Values of every reward by label, as it gave them, float64 [B]; NaN where it failed."""
    failed: Counter[str] = field(default_factory=Counter)
    """Samples by reward and reason why they have no value, such as "ocr: returned NaN"; empty when all went well."""
    notes: list[str] = field(default_factory=list)
    """What else happened, such as requests that were tried again."""
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Metrics of the rewards' own that are fractions: how many of how many."""
    metadata: list[JsonObject] | None = None
    """B rows of the data, where the combination takes them."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What each reward took, by label."""
    remembered: dict[str, int] = field(default_factory=dict)
    """Samples whose value was known from an equal one, by label of the rewards that remember."""

    @staticmethod
    def cat(parts: Sequence[Scores]) -> Scores:
        """Scores of several micro-batches or ranks, in order."""
        return Scores(
            total=np.concatenate([scores.total for scores in parts]),
            level=np.concatenate([scores.level for scores in parts]),
            components={
                name: np.concatenate([scores.components[name] for scores in parts]) for name in parts[0].components
            },
            failed=sum((scores.failed for scores in parts), Counter()),
            notes=[note for scores in parts for note in scores.notes],
            counts={
                name: (sum(scores.counts[name][0] for scores in parts), sum(scores.counts[name][1] for scores in parts))
                for name in parts[0].counts
            },
            metadata=None if parts[0].metadata is None else [row for scores in parts for row in scores.metadata or ()],
            seconds={name: sum(scores.seconds[name] for scores in parts) for name in parts[0].seconds},
            remembered={name: sum(scores.remembered[name] for scores in parts) for name in parts[0].remembered},
        )

    def rows(self, index: Sequence[int]) -> Scores:
        """The samples at ``index``, with the messages and times of all."""
        rows = list(index)
        return dataclasses.replace(
            self,
            total=self.total[rows],
            level=self.level[rows],
            components={name: values[rows] for name, values in self.components.items()},
            metadata=None if self.metadata is None else [self.metadata[row] for row in rows],
        )

    @property
    def failures(self) -> list[str]:
        """One message per reward and reason, with the number of samples."""
        return [f"{reason} ({count} of {len(self.total)} samples)" for reason, count in self.failed.items()]

    @property
    def messages(self) -> list[str]:
        """Failures and notes for the log, each once."""
        return list(dict.fromkeys([*(f"failed: {failure}" for failure in self.failures), *self.notes]))

    def metrics(self, prefix: str) -> dict[str, float]:
        """Metrics by name: means, spreads and failed fractions, also of each reward where there are several.

        Samples without a value count in the fractions alone.
        """
        numbers = {f"{prefix}reward/total": _mean_of_scored(self.level)}
        numbers |= {f"{prefix}reward/{name}": _mean_of_scored(values) for name, values in self.components.items()}
        for name, (part, whole) in self.counts.items():
            numbers[f"{prefix}{name}"] = part / whole if whole else math.nan
        numbers |= {
            f"{prefix}reward/std": _std_of_scored(self.level),
            f"{prefix}reward/failed": _fraction_failed(self.total),
        }
        # With one reward its spread and its failures are those of the total, which stand there already.
        for name, values in self.components.items() if len(self.components) > 1 else ():
            numbers |= {
                f"{prefix}reward_std/{name}": _std_of_scored(values),
                f"{prefix}reward_failed/{name}": _fraction_failed(values),
            }
        return numbers

    def timings(self, wait_s: float) -> dict[str, float]:
        """What scoring took, which is not the same in a rerun.

        Args:
            wait_s: seconds that a step waited for rewards.
        """
        scoring_s = sum(self.seconds.values())
        metrics = {"time/scoring_s": scoring_s, "scoring/hidden_share": 1 - wait_s / max(scoring_s, wait_s, 1e-9)}
        metrics |= {f"time/reward_{name}_s": seconds for name, seconds in self.seconds.items()}
        return metrics | {
            f"scoring/remembered_share_{name}": count / len(self.total) for name, count in self.remembered.items()
        }

    def record(self, row: int, sample: Sample, **about: Any) -> SampleRecord:
        """One sample with its scores, for the run folder; ``about`` are the record's other fields."""
        rewards = {name: float(values[row]) for name, values in self.components.items()}
        return SampleRecord(
            content=sample.content,
            damage=sample.damage,
            frame_rate=sample.frame_rate,
            source=sample.source if sample.images is None else sample.images.side_by_side(),
            prompt=sample.prompt,
            rewards=rewards,
            total=float(self.total[row]),
            **about,
        )


def _mean_of_scored(values: np.ndarray) -> float:
    scored = values[np.isfinite(values)]
    return float(scored.mean()) if len(scored) else math.nan


def _std_of_scored(values: np.ndarray) -> float:
    scored = values[np.isfinite(values)]
    return float(scored.std()) if len(scored) else math.nan


def _fraction_failed(values: np.ndarray) -> float:
    return float(np.isnan(values).mean())
