"""Runs a task: from the command line to the exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sfumato.config.base import Section
from sfumato.errors import PreemptedError, RoleLostError, StoppedError
from sfumato.kernels import choose_allocator, choose_kernels
from sfumato.parallel.mesh import close_mesh
from sfumato.parallel.peers import leave_peers
from sfumato.tracking.exit import Ending, ending_of, keep_stacks
from sfumato.tracking.folder import read_environment
from sfumato.tracking.lock import release_locks
from sfumato.tracking.run import Run
from sfumato.tracking.terminal import outlive_readers

if TYPE_CHECKING:
    from sfumato.config.sections import TrainConfig

ConfigT = TypeVar("ConfigT", bound=Section)


def run_task(main: Callable[[ConfigT], None], schema: type[ConfigT]) -> None:
    """Parses the command line, runs a task, and turns errors into messages and exit codes.

    An error that is the user's mistake prints its message alone; any other prints its stack trace.

    Args:
        main: runs the task with its configuration.
        schema: of the configuration.
    """
    from sfumato.config.load import parse_config

    outlive_readers()
    keep_stacks()
    choose_kernels()
    try:
        config = after_requeue(parse_config(schema))
        choose_allocator(shares_memory=getattr(getattr(config, "runtime", None), "shares_gpu_memory", False))
        run_again_when_lost(main, config)
        leave_peers()
        release_locks()
        close_mesh()
        return
    except (Exception, KeyboardInterrupt) as error:
        ending = ending_of(error)
    ending.tell()
    leave_peers()
    if ending.code != 128 + signal.SIGINT:  # a second Ctrl+C asks to stop at once: a report would take seconds
        report_ending(ending)
    release_locks()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ending.code)  # other ranks may be waiting in a collective, and a scoring thread may hang: do not join them


def after_requeue(config: ConfigT) -> ConfigT:
    """The configuration of a job that Slurm has queued again, which goes on with the run that it began.

    A checkpoint that its command names, or ``new``, would throw away what the job has done already.
    """
    train: TrainConfig = config.train  # type: ignore[attr-defined]
    if train.load_checkpoint_path in (None, "auto") or os.environ.get("SLURM_RESTART_COUNT", "0") in ("", "0"):
        return config
    if read_environment(Path(train.output_dir)).get("slurm_job") != os.environ.get("SLURM_JOB_ID"):
        return config  # the job was queued again before its run began
    if os.environ.get("RANK", "0") == "0":
        print(
            f"Slurm has queued this job again: it goes on in {train.output_dir} (load_checkpoint_path auto, "
            f"and not {train.load_checkpoint_path})",
            file=sys.stderr,
        )
    return config.model_copy(update={"train": train.model_copy(update={"load_checkpoint_path": "auto"})})


def report_ending(ending: Ending) -> None:
    """Writes to the log and the report of a run that has begun why it ended, and brings the report up to date."""
    run = Run.newest
    if run is None or not run._enabled:
        return
    line = ending.text.splitlines()[-1 if ending.code == 1 else 0]  # of a stack trace the last says what it was
    try:
        run._write_log([line])
        if ending.code not in (PreemptedError.exit_code, StoppedError.exit_code):  # somebody asked for that
            from sfumato.tracking.alerts import Alert

            run.alert(Alert("stopped", f"ended with exit code {ending.code}: {line}"))
        run.write_report(ending=line)
        run.end_trackers(ending.code)
    except Exception as error:  # what ended the run matters more
        print(f"{run.output_dir}/report.html is not of the last step: {error}", file=sys.stderr)


def run_again_when_lost(main: Callable[[Any], None], config: Any) -> None:
    """Runs a task; if its actor or all of Ray is lost, runs it again from the newest checkpoint, as a resume does.

    Args:
        main: runs the task with its configuration.
        config: of the task; ``runtime.max_restarts`` says how often it is run again.

    Raises:
        RoleLostError: when another role is lost, or no restart is left.
        PreemptedError: when the run was also asked to stop.
    """
    runtime = getattr(config, "runtime", None)
    if runtime is None:  # a task without roles
        return main(config)
    folder = Path(config.train.output_dir)
    root = folder / "checkpoints"
    times_before = {path: path.stat().st_mtime_ns for path in root.glob("global_step_*")}
    id_before = read_environment(folder).get("run_id")
    for restarts_left in reversed(range(runtime.max_restarts + 1)):
        try:
            return main(config)
        except RoleLostError as lost:
            if lost.role not in ("actor", "ray") or restarts_left == 0:
                raise
            if getattr(signal.getsignal(signal.SIGTERM), "was_asked", False):
                raise PreemptedError(f"stopped by signal; {lost}\nso only what was saved before is kept") from lost
            has_saved = any(
                times_before.get(path) != path.stat().st_mtime_ns for path in root.glob("global_step_*[0-9]")
            )
            named = resume_from = config.train.load_checkpoint_path
            if named in (None, "new"):
                has_begun = read_environment(folder).get("run_id") != id_before
                # A run that had not begun when it was lost has made no checkpoint: those in the folder may be of an
                # earlier run, which "auto" would go on with.
                resume_from = "auto" if has_begun else named
            elif has_saved:
                resume_from = "auto"
            starts = resume_from in (None, "new")
            from_checkpoint = f"going on from the newest checkpoint (load_checkpoint_path {resume_from})"
            announcement = "starting again" if starts else from_checkpoint
            print(f"{lost}\n{announcement}", file=sys.stderr)
            # The new start waits for nodes at least as long as a call does: the node of the lost actor has to return.
            wait_settings = {"wait_for_nodes_s": max(runtime.wait_for_nodes_s, runtime.call_timeout_s)}
            config = config.model_copy(
                update={
                    "train": config.train.model_copy(update={"load_checkpoint_path": resume_from}),
                    "runtime": config.runtime.model_copy(update=wait_settings),
                }
            )
