"""The headline figures of a run: what its evaluations say before and after, for the report and the studio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sfumato.tracking.json_lines import SeriesView, finite_points, is_number

HEADLINES = ("eval/reward/", "eval/exact_match", "eval/accuracy")
NO_HEADLINES = ("eval/reward/std", "eval/reward/failed")


@dataclass(frozen=True)
class Headline:
    """The first, the last and the best value of a metric.

    Attributes:
        name: of the metric.
        first: step and value of the first evaluation.
        last: of the last one, which may be the first.
        best: of the best one; the highest where it is not known which values are better.
        change: whether the last value is better than the first.
        has_direction: whether it is known which values are better.
        lost_at: step of the newest evaluation where its value was not finite; None where it was.
    """

    name: str
    first: tuple[int, float]
    last: tuple[int, float]
    best: tuple[int, float]
    change: Literal["better", "worse", "unknown"]
    has_direction: bool
    lost_at: int | None

    @property
    def is_single(self) -> bool:
        """Whether one evaluation alone has a value."""
        return self.first[0] == self.last[0]


def list_headlines(metrics: SeriesView, weights: Mapping[str, float]) -> list[Headline]:
    """The headline figures of a run.

    Args:
        metrics: of ``metrics.jsonl``.
        weights: of the rewards, as ``reward_weights`` gives them.
    """
    figures = []
    for name in metrics:
        if not name.startswith(HEADLINES) or name in NO_HEADLINES:
            continue
        values = list(finite_points(metrics[name]).items())
        if not values:
            continue
        direction = _direction_of_metric(name, weights)
        best = (min if direction < 0 else max)(values, key=lambda item: item[1])
        gain = direction * (values[-1][1] - values[0][1])
        change = "better" if gain > 0 else "worse" if gain < 0 else "unknown"
        newest = max(metrics[name])
        lost_at = None if newest == values[-1][0] else newest
        figures.append(Headline(name, values[0], values[-1], best, change, bool(direction), lost_at))
    return figures


def reward_weights(config: Any) -> dict[str, float]:
    """Weights of the rewards in a parsed configuration of whatever shape, by name."""
    try:
        weights = {}
        for reward in config["reward"]["rewards"]:
            name = reward.get("name") or (reward["path"] if reward["type"] == "function" else reward["type"])
            weight = reward.get("weight", 1.0)
            weights[name.rpartition(":")[2]] = float(weight) if is_number(weight) else 0.0
    except (TypeError, KeyError, IndexError, AttributeError):  # a task without rewards
        return {}
    return weights


def _direction_of_metric(name: str, weights: Mapping[str, float]) -> float:
    """Positive for a metric of which more is better, negative where less is, 0 where the configuration does not say."""
    reward = name.removeprefix("eval/reward/")
    return 1.0 if reward in (name, "total") else weights.get(reward, 0.0)
