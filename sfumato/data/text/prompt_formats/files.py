"""Formats of prompts that are read from files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sfumato.config.open_mappings import JsonObject
from sfumato.config.text_rl_data import TextPromptDataConfig
from sfumato.data.files.row_table import RowTable
from sfumato.data.files.rows import open_rows, text_field
from sfumato.data.text.chat_message import as_text
from sfumato.data.text.format import find_key
from sfumato.data.text.messages import read_messages, read_tools, without_absent
from sfumato.data.text.prompt_formats.base import PromptFormat, PromptRow, other_columns, text_or_messages
from sfumato.data.text.row_layouts import ask_of_alpaca, has_columns
from sfumato.errors import DataError


@dataclass(frozen=True)
class Prompts(PromptFormat):
    """A column of texts or of messages; all other columns are metadata. Without such a column, rows of GSM8K, of
    conversations and of Alpaca are told by their columns."""

    type: ClassVar[str] = "prompts"

    prompt_key: str = "prompt"
    """Column of the prompt."""

    def open(self, config: TextPromptDataConfig, split: str, seed: int) -> RowTable:
        del seed
        option = f"{split}_path"
        return open_rows(str(getattr(config, option)), self.prompt_key, f"data.{option}", split == "eval")

    def read(self, row: dict[str, object], where: str) -> PromptRow:
        other = self._format_of(row)
        if other is not None:
            return other.read(row, where)
        key = self._find_key(row, where)
        content = text_or_messages(row[key], where, key)
        return PromptRow(content, other_columns(row, key, "tools"), read_tools(row, where))

    def describe(self, row: dict[str, object]) -> str:
        other = self._format_of(row)
        return f"prompts ({self.prompt_key})" if other is None else other.describe(row)

    def _format_of(self, row: dict[str, object]) -> PromptFormat | None:
        """The format of verl's rows, and of rows without the column ``prompt``; None where the row is of this one."""
        if self.prompt_key != "prompt":
            return None
        return next((other for other, fits in told_by_columns() if fits(row)), None)

    def _find_key(self, row: dict[str, object], where: str) -> str:
        if row.get(self.prompt_key) is None and self.prompt_key == "prompt":
            others = "; ".join(dict.fromkeys(other.columns for other, _ in told_by_columns()))
            raise DataError(
                f"{where}: no column 'prompt'; its columns are {', '.join(row)}. Name the column in data.data_type, "
                f"{{type: {self.type}, prompt_key: COLUMN}}, or take rows of {others}"
            )
        return find_key(row, [self.prompt_key], where)


@dataclass(frozen=True)
class QuestionAnswer(PromptFormat):
    """Questions with answers that end in the solution, as in GSM8K: ``... #### 1,234``."""

    type: ClassVar[str] = "gsm8k"
    columns: ClassVar[str] = "GSM8K (question, answer)"
    text_column: ClassVar[str] = "question"

    marker: str = "####"
    """The correct answer is what stands after the last of it in column answer, without the commas within numbers; empty
    takes the whole column."""

    def read(self, row: dict[str, object], where: str) -> PromptRow:
        solution = text_field(row, "answer", where)
        if self.marker and self.marker not in solution:
            raise DataError(
                f"{where}: column 'answer' holds no {self.marker!r}, after which the answer stands: mend the row, or "
                "set data.data_type.marker, which is empty where the whole column is the answer"
            )
        answer = solution.rpartition(self.marker)[2].strip() if self.marker else solution.strip()
        if not answer:
            raise DataError(f"{where}: nothing stands after {self.marker!r} in column 'answer'")
        bare = answer.replace(",", "")
        answer = bare if bare.lstrip("-$").replace(".", "", 1).isdigit() else answer
        metadata = other_columns(row, "question") | {"answer": answer, "solution": solution}
        return PromptRow(text_field(row, "question", where), metadata)


@dataclass(frozen=True)
class Verl(PromptFormat):
    """verl's parquet files, which DAPO's are too: messages in ``prompt``, the answer in
    ``reward_model.ground_truth``, beside ``data_source``, ``ability`` and ``extra_info``."""

    type: ClassVar[str] = "verl"
    columns: ClassVar[str] = "verl and DAPO (prompt, reward_model.ground_truth)"

    def read(self, row: JsonObject, where: str) -> PromptRow:
        key = find_key(row, ["prompt"], where)
        reward_model = row.get("reward_model")
        if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
            raise DataError(f"{where}: column 'reward_model' must hold ground_truth, not {reward_model!r}")
        other_values = without_absent(other_columns(row, key, "tools"))
        metadata = other_values | {"answer": reward_model["ground_truth"]}
        return PromptRow(text_or_messages(row[key], where, key), metadata, read_tools(row, where))


@dataclass(frozen=True)
class ShareGPT(PromptFormat):
    """Conversations in ``conversations`` or ``messages``; the assistant's last message is the answer, what stands
    before it the prompt."""

    type: ClassVar[str] = "sharegpt"
    columns: ClassVar[str] = "conversations (conversations or messages)"

    def read(self, row: dict[str, object], where: str) -> PromptRow:
        key = find_key(row, ["conversations", "messages"], where)
        messages = read_messages(row[key], where, row.get("system"))
        metadata = other_columns(row, key, "tools", "system")
        if messages[-1].get("role") == "assistant":
            *messages, answer = messages
            content = answer.get("content")
            is_text = isinstance(content, list) and all(isinstance(part.get("text"), str) for part in content)
            metadata["answer"] = as_text(content) if is_text else content
        if all(message["role"] in ("system", "developer") for message in messages):
            raise DataError(f"{where}: the conversation is an answer without a prompt")
        return PromptRow(messages, metadata, read_tools(row, where))


@dataclass(frozen=True)
class AlpacaPrompts(PromptFormat):
    """Alpaca's ``instruction`` and ``input``, joined by a line break; ``output`` is the answer."""

    type: ClassVar[str] = "alpaca"
    columns: ClassVar[str] = "Alpaca (instruction, input, output)"
    text_column: ClassVar[str] = "instruction"

    def read(self, row: dict[str, object], where: str) -> PromptRow:
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        metadata = other_columns(row, "instruction", "input", "output", "history", "system", "tools")
        if row.get("output") is not None:
            metadata["answer"] = row["output"]
        return PromptRow([*system, *ask_of_alpaca(row, where)], metadata, read_tools(row, where))


def told_by_columns() -> Sequence[tuple[PromptFormat, Callable[[Mapping[str, object]], bool]]]:
    """Formats that ``prompts`` tells by their columns, with whether a row is of one, in the order they are tried."""

    def is_of_verl(row: Mapping[str, object]) -> bool:
        reward_model = row.get("reward_model")
        has_truth = isinstance(reward_model, dict) and reward_model.get("ground_truth") is not None
        return row.get("prompt") is not None and has_truth and row.get("answer") is None

    def has(*names: str) -> Callable[[Mapping[str, object]], bool]:
        return lambda row: row.get("prompt") is None and has_columns(row, *names)

    return (
        (Verl(), is_of_verl),
        (QuestionAnswer(), has("question", "answer")),
        (ShareGPT(), has("conversations")),
        (ShareGPT(), has("messages")),
        (AlpacaPrompts(), has("instruction")),
    )
