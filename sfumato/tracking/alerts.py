"""What a person should be told of a run: one function for its pages, notifications of browsers, and the webhook."""

from __future__ import annotations

from dataclasses import dataclass

from sfumato.tracking.json_lines import SeriesView
from sfumato.tracking.reward_hacking import Sign, signs_of_hacking

FAILED = "reward/failed"
"""Share of a step's samples that have no reward."""


@dataclass(frozen=True)
class Alert:
    """A trouble of a run."""

    kind: str
    """reward_hacking, reward_failures, died, standing still, or stopped."""
    text: str
    """A sentence that tells a trouble from another and stays the same while it lasts, so that each is told once."""
    details: str = ""
    """Numbers, which change."""


def find_alerts(metrics: SeriesView, state: str = "", why: str = "") -> list[Alert]:
    """The alerts of a run as it stands.

    Args:
        metrics: of ``metrics.jsonl``.
        state: what the run is doing, as the studio finds it; empty where that is not known.
        why: a sentence about the state.
    """
    alerts = state_alerts(state, why)
    alerts += map(hacking_alert, signs_of_hacking(metrics))
    shares = metrics.get(FAILED, {})
    newest = max(shares, default=None)
    return alerts + ([] if newest is None else failure_alerts(newest, shares[newest]))


def hacking_alert(sign: Sign) -> Alert:
    """The alert of a sign of reward hacking."""
    return Alert("reward_hacking", f"sign of reward hacking in {sign.metric}", sign.text)


def state_alerts(state: str, why: str) -> list[Alert]:
    """The alert of a run that has died or stands still."""
    return [Alert(state, f"{state}: {why}")] if state in ("died", "standing still") else []


def failure_alerts(step: int, share: float | None) -> list[Alert]:
    """The alert of a step in which samples have no reward; ``share`` is the metric ``reward/failed``."""
    if not share:
        return []
    return [
        Alert(
            "reward_failures", "samples of the newest step have no reward", f"{share:.1%} of the samples of step {step}"
        )
    ]
