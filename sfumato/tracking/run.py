"""A run: its folder, its seeds, its signals, its log. Only rank 0 writes and shows anything."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

import numpy as np
import torch

from sfumato.config.base import Section
from sfumato.config.characters import printable
from sfumato.config.trust import describe_code
from sfumato.config.versions import describe_untested_versions
from sfumato.errors import CheckpointError, ConfigError, FolderError
from sfumato.optim.optimizer import say_unfinished_warmup
from sfumato.parallel.compiling import compiler_figures
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.peers import watch_peers
from sfumato.tracking.exit import check_early_stop, ending_of, install_signal_handlers, name_log
from sfumato.tracking.folder import RunFolder, check_same_settings, describe_absent_checkpoint, environment_of
from sfumato.tracking.idle import IdleIterations, idle_summary
from sfumato.tracking.json_lines import BestEffortFiles, JsonLines, read_jsonl, series_of
from sfumato.tracking.meters import Meter, StepProfiler, describe_float32, peak_flops
from sfumato.tracking.model_card import CARD, write_card
from sfumato.tracking.progress import Progress, digits_after_point, quiet_libraries, say_messages, show_progress
from sfumato.tracking.samples import SampleRecord, drop_samples_after, read_stills, save_samples_and_grids
from sfumato.tracking.shared_folder import check_shared
from sfumato.tracking.source_code import SourceWatch, check_same_code
from sfumato.tracking.timeline import Event, Phase, Timeline
from sfumato.tracking.trackers import Trackers, build_trackers, check_trackers

if TYPE_CHECKING:
    from sfumato.tracking.alerts import Alert
    from sfumato.tracking.control import RunControl

Item = TypeVar("Item")

REPORT_FRACTION = 0.05
"""Fraction of a run's time that reports before the last may take."""


