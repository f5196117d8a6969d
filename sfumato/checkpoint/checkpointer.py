"""When a run saves checkpoints, how many it keeps, and which one it resumes from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from sfumato.checkpoint.parts import StoredCheckpoint
from sfumato.checkpoint.saving import Saving, Staging
from sfumato.checkpoint.state import TrainState, load_state
from sfumato.config.sections import TrainConfig
from sfumato.errors import CheckpointError, NonFiniteError, PreemptedError
from sfumato.parallel.finite import gather_names, list_first, not_finite
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import trainable_parameters
from sfumato.tracking.atomic_folders import (
    list_checkpoints,
    newest_intact,
    read_run_id,
    restore_folder,
    verify_checkpoint,
)
from sfumato.tracking.control import agree_to_stop
from sfumato.tracking.folder import read_environment
from sfumato.tracking.identity import own_checkpoints
from sfumato.tracking.run import Run


class Checkpointer:
    """Saves the state periodically, on SIGTERM and at the end. Every rank writes its own shards.

    With ``train.save_async`` a thread writes periodic saves from a copy of the state. At most one save is under way,
    and the run waits for its last one.
    """

    def __init__(self, config: TrainConfig, run: Run, mesh: Mesh, total_steps: int | Callable[[], int]) -> None:
        """Restores a half-replaced export, and takes what saving needs.

        Args:
            config: the section ``train``.
            run: the run folder and its messages.
            mesh: the ranks.
            total_steps: steps of the run; a function where the data counts its steps again after a resume.
        """
        self.config = config
        self.run = run
        self.mesh = mesh
        self.total_steps = total_steps
        self.root = Path(config.output_dir) / "checkpoints"
        self.before_save: Callable[[], None] = lambda: None
        """Called before the state is read: it must bring back tensors that were moved off the device."""
        self._saved_step = -1
        self._unwritten = ""
        self._staging = Staging() if config.save_async else None
        self._pending: tuple[Saving, threading.Thread] | None = None
        if mesh.is_first:
            restore_folder(self.root.parent / "hf_ckpt")

    def resume(self, state: TrainState) -> None:
        """Loads the checkpoint that ``train.load_checkpoint_path`` asks for, if any, into the state.

        Raises:
            CheckpointError: when the named checkpoint, or with ``auto`` every one, is missing, damaged or of another
                model; or when its weights are not finite.
        """
        requested = self.config.load_checkpoint_path
        if requested in (None, "new"):
            return
        # What rank 0 sees counts: ranks that take different checkpoints would wait for each other in different
        # collectives.
        checkpoints, other_runs = self.mesh.first(own_checkpoints(self.root.parent), among="world")
        if requested == "auto":
            for step, run_id in other_runs.items():
                self.run.say(f"checkpoint passed over: {self.root}/global_step_{step} is of another run ({run_id})")
            if other_runs and not checkpoints:
                raise CheckpointError(
                    f"no checkpoint in {self.root} is of the run that stands there: to go on from one of them as a new "
                    "run, name it as train.load_checkpoint_path with another train.output_dir"
                )
            newest = newest_intact(checkpoints, self.run.say, self._verify)
            folder = self._fork_origin() if newest is None else newest[1]
            if folder is None:
                self.run.say(f"no checkpoint in {self.root}: starting from the first step")
                return
        else:
            folder = Path(self.mesh.first(requested, among="world"))
            if self.mesh.any(str(folder) != requested):
                raise CheckpointError(
                    "train.load_checkpoint_path names the folder of a run that saves at this moment, so that ranks saw "
                    "different checkpoints: name one of its checkpoints"
                )
            if not folder.is_dir():
                raise CheckpointError(f"train.load_checkpoint_path: {folder} does not exist")
            self._verify(folder)
        for line in load_state(state, StoredCheckpoint(folder), self.mesh):
            self.run.say(line)
        if bad := self._find_not_finite(state):
            raise CheckpointError(
                f"{folder} holds weights that are NaN or infinite: {list_first(bad)}: its run had diverged. Name an "
                "earlier checkpoint in train.load_checkpoint_path"
            )
        self._saved_step = state.step
        self.run.say(f"resumed from {folder} at step {state.step}")
        # Those of a run that goes back to a named checkpoint are set aside when it begins.
        later = [path.name for step, path in checkpoints.items() if requested == "auto" and step > state.step]
        if later:
            self.run.say(f"of later steps, and removed by the next save: {', '.join(later)}")

    def _fork_origin(self) -> Path | None:
        """The checkpoint of another run that this one began from, where it has not saved any; else None.

        Raises:
            CheckpointError: on every rank, when it is there no longer.
        """
        origin = self.mesh.first(read_environment(self.root.parent).get("forked_from"), among="world")
        if origin is None:
            return None
        folder = Path(origin["checkpoint"])
        if self.mesh.any(not folder.is_dir() or read_run_id(folder) != origin["run_id"]):
            raise CheckpointError(
                f"{self.root.parent} has saved nothing, and began from {folder}, which is not there any more: name "
                "where it is, or another checkpoint, as train.load_checkpoint_path"
            )
        self._verify(folder)
        return folder

    def after_step(self, state: TrainState, due: bool = False, unwritten: str = "") -> None:
        """Saves when a save is due, at the end, or when the run was asked to stop.

        Args:
            state: what is saved.
            due: saves although ``train.save_steps`` does not ask for it.
            unwritten: why the metrics of these steps cannot be written, where another process writes them; else empty.

        Raises:
            CheckpointError: when the checkpoint after a signal could not be written. That of the last step is
                raised by ``Run.finish``, after the export.
            PreemptedError: after saving, when SIGTERM or SIGINT came on some rank.
        """
        self._unwritten = unwritten
        # Agreed on before anything else is decided, since a save is collective and a signal may reach one rank alone.
        stopping = agree_to_stop(self.run, self.mesh)
        total_steps = self.total_steps() if callable(self.total_steps) else self.total_steps
        last = state.step >= total_steps
        due = due or (self.config.save_steps > 0 and state.step % self.config.save_steps == 0)
        if last and not stopping:
            try:
                self.save(state)
            except CheckpointError as error:
                self.run.store_error(error)  # an export may fit where a checkpoint does not
        elif due or stopping:
            self.save(state, must_succeed=stopping)
        # Completing a save is collective: all ranks must agree that every thread has finished.
        elif self._pending is not None and not self.mesh.any(self._pending[1].is_alive()):
            self._settle()
        if stopping:
            raise PreemptedError(f"stopped by signal after step {state.step}; the state is saved")

    def save(self, state: TrainState, must_succeed: bool = True) -> None:
        """Writes a checkpoint and prunes old ones.

        A periodic save that fails (a full disk) is reported and the run goes on, the previous checkpoint untouched.

        Args:
            state: what is saved.
            must_succeed: waits until the checkpoint is written, and raises CheckpointError when it cannot be.

        Raises:
            NonFiniteError: when weights are not finite, since pruning would remove good checkpoints for this one.
        """
        self._settle()  # the staging buffers are free only then, and at most one save is under way
        # Saved already, on request or as a periodic save; or the run was resumed from it.
        if self._saved_step == state.step:
            return
        self.before_save()
        if bad := self._find_not_finite(state):
            raise NonFiniteError(
                f"after step {state.step} weights are NaN or infinite: {list_first(bad)}. No checkpoint was written; "
                f"{self._describe_newest()}"
            )
        if state.run_id is None and self.mesh.is_first:  # rank 0 writes everything that is not a tensor
            state.run_id = read_environment(self.root.parent).get("run_id")
        in_background = self._staging is not None and not must_succeed
        with self.run.timed("save"):
            try:
                saving = Saving(self.root, state, self.mesh, self._staging if in_background else None)
            except CheckpointError as error:
                self._report(state.step, error, must_succeed)
                return
            if in_background:
                thread = threading.Thread(target=saving.write, name="checkpoint", daemon=True)
                thread.start()
                self._pending = saving, thread
                return
            saving.write()
            self._finish(saving, must_succeed)

    def _find_not_finite(self, state: TrainState) -> list[str]:
        """Names of weights and of their averages that are not finite on some rank. Every rank must call it."""
        names = not_finite(trainable_parameters(state.model))
        if state.critic is not None:
            names += [f"critic's {key}" for key in not_finite(trainable_parameters(state.critic.module))]
        averages = {"ema": state.ema, **state.policies}
        for name, average in averages.items():
            names += [f"{name} of {key}" for key in not_finite({} if average is None else average.averages)]
        return gather_names(names, self.mesh)

    def _settle(self) -> None:
        """Waits for the save that is under way, if there is one, and completes it."""
        if self._pending is None:
            return
        saving, thread = self._pending
        self._pending = None
        with self.run.timed("save"):
            thread.join()
            self._finish(saving, must_succeed=False)

    def _finish(self, saving: Saving, must_succeed: bool) -> None:
        """Completes a checkpoint whose files this rank has written. Every rank must call it."""
        if unwritten := self.run.sync() or self._unwritten:  # no checkpoint may outlive the metrics of its steps
            saving.fail(OSError(unwritten))
        try:
            saving.finish(self.config.max_checkpoints)
        except CheckpointError as error:
            self._report(saving.step, error, must_succeed)
        else:
            self._saved_step = saving.step

    def _describe_newest(self) -> str:
        """Which checkpoint the run can go on from now."""
        steps = list_checkpoints(self.root)
        return f"the newest is of step {max(steps)}" if steps else "there is no other yet"

    def _report(self, step: int, error: CheckpointError, must_succeed: bool) -> None:
        """Raises, or only says, that a checkpoint could not be written."""
        text = f"checkpoint of step {step} could not be written: {error}; {self._describe_newest()}"
        if must_succeed:
            raise CheckpointError(text) from error
        self.run.say(text)

    def _verify(self, folder: Path) -> None:
        """Compares a checkpoint with its manifest, each rank a part of the files.

        Raises:
            CheckpointError: on every rank, when a file differs or cannot be read on some rank.
        """
        problem = ""
        try:
            verify_checkpoint(folder, self.mesh.rank, self.mesh.size)
        except (CheckpointError, OSError) as error:  # OSError: the disk cannot read it
            problem = str(error)
        problems = [message for message in self.mesh.gather(problem, over="world") if message]
        if problems:
            raise CheckpointError(problems[0])
