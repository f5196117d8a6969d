"""Calls of tools in the text of an answer, in the syntaxes that models are taught."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from sfumato.config.open_mappings import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_TAGS = re.compile(r"</?think>|<tool_call>")
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
_FUNCTION_END = re.compile(r"</function>\s*(?=</tool_call>)")
_NAME_AND_KEYS = re.compile(r"([\w.:-]+)\s*((?:<arg_key>.*)?)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call, or why it cannot be read."""

    name: str
    arguments: object
    problem: str = ""
    """Why it cannot be read, in words for the model; empty where it can."""


def read_calls(text: str, tools: Sequence[JsonObject] = ()) -> list[ToolCall]:
    """The calls of a text, each between ``<tool_call>`` and ``</tool_call>``.

    Between the tags stands what one of these families is taught:

    - ``{"name": ..., "arguments": {...}}``: Hermes, Qwen 2.5 and 3, Granite 4;
    - ``<function=NAME><parameter=KEY>value</parameter></function>``: Qwen3-Coder, Qwen3.5, Nemotron 3;
    - ``NAME<arg_key>key</arg_key><arg_value>value</arg_value>``: GLM-4.5 and later.

    Calls within a thought, ``<think>...</think>``, are none: servers with a parser of thoughts see none there either.

    Args:
        text: of the answer, with its special tokens.
        tools: schemas, as chat templates show them, which tell what type a value has that is written without JSON;
            values of other tools stay texts.
    """
    return [_read_call(text[begin:end].strip(), tools) for begin, end in _find_calls(text)]


def without_calls(text: str) -> str:
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
    position = 0
    is_thought = False
    has_begun = False  # a thought
    while tag := _TAGS.search(text, position):
        position = tag.end()
        if tag.group() == "<think>":
            is_thought = True
            has_begun = True
        elif tag.group() == "</think>":
            if not has_begun:  # the prompt ended with <think>
                calls.clear()
            is_thought = False
            has_begun = True
        elif not is_thought and (end := _end_of_call(text, position)) is not None:
            calls.append((position, end))
            position = end + len(_CLOSING)
    return calls


def _end_of_call(text: str, begin: int) -> int | None:
    """Where the tag stands that closes a call whose content begins at ``begin``; None where no call begins."""
    if text[begin:].lstrip().startswith("<function=") and (function_end := _FUNCTION_END.search(text, begin)):
        return function_end.end()
    with suppress(ValueError, RecursionError):  # what is no JSON ends at the first tag
        rest = text[begin:].lstrip()
        _, length = json.JSONDecoder().raw_decode(rest)
        behind = rest[length:].lstrip()
        if behind.startswith(_CLOSING):
            return len(text) - len(behind)
    end = text.find(_CLOSING, begin)
    is_mention = "</think>" in text[begin:end]  # of the tag, by a thought that began in the prompt
    return None if end < 0 or is_mention else end


def _read_call(content: str, tools: Sequence[JsonObject]) -> ToolCall:
    """A call from what stands between its tags; one with ``problem`` where that is malformed."""
    if content.startswith("<function="):
        function = _FUNCTION.fullmatch(content)
        parts = None if function is None else _split(function[2], "<parameter=", "</parameter>")
        if function is None or parts is None:
            return ToolCall("", None, "a call must be <function=NAME>, with <parameter=KEY>value</parameter> within")
        values = {}
        for part in parts:
            key, _, value = part.partition(">")
            values[key] = value.removeprefix("\n").removesuffix("\n")  # these line breaks belong to the syntax
        return _typed_call(function[1], values, tools)
    if named := _NAME_AND_KEYS.fullmatch(content):
        parts = _split(named[2], "<arg_key>", "</arg_value>")
        pairs = [re.split(r"</arg_key>\s*<arg_value>", part, maxsplit=1) for part in parts or ()]
        if parts is None or any(len(pair) < 2 for pair in pairs):
            return ToolCall(named[1], None, "each <arg_key> must be closed and followed by an <arg_value>")
        return _typed_call(named[1], dict(pairs), tools)
    return _read_json_call(content)


def _split(text: str, opening: str, closing: str) -> list[str] | None:
    """What stands between each pair of tags in a text that holds nothing else; None where it does.

    A pair ends where the next begins, so a value may hold the tags as long as it does not hold both in that order.
    """
    before, *pieces = text.split(opening)
    parts: list[str] = []
    pending: list[str] = []
    for piece in pieces:
        pending.append(piece)
        if piece.rstrip().endswith(closing):
            parts.append(opening.join(pending).rstrip().removesuffix(closing))
            pending = []
    return None if before.strip() or pending else parts


def _typed_call(name: str, values: Mapping[str, str], tools: Sequence[JsonObject]) -> ToolCall:
    """A call whose values were written as texts, of the types that the tool's schema gives them."""
    properties: Mapping[str, object] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            described = parameters.get("properties") if isinstance(parameters, dict) else None
            properties = described if isinstance(described, dict) else {}
    return ToolCall(name, {key: typed_value(value, properties.get(key)) for key, value in values.items()})


def typed_value(text: str, schema: object) -> object:
    """A value from its text; the text itself where the schema has strings, or the text is no value of its type.

    Templates write lists and mappings as JSON, and truth values as JSON or as Python does.
    """
    if "string" in types_of(schema):
        return text
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(text.strip())
    return text


def types_of(schema: object) -> set[str]:
    """The types that a JSON schema allows; a schema that does not say any has strings."""
    if not isinstance(schema, dict):
        return {"string"}
    options = schema.get("anyOf")
    if isinstance(options, list):
        return {name for option in options for name in types_of(option)}
    kind = schema.get("type", "string")
    return {str(name) for name in (kind if isinstance(kind, list) else [kind])}


def _read_json_call(content: str) -> ToolCall:
    """A call from JSON; one with ``problem`` where that is malformed."""
    try:
        call = json.loads(content)
    except (ValueError, RecursionError) as error:
        return ToolCall("", None, f"the call is not valid JSON: {str(error)[:200]}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", None, "a call must be a JSON object with name and arguments")
    arguments = call.get("arguments")
    others = sorted(set(call) - {"name", "arguments", "id", "type"})
    if others and "arguments" not in call:  # such as Llama's parameters, without which the defaults would be taken
        return ToolCall(call["name"], None, f"a call must have name and arguments, and not {others[0]!r}")
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
