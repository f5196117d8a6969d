"""A sample that a run has saved, and the weights that it was drawn with, as far as they are still there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sfumato.config.file_checks import path_inside
from sfumato.errors import CheckpointError, ConfigError, DataError
from sfumato.evaluation.sources import ModelSource, SourceRun
from sfumato.rewards.base import Sample
from sfumato.tracking.atomic_folders import list_checkpoints, verify_checkpoint
from sfumato.tracking.samples import read_step, sample_steps, step_folder

KINDS = ("eval", "train", "watched")
MOST_NAMED = 12
"""Steps or samples that a message lists."""


@dataclass(frozen=True)
class RecordedSample:
    """A row of ``samples.jsonl``."""

    run: SourceRun
    step: int
    row: Mapping[str, object]
    siblings: tuple[Mapping[str, object], ...]
    """Rows of the same kind and step, itself included, by their ids."""

    @property
    def sample_id(self) -> int:
        """Unique among the samples of its kind and step."""
        return _whole_number(self.row, "sample_id")

    @property
    def seed(self) -> int:
        """Keys its noise."""
        return _whole_number(self.row, "seed")

    @property
    def policy_version(self) -> int:
        """Updates of the weights that drew it."""
        return _whole_number(self.row, "policy_version")

    @property
    def kind(self) -> str:
        """eval, train or watched."""
        return str(self.row.get("kind"))

    @property
    def prompt(self) -> str:
        """As people read it."""
        return str(self.row.get("prompt", ""))

    @property
    def file(self) -> Path | None:
        """Its picture; None for a text. Raises DataError for a file that is not there, or lies elsewhere."""
        name = self.row.get("file")
        if not isinstance(name, str):
            return None
        path = path_inside(step_folder(self.run.folder, self.step), name)
        if path is None or not path.is_file():
            raise DataError(f"{self}: its file {name!r} is not in {step_folder(self.run.folder, self.step)}")
        return path

    def __str__(self) -> str:
        return f"{self.kind} sample {self.sample_id} of step {self.step}"


def _whole_number(row: Mapping[str, object], name: str) -> int:
    value = row.get(name, 0)
    return value if isinstance(value, int) else 0


def find_recorded(run: SourceRun, step: int, kind: str, sample_id: int) -> RecordedSample:
    """A sample of a run's folder.

    Raises:
        DataError: when there is none of this step, kind and number; names those that there are.
    """
    steps = sample_steps(run.folder)
    if step not in steps:
        raise DataError(f"{run.folder} has no samples of step {step}; it has those of {_list_numbers(steps)}")
    rows = read_step(run.folder, step)
    siblings = sorted((row for row in rows if row.get("kind") == kind), key=lambda row: _whole_number(row, "sample_id"))
    for row in siblings:
        if row.get("sample_id") == sample_id:
            return RecordedSample(run, step, row, tuple(siblings))
    others = [other for other in KINDS if other != kind and any(row.get("kind") == other for row in rows)]
    hint = f"; it has samples of --kind {' and '.join(others)}, too" if others else ""
    numbers = [_whole_number(row, "sample_id") for row in siblings]
    raise DataError(
        f"step {step} of {run.folder} has no {kind} sample {sample_id}; it has {_list_numbers(numbers)}{hint}"
    )


def _list_numbers(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    shown = ", ".join(map(str, numbers[:MOST_NAMED]))
    return f"{shown} and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else shown


@dataclass(frozen=True)
class ChosenWeights:
    """The weights that a sample is drawn with again."""

    source: ModelSource
    version: int
    """Updates of these weights."""
    notes: tuple[str, ...] = ()
    """Damaged checkpoints that were passed over."""


def choose_weights(recorded: RecordedSample) -> ChosenWeights:
    """The checkpoint that the sample was drawn by, else the newest intact one before it, else the run's start.

    Raises:
        ConfigError: when the run began with the weights of another one, which its folder does not hold.
    """
    run = recorded.run
    wanted = recorded.policy_version
    notes = []
    for step, folder in sorted(list_checkpoints(run.folder / "checkpoints").items(), reverse=True):
        if step > wanted:
            continue
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            notes.append(f"passed over: {error}")
            continue
        return ChosenWeights(
            ModelSource("checkpoint", folder, f"step {step}", run, _checkpoint_section(recorded)), step, (*notes,)
        )
    loaded = getattr(run.config.train, "load_checkpoint_path", None)
    is_own = loaded in (None, "auto", "new") or Path(loaded).absolute().parent.parent == run.folder.absolute()
    if not is_own:
        raise ConfigError(
            f"{recorded} was drawn after {wanted} updates; {run.folder} has no checkpoint up to there, and the run "
            f"began with {loaded}: name that run's checkpoint with sfumato sample"
        )
    return ChosenWeights(ModelSource("run", run.folder, "base", run), 0, (*notes,))


def _checkpoint_section(recorded: RecordedSample) -> str | None:
    """The weights of a checkpoint that drew the sample: the moving average of an evaluation, or the sampling policy."""
    config = recorded.run.config
    draws_as_policy = recorded.kind == "train" or getattr(config, "sampler_evaluates", False)
    if not draws_as_policy:
        return None
    sample_with = getattr(config.algorithm, "sample_with", "policy")
    return "model" if sample_with == "policy" else f"{sample_with}_policy"


@dataclass(frozen=True)
class Redrawn:
    """A sample that was drawn again."""

    sample: Sample
    token_ids: tuple[int, ...] = ()
    """Of a language model: the tokens that it drew."""
    log_probs: tuple[float, ...] = ()
    """Of these tokens, float32."""
    how: str = ""
    """With which others it was drawn, for people."""
