"""Calls of tools in the text of an answer, in the two syntaxes that models are taught."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_TAGS = re.compile(r"</?think>|<tool_call>")


@dataclass(frozen=True)
class ToolCall:
    """A call, or why it cannot be read."""

    name: str
    arguments: object
    problem: str = ""
    """Why it cannot be read, in words for the model; empty where it can."""


def hermes_calls(text: str) -> list[ToolCall]:
    """Calls ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` of a text, as Hermes and Qwen write them.

    Calls within a thought, ``<think>...</think>``, are none: servers with a parser of thoughts see none there either.
    """
    return [_hermes_call(text[begin:end].strip()) for begin, end in _find_calls(text)]


def without_hermes_calls(text: str) -> str:
    """A text without its calls."""
    for begin, end in reversed(_find_calls(text)):
        text = text[: begin - len(_OPENING)] + text[end + len(_CLOSING) :]
    return text.strip()


def _find_calls(text: str) -> list[tuple[int, int]]:
    """Begin and end of what stands between the tags of each call that is no part of a thought.

    A thought stands between ``<think>`` and ``</think>``. Its begin may be part of the prompt, its end be missing. A
    closing tag within a text of the JSON, such as an argument that quotes the model's own syntax, closes nothing.
    """
    calls: list[tuple[int, int]] = []
    position, is_thought, has_begun = 0, False, False
    while tag := _TAGS.search(text, position):
        position = tag.end()
        if tag.group() == "<think>":
            is_thought = has_begun = True
        elif tag.group() == "</think>":
            if not has_begun:  # the prompt ended with <think>
                calls.clear()
            is_thought, has_begun = False, True
        elif not is_thought and (end := _end_of_call(text, position)) is not None:
            calls.append((position, end))
            position = end + len(_CLOSING)
    return calls


def _end_of_call(text: str, begin: int) -> int | None:
    """Where the tag stands that closes a call whose content begins at ``begin``; None where no call begins."""
    with suppress(ValueError, RecursionError):  # what is no JSON ends at the first tag
        rest = text[begin:].lstrip()
        _, length = json.JSONDecoder().raw_decode(rest)
        behind = rest[length:].lstrip()
        if behind.startswith(_CLOSING):
            return len(text) - len(behind)
    end = text.find(_CLOSING, begin)
    is_mention = "</think>" in text[begin:end]  # of the tag, by a thought that began in the prompt
    return None if end < 0 or is_mention else end


def _hermes_call(content: str) -> ToolCall:
    """A call from the JSON between its tags; one with ``problem`` where that is malformed."""
    try:
        call = json.loads(content)
    except (ValueError, RecursionError) as error:
        return ToolCall("", None, f"the call is not valid JSON: {str(error)[:200]}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", None, "a call must be a JSON object with name and arguments")
    arguments = call.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return ToolCall(call["name"], None, "the arguments are not valid JSON")
    # rows of data without arguments are read in the same way
    return ToolCall(call["name"], {} if arguments is None or arguments == "" else arguments)


LONGEST_NAME = 100
"""Characters before the parenthesis of an inline call that may belong to the tool's name."""

INLINE_END = "="
"""The text that ends an inline call."""


def inline_call(text: str) -> tuple[str, str] | None:
    """Name and argument of the call ``name(argument)=`` at the end of a text; None where it ends otherwise.

    The argument begins at the parenthesis that the last one closes, so it may hold parentheses itself.
    """
    if not text.endswith(")="):
        return None
    depth = 0
    for index in range(len(text) - 2, -1, -1):
        depth += {")": 1, "(": -1}.get(text[index], 0)
        if depth == 0:
            # matched backwards from the parenthesis: a search from the front would start at each letter of a long word
            backwards = re.match(r"\w*", text[max(index - LONGEST_NAME, 0) : index][::-1])
            assert backwards is not None  # the pattern matches the empty text, too
            word = backwards.group()[::-1]
            name = re.search(r"[A-Za-z_]\w*", word)
            return (name.group(), text[index + 1 : -2]) if name else None
    return None


@cache
def tokens_that_end_in(tokenizer: PreTrainedTokenizerBase, ending: str) -> frozenset[int]:
    """Ids of all tokens of the vocabulary whose text ends with ``ending``."""
    numbers = range(len(tokenizer))
    texts = tokenizer.batch_decode([[number] for number in numbers], clean_up_tokenization_spaces=False)
    return frozenset(number for number, text in zip(numbers, texts, strict=True) if text.endswith(ending))
