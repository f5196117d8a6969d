"""Signs of reward hacking in a run's metrics: the optimised reward rises while metrics that only watch fall.

A sign is no proof. Each rule is set so that noise alone triggers it in about one of fifty runs of sixty evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sfumato.tracking.json_lines import SeriesView, finite_points

OPTIMISED, HELD_OUT, VELOCITY = "reward/total", "eval/reward/total", "eval/velocity/rms"
STANDARD_ERRORS = 5.0
"""Standard errors by which a reward must have changed."""
LEAST_VALUES = 6
"""Fewest values of a metric: fewer do not show how noisy it is."""
NORM_GROWTH = 0.1
"""Growth of the velocity's norm that is a sign. Any training brings some; 5 to 15 % went with worse images in arXiv
2606.27771."""
DIVERSITY_LEFT = 0.5
"""Share of the diversity at the beginning of a run below which the loss of it is a sign."""
TYPICAL = 5
"""Iterations over which the median of the diversity is taken, at the beginning of a run and at its end."""


@dataclass(frozen=True)
class Sign:
    """Something that a person should look at."""

    metric: str
    """Name of the metric in which the sign shows."""
    text: str
    """One sentence with numbers."""


def signs_of_hacking(metrics: SeriesView) -> list[Sign]:
    """The signs of reward hacking at the last step of a run; empty for most runs.

    Args:
        metrics: of ``metrics.jsonl``.
    """
    watched = [name for name in [HELD_OUT, *evaluation_only(metrics)] if name in metrics]
    signs = [_find_gap(metrics, name) for name in watched]
    signs += [
        _find_velocity_growth(metrics),
        *(_find_diversity_loss(metrics, name) for name in metrics if name.startswith("diversity/")),
    ]
    return [sign for sign in signs if sign is not None]


def evaluation_only(metrics: SeriesView) -> list[str]:
    """Names of held-out rewards that are not optimised."""
    rewards = [name for name in metrics if name.startswith("eval/reward/")]
    return [name for name in rewards if name.removeprefix("eval/") not in metrics] if OPTIMISED in metrics else []


def relative_to_first(points: Mapping[int, float | None]) -> dict[int, float | None]:
    """Values divided by the first of them."""
    first = next((value for value in points.values() if value is not None), None)
    return {step: value / first if value is not None and first else None for step, value in points.items()}


def measure_change(values: np.ndarray) -> tuple[float, float]:
    """The mean of the last third minus the mean of the first, and the standard error of this difference.

    The noise is estimated from successive differences, so that a trend hardly counts as noise.

    Args:
        values: floats ``[n]``, at least three.
    """
    part = len(values) // 3
    variance = np.square(np.diff(values)).sum() / (2 * (len(values) - 1))
    return float(values[-part:].mean() - values[:part].mean()), float(np.sqrt(2 * variance / part))


def _find_gap(metrics: SeriesView, name: str) -> Sign | None:
    """A held-out reward that has fallen since its best evaluation while the optimised one rose."""
    held_out = finite_points(metrics[name])
    if len(held_out) < LEAST_VALUES or OPTIMISED not in metrics:
        return None
    best = max(held_out, key=lambda step: held_out[step])
    values = np.array([value for step, value in held_out.items() if step >= best])
    optimised = np.array([value for step, value in finite_points(metrics[OPTIMISED]).items() if step >= best])
    if min(len(values), len(optimised)) < LEAST_VALUES:
        return None
    (rise, rise_error), (fall, fall_error) = measure_change(optimised), measure_change(values)
    if rise <= STANDARD_ERRORS * rise_error or -fall <= STANDARD_ERRORS * fall_error:
        return None
    return Sign(name, f"{OPTIMISED} rose by {rise:.3g} since step {best}, while {name} fell by {-fall:.3g}")


def _find_velocity_growth(metrics: SeriesView) -> Sign | None:
    """The norm of the velocity in evaluations that has grown since the first one."""
    values = list(finite_points(relative_to_first(metrics.get(VELOCITY, {}))).values())
    if not values or values[-1] <= 1 + NORM_GROWTH:
        return None
    return Sign(VELOCITY, f"{VELOCITY} is {100 * (values[-1] - 1):.0f} % above the first evaluation's")


def _find_diversity_loss(metrics: SeriesView, name: str) -> Sign | None:
    """A measure of the diversity of a prompt's samples that has fallen since the beginning."""
    values = list(finite_points(metrics[name]).values())
    if len(values) < 2 * TYPICAL:
        return None
    before, now = np.median(values[:TYPICAL]), np.median(values[-TYPICAL:])
    if now >= DIVERSITY_LEFT * before:
        return None
    return Sign(name, f"{name} fell from {before:.3g} to {now:.3g}: samples of a prompt look alike")
