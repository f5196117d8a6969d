"""Messages in the forms that published data has, as chat templates take them: role, content and tool_calls.

What a person wrote in JSON stays, null included. In a column of a table each row has the keys of all rows, with None
where it has none: such keys are left out (see ``StructValue``). A null that a person put there looks the same and goes,
too: arguments and schemas with nulls of meaning are written as JSON texts, or as columns of the type Json of datasets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sfumato.data.files.arrow_values import StructValue
from sfumato.data.files.bad_rows import parse_json
from sfumato.errors import DataError

Messages = list[dict[str, Any]]

ROLE_NAMES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
"""Other names of roles: of ShareGPT, Gemma, Llama, ms-swift, and of OpenAI's older protocol."""

CALL_ROLES = ("function_call", "tool_call")
"""Roles of messages whose content is the JSON of calls, which the assistant makes."""

LEARNED_KEYS = ("loss_mask", "loss", "train", "training", "trainable", "train_on_turn", "weight")
"""Keys that say of a message whether it is learned: 1 or true, 0 or false."""
MASKED_KEY = "masked"
"""The key that says the opposite."""
UNSUPPORTED_KEYS = ("train_detail", "training_detail")
"""Keys that say of parts of a message whether they are learned."""

MESSAGE_KEYS = {
    "role",
    "from",
    "content",
    "value",
    "tool_calls",
    "function_call",
    "tool_call_id",
    "name",
    "reasoning_content",
    *LEARNED_KEYS,
    MASKED_KEY,
}
"""Keys of a message that have a meaning; any other has one only where the chat template knows it."""


def read_messages(value: Any, where: str, system: Any = None) -> Messages:
    """The conversation of a column.

    Args:
        value: a list of messages or its JSON text, with ``role`` and ``content`` or ShareGPT's ``from`` and ``value``;
            or the same turned around, lists of roles and of contents.
        where: file and row, for messages.
        system: text of a column beside it, which becomes the first message where it is not empty.

    Returns:
        messages with ``role`` and ``content``. Calls of tools are ``tool_calls`` with ``function``, whose ``arguments``
        are mappings. Where a message says whether it is learned, ``loss_mask`` does.

    Raises:
        DataError: names the row and the message.
    """
    value = _rows_of_columns(parsed_json(value, where))
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise DataError(f"{where}: a conversation must be a list of messages, each with role and content")
    messages: Messages = []
    for index, message in enumerate(value):
        read = _read_message(message, f"{where}: message {index + 1}")
        if read.pop("_adds_calls", False) and messages and messages[-1].get("_has_calls_alone"):
            messages[-1]["tool_calls"] += read["tool_calls"]
            continue
        messages.append(read)
    for message in messages:
        message.pop("_has_calls_alone", None)
    return _with_system(messages, system, where)