class Run:
    """The folder and the logs of one run.

    ``metrics.jsonl`` holds computed numbers, which a rerun reproduces to the bit; ``timings.jsonl`` holds times, rates
    and memory of this machine.
    """

    newest: ClassVar[Run | None] = None
    """The run that this process started last."""

    def __init__(
        self, output_dir: Path, label: str, mesh: Mesh, config: Section | None = None, folder: RunFolder | None = None
    ) -> None:
        """Use ``start_run``."""
        self._enabled = False
        self.output_dir = output_dir
        self.label = label
        self.mesh = mesh
        self.stop_requested = False
        self.is_started_again = Run.newest is not None and Run.newest.output_dir == output_dir
        """Whether this process has started the run before, and lost its actor or all of Ray meanwhile."""
        self.in_steps = False
        """Whether a signal stops the run after the step, and no longer at once."""
        self.is_open = False
        self.total_steps = 0
        """Steps of the whole run, which ``begin`` sets."""
        self.control: RunControl | None = None
        """What is done on request, in a task that makes one."""
        self.sampled_step: int | None = None
        """The last step whose samples were saved."""
        self.folder = folder
        """The run folder and its lock, on rank 0 of a run that ``start_run`` made; elsewhere None."""
        self._early: list[str] | None = None
        """Messages from before ``begin``, until which nothing is written; None after it."""
        self._config = {} if config is None else config.model_dump(mode="json")
        self._timeout_s: float | None = None
        self._meter = Meter(mesh)
        self._profiler = None
        if config is not None:
            train = config.train  # type: ignore[attr-defined]
            self._timeout_s = train.timeout_s
            self._meter = Meter(mesh, peak_flops(mesh.device, train.mixed_precision, train.peak_tflops))
            if (steps := train.profile_steps) is not None:
                first, last = cast("tuple[int, int]", steps)
                self._profiler = StepProfiler(first, last, output_dir / "traces", mesh.rank)
        self._trackers = Trackers([], self.say)  # a signal may come while those of ``begin`` start
        self._files = BestEffortFiles(self.say)
        self._pending_error: CheckpointError | None = None
        self._timings: dict[str, float] = {}
        self._signs_said: set[str] = set()
        self._graphs_said = compiler_figures().get("compile/graphs", 0)
        self._idle = IdleIterations()
        self._source_watch: SourceWatch | None = None
        self._report_due = 0.0
        self._step_started = time.perf_counter()

    def report_if_complete(self) -> bool:
        """Says so if the folder holds this run, finished: nothing is loaded or started then. Every rank must call it.

        A run without its exported weights is not complete: it goes on, and makes them again.
        """
        is_complete = self.mesh.first(self.folder is not None and self.folder.is_complete, among="world")
        if is_complete:
            self.say(
                f"{self.output_dir} holds this run, finished: nothing is left to do. A larger --train.max_steps goes on"
            )
            self.say(f"trained weights: {self.output_dir / 'hf_ckpt'}   report: {self.output_dir / 'report.html'}")
        if is_complete and self.folder is not None:
            self.folder.say_next_steps(self.label, self._config["train"]["max_steps"])
        return is_complete

    def begin(self, total_steps: int, from_step: int, trackers: list[str]) -> None:
        """Takes the folder for this run, and opens logs and progress. Before it, a start has written nothing.

        Lines of steps after ``from_step``, which a resumed run repeats, are dropped. Every rank must call it.

        Args:
            total_steps: of the whole run.
            from_step: step of the checkpoint that the run goes on from; 0 without one.
            trackers: names of trackers.

        Raises:
            FolderError: on every rank, when the folder cannot be this run's.
        """
        self.total_steps = total_steps
        self._claim_folder(total_steps, from_step)
        self._enabled = self.mesh.is_first
        self._source_watch = SourceWatch() if self._enabled and self.folder is not None else None
        self._progress = Progress(total_steps, from_step, self.label, enabled=self._enabled)
        if self._enabled:
            drop_samples_after(self.output_dir, from_step)
            keep = from_step if from_step > 0 else None
            self._metrics = JsonLines(self.output_dir / "metrics.jsonl", keep, self._files.report)
            self._times = JsonLines(self.output_dir / "timings.jsonl", keep, self._files.report)
            purge_step = from_step + 1 if from_step > 0 else None
            self._timeline = Timeline(self.output_dir, keep, report=self._files.report)
            self._trackers = Trackers(
                build_trackers(trackers, self.output_dir, purge_step, self._config, self.say), self.say
            )
        self.is_open = True
        self._say_compiled(compiler_figures(), f"before step {from_step + 1}")
        if self._profiler is not None:
            self._profiler.after_step(from_step)
        self._step_started = time.perf_counter()
        say_unfinished_warmup(self._config, total_steps, self.say)

    def _claim_folder(self, total_steps: int, from_step: int) -> None:
        """Rank 0 takes the folder; every rank raises its FolderError. Then early messages are written to the log."""
        if self._early is None:  # not from start_run
            return
        problem = ""
        if self.folder is not None:
            try:
                self.folder.begin(total_steps, from_step, {"task": self.label, **environment_of(self.mesh)})
            except FolderError as error:
                problem = str(error)
            except OSError as error:
                problem = f"train.output_dir {self.output_dir} cannot be written: {error.strerror}"
        if problem := self.mesh.first(problem, among="world"):
            raise FolderError(problem)
        early = self._early
        self._early = None
        if self.folder is not None:
            self._write_log(early)
            name_log(self.output_dir / "log.txt")

    def steps(self, items: Iterable[Item]) -> Iterator[Item]:
        """Passes on the steps of the training loop.

        Before the first step a signal stops the run at once, since nothing has to be finished; later, after the step.
        The first step may take long (compilation, caches): only after it ``train.timeout_s`` limits how long ranks wait
        for each other.
        """
        for item in items:
            check_early_stop(self)
            self.in_steps = True
            yield item
            if self._timeout_s is not None:
                self.mesh.set_timeout(self._timeout_s)
                self._timeout_s = None
        self.in_steps = True

    def is_due(self, step: int, every: int) -> bool:
        """Whether something that is done every ``every`` steps (0: never), and after the last one, is due now."""
        return step == self.total_steps or (every > 0 and step % every == 0)

    def count(self, **amounts: float | Mapping[str, float]) -> None:
        """Adds tokens, images and flops of this step and this data-parallel rank; see ``Meter.count``."""
        self._meter.count(**amounts)

    def log(self, step: int, metrics: dict[str, float], show: Mapping[str, str]) -> None:
        """Writes a line of metrics, and one of timings, rates and memory since the last call. Every rank must call it.

        Args:
            step: finished steps.
            metrics: deterministic numbers by name.
            show: metrics to show beside the progress bar, by their label there.
        """
        seconds = time.perf_counter() - self._step_started
        training_s = seconds - sum(self._timings.get(phase.metric, 0.0) for phase in Phase if not phase.is_training)
        rates = self._meter.rates(training_s, self._timings)
        busy = self._timeline.end_step(step) if self._enabled else {}
        compiled = compiler_figures()
        timings = {**self._timings, "time/step_s": seconds, **rates, **busy, **compiled, **self._meter.memory()}
        self._say_compiled(compiled, f"by the end of step {step}")
        self._timings = {}
        self._step_started = self._step_started + seconds
        if self._profiler is not None and self._profiler.after_step(step):
            self.say(f"profile of steps {self._profiler.first} to {self._profiler.last}: {self._profiler.folder}")
            self._step_started = time.perf_counter()  # writing the trace belongs to no step
        if not self._enabled:
            return
        if self.folder is not None:
            self.folder.lock.check(at_most_every_s=1.0)
        self._metrics.write({"step": step, **metrics})
        self._times.write({"step": step, **timings})
        self._trackers.log(step, {**metrics, **timings})
        shown = {label: metrics[name] for label, name in show.items() if name in metrics}
        if "throughput/tokens_per_s" in rates:
            shown["tokens/s"] = rates["throughput/tokens_per_s"]
        self._progress.update(step, **shown)
        if text := self._idle.note(step, metrics):
            self.say(text)
        if self._source_watch is not None and (text := self._source_watch.look()):
            self.say(text)

    def sync(self) -> str:
        """Flushes metrics and timings to disk, so that they survive a power failure.

        Returns:
            Why metrics cannot be written, with the name of the file; empty when they were written.
        """
        if not (self.is_open and self._enabled):
            return ""
        with self._files.spare(self._times.path):
            self._times.sync()
        try:
            self._metrics.sync()
        except OSError as error:
            return f"{error.filename} lacks {self._metrics.num_waiting} lines: {error.strerror}"
        return ""

    def save_samples(self, step: int, records: list[SampleRecord]) -> None:
        """Writes samples with their prompts and rewards, and grids of pictures, and passes these to the trackers."""
        self.sampled_step = step
        if self._enabled and records:
            damaged = [record.damage for record in records if record.damage]
            if damaged:
                self.say(f"samples of step {step}: {len(damaged)} of {len(records)} cannot be shown: {damaged[0]}")
            with self._files.spare(self.output_dir / "samples"):
                save_samples_and_grids(self.output_dir, step, records)
                self.show_samples(step)

    def add_samples(self, step: int, records: list[SampleRecord]) -> None:
        """Writes further samples to those of a step; one of the same kind and id is replaced."""
        if self._enabled and records:
            with self._files.spare(self.output_dir / "samples"):
                save_samples_and_grids(self.output_dir, step, records, add=True)

    def report_samples(self, error: OSError | None) -> None:
        """Reports why samples that a role saves could not be written, once until they can be; None: they were."""
        self._files.report(self.output_dir / "samples", error)

    def show_samples(self, step: int) -> None:
        """Passes the pictures of a step in the run folder to the trackers."""
        self.sampled_step = step
        for kind, images in read_stills(self.output_dir, step).items() if self._enabled and self._trackers.all else ():
            self._trackers.log_images(step, f"samples/{kind}", images)

    def attempt(self, write: Callable[..., object], *arguments: object) -> None:
        """Writes something that is written again at the end of the run; that it fails now is only reported."""
        try:
            with self.timed(Phase.EXPORT):
                write(*arguments)
        except CheckpointError as error:
            self.say(f"{error}; the run goes on")

    def store_error(self, error: CheckpointError) -> None:
        """Stores the error of the last checkpoint, until the rest of the run's end is done; ``finish`` raises it."""
        self.say(str(error))
        self._pending_error = error

    def set_devices(self, count: int) -> None:
        """Sets how many processes compute, where these are not the processes that run the script."""
        self._meter.num_devices = count

    def set_peak(self, flops: float | None) -> None:
        """Sets the peak operations a second of a device, where other processes compute; None, unknown, is ignored."""
        if flops is not None:
            self._meter.peak_flops = flops

    def add_events(self, events: Iterable[Event], timings: Mapping[str, float]) -> None:
        """Adds events of the roles to the timeline, and numbers that were measured there to the timings."""
        if self._enabled:
            self._timeline.add(events)
        self.add_timings(timings)

    def changes(self, prefix: str) -> str:
        """The first and last value of every metric with this prefix, without spreads and failures, as text."""
        if not self._enabled:
            return ""
        lines = read_jsonl(self.output_dir / "metrics.jsonl")
        names = [name for name in dict.fromkeys(key for line in lines for key in line) if name.startswith(prefix)]
        parts = []
        for name in names:
            values = [line[name] for line in lines if line.get(name) is not None]
            if values and name.removeprefix(prefix) not in {"std", "failed"}:
                digits = digits_after_point(values[0], values[-1])
                parts.append(f"{name.removeprefix(prefix)} {values[0]:.{digits}f} -> {values[-1]:.{digits}f}")
        return ", ".join(parts)

    def say_signs_of_hacking(self) -> None:
        """Reports signs of reward hacking in the metrics, each sign once in a run."""
        if not self._enabled:
            return
        from sfumato.tracking.alerts import hacking_alert
        from sfumato.tracking.reward_hacking import signs_of_hacking

        for sign in signs_of_hacking(series_of(read_jsonl(self.output_dir / "metrics.jsonl"))):
            if sign.metric not in self._signs_said:
                self.say(f"sign of reward hacking: {sign.text}")
                self.alert(hacking_alert(sign))
                self._signs_said.add(sign.metric)

    def alert(self, alert: Alert) -> None:
        """Sends an alert to the webhook, where ``train.trackers`` names it."""
        if self._enabled:
            self._trackers.alert(alert)

    def end_profile(self) -> None:
        """Writes what was recorded of ``train.profile_steps``, where the run ends before the last of them."""
        if self._profiler is not None:
            with self._files.spare(self._profiler.folder):
                self._profiler.close()

    def end_trackers(self, exit_code: int) -> None:
        """Tells trackers that the run has ended, if it was not closed, and waits until alerts are sent, or given up."""
        if self._enabled:
            self._trackers.close(exit_code)
            self._trackers.flush_alerts()

    def write_report(self, *, if_cheap: bool = False, ending: str = "") -> None:
        """Writes ``report.html`` from the present content of the run folder.

        Args:
            if_cheap: does nothing where writing it so often would take more than ``REPORT_FRACTION`` of the time.
            ending: why the run ended before its last step.
        """
        started = time.monotonic()
        if not self._enabled or (if_cheap and started < self._report_due):
            return
        from sfumato.tracking.report import write_report

        with self.timed(Phase.REPORT), self._files.spare(self.output_dir / "report.html"):
            write_report(self.output_dir, ending)
        ended = time.monotonic()
        self._report_due = ended + (ended - started) / REPORT_FRACTION

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to ``time/<name>_s`` of the step; ``name`` is one of ``Phase``."""
        started = time.perf_counter()
        yield
        self.add_time(name, time.perf_counter() - started)

    def waiting(self, name: str, items: Iterable[Item]) -> Iterator[Item]:
        """Passes on the items, and adds the seconds until each arrives to ``time/<name>_s`` of the step."""
        iterator = iter(items)
        while True:
            with self.timed(name):
                item = next(iterator, None)
            if item is None:
                return
            yield item

    def add_time(self, name: str, seconds: float) -> None:
        """Adds seconds to ``time/<name>_s`` of the step. Call it when that part of the step ends."""
        phase = Phase(name)
        self._meter.phase_ended(phase)
        self._timings[phase.metric] = self._timings.get(phase.metric, 0.0) + seconds

    def add_timings(self, timings: Mapping[str, float]) -> None:
        """Adds measured numbers to the timings of the step, which a rerun does not reproduce."""
        self._timings |= timings

    def watch(self, label: str) -> Callable[[Iterable[Item], int], Iterator[Item]]:
        """A function that passes on items, given their number, and shows the progress over them."""
        return partial(show_progress, label=label, enabled=self.mesh.is_first)

    def add_environment(self, values: Mapping[str, object], message: str = "") -> None:
        """Adds measurements of this machine to ``environment.json``, and reports what follows from them."""
        if message:
            self.say(message)
        if self.folder is not None:
            self.folder.add_environment(values)

    def _say_compiled(self, figures: Mapping[str, float], when: str) -> None:
        """Reports what compilation has cost so far, where graphs have come since the last report."""
        graphs = figures.get("compile/graphs", 0)
        if graphs != self._graphs_said:
            self.say(f"torch.compile made {graphs} graphs in {figures['compile/seconds']:.0f} s {when}")
            self._graphs_said = graphs

    @property
    def timed_seconds(self) -> float:
        """Seconds of this step so far that were timed as one of ``Phase``."""
        return sum(self._timings.get(phase.metric, 0.0) for phase in Phase)

    def append(self, name: str, line: str) -> None:
        """Appends a line to a file of the run folder that the run can do without."""
        self._files.append(self.output_dir / name, [line])

    def say(self, text: str) -> None:
        """Shows a line to the person who watches, and writes it to ``log.txt``."""
        if not self.mesh.is_first:
            return
        text = printable(text)
        if self.is_open:
            self._progress.message(text)
        else:
            print(text, file=sys.stderr, flush=True)
        if self._early is not None:
            self._early.append(text)
        else:
            self._write_log([text])

    def _write_log(self, texts: Iterable[str]) -> None:
        self._files.append(self.output_dir / "log.txt", map(printable, texts))

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(0 if error is None else ending_of(error).code)

    def finish(self) -> None:
        """Marks the run as finished, reports if it learned nothing, and closes it.

        Raises:
            CheckpointError: on every rank, when its last checkpoint or lines of its metrics could not be written.
        """
        problem = str(self._pending_error or "") or self.sync()
        if problem := self.mesh.first(problem, among="world"):
            raise CheckpointError(problem)
        if self._enabled and (text := idle_summary(series_of(read_jsonl(self.output_dir / "metrics.jsonl")))):
            self.say(text)
        if self.folder is not None:
            self._write_card()
            self.folder.finish()
        self.close()
        if self.folder is not None:
            self.folder.say_next_steps(self.label, self.total_steps)

    def _write_card(self) -> None:
        """Writes the model card of what was exported, so that the folder can be shared as it is."""
        export = self.output_dir / "hf_ckpt"
        if not export.is_dir():
            return
        try:
            with self._files.spare(export / CARD):
                write_card(self.output_dir, export, with_curves=False)  # the report has them
        except ConfigError as error:  # somebody has edited the run's configuration, and the weights are complete
            self.say(f"{export} has no {CARD}: {error}")

    def close(self, exit_code: int = 0) -> None:
        """Flushes logs, tells trackers how the run ended, ends the progress bar, and gives the folder back."""
        if self.mesh.is_first:
            say_messages(None)
        was_open = self.is_open
        if was_open and self.control is not None:
            self.control.close()
        self.is_open = False
        try:
            if was_open:
                self.end_profile()
                self._progress.close()
            if was_open and self._enabled:
                for log in (self._metrics, self._times, self._timeline):
                    log.close()
                self._trackers.close(exit_code)
        finally:
            if self.folder is not None:
                self.folder.lock.release()


def start_run(config: Section, mesh: Mesh, label: str) -> Run:
    """Takes the run folder, seeds every generator, and listens to signals. ``Run.begin`` writes the first file.

    Args:
        config: the task's configuration; its ``train`` section names folder and seed.
        mesh: the processes of the run.
        label: name of the task; shown beside the progress bar.

    Raises:
        UserError: when a tracker is unknown or not installed, or the processes of the run do not have the same
            settings and code or do not share the folder.
        FolderError: on every rank, when another run is at work in the folder, or one stands there that this one
            does not go on with.
        CheckpointError: on every rank, when ``train.load_checkpoint_path`` does not exist.
    """
    train = config.train  # type: ignore[attr-defined]
    check_trackers(train.trackers)
    check_same_settings(config, mesh)
    check_shared(Path(train.output_dir), mesh)
    check_same_code(mesh)
    quiet_libraries()
    early: list[str] = []
    folder = _take_folder(config, mesh, early)
    seed_generators(train.seed)
    run = Run(Path(train.output_dir), label, mesh, config, folder)
    run._early = early
    for line in (*describe_untested_versions(), *describe_code(), *describe_float32(mesh.device)):
        run.say(line)
    Run.newest = run
    if mesh.is_first:  # other ranks' messages are not shown, but their warnings go to standard error
        say_messages(run.say)
    install_signal_handlers(run)
    watch_peers(mesh.rank, mesh.size, run.say if mesh.is_first else partial(print, file=sys.stderr, flush=True))
    return run


def _take_folder(config: Section, mesh: Mesh, early: list[str]) -> RunFolder | None:
    """Rank 0 opens the folder; every rank raises its FolderError. ``early`` takes the messages.

    Raises CheckpointError when ``train.load_checkpoint_path`` does not exist: reading data, which comes before the
    checkpoint, may take hours.
    """
    if absent := mesh.first(describe_absent_checkpoint(config), among="world"):
        raise CheckpointError(absent)

    def say(text: str) -> None:
        early.append(text)
        print(text, file=sys.stderr, flush=True)

    folder = None
    problem = ""
    if mesh.is_first:
        try:
            folder = RunFolder(config, say)
        except FolderError as error:
            problem = str(error)
    if problem := mesh.first(problem, among="world"):
        raise FolderError(problem)
    return folder


def seed_generators(seed: int) -> None:
    """Seeds the generators of Python, numpy and torch in this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
