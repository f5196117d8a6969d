"""Requests to a run that is under way: save, sample, evaluate, stop, pause, resume, and prompts that are watched.

They are files in the folder ``control`` of the run folder, which whoever may control the run makes. The first rank
looks for it after each step; whether there is something to do is agreed on in the collective that asks anyway whether a
signal came. Answers are lines of ``control.jsonl``. A request computes what the run could have computed after this
step, with noise that is keyed, so it changes no bit of what is trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sfumato.errors import CheckpointError, NonFiniteError, PreemptedError, RewardError, UserError
from sfumato.tracking.control_files import ANSWERS, COMMANDS, ControlFolder, ControlRequest, Watched
from sfumato.tracking.json_lines import strict_json
from sfumato.tracking.samples import step_folder
from sfumato.tracking.timeline import Phase

if TYPE_CHECKING:
    from sfumato.parallel.mesh import Mesh
    from sfumato.tracking.run import Run
    from sfumato.tracking.samples import SampleRecord

PAUSE_TURN_S = 1.0
"""Seconds between two looks at the folder while the run is paused."""

NEWS = 2.0**32
"""What the first rank adds to the number of ranks that were asked to stop, where there are requests: a float64 holds
both exactly."""

FAILURES = (CheckpointError, NonFiniteError, RewardError, UserError, OSError)
"""Errors of a request that a run survives."""


@dataclass
class Actions:
    """What a task can do when it is asked to. None is what it cannot do. Every rank calls them."""

    save: Callable[[], object]
    """Writes a checkpoint."""
    evaluate: Callable[[], Mapping[str, float]] | None = None
    """Evaluates, and returns metrics."""
    sample: Callable[[], list[SampleRecord] | None] | None = None
    """Draws the samples that the run draws anyway now and then; returns None where it has saved them itself."""
    watch: Callable[[list[str]], list[SampleRecord]] | None = None
    """Draws a sample for each of these prompts."""


class RunControl:
    """The requests to one run. Every rank has one, and calls ``obey`` after each step."""

    def __init__(self, run: Run, actions: Actions) -> None:
        """Requests that are in the folder already were for another run, or for this one before it was ready.

        Args:
            run: whose folder is watched; ``agree_to_stop`` then asks it whether there are requests.
            actions: what the task can do.
        """
        self.run = run
        self.actions = actions
        self.watched: list[str] = []
        """Prompts that are drawn whenever samples are."""
        self._folder = ControlFolder(run.output_dir) if run.mesh.is_first else None
        self._has_news: bool | None = None
        """Whether ranks have agreed since the last call of ``obey`` that there is news; None: nobody has asked."""
        self._is_paused = False
        run.control = self
        if self._folder is not None:
            self._refuse_waiting(0, "it was there before the first step of this start; ask again")

    def has_news(self) -> bool:
        """On the first rank whether there is something to read; False on the others."""
        return self._folder is not None and self._folder.has_news()

    def agreed(self, has_news: bool) -> None:
        """Takes what all ranks have agreed on."""
        self._has_news = has_news

    def obey(self, step: int) -> None:
        """Does what the requests ask for, and draws watched prompts where samples of this step were saved.

        Args:
            step: finished steps.

        Raises:
            PreemptedError: after saving, when the run was asked to stop.
        """
        if self._has_news is None:  # the state is saved in another process, whose ranks know of no requests
            agree_to_stop(self.run, self.run.mesh)
        has_news = self._has_news
        self._has_news = None
        is_drawing = bool(self.watched) and self.run.sampled_step == step
        if not has_news and not is_drawing:
            return
        run = self.run
        started = time.perf_counter()
        timed_before = run.timed_seconds
        try:
            if has_news:
                self._read_and_do(step)
            elif is_drawing:
                self._draw_watched(step)
            while self._is_paused:
                self._wait(step)
        finally:
            # what evaluations and saves in between have timed themselves is not counted twice
            seconds = time.perf_counter() - started - (run.timed_seconds - timed_before)
            run.add_time(Phase.CONTROL, max(seconds, 0.0))

    def close(self) -> None:
        """Refuses what nobody will do."""
        if self._folder is not None:
            self._refuse_waiting(self.run.total_steps, "the run has ended")

    def _refuse_waiting(self, step: int, why: str) -> None:
        """Answers all requests in the folder with a refusal."""
        assert self._folder is not None
        for request in self._folder.take_requests():
            self._answer_request(request, step, "refused", request.problem or why)

    def _wait(self, step: int) -> None:
        """One turn of a pause. Ranks meet in each, so that none waits for longer than it may."""
        run = self.run
        if self._folder is not None:
            time.sleep(PAUSE_TURN_S)
            if run.folder is not None:
                run.folder.lock.check()
        if agree_to_stop(run, run.mesh):
            self.actions.save()
            raise PreemptedError(f"stopped by signal after step {step}, while it was paused; the state is saved")
        has_news = self._has_news
        self._has_news = None
        if has_news:
            self._read_and_do(step)

    def _read_and_do(self, step: int) -> None:
        """Has the first rank read the files, and every rank do what they ask for."""
        mine = None if self._folder is None else (self._folder.take_requests(), self._folder.read_watched())
        requests, watched = self.run.mesh.first(mine, among="world")
        has_drawn = False
        if watched is not None:
            self._take_watched(watched, step)
        for request in requests:
            self._fulfil_request(request, step)
            has_drawn |= request.command in ("sample", "evaluate")
        if self.watched and not has_drawn and self.run.sampled_step == step:
            self._draw_watched(step)

    def _take_watched(self, watched: Watched, step: int) -> None:
        """Takes other watched prompts."""
        request = ControlRequest("watched_prompts", "watched_prompts")
        if watched.problem:
            self._answer_request(request, step, "refused", f"{watched.problem}; the prompts of before stay")
        elif self.actions.watch is None and watched.prompts:
            self._answer_request(
                request, step, "refused", "this task draws no samples of prompts that are not in its data"
            )
        else:
            self.watched = watched.prompts
            self._answer_request(request, step, "done", f"{len(self.watched)} prompts are watched")

    def _fulfil_request(self, request: ControlRequest, step: int) -> None:
        """Does what one request asks for, and answers it."""
        refusal = request.problem or self._refusal_of(request.command, step)
        if refusal:
            self._answer_request(request, step, "refused", refusal)
            return
        metrics: Mapping[str, float] | None = None
        text = ""
        try:
            match request.command:
                case "save" | "stop":
                    self.actions.save()
                    text = f"the checkpoint of step {step} is written"
                case "sample":
                    text = self._draw(step)
                case "evaluate":
                    assert self.actions.evaluate is not None
                    metrics = self.actions.evaluate()
                    text = "evaluated"
                    self._draw_watched(step)
                case "pause" | "resume":
                    self._is_paused = request.command == "pause"
                    text = f"{'paused' if self._is_paused else 'going on'} after step {step}"
                case _:
                    raise AssertionError(request.command)
        except FAILURES as error:
            # ranks that failed apart would now do different things; a save fails on all of them or on none
            if self.run.mesh.size > 1 and request.command not in ("save", "stop"):
                raise
            self._answer_request(request, step, "failed", str(error))
            return
        self._answer_request(request, step, "done", text, metrics)
        if request.command == "stop" and step < self.run.total_steps:
            raise PreemptedError(f"stopped by request after step {step}; the state is saved")

    def _refusal_of(self, command: str, step: int) -> str:
        """Why a command cannot be carried out now; empty where it can."""
        if command not in COMMANDS:
            return f"unknown command {command!r}; commands are {', '.join(COMMANDS[:-1])} and {COMMANDS[-1]}"
        if command == "evaluate" and self.actions.evaluate is None:
            return "this run has no held-out data to evaluate on"
        if command == "sample" and self.actions.sample is None and not (self.actions.watch and self.watched):
            return "this run draws no samples"
        if command == "pause" and self._is_paused:
            return "it is paused already"
        if command == "pause" and step >= self.run.total_steps:
            return "the last step is done"
        if command == "resume" and not self._is_paused:
            return "it is not paused"
        return ""

    def _draw(self, step: int) -> str:
        """Draws what the run samples anyway, and the watched prompts; returns what was done."""
        records = None if self.actions.sample is None else self.actions.sample()
        if records:
            self.run.add_samples(step, records)
        self._draw_watched(step)
        return f"the samples are in {step_folder(self.run.output_dir, step).relative_to(self.run.output_dir)}"

    def _draw_watched(self, step: int) -> None:
        """Draws the watched prompts."""
        if self.watched and self.actions.watch is not None:
            try:
                records = self.actions.watch(self.watched)
            except UserError as error:  # every rank has the same prompts, and so the same mistake
                prompts = self.watched
                self.watched = []
                request = ControlRequest("watched_prompts", "watched_prompts")
                self._answer_request(request, step, "refused", f"{error}; {len(prompts)} prompts are watched no more")
                return
            self.run.add_samples(step, records)

    def _answer_request(
        self, request: ControlRequest, step: int, result: str, text: str, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Appends a line to ``control.jsonl``, and says it."""
        run = self.run
        if not run.mesh.is_first:
            return
        answer: dict[str, object] = {
            "id": request.id,
            "command": request.command or None,
            "time": time.time(),
            "step": step,
            "result": result,
            "text": text,
        }
        if metrics is not None:
            answer["metrics"] = dict(metrics)
        run.append(ANSWERS, strict_json(answer))
        run.say(f"request {request.command or request.id!r} {result}: {text}")


def agree_to_stop(run: Run, mesh: Mesh) -> bool:
    """Whether some rank was asked to stop by a signal. Every rank must call it.

    The same collective tells all ranks of a run with a ``RunControl`` whether there are requests. ``run`` may be the
    run as a role on Ray sees it, which has none: there the process that drives the roles reads them.
    """
    control: RunControl | None = getattr(run, "control", None)
    has_news = control is not None and control.has_news()
    total = mesh.sum(float(run.stop_requested) + NEWS * has_news, over="world")
    if control is not None:
        control.agreed(total >= NEWS)
    return total % NEWS > 0
