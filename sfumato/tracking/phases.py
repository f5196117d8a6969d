"""The parts of a step. Imports nothing heavy: a report is made without torch."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """The parts of a step whose time is told apart: ``time/<part>_s``."""

    DATA = "data"
    REFERENCE = "reference"
    GENERATE = "generate"
    WAIT_FOR_REWARDS = "wait_for_rewards"
    UPDATE = "update"
    EVALUATE = "evaluate"
    SAMPLE = "sample"
    SAVE = "save"
    EXPORT = "export"
    REPORT = "report"

    @property
    def metric(self) -> str:
        """Its name among the timings."""
        return f"time/{self}_s"

    @property
    def is_training(self) -> bool:
        """Rates are over the time of these parts, and of what no part tells."""
        return self not in (Phase.EVALUATE, Phase.SAMPLE, Phase.SAVE, Phase.EXPORT, Phase.REPORT)
