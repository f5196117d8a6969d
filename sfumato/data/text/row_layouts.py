"""How rows are laid out in the formats that data is published in, told by their columns.

A layout turns a row into the columns that the formats of ``sfumato.data.text.formats`` read, so that a row makes the
same tokens and the same loss mask as the same conversation written as messages. The layouts of a table are in the order
in which they are tried: of two that fit a row, the first counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sfumato.data.text.chat_message import Messages
from sfumato.data.text.format import find_key
from sfumato.data.text.messages import as_turn, parsed_json, read_messages
from sfumato.errors import DataError

Row = Mapping[str, object]

CONVERSATION_KEYS = ["messages", "conversations"]
PREFERENCE_KEYS = ["prompt", "chosen", "rejected"]
UNPAIRED_KEYS = ["prompt", "completion", "label"]
"""Columns that the formats read where ``data.text_keys`` names none; only then other layouts are looked for."""

CHANGED_COLUMNS = ("history", "system", "kto_tag", "score_chosen", "score_rejected")
"""Columns that some layout reads besides those that tell it."""

_TRANSCRIPT = re.compile(r"\n\n(Human|Assistant):")


@dataclass(frozen=True)
class ColumnLayout:
    """A form in which rows are published."""

    name: str
    """As people call it."""
    columns: tuple[str, ...]
    """Columns that tell it, and that it reads."""
    fits: Callable[[Row], bool]
    """Whether a row has it."""
    convert: Callable[[Row, str], dict[str, object]]
    """The row with the columns that a format reads, given the row and its place. Raises DataError that names it."""

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.columns)})"


def has_columns(row: Row, *names: str) -> bool:
    """Whether a row has a value in each of these columns."""
    return all(row.get(name) is not None for name in names)


def find_layout(layouts: Sequence[ColumnLayout], row: Row, data_type: str, where: str) -> ColumnLayout:
    """The first layout that fits a row. Raises DataError that names its columns and the layouts that there are."""
    for layout in layouts:
        if layout.fits(row):
            return layout
    required = {"conversation": (), "preference": PREFERENCE_KEYS[1:], "unpaired": UNPAIRED_KEYS}[data_type]
    missing = next((repr(name) for name in required if row.get(name) is None), "'messages' or 'conversations'")
    raise DataError(
        f"{where}: no column {missing}; its columns are {', '.join(map(str, row))}{_other_type(row, data_type)}. "
        f"data.data_type {data_type} reads {'; '.join(map(str, layouts))}. Name other columns in data.text_keys, or in "
        "a dataset_info.json"
    )


def convert_row(layouts: Sequence[ColumnLayout], row: Row, data_type: str, where: str) -> dict[str, object]:
    """A row with the columns that a format reads. Raises DataError for a row of no layout, or a broken one."""
    layout = find_layout(layouts, row, data_type, where)
    return dict(row) if layout.convert is _copy_row else layout.convert(row, where)


def read_conversation(row: Row, keys: list[str], where: str) -> Messages:
    """The messages of a row.

    Args:
        row: of data of conversations.
        keys: columns of messages, of which the row has one. Where they are ``CONVERSATION_KEYS`` the row may have
            another layout of ``CONVERSATIONS``.
        where: file and row, for messages.

    Raises:
        DataError: names the row.
    """
    if keys == CONVERSATION_KEYS:
        row = convert_row(CONVERSATIONS, row, "conversation", where)
    return read_messages(row[find_key(row, keys, where)], where, row.get("system"))


def describe_layouts(layouts: Sequence[ColumnLayout], rows: Iterable[Row]) -> str:
    """Which layouts rows have, as ``ShareGPT (conversations)``; empty where no row has one.

    A second layout that would fit, too, is named.
    """
    counts: Counter[str] = Counter()
    others: set[str] = set()
    for row in rows:
        fitting = [layout for layout in layouts if layout.fits(row)]
        if fitting:
            counts[str(fitting[0])] += 1
            others.update(str(layout) for layout in fitting[1:])
    if not counts:
        return ""
    names = counts if len(counts) == 1 else [f"{name} in {count} rows" for name, count in counts.most_common()]
    more = f"; {' and '.join(sorted(others))} would fit, too, and is not read" if others else ""
    return ", ".join(names) + more


def _other_type(row: Row, data_type: str) -> str:
    """The end of a message about a row of another format: which one."""
    for other, layouts in LAYOUTS.items():
        if other != data_type and any(layout.fits(row) for layout in layouts):
            return f", as data.data_type {other} reads them"
    return ""


def _copy_row(row: Row, where: str) -> dict[str, object]:
    del where
    return dict(row)


def ask_of_alpaca(row: Row, where: str) -> Messages:
    """The messages before the answer of an Alpaca row: earlier turns, then instruction and input in two lines."""
    messages: Messages = []
    history = parsed_json(row.get("history"), where)
    for turn in history or []:
        if not (isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise DataError(f"{where}: column 'history' must be a list of [question, answer], not {history!r}")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    lines = [row[name] for name in ("instruction", "input") if row.get(name)]
    if not lines or not all(isinstance(line, str) for line in lines):
        raise DataError(f"{where}: columns 'instruction' and 'input' must be texts, and one of them must not be empty")
    return [*messages, {"role": "user", "content": "\n".join(map(str, lines))}]


def _read_texts(row: Row, where: str, *names: str) -> list[str]:
    values = [row[name] for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str):
            raise DataError(f"{where}: column {name!r} must be a text, not {value!r}")
    return [str(value) for value in values]


def _prompt_and_completion(row: Row, where: str) -> dict[str, object]:
    prompt = read_messages(as_turn(row["prompt"], "user"), where)
    completion = read_messages(as_turn(row["completion"], "assistant"), where)
    if completion[0].get("role") != "assistant":
        raise DataError(f"{where}: column 'completion' must begin with the assistant: the prompt has its own column")
    # Answers that stand in the prompt belong to the question: TRL learns the completion alone, too.
    prompt = [{**message, "loss_mask": 0} if message.get("role") == "assistant" else message for message in prompt]
    return {**row, "messages": [*prompt, *completion]}


def _alpaca_messages(row: Row, where: str) -> dict[str, object]:
    (answer,) = _read_texts(row, where, "output")
    return {**row, "messages": [*ask_of_alpaca(row, where), {"role": "assistant", "content": answer}]}


def _question_and_answer(row: Row, where: str) -> dict[str, object]:
    question, answer = _read_texts(row, where, "question", "answer")
    return {**row, "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _is_unlabelled(row: Row) -> bool:
    """Whether nothing marks the answer of a row as good or bad: a bad one must not be learned as if it were good."""
    label = row.get("kto_tag") if row.get("label") is None else row.get("label")
    return not (isinstance(label, bool | int | float) and label in (0, 1))


def _is_whole(row: Row) -> bool:
    """Whether a conversation ends with the answer to learn: LLaMA-Factory's pairs and KTO rows hold it otherwise."""
    return not isinstance(row.get("chosen"), dict) and row.get("kto_tag") is None


