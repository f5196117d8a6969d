"""Iterations of RL that learned nothing: how metrics show them, why they happen, and what can be done."""

from __future__ import annotations

from collections.abc import Mapping

from sfumato.tracking.json_lines import SeriesView

NO_SPREAD = "advantage/groups_without_spread"
REASONS_FROM = ("updates", NO_SPREAD, "lr", "grad_norm")
"""The metrics that ``why_idle`` looks at."""
REMEDIES = {
    "no group has samples of different rewards": "see whether the reward can tell samples apart (rewards in "
    "metrics.jsonl, samples in the run folder), draw more of each prompt (rollout.n), or take prompts of which the "
    "policy answers some well and some badly",
    "no sample could be learned from": "see in log.txt why samples have no reward or are left out",
    "the gradient is zero": "see whether advantages (advantage/abs_mean in metrics.jsonl) are zero, or all weights "
    "frozen",
    "the learning rate is zero": "raise train.lr or train.lr_min",
}
"""What can be done, by the reason why nothing was learned."""


def why_idle(metrics: Mapping[str, float | None]) -> str:
    """The reason, a key of ``REMEDIES``, why an iteration learned nothing; empty where it learned, or is no RL."""
    if "updates" not in metrics:
        return ""
    if metrics["updates"] == 0:
        spread = "no group has samples of different rewards"
        return spread if metrics.get(NO_SPREAD) == 1 else "no sample could be learned from"
    if metrics.get("lr") == 0:
        return "the learning rate is zero"
    return "the gradient is zero" if metrics.get("grad_norm") == 0 else ""


class IdleIterations:
    """Reports consecutive iterations that learn nothing: the first, and whenever their number has doubled."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def note(self, step: int, metrics: Mapping[str, float | None]) -> str:
        """The message about an iteration; empty where there is nothing to report."""
        why = why_idle(metrics)
        if "updates" in metrics:
            self._in_a_row = self._in_a_row + 1 if why else 0
        if not why or self._in_a_row & (self._in_a_row - 1):  # not a power of two
            return ""
        in_a_row = f", the last {self._in_a_row} of them" if self._in_a_row > 1 else ""
        return f"step {step}: nothing was learned{in_a_row}: {why}. {REMEDIES[why].capitalize()}"


def idle_summary(series: SeriesView) -> str:
    """How many of a run's iterations learned nothing, and what can be done; empty where fewer than half did."""
    asked = {name: series[name] for name in REASONS_FROM if name in series}
    iterations = [
        {name: points[step] for name, points in asked.items() if step in points} for step in series.get("updates", {})
    ]
    reasons = [why for metrics in iterations if (why := why_idle(metrics))]
    if not reasons or 2 * len(reasons) < len(iterations):
        return ""
    why = max(dict.fromkeys(reasons), key=reasons.count)
    if len(reasons) < len(iterations):
        return f"{len(reasons)} of {len(iterations)} iterations learned nothing, most since {why}: {REMEDIES[why]}"
    return (
        f"none of the {len(iterations)} iterations learned anything, so the weights are those that the run started "
        f"from; most since {why}: {REMEDIES[why]}"
    )
