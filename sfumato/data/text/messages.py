"""Reads messages in the forms of published data into the form of chat templates: role, content and tool_calls.

JSON stays as it was written, null included. In a column of a table each row has the keys of all rows, with None where
it has no value: such keys are left out (see ``StructValue``). A null that was meant looks the same there and is left
out, too, so that arguments and schemas with meaningful nulls must be JSON texts, or columns of the type Json of
datasets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sfumato.config.open_mappings import JsonObject
from sfumato.data.files.arrow_values import StructValue
from sfumato.data.files.bad_rows import parse_json
from sfumato.data.text.chat_message import Messages
from sfumato.errors import DataError

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
"""Roles by other names that data has for them: of ShareGPT, Gemma, Llama, ms-swift, and OpenAI's older protocol."""

CALL_ROLES = ("function_call", "tool_call")
"""Roles of messages whose content is the JSON of calls: they become messages of the assistant."""

LEARNED_KEYS = ("loss_mask", "loss", "train", "training", "trainable", "train_on_turn", "weight")
"""Keys whose value says whether a message is learned: 1 or true, 0 or false."""
MASKED_KEY = "masked"
"""The key whose value says the opposite."""
UNSUPPORTED_KEYS = ("train_detail", "training_detail")
"""Keys that mask parts of a message, which is refused."""

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
"""Keys of a message that have a meaning here. Any other key is used only if the chat template names it."""


ROW_OPTIONS = "chat_template_kwargs"
"""The column of a row's own values of variables of the chat template, as SmolTalk 2 and TRL have it."""

_WRITTEN_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](?:role|from|content|value)["']\s*:.*\}\s*\]\s*""", re.DOTALL)


def are_written_messages(value: object) -> bool:
    """Whether a text holds a list of messages, as columns of .csv files do, in JSON or as Python shows it."""
    return isinstance(value, str) and _WRITTEN_MESSAGES.fullmatch(value) is not None


def as_turn(value: object, role: str) -> object:
    """A text as a list with one message of ``role``, a single message as a list of it.

    Another value is unchanged, and so is a text that holds a list of messages: ``read_messages`` reads either.
    """
    if isinstance(value, str) and not are_written_messages(value):
        return [{"role": role, "content": value}]
    return [value] if isinstance(value, dict) else value


def read_messages(value: object, where: str, system: object = None) -> Messages:
    """Reads the conversation in a column.

    Args:
        value: a list of messages or its JSON text, with ``role`` and ``content`` or ShareGPT's ``from`` and ``value``;
            or the same as columns, a list of roles and one of contents.
        where: file and row, for messages.
        system: value of the column ``system``, which becomes the first message unless it is empty.

    Returns:
        Messages with ``role`` and ``content``. Calls of tools are ``tool_calls`` with ``function``, whose ``arguments``
        are mappings. A message that says whether it is learned has ``loss_mask``.

    Raises:
        DataError: names the row and the message.
    """
    value = _rows_of_columns(parsed_json(value, where))
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise DataError(f"{where}: a conversation must be a list of messages, each with role and content")
    messages: Messages = []
    for index, message in enumerate(value):
        read = _read_message(message, f"{where}: message {index + 1}")
        # Data with one message for each call: calls that follow each other become one message of the assistant.
        if read.pop("_adds_calls", False) and messages and messages[-1].get("_has_calls_alone"):
            messages[-1]["tool_calls"] += read["tool_calls"]
            continue
        messages.append(read)
    for message in messages:
        message.pop("_has_calls_alone", None)
    return _with_system(messages, system, where)


