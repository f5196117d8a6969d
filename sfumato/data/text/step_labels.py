"""Labels of answers and of their steps, and where steps end in the tokens of a conversation."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from sfumato.data.files.bad_rows import parse_json
from sfumato.data.text.chat import ChatTemplate
from sfumato.data.text.format import Document
from sfumato.data.text.messages import Messages
from sfumato.data.text.tokenise import Tokens
from sfumato.errors import DataError

SEPARATORS = {"paragraph": "\n\n", "line": "\n"}
"""What stands between two steps of an answer."""


def place_steps(
    template: ChatTemplate, prompt: Messages, steps: list[Any], separator: str, where: str
) -> tuple[str, list[int]]:
    """The text of a conversation whose answer has these steps, and where they end.

    Args:
        template: of the conversation.
        prompt: messages before the answer.
        steps: texts; white space around each is left out.
        separator: what stands between two of them.
        where: for messages.

    Returns:
        The text, and for each step the place after its last character.

    Raises:
        DataError: when there is no step, one is empty or no text, or the template leaves out some of it.
    """
    if not steps or not all(isinstance(step, str) and step.strip() for step in steps):
        raise DataError(f"{where}: the steps of an answer must be texts that are not empty, not {json.dumps(steps)}")
    steps = [step.strip() for step in steps]
    messages = [*prompt, {"role": "assistant", "content": separator.join(steps)}]
    text = template.render(messages, where, prompt=False)
    begin = template.render(prompt, where)
    place = len(begin) if text.startswith(begin) else text.rfind(steps[0])
    places = []
    for number, step in enumerate(steps, start=1):
        found = text.find(step, max(place, 0))
        if found < 0:
            raise DataError(f"{where}: the chat template leaves out step {number} of the answer, or changes it")
        place = found + len(step)
        places.append(place)
    return text, places


def step_ends(tokens: Tokens, places: list[int]) -> np.ndarray:
    """The token that holds the last character of each step, int64 ``[steps]``."""
    return np.searchsorted(tokens.starts, np.array(places) - 1, side="right") - 1


def with_last(document: Document, number: float) -> Document:
    """A document whose last token has a number."""
    numbers = np.full(len(document.input_ids), math.nan, np.float32)
    numbers[-1] = number
    return Document(document.input_ids, document.loss_mask, numbers)


def read_list(value: Any, what: str, where: str) -> list[Any]:
    """A list, or its JSON text. Raises DataError that names ``where``."""
    value = (
        parse_json(value, f"{where}: {what} are neither a list nor its JSON text") if isinstance(value, str) else value
    )
    if not isinstance(value, list | tuple | np.ndarray):
        raise DataError(f"{where}: {what} must be a list, not {type(value).__name__}")
    return list(value)


def read_label(value: Any, key: str, where: str) -> float:
    """A label: true or false, or a share from 0 to 1. Raises DataError that names ``where``."""
    number = float(value) if isinstance(value, bool | int | float | np.generic) else math.nan
    if not 0 <= number <= 1:
        raise DataError(
            f"{where}: a label in column {key!r} must be true, false or a number from 0 to 1, not {value!r}"
        )
    return number


def read_number(row: dict[str, Any], key: str, where: str) -> float:
    """A finite number of a column. Raises DataError that names ``where``."""
    value = row.get(key)
    is_number = isinstance(value, int | float | np.generic) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value)):
        raise DataError(f"{where}: column {key!r} must be a finite number, not {value!r}")
    return float(value)
