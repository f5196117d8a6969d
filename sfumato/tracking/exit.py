"""How a process of a run ends: its signals, its last message, its exit code, and its stacks when it hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sfumato.config.characters import printable
from sfumato.config.versions import describe_broken_package
from sfumato.errors import (
    CheckpointError,
    NonFiniteError,
    PreemptedError,
    RanksMissingError,
    RewardError,
    RoleLostError,
    SelfCheckError,
    StoppedError,
    UserError,
    WeightSyncError,
    describe_file_error,
)
from sfumato.parallel.peers import is_lost_connection, lost_peers
from sfumato.tracking.next_steps import rerun_command, resume_command
from sfumato.tracking.terminal import hangup_signals

if TYPE_CHECKING:
    from types import FrameType

RESUME = "to go on, add --train.load_checkpoint_path auto"
STOPS = (NonFiniteError, RewardError, SelfCheckError, WeightSyncError, RoleLostError, RanksMissingError)


@dataclass(frozen=True)
class Ending:
    """The last message of a process, and its exit code."""

    text: str
    code: int
    kind: str = "own"
    """Cause of the end: "lost", another rank has ended; "hang", another rank does not answer; "own", anything else."""
    stacks: str = ""

    def tell(self) -> None:
        """Gives the message to the launcher, which knows how the other ranks ended; without one, prints it."""
        folder = os.environ.get("SFUMATO_ENDS")
        rank = os.environ.get("RANK")
        if folder is not None:
            record = {"text": self.text, "kind": self.kind, "at": time.time(), "stacks": self.stacks}
            path = Path(folder) / f"{rank}.json"
            try:
                path.with_suffix(".tmp").write_text(json.dumps(record), encoding="utf-8")
                path.with_suffix(".tmp").rename(path)
            except OSError:  # the disk of the temporary files is full: say it here
                path.with_suffix(".tmp").unlink(missing_ok=True)
            else:
                return
        print(printable("\n".join(part for part in (self.text, self.stacks) if part)), file=sys.stderr)


def ending_of(error: BaseException) -> Ending:
    """The ending of a process that an uncaught error ends."""
    if isinstance(error, PreemptedError):
        return Ending(_with_command(str(error), "to go on", resume_command()), error.exit_code)
    if isinstance(error, StoppedError):
        return Ending(_with_command(str(error), "to start it again", rerun_command()), error.exit_code)
    if isinstance(error, UserError):
        return Ending(f"error: {error}", error.exit_code)
    if isinstance(error, STOPS):
        return Ending(f"stopped: {error}", error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        text = _with_command("stopped at once", "to go on from what was saved last", resume_command())
        return Ending(text, 128 + signal.SIGINT)
    if problem := describe_file_error(error):
        if isinstance(error, PermissionError):
            return Ending(f"error: {problem}", UserError.exit_code)
        return Ending(f"error: {problem}. {RESUME.capitalize()}", CheckpointError.exit_code)
    if broken_package := describe_broken_package(error):
        return Ending(f"error: {broken_package}", UserError.exit_code)
    trace = "".join(traceback.format_exception(error)).rstrip()
    text = str(error)
    rank = os.environ.get("RANK", "0")
    if is_lost_connection(error) and ("Timed out" in text or "timeout" in text.lower()):
        waited = f"stopped: rank {rank} has waited for another rank for longer than train.timeout_s allows; {RESUME}"
        return Ending(waited, RoleLostError.exit_code, "hang", trace)
    if is_lost_connection(error):
        named = lost_peers()
        who = named or "the connection to another rank, whose node says why"
        lost = f"stopped: rank {rank} has lost {who}; {RESUME}"
        return Ending(lost, RoleLostError.exit_code, "lost", "" if named else trace)
    return Ending(trace, 1)


def _with_command(text: str, purpose: str, command: str) -> str:
    """A message with the command for what comes next in a line below it; log and report have the first line alone."""
    return f"{text}\n{purpose}: {command}" if command else text


def keep_stacks() -> None:
    """Makes a crash show the stacks of all threads, and under the launcher SIGQUIT, too, whatever the process does."""
    folder = os.environ.get("SFUMATO_ENDS")
    rank = os.environ.get("RANK")
    if folder is None:
        faulthandler.enable()
        return
    try:
        file = (Path(folder) / f"{rank}.stacks").open("w")
    except OSError:  # the disk of the temporary files has no room for another one
        file = sys.stderr
    faulthandler.enable(file)
    faulthandler.register(signal.SIGQUIT, file)


def name_log(log: Path) -> None:
    """Tells the launcher where the run's log is, so that it adds the last messages of the ranks there."""
    folder = os.environ.get("SFUMATO_ENDS")
    if folder is not None:
        with contextlib.suppress(OSError):  # no room there: the terminal alone has the last messages
            (Path(folder) / "log").write_text(str(log.absolute()), encoding="utf-8")


class Stoppable(Protocol):
    """The attributes of a run that the handler of signals needs."""

    output_dir: Path
    stop_requested: bool
    in_steps: bool
    """Whether a stop waits for the end of the step."""


class Listener:
    """The handler of a run's signals: the first asks the run to stop after the step, a second SIGINT stops at once."""

    def __init__(self, run: Stoppable) -> None:
        self.run = run

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self.run.stop_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.run.stop_requested = True
        check_early_stop(self.run)

    @property
    def was_asked(self) -> bool:
        """Whether the run was asked to stop."""
        return self.run.stop_requested


def install_signal_handlers(run: Stoppable) -> None:
    """Installs the handler of a run's signals: SIGTERM, SIGINT, and SIGHUP of a lost terminal, unless under nohup.

    Raises:
        StoppedError: when an earlier run of this process, whose result this run starts from, was asked to stop while it
            ended.
    """
    run.stop_requested = getattr(signal.getsignal(signal.SIGTERM), "was_asked", False)
    check_early_stop(run)
    listener = Listener(run)
    for number in (signal.SIGTERM, signal.SIGINT, *hangup_signals()):
        signal.signal(number, listener)


def check_early_stop(run: Stoppable) -> None:
    """Raises StoppedError when a run was asked to stop and has not begun a step."""
    if run.in_steps or not run.stop_requested:
        return
    steps = [path.name.rpartition("_")[2] for path in (run.output_dir / "checkpoints").glob("global_step_*[0-9]")]
    newest = max(map(int, steps), default=None)
    untouched_note = " yet" if newest is None else f" since the start; the checkpoint of step {newest} is untouched"
    raise StoppedError(f"stopped by signal before the first step; nothing was trained{untouched_note}")