def _alpaca_pair(row: Row, where: str) -> dict[str, object]:
    return {**row, "prompt": ask_of_alpaca(row, where)}


def _pair_beside_messages(row: Row, where: str) -> dict[str, object]:
    key = "conversations" if has_columns(row, "conversations") else "messages"
    prompt = read_messages(row[key], where)
    return {**row, "prompt": prompt, "chosen": [row["chosen"]], "rejected": [row["rejected"]]}


def _pair_of_transcripts(row: Row, where: str) -> dict[str, object]:
    return {**row, **{name: _read_transcript(str(row[name]), f"{where}, {name}") for name in ("chosen", "rejected")}}


def _read_transcript(text: str, where: str) -> Messages:
    """The messages of a text in which turns begin with an empty line and ``Human:`` or ``Assistant:``."""
    before, *turns = _TRANSCRIPT.split(text if text.startswith("\n\n") else f"\n\n{text}")
    if before.strip():
        raise DataError(f"{where}: a transcript must begin with 'Human:', not {before[:40]!r}")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[name], "content": content.strip()} for name, content in zip(turns[::2], turns[1::2], strict=True)
    ]


def _is_transcript(value: object) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("Human:")


def _is_conversation(value: object) -> bool:
    """Whether a value is a list of messages, or its JSON; of two plain texts nobody can tell where the prompt ends."""
    return isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))


