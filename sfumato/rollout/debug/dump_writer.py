"""When a run of a language model writes what its updates learn from, and where; ``dumps.py`` says what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from sfumato.algorithms.advantages import Advantages
from sfumato.config.text_rl import TextRLConfig
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.json_lines import BestEffortFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sfumato.rollout.text.tokens import TextRollout


class RolloutDumps:
    """Writes the dumps of a run that asks for them, each data-parallel rank its own."""

    def __init__(
        self,
        config: TextRLConfig,
        mesh: Mesh,
        say: Callable[[str], None],
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """``say`` is told, once, that dumps cannot be written; ``tokenizer`` is the policy's, which dumps name."""
        self.rollout = config.rollout
        self.mesh = mesh
        self.output_dir = Path(config.train.output_dir)
        self.tokenizer = tokenizer
        self._best_effort_files = BestEffortFiles(say)
        self._has_begun = False

    @property
    def needs_token_values(self) -> bool:
        """Whether the run asks for dumps with the values that an update computes for tokens."""
        return self.rollout.dump and not self.rollout.rollout_only

    @cached_property
    def _vocabulary(self) -> str | None:
        from sfumato.rollout.debug.dumps import digest_vocabulary

        return None if self.tokenizer is None else digest_vocabulary(self.tokenizer)

    def write(
        self, rollout: TextRollout, advantages: Advantages, token_values: Mapping[str, Tensor], step: int
    ) -> None:
        """Writes what this rank learns from, where the run asks for it. All ranks must call it.

        Where the disk is full the run says so and goes on. A resumed run first removes the files of the steps that it
        makes again.

        Args:
            rollout: this rank's samples.
            advantages: of these samples.
            token_values: see ``RolloutDump``; empty where nothing was computed.
            step: the iteration, from 1.
        """
        if not (self.rollout.dump or self.rollout.rollout_only):
            return
        from sfumato.rollout.debug.dumps import FOLDER, dump_path, write_dump

        problem = None
        rank = self.mesh.data_rank
        if self.mesh.rank_in("copies") == 0:
            try:
                if not self._has_begun and self.mesh.is_first:
                    self._remove_from(step)
                path = dump_path(self.output_dir, step, rank)
                vocabulary = self._vocabulary
                write_dump(path, rollout, advantages, token_values, step, rank, self.rollout.temperature, vocabulary)
            except OSError as error:
                problem = error
        # gathered, so that all ranks report the same problem
        problems = [error for error in self.mesh.gather(problem) if error is not None]
        self._has_begun = True
        self._best_effort_files.report(self.output_dir / FOLDER, problems[0] if problems else None)

    def _remove_from(self, step: int) -> None:
        """Removes the dumps of later steps, and those of this step by ranks that this run does not have.

        Its own ranks write theirs anew, perhaps just now.
        """
        from sfumato.rollout.debug.dumps import FOLDER, NAME

        for path in (self.output_dir / FOLDER).glob("step_*.safetensors"):
            match = NAME.fullmatch(path.name)
            if match and (int(match[1]) > step or (int(match[1]) == step and int(match[2]) >= self.mesh.data_size)):
                path.unlink()