def read_tools(row: dict[str, Any], where: str) -> list[dict[str, Any]] | None:
    """The descriptions of tools in the column ``tools``, or of functions in the older column ``functions``, if there is
    one. Raises DataError that names the row."""
    if row.get("tools") is None:
        functions = parsed_json(row.get("functions"), where)
        return _tools_of_functions(without_absent(functions), where) if functions else None
    tools = without_absent(parsed_json(row["tools"], where))
    if isinstance(tools, list):
        tools = [without_absent(parsed_json(tool, where)) for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: column 'tools' must be a list of JSON schemas")
    return tools or None


def _tools_of_functions(functions: Any, where: str) -> list[dict[str, Any]]:
    """The descriptions as OpenAI's API has them since calls are those of tools."""
    functions = functions if isinstance(functions, list) else [functions]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise DataError(f"{where}: column 'functions' must be a list of descriptions with a name")
    return [{"type": "function", "function": function} for function in functions]


def with_text_arguments(messages: Messages) -> Messages:
    """Messages whose calls of tools have their arguments as JSON texts."""
    return [
        message | {"tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    text = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def without_absent(value: Any) -> Any:
    """Leaves out keys that stand in a row only because other rows of its table have them."""
    if isinstance(value, dict):
        is_struct = isinstance(value, StructValue)
        return {key: without_absent(item) for key, item in value.items() if item is not None or not is_struct}
    return [without_absent(item) for item in value] if isinstance(value, list) else value


def without_nulls(mapping: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the keys of a mapping, not those within, that say nothing."""
    return {key: value for key, value in mapping.items() if value is not None}


def parsed_json(value: Any, where: str) -> Any:
    """What JSON text stands for (tables without nested columns hold such texts); anything else as it is."""
    if not isinstance(value, str):
        return value
    return parse_json(value, f"{where}: neither a list nor its JSON text")


def unread_keys(rows: Sequence[dict[str, Any]], columns: set[str], template: str | None) -> list[str]:
    """Keys of some rows and of their messages that nothing reads.

    Args:
        rows: of one table.
        columns: that the format reads.
        template: the text of the chat template, whose own keys count as read; None for data without messages.

    Returns:
        ``column source`` or ``key id of messages``, each once.
    """
    names: dict[str, None] = {}
    for row in rows:
        for column, value in row.items():
            if value is None:
                continue
            if column not in columns:
                names[f"column {column!r}"] = None
            elif template is not None and isinstance(value, list):
                messages = [message for message in value if isinstance(message, dict)]
                keys = [key for message in messages if "role" in message or "from" in message for key in message]
                unknown = [key for key in keys if key not in MESSAGE_KEYS and str(key) not in template]
                names |= {f"key {key!r} of messages": None for key in unknown}
    return list(names)


def _read_message(message: dict[str, Any], place: str) -> dict[str, Any]:
    read = {key: without_absent(value) for key, value in without_nulls(message).items()}
    role = read.pop("role") if "role" in read else read.get("from")
    content = read.pop("content") if "content" in read else read.pop("value", None)
    read.pop("from", None)
    name = role.strip().lower() if isinstance(role, str) else role
    learned = _read_learned(read, place)
    calls = _read_calls(read, place)
    if name in CALL_ROLES:
        calls = _calls_of(content, place)
        content = ""
        read |= {"_adds_calls": True, "_has_calls_alone": True}
        name = "assistant"
    elif isinstance(name, str):
        name = ROLE_NAMES.get(name, name)
    if isinstance(content, list):
        content = [without_nulls(part) if isinstance(part, dict) else part for part in content]
    if content is None and (calls or name == "tool"):
        content = ""
    if name == "tool" and isinstance(content, dict | int | float):  # what a tool gave, not yet as a text
        content = json.dumps(content, ensure_ascii=False)
    result = {"role": name, "content": content, **read}
    if calls:
        result["tool_calls"] = calls
    if learned is not None:
        result["loss_mask"] = int(learned)
    return result


def _read_learned(message: dict[str, Any], place: str) -> bool | None:
    """Takes out the keys that say whether a message is learned. Returns what they say, None where there is none."""
    for key in UNSUPPORTED_KEYS:
        if message.get(key):
            raise DataError(f"{place}: {key} cannot be followed, which masks parts of a message: mask whole messages")
        message.pop(key, None)
    said: dict[str, bool] = {}
    for key in (*LEARNED_KEYS, MASKED_KEY):
        if key not in message:
            continue
        value = message.pop(key)
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise DataError(f"{place}: {key} must be 0 or 1, not {value!r}")
        said[key] = bool(value) != (key == MASKED_KEY)
    if len(set(said.values())) > 1:
        raise DataError(f"{place}: {' and '.join(said)} contradict each other")
    return next(iter(said.values()), None)


def _read_calls(message: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """Takes out the calls of a message, in OpenAI's form, its older one, or flat."""
    calls = _calls_of(message.pop("tool_calls", None), place)
    return calls + _calls_of(message.pop("function_call", None), place)


def _calls_of(value: Any, place: str) -> list[dict[str, Any]]:
    value = _rows_of_columns(parsed_json(value, f"{place}: calls of tools") if value else None)
    calls = [value] if isinstance(value, dict) else value or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{place}: tool_calls must be a list of calls, each with name and arguments")
    return [_read_call(call, place) for call in calls]


def _read_call(call: dict[str, Any], place: str) -> dict[str, Any]:
    """A call whose ``function`` has a name and arguments, which are a mapping."""
    outer = without_nulls(call)
    if isinstance(outer.get("function"), dict):
        function = without_nulls(outer["function"])
    else:
        function = {key: outer.pop(key) for key in ("name", "arguments", "parameters") if key in outer}
        outer.setdefault("type", "function")
    if "parameters" in function and "arguments" not in function:
        function["arguments"] = function.pop("parameters")
    name = function.get("name")
    arguments = function.get("arguments")
    if not isinstance(name, str) or not name:
        raise DataError(f"{place}: a call of a tool must have a name, not {name!r}")
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{place}: arguments of {name}") if arguments.strip() else {}
    if arguments is not None and not isinstance(arguments, dict):
        raise DataError(f"{place}: arguments of {name} must be a JSON object, not {arguments!r}")
    return {**outer, "function": {**function, "arguments": without_absent(arguments or {})}}


def _rows_of_columns(value: Any) -> Any:
    """Lists of equal length by name, as datasets stores a sequence of mappings, as a list of mappings."""
    if not isinstance(value, dict) or not value or not all(isinstance(column, list) for column in value.values()):
        return value
    if len({len(column) for column in value.values()}) > 1:
        return value
    return [StructValue(zip(value, items, strict=True)) for items in zip(*value.values(), strict=True)]


def _with_system(messages: Messages, system: Any, where: str) -> Messages:
    """The conversation with the text of the column ``system`` as its first message."""
    if system is None or (isinstance(system, str) and not system.strip()):
        return messages
    if not isinstance(system, str):
        raise DataError(f"{where}: column 'system' must be a text, not {system!r}")
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise DataError(f"{where}: column 'system' and the conversation's own system message differ: leave one out")
    return messages