def read_tools(row: JsonObject, where: str) -> list[JsonObject] | None:
    """Reads the descriptions of tools in the column ``tools``, or of functions in the older column ``functions``.

    Returns None without such a column. Raises DataError that names the row.
    """
    tools = without_absent(_parsed_column(row.get("tools"), where))
    if tools is None:
        functions = without_absent(_parsed_column(row.get("functions"), where))
        return _tools_of_functions(functions, where) if functions else None
    if isinstance(tools, list):
        tools = [without_absent(parsed_json(tool, where)) for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: column 'tools' must be a list of JSON schemas")
    as_json(tools, f"{where}: column 'tools'")
    return [_complete_tool(tool) for tool in tools] or None


def read_row_options(row: Mapping[str, object], variables: set[str], where: str) -> JsonObject:
    """The values of variables of the chat template that a row has in a column of its own.

    Values that say nothing (null, empty texts and lists) are left out: rows of a table have the keys of all of them.

    Raises:
        DataError: when the column is no mapping, or names a variable that is not in ``variables``, which the template
            reads; names ``where``.
    """
    options = without_absent(parsed_json(row.get(ROW_OPTIONS) or {}, where))
    if not isinstance(options, dict):
        raise DataError(f"{where}: column {ROW_OPTIONS!r} must be a mapping, not {options!r}")
    options = {name: value for name, value in options.items() if value not in (None, "", [], {})}
    if unknown := sorted(map(str, options.keys() - variables)):
        raise DataError(
            f"{where}: column {ROW_OPTIONS!r}: the chat template has no variable {unknown[0]!r}, but "
            f"{', '.join(sorted(variables)) or 'none'}: leave it out, or take a template that reads it"
        )
    return options


def _parsed_column(value: object, where: str) -> object:
    """As ``parsed_json``. An empty text is None: rows of LLaMA-Factory's data without tools have one."""
    return None if isinstance(value, str) and not value.strip() else parsed_json(value, where)


def _tools_of_functions(functions: object, where: str) -> list[dict[str, object]]:
    """Turns descriptions of functions, as OpenAI's older API has them, into descriptions of tools."""
    functions = functions if isinstance(functions, list) else [functions]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise DataError(f"{where}: column 'functions' must be a list of descriptions with a name")
    return [_complete_tool(function) for function in functions if isinstance(function, dict)]


def _complete_tool(tool: JsonObject) -> JsonObject:
    """A description in the form of OpenAI's API, in which servers give tools to templates at inference.

    Published rows leave ``type`` out, or hold what belongs below ``function`` alone.
    """
    if tool.get("type", "function") != "function":
        return tool
    if "function" in tool:
        return {"type": "function", **tool}
    if not isinstance(tool.get("name"), str):
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def with_text_arguments(messages: Messages) -> Messages:
    """The messages with the arguments of their calls as JSON texts."""
    return [
        message | {"tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_text_arguments(call: dict[str, object]) -> dict[str, object]:
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    text = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def without_absent(value: object) -> Any:
    """Removes, at any depth, keys that a row has only because other rows of its table have them."""
    if isinstance(value, dict):
        is_struct = isinstance(value, StructValue)
        return {key: without_absent(item) for key, item in value.items() if item is not None or not is_struct}
    return [without_absent(item) for item in value] if isinstance(value, list) else value


def without_nulls(mapping: Mapping[str, object]) -> dict[str, object]:
    """Removes the keys of a mapping whose value is None; nested mappings stay."""
    return {key: value for key, value in mapping.items() if value is not None}


def as_json(value: object, place: str) -> str:
    """The JSON text of a value.

    Raises DataError that names ``place`` for what JSON has no form for, as the dates and decimals of a table have none:
    chat templates would write ``<datetime>`` in its place.
    """
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise DataError(f"{place}: {error}: store such values as texts or numbers") from error


def parsed_json(value: object, where: str) -> Any:
    """Parses JSON text, which tables without nested columns hold; any other value is returned unchanged."""
    if not isinstance(value, str):
        return value
    return parse_json(value, f"{where}: neither a list nor its JSON text")


def unread_keys(rows: Sequence[Mapping[str, object]], columns: set[str], template: str | None) -> list[str]:
    """Lists the columns of rows and the keys of their messages that nothing reads.

    Args:
        rows: of one table.
        columns: names of the columns that the format reads.
        template: text of the chat template: a key that it mentions counts as read. None for data without messages.

    Returns:
        Descriptions such as ``column 'source'`` or ``key 'id' of messages``, each once.
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


def _read_message(message: Mapping[str, object], place: str) -> dict[str, object]:
    """Reads one message. ``place`` names row and message in errors.

    Beside the keys of messages the result may have ``_adds_calls`` and ``_has_calls_alone``, which ``read_messages``
    removes: they mark a message of calls alone, which is joined to such a message before it.
    """
    read = {key: without_absent(value) for key, value in without_nulls(message).items()}
    role = read.pop("role") if "role" in read else read.get("from")
    content = read.pop("content") if "content" in read else read.pop("value", None)
    read.pop("from", None)
    name = role.strip().lower() if isinstance(role, str) else role
    learned = _take_learned(read, place)
    calls = _take_calls(read, place)
    if name in CALL_ROLES:
        calls = _parse_calls(content, place)
        content = ""
        read |= {"_adds_calls": True, "_has_calls_alone": True}
        name = "assistant"
    elif isinstance(name, str):
        name = ROLE_NAMES.get(name, name)
    if isinstance(content, list):
        content = [without_nulls(part) if isinstance(part, dict) else part for part in content]
    if content is None and (calls or name == "tool"):
        content = ""
    if name == "tool" and isinstance(content, dict | int | float):  # the result of a tool that is not yet a text
        content = as_json(content, place)
    result = {"role": name, "content": content, **read}
    if calls:
        result["tool_calls"] = calls
    if learned is not None:
        result["loss_mask"] = int(learned)
    return result


def _take_learned(message: dict[str, object], place: str) -> bool | None:
    """Removes the keys that say whether a message is learned. Returns what they say, or None if there are none."""
    for key in UNSUPPORTED_KEYS:
        if message.get(key):
            raise DataError(f"{place}: {key} cannot be followed, which masks parts of a message: mask whole messages")
        message.pop(key, None)
    is_learned_by_key: dict[str, bool] = {}
    for key in (*LEARNED_KEYS, MASKED_KEY):
        if key not in message:
            continue
        value = message.pop(key)
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise DataError(f"{place}: {key} must be 0 or 1, not {value!r}")
        is_learned_by_key[key] = bool(value) != (key == MASKED_KEY)
    if len(set(is_learned_by_key.values())) > 1:
        raise DataError(f"{place}: {' and '.join(is_learned_by_key)} contradict each other")
    return next(iter(is_learned_by_key.values()), None)


def _take_calls(message: dict[str, object], place: str) -> list[dict[str, object]]:
    """Removes the calls of tools from a message and returns them, whether in OpenAI's form, its older one, or flat."""
    calls = _parse_calls(message.pop("tool_calls", None), place)
    return calls + _parse_calls(message.pop("function_call", None), place)


def _parse_calls(value: object, place: str) -> list[dict[str, object]]:
    """Reads one call or several, or the JSON text of them."""
    value = _rows_of_columns(parsed_json(value, f"{place}: calls of tools") if value else None)
    calls = [value] if isinstance(value, dict) else value or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{place}: tool_calls must be a list of calls, each with name and arguments")
    return [_read_call(call, place) for call in calls]


def _read_call(call: dict[str, object], place: str) -> JsonObject:
    """Reads a call. Its result has a ``function`` with a name, and with arguments that are a mapping."""
    outer = without_nulls(call)
    named = outer.get("function")
    if isinstance(named, dict):
        function = without_nulls(named)
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
    arguments = without_absent(arguments or {})
    as_json(arguments, f"{place}: arguments of {name}")
    return {**outer, "function": {**function, "arguments": arguments}}


def _rows_of_columns(value: object) -> object:
    """Turns lists of equal length by name, as datasets stores a sequence of mappings, into a list of mappings."""
    if not isinstance(value, dict) or not value or not all(isinstance(column, list) for column in value.values()):
        return value
    if len({len(column) for column in value.values()}) > 1:
        return value
    return [StructValue(zip(value, items, strict=True)) for items in zip(*value.values(), strict=True)]


def _with_system(messages: Messages, system: object, where: str) -> Messages:
    """Puts the text of the column ``system`` in front of a conversation, unless its first message is the same."""
    if system is None or (isinstance(system, str) and not system.strip()):
        return messages
    if not isinstance(system, str):
        raise DataError(f"{where}: column 'system' must be a text, not {system!r}")
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise DataError(f"{where}: column 'system' and the conversation's own system message differ: leave one out")
    return messages
