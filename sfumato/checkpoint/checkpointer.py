"""When to save, what to keep, where to resume."""

from __future__ import annotations

from pathlib import Path

from sfumato.checkpoint.envelope import (
    list_checkpoints,
    newest_intact,
    prune_checkpoints,
    verify_checkpoint,
    write_checkpoint,
)
from sfumato.checkpoint.state import TrainState, gather_state, load_state, save_state
from sfumato.config.sections import TrainConfig
from sfumato.errors import CheckpointError, PreemptedError
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.run import Run


class Checkpointer:
    """Saves the state periodically, on SIGTERM and at the end: whole tensors of all ranks, written by rank 0."""

    def __init__(self, config: TrainConfig, run: Run, mesh: Mesh, total_steps: int) -> None:
        self.config, self.run, self.mesh = config, run, mesh
        self.total_steps = total_steps
        self.root = Path(config.output_dir) / "checkpoints"
        self._saved_step = -1

    def resume(self, state: TrainState) -> None:
        """Loads what ``train.load_checkpoint_path`` asks for into the state, if anything.

        Raises:
            CheckpointError: when a named checkpoint is missing or damaged, or all are.
        """
        wanted = self.config.load_checkpoint_path
        if wanted is None:
            return
        if wanted == "auto":
            found = newest_intact(self.root, self.run.say)
            if found is None:
                self.run.say(f"no checkpoint in {self.root}: starting from the first step")
                return
            folder = found[1]
        else:
            folder = Path(wanted)
            if not folder.is_dir():
                raise CheckpointError(f"train.load_checkpoint_path: {folder} does not exist")
            verify_checkpoint(folder)
        load_state(state, folder, self.mesh)
        self._saved_step = state.step
        self.run.say(f"resumed from {folder} at step {state.step}")
        later = [each.name for step, each in list_checkpoints(self.root).items() if step > state.step]
        if later:
            self.run.say(f"of later steps, and removed by the next save: {', '.join(later)}")

    def after_step(self, state: TrainState) -> None:
        """Saves if it is due, at the end, or when the run was asked to stop.

        Raises:
            PreemptedError: after saving, when SIGTERM or SIGINT came on some rank.
        """
        stopping = self.mesh.any(self.run.stop_requested)
        due = self.config.save_steps > 0 and state.step % self.config.save_steps == 0
        last = state.step >= self.total_steps
        if due or last or stopping:
            self.save(state, must_succeed=last or stopping)
        if stopping:
            raise PreemptedError(f"stopped by signal after step {state.step}; the state is saved")

    def save(self, state: TrainState, must_succeed: bool = True) -> None:
        """Writes a checkpoint and prunes old ones.

        A periodic save that fails (a full disk) is reported and the run goes on, the previous checkpoint untouched.
        """
        if self._saved_step == state.step:
            return
        failed = ""
        gathered = gather_state(state, self.mesh)
        if self.mesh.is_first:
            try:
                folder = write_checkpoint(self.root, state.step, lambda path: save_state(gathered, path))
                verify_checkpoint(folder)
                prune_checkpoints(self.root, self.config.max_checkpoints, state.step)
            except (OSError, CheckpointError) as error:
                if must_succeed:
                    raise
                failed = f"checkpoint of step {state.step} could not be written: {error}; "
                failed += f"the newest is of step {max(list_checkpoints(self.root), default=0)}"
        if not self.mesh.any(bool(failed)):
            self._saved_step = state.step
        elif failed:
            self.run.say(failed)
