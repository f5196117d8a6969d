"""Prompts that reasoning-gym makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sfumato.config.open_mappings import JsonObject
from sfumato.config.text_rl_data import TextPromptDataConfig
from sfumato.data.files.row_table import RowTable
from sfumato.data.synthetic.reasoning_gym import load
from sfumato.data.text.prompt_formats.base import PromptFormat, PromptRow
from sfumato.errors import ConfigError, DataError


@dataclass(frozen=True)
class ReasoningGymTasks(PromptFormat):
    """Problems of a task of reasoning-gym, for the reward of that name; none of evaluation is trained on."""

    type: ClassVar[str] = "reasoning_gym"
    makes_rows: ClassVar[bool] = True

    task: str
    """Name in reasoning-gym, such as basic_arithmetic."""
    parameters: JsonObject = field(default_factory=dict)
    """Fields of the task's configuration, such as `{max_digits: 2}`."""
    size: int = 2000
    """Problems that are made for training."""
    num_eval: int = 100
    """Problems that are made for evaluation."""

    def __post_init__(self) -> None:
        if min(self.size, self.num_eval) < 1:
            raise ConfigError("data.data_type: size and num_eval must be at least 1")

    def open(self, config: TextPromptDataConfig, split: str, seed: int) -> RowTable:
        # The seed differs from that of training rows, but a small task may still make the same problems: these are
        # removed from training.
        held_out = load(self.task, self.num_eval, 2 * seed + 1, self.parameters)
        if split == "eval":
            return _MadeRows(held_out, f"reasoning-gym {self.task}, held-out")
        questions = {row["question"] for row in held_out}
        problems = load(self.task, self.size, 2 * seed, self.parameters)
        rows = [row for row in problems if row["question"] not in questions]
        if not rows:
            raise DataError(
                f"data.data_type: all {self.size} training problems of task {self.task} are among the {self.num_eval} "
                "of evaluation: lower num_eval, or choose parameters with more problems"
            )
        return _MadeRows(rows, f"reasoning-gym {self.task}")

    def read(self, row: JsonObject, where: str) -> PromptRow:
        del where
        return PromptRow(row["question"], {"answer": row["answer"], "metadata": row["metadata"]})


@dataclass(frozen=True)
class _MadeRows:
    """Problems as a table of rows."""

    rows: list[JsonObject]
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, object]:
        return self.rows[index]

    def describe(self, index: int) -> str:
        return f"{self.name} problem {self.rows[index]['metadata']['index'] + 1}"

    def fingerprint(self) -> str:
        return f"{self.name} {self.rows[0]['metadata'] if self.rows else ''}"
