"""Labels of answers and of their steps, and the tokens of a conversation at which steps end."""

from __future__ import annotations

import contextlib
import json
import math
from typing import cast

import numpy as np

from sfumato.data.files.arrow_values import TRUTH_OF_CLASS, ClassLabelValue, truth_of_class
from sfumato.data.files.bad_rows import parse_json
from sfumato.data.text.chat import ChatTemplate
from sfumato.data.text.chat_message import Messages
from sfumato.data.text.document import Document
from sfumato.data.text.tokenise import Tokens
from sfumato.errors import DataError

SEPARATORS = {"paragraph": "\n\n", "line": "\n"}
"""What stands between two steps of an answer."""


def place_steps(
    template: ChatTemplate, prompt: Messages, steps: list[object], separator: str, where: str
) -> tuple[str, list[int]]:
    """Renders a conversation whose answer consists of steps, and finds where each step ends.

    Args:
        template: renders the conversation.
        prompt: messages before the answer.
        steps: texts; white space around each is removed.
        separator: stands between two steps.
        where: file and row, for messages.

    Returns:
        The text, and for each step the position after its last character.

    Raises:
        DataError: when there is no step, a step is empty or no text, or the template leaves a step out or changes it.
    """
    texts = [step.strip() for step in steps if isinstance(step, str) and step.strip()]
    if not steps or len(texts) < len(steps):
        raise DataError(f"{where}: the steps of an answer must be texts that are not empty, not {json.dumps(steps)}")
    messages = [*prompt, {"role": "assistant", "content": separator.join(texts)}]
    text = template.render(messages, where, prompt=False)
    begin = template.render(prompt, where)
    # The prompt may repeat a step, so that the search begins after it. Where a template renders the prompt otherwise
    # once an answer follows, it begins at the last occurrence of the first step.
    place = len(begin) if text.startswith(begin) else text.rfind(texts[0])
    places = []
    for number, step in enumerate(texts, start=1):
        start = text.find(step, max(place, 0))
        if start < 0:
            raise DataError(f"{where}: the chat template leaves out step {number} of the answer, or changes it")
        place = start + len(step)
        places.append(place)
    return text, places


def step_ends(tokens: Tokens, places: list[int]) -> np.ndarray:
    """Indices of the tokens that hold the last character of each step, int64 ``[steps]``.

    ``places`` are from ``place_steps``, and the tokens must have offsets.
    """
    return np.searchsorted(cast(np.ndarray, tokens.starts), np.array(places) - 1, side="right") - 1


def with_last(document: Document, number: float) -> Document:
    """A copy of a document with a number at its last token and NaN at the others."""
    numbers = np.full(len(document.input_ids), math.nan, np.float32)
    numbers[-1] = number
    return Document(document.input_ids, document.loss_mask, numbers)


def read_list(value: object, name: str, where: str) -> list[object]:
    """Reads a list or its JSON text. Raises DataError that names ``where``; ``name`` is what messages call the list."""
    value = (
        parse_json(value, f"{where}: {name} are neither a list nor its JSON text") if isinstance(value, str) else value
    )
    if not isinstance(value, list | tuple | np.ndarray):
        raise DataError(f"{where}: {name} must be a list, not {type(value).__name__}")
    return list(value)


def read_label(value: object, key: str, where: str) -> float:
    """Reads a label: true, false, a number from 0 to 1, or a class or text whose name says true or false.

    Raises DataError that names ``where``.
    """
    if isinstance(value, str):  # .csv files have texts
        value = TRUTH_OF_CLASS.get(value.strip().lower(), value)
    if isinstance(value, ClassLabelValue):
        return float(truth_of_class(value, key, where))
    number = float(value) if isinstance(value, bool | int | float | np.generic) else math.nan
    if not 0 <= number <= 1:
        raise DataError(
            f"{where}: a label in column {key!r} must be true, false or a number from 0 to 1, not {value!r}"
        )
    return number


def read_number(row: dict[str, object], key: str, where: str) -> float:
    """Reads a finite number of a column, which is a text in .csv files. Raises DataError that names ``where``."""
    value = row.get(key)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    is_number = isinstance(value, int | float | np.generic) and not isinstance(value, bool)
    if not (is_number and math.isfinite(cast(float, value))):
        raise DataError(f"{where}: column {key!r} must be a finite number, not {value!r}")
    return float(cast(float, value))


def read_margin(row: dict[str, object], key: str, where: str) -> float:
    """How much better the better answer is: the column ``key``, or in a row without ``margin`` how much higher
    UltraFeedback's ``score_chosen`` is than its ``score_rejected``. Raises DataError that names ``where``."""
    if key == "margin" and row.get(key) is None and row.get("score_chosen") is not None:
        margin = read_number(row, "score_chosen", where) - read_number(row, "score_rejected", where)
    else:
        margin = read_number(row, key, where)
    if margin < 0:
        raise DataError(f"{where}: the margin is {margin:g}, so that the better answer would be the worse: swap them")
    return margin