def _labelled_alpaca(row: Row, where: str) -> dict[str, object]:
    return {**row, "prompt": ask_of_alpaca(row, where), "completion": row["output"], "label": row["kto_tag"]}


def _labelled_messages(row: Row, where: str) -> dict[str, object]:
    key = "conversations" if has_columns(row, "conversations") else "messages"
    *prompt, answer = read_messages(row[key], where)
    if not prompt:
        raise DataError(f"{where}: the conversation is an answer without a prompt")
    return {**row, "prompt": prompt, "completion": [answer], "label": row.get("kto_tag", row.get("label"))}


CONVERSATIONS = (
    ColumnLayout(
        "OpenAI messages", ("messages",), lambda row: has_columns(row, "messages") and _is_whole(row), _copy_row
    ),
    ColumnLayout(
        "ShareGPT", ("conversations",), lambda row: has_columns(row, "conversations") and _is_whole(row), _copy_row
    ),
    ColumnLayout(
        "TRL prompt and completion",
        ("prompt", "completion"),
        lambda row: has_columns(row, "prompt", "completion") and _is_unlabelled(row),
        _prompt_and_completion,
    ),
    ColumnLayout(
        "Alpaca",
        ("instruction", "input", "output"),
        lambda row: has_columns(row, "instruction", "output") and _is_unlabelled(row),
        _alpaca_messages,
    ),
    ColumnLayout(
        "GSM8K", ("question", "answer"), lambda row: has_columns(row, "question", "answer"), _question_and_answer
    ),
)

PAIRS = (
    ColumnLayout(
        "TRL preference", ("prompt", "chosen", "rejected"), lambda row: has_columns(row, *PREFERENCE_KEYS), _copy_row
    ),
    ColumnLayout(
        "LLaMA-Factory ShareGPT preference",
        ("conversations", "chosen", "rejected"),
        lambda row: (
            isinstance(row.get("chosen"), dict)
            and has_columns(row, "rejected")
            and (has_columns(row, "conversations") or has_columns(row, "messages"))
        ),
        _pair_beside_messages,
    ),
    ColumnLayout(
        "LLaMA-Factory Alpaca preference",
        ("instruction", "input", "chosen", "rejected"),
        lambda row: has_columns(row, "instruction", "chosen", "rejected"),
        _alpaca_pair,
    ),
    ColumnLayout(
        "question with a better and a worse answer",
        ("question", "chosen", "rejected"),
        lambda row: has_columns(row, "question", "chosen", "rejected"),
        lambda row, where: {**row, "prompt": _read_texts(row, where, "question")[0]},
    ),
    ColumnLayout(
        "pairs of transcripts of Human and Assistant",
        ("chosen", "rejected"),
        lambda row: _is_transcript(row.get("chosen")) and _is_transcript(row.get("rejected")),
        _pair_of_transcripts,
    ),
    ColumnLayout(
        "TRL preference with an implicit prompt",
        ("chosen", "rejected"),
        lambda row: (
            row.get("prompt") is None and _is_conversation(row.get("chosen")) and _is_conversation(row.get("rejected"))
        ),
        _copy_row,
    ),
)

LABELLED = (
    ColumnLayout(
        "TRL KTO", ("prompt", "completion", "label"), lambda row: has_columns(row, "prompt", "completion"), _copy_row
    ),
    ColumnLayout(
        "LLaMA-Factory Alpaca KTO",
        ("instruction", "input", "output", "kto_tag"),
        lambda row: has_columns(row, "instruction", "output", "kto_tag"),
        _labelled_alpaca,
    ),
    ColumnLayout(
        "LLaMA-Factory ShareGPT KTO",
        ("conversations", "kto_tag"),
        lambda row: (
            (has_columns(row, "conversations") or has_columns(row, "messages")) and ("kto_tag" in row or "label" in row)
        ),
        _labelled_messages,
    ),
    *PAIRS,
)

LAYOUTS = {"conversation": CONVERSATIONS, "preference": PAIRS, "unpaired": LABELLED}
"""Layouts of the formats, by ``data.data_type``."""
