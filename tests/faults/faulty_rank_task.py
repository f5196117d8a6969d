"""``tasks/train_dit.py`` with ranks on which something happens in a step: FAULTS is [[rank, step, what], ...]."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from sfumato.config.dit import TrainDitConfig
from sfumato.errors import (
    ConfigError,
    NonFiniteError,
    RewardError,
    SelfCheckError,
    WeightSyncError,
)
from sfumato.tracking.task import run_task
from tests.tiny import load_task

ERRORS = {
    2: ConfigError("the data is wrong"),
    4: NonFiniteError("a loss is not finite"),
    5: RewardError("rewards fail"),
    6: SelfCheckError("replay and rollout disagree"),
    7: WeightSyncError("weights were not sent"),
    130: KeyboardInterrupt(),
}

task = load_task("train_dit")
losses_of = task.denoising_losses
rank = int(os.environ.get("RANK", "0"))


def deadlock() -> None:
    """What hangs."""
    time.sleep(600)


def denoising_losses(model: Any, batch: Any, flow: Any, seed: int, step: int) -> Any:
    """The task's own, after what is to happen."""
    for who, when, what in json.loads(os.environ["FAULTS"]):
        if (who, when) == (rank, step + 1):
            if what == "hang":
                deadlock()
            elif what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "long":
                Path(os.environ["IN_STEP"]).touch()
                time.sleep(40)
            else:
                raise ERRORS[what]
    return losses_of(model, batch, flow, seed, step)


if __name__ == "__main__":
    task.denoising_losses = denoising_losses
    run_task(task.main, TrainDitConfig)
