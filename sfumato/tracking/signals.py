"""What SIGTERM and Ctrl-C do to a run: before its first step they stop it at once, later after the step."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Protocol

from sfumato.errors import StoppedError


class Stoppable(Protocol):
    """What is known of a run here."""

    output_dir: Path
    stop_requested: bool
    in_steps: bool
    """Whether a stop waits for the end of the step."""


class Listener:
    """The handler of a run's signals. A second SIGINT stops at once, whatever is lost."""

    def __init__(self, run: Stoppable) -> None:
        self.run = run

    def __call__(self, number: int, _frame: Any) -> None:
        if self.run.stop_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.run.stop_requested = True
        check_early_stop(self.run)

    @property
    def was_asked(self) -> bool:
        """Whether the run was asked to stop."""
        return self.run.stop_requested


def listen(run: Stoppable) -> None:
    """Listens to the signals of this process, for a run.

    Raises:
        StoppedError: when the run before, which made what this one starts from, was asked to stop while it ended.
    """
    run.stop_requested = getattr(signal.getsignal(signal.SIGTERM), "was_asked", False)
    check_early_stop(run)
    listener = Listener(run)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, listener)


def check_early_stop(run: Stoppable) -> None:
    """Raises StoppedError when a run was asked to stop and has not begun a step."""
    if run.in_steps or not run.stop_requested:
        return
    steps = [path.name.rpartition("_")[2] for path in (run.output_dir / "checkpoints").glob("global_step_*[0-9]")]
    newest = max(map(int, steps), default=None)
    kept = " yet" if newest is None else f" since the start; the checkpoint of step {newest} is untouched"
    raise StoppedError(f"stopped by signal before the first step; nothing was trained{kept}")
