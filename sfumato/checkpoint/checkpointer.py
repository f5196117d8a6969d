"""When to save, what to keep, where to resume."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from sfumato.checkpoint.parts import StoredCheckpoint
from sfumato.checkpoint.saving import Saving, Staging
from sfumato.checkpoint.state import TrainState, load_state
from sfumato.config.sections import TrainConfig
from sfumato.errors import CheckpointError, NonFiniteError, PreemptedError
from sfumato.parallel.finite import listed, not_finite, together
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import trainable_parameters
from sfumato.tracking.atomic_folders import list_checkpoints, newest_intact, restore_folder, verify_checkpoint
from sfumato.tracking.folder import read_environment
from sfumato.tracking.identity import own_checkpoints
from sfumato.tracking.run import Run


class Checkpointer:
    """Saves the state periodically, on SIGTERM and at the end. Every rank writes what it holds.

    With ``train.save_async`` periodic saves are written by a thread, from a copy; at most one is on its way, and the
    last one of a run is waited for.
    """

    def __init__(self, config: TrainConfig, run: Run, mesh: Mesh, total_steps: int | Callable[[], int]) -> None:
        """``total_steps`` may be a function, of data that counts its steps anew when it goes on."""
        self.config = config
        self.run = run
        self.mesh = mesh
        self.total_steps = total_steps
        self.root = Path(config.output_dir) / "checkpoints"
        self.before_save: Callable[[], None] = lambda: None
        """A function that is called before the state is looked at: tensors that were moved away must be back."""
        self._saved_step = -1
        self._unwritten = ""
        self._staging = Staging() if config.save_async else None
        self._pending: tuple[Saving, threading.Thread] | None = None
        if mesh.is_first:
            restore_folder(self.root.parent / "hf_ckpt")

    def resume(self, state: TrainState) -> None:
        """Loads what ``train.load_checkpoint_path`` asks for into the state, if anything.

        Raises:
            CheckpointError: when a named checkpoint is missing or damaged or of another model, or all are; or its
                weights are not finite.
        """
        wanted = self.config.load_checkpoint_path
        if wanted in (None, "new"):
            return
        present, others = self.mesh.first(own_checkpoints(self.root.parent), among="world")
        if wanted == "auto":
            for step, run_id in others.items():
                self.run.say(f"checkpoint passed over: {self.root}/global_step_{step} is of another run ({run_id})")
            if others and not present:
                raise CheckpointError(
                    f"no checkpoint in {self.root} is of the run that stands there: to go on from one of them as a new "
                    "run, name it as train.load_checkpoint_path with another train.output_dir"
                )
            found = newest_intact(present, self.run.say, self._verify)
            if found is None:
                self.run.say(f"no checkpoint in {self.root}: starting from the first step")
                return
            folder = found[1]
        else:
            folder = Path(wanted)
            if not folder.is_dir():
                raise CheckpointError(f"train.load_checkpoint_path: {folder} does not exist")
            self._verify(folder)
        if changed := load_state(state, StoredCheckpoint(folder), self.mesh):
            self.run.say(changed)
        if bad := self._not_finite(state):
            raise CheckpointError(
                f"{folder} holds weights that are NaN or infinite: {listed(bad)}: its run had diverged. Name an "
                "earlier checkpoint in train.load_checkpoint_path"
            )
        self._saved_step = state.step
        self.run.say(f"resumed from {folder} at step {state.step}")
        later = [path.name for step, path in present.items() if step > state.step]
        if later:
            self.run.say(f"of later steps, and removed by the next save: {', '.join(later)}")

    def after_step(self, state: TrainState, due: bool = False, unwritten: str = "") -> None:
        """Saves if it is due, at the end, or when the run was asked to stop.

        Args:
            state: what is saved.
            due: save also when the number of steps alone does not ask for it.
            unwritten: why metrics of these steps cannot be written, where the run is in another process.

        Raises:
            CheckpointError: when the checkpoint after a signal could not be written. That of the last step is
                raised by ``Run.finish``, after the export.
            PreemptedError: after saving, when SIGTERM or SIGINT came on some rank.
        """
        self._unwritten = unwritten
        stopping = self.mesh.any(self.run.stop_requested)
        total_steps = self.total_steps() if callable(self.total_steps) else self.total_steps
        last = state.step >= total_steps
        due = due or (self.config.save_steps > 0 and state.step % self.config.save_steps == 0)
        if last and not stopping:
            try:
                self.save(state)
            except CheckpointError as error:
                self.run.owe(error)  # an export may fit where a checkpoint does not
        elif due or stopping:
            self.save(state, must_succeed=stopping)
        elif self._pending is not None and not self.mesh.any(self._pending[1].is_alive()):
            self._settle()
        if stopping:
            raise PreemptedError(f"stopped by signal after step {state.step}; the state is saved")

    def save(self, state: TrainState, must_succeed: bool = True) -> None:
        """Writes a checkpoint and prunes old ones.

        A periodic save that fails (a full disk) is reported and the run goes on, the previous checkpoint untouched.

        Args:
            state: what is saved.
            must_succeed: wait until it is written, and raise CheckpointError when it cannot be.

        Raises:
            NonFiniteError: when weights are not finite: their checkpoint would replace good ones.
        """
        self._settle()
        if self._saved_step == state.step:
            return
        self.before_save()
        if bad := self._not_finite(state):
            raise NonFiniteError(
                f"after step {state.step} weights are NaN or infinite: {listed(bad)}. No checkpoint was written; the "
                f"newest is of step {max(list_checkpoints(self.root), default=0)}"
            )
        if state.run_id is None and self.mesh.is_first:  # which writes what is no tensor
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

    def _not_finite(self, state: TrainState) -> list[str]:
        """Names of weights, and of averages of them, that are not finite on any rank. Every rank must call it."""
        found = not_finite(trainable_parameters(state.model))
        if state.critic is not None:
            found += [f"critic's {key}" for key in not_finite(trainable_parameters(state.critic.module))]
        averages = {"ema": state.ema, **state.policies}
        for name, average in averages.items():
            found += [f"{name} of {key}" for key in not_finite({} if average is None else average.averages)]
        return together(found, self.mesh)

    def _settle(self) -> None:
        """Waits for the save that is on its way, if there is one."""
        if self._pending is None:
            return
        saving, thread = self._pending
        self._pending = None
        with self.run.timed("save"):
            thread.join()
            self._finish(saving, must_succeed=False)

    def _finish(self, saving: Saving, must_succeed: bool) -> None:
        if unwritten := self.run.sync() or self._unwritten:  # no checkpoint may outlive the metrics of its steps
            saving.fail(OSError(unwritten))
        try:
            saving.finish(self.config.max_checkpoints)
        except CheckpointError as error:
            self._report(saving.step, error, must_succeed)
        else:
            self._saved_step = saving.step

    def _report(self, step: int, error: CheckpointError, must_succeed: bool) -> None:
        newest = max(list_checkpoints(self.root), default=0)
        text = f"checkpoint of step {step} could not be written: {error}; the newest is of step {newest}"
        if must_succeed:
            raise CheckpointError(text) from error
        self.run.say(text)

    def _verify(self, folder: Path) -> None:
        """Compares a checkpoint with its manifest, each rank some of the files. Raises on every rank."""
        problem = ""
        try:
            verify_checkpoint(folder, self.mesh.rank, self.mesh.size)
        except (CheckpointError, OSError) as error:  # OSError: the disk cannot read it
            problem = str(error)
        problems = [message for message in self.mesh.gather(problem, over="world") if message]
        if problems:
            raise CheckpointError(problems[0])
