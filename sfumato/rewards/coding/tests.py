"""Tests of a row, in any of the layouts that data sets have, and where the code of an answer stands."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sfumato.errors import DataError

_PYTHON = ("python", "python3", "py")
_FENCE = re.compile(
    r"(?:^[ \t]*```[ \t]*(?P<language>\w*)|```[ \t]*(?P<inline>python3?|py)\b)[^\n`]*\n(?P<code>.*?)^[ \t]*```",
    re.MULTILINE | re.DOTALL | re.IGNORECASE,
)
"""A block in triple backticks; one that says it is Python may begin behind other text, such as ``<think>``."""
_CALLED = ("function_call", "functional", "call_based")
"""Kinds of tests, by ``type`` or ``testtype``, whose input is the arguments of a function."""
_WRITTEN_AS_JSON = ("[", "{")


@dataclass(frozen=True)
class CodeTests:
    """What an answer is put to: pieces of code with assertions, or inputs and outputs, never both."""

    assertions: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    """Standard input, and the standard output that is expected."""
    setup: str = ""
    """Code that stands before the answer and before the tests."""
    entry_point: str = ""
    """The function that is tested; empty: whatever the tests name."""


def read_tests(metadata: Mapping[str, object], value: Any, where: str) -> CodeTests:
    """The tests of a row.

    Args:
        metadata: the row, of which ``setup`` and ``entry_point`` are used where they are there.
        value: of the column with the tests: a text of Python; a list of such texts; a list of mappings with ``input``
            and ``output``; a mapping with the lists ``inputs`` and ``outputs``; or JSON of one of the latter.
        where: reward, column and prompt, for messages.

    Raises:
        DataError: there are no tests, or they cannot be read.
    """
    setup = metadata.get("setup") or ""
    entry_point = metadata.get("entry_point") or ""
    if not isinstance(setup, str) or not isinstance(entry_point, str):
        raise DataError(f"{where}: setup and entry_point must be texts")
    if isinstance(value, str) and value.lstrip().startswith(_WRITTEN_AS_JSON):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{where}: the tests are no JSON: {error}") from error
    _refuse_calls(value if isinstance(value, list) else [value], where)
    if isinstance(value, Mapping) and {"inputs", "outputs"} <= set(value):
        inputs, outputs = value["inputs"], value["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise DataError(f"{where}: inputs and outputs must be lists of the same length")
        value = [{"input": stdin, "output": stdout} for stdin, stdout in zip(inputs, outputs, strict=True)]
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: there must be tests: code, a list of assertions, or pairs of input and output")
    if all(isinstance(test, Mapping) for test in value):
        return CodeTests(pairs=tuple(_read_pair(test, where) for test in value), setup=setup)
    if not all(isinstance(test, str) and test.strip() for test in value):
        raise DataError(f"{where}: tests must be all code, or all pairs of input and output")
    _parse(setup, where)
    for source in value:
        if "check" in _parse(source, where) and not entry_point:
            raise DataError(f"{where}: tests that define check(candidate) need a column entry_point with the function")
    return CodeTests(assertions=tuple(value), setup=setup, entry_point=entry_point)


def _refuse_calls(tests: Sequence[object], where: str) -> None:
    """Raises DataError for tests whose inputs are arguments: as standard input every answer would fail them."""
    for test in tests:
        if not isinstance(test, Mapping):
            continue
        names_function = test.get("fn_name") or test.get("func_name")
        if names_function or test.get("type") in _CALLED or test.get("testtype") in _CALLED:
            raise DataError(
                f"{where}: the inputs of its tests are arguments of a function, and not a program's standard input: "
                "write them as assertions, such as assert add(1, 2) == 3"
            )


def _read_pair(pair: Mapping[str, object], where: str) -> tuple[str, str]:
    stdin, stdout = pair.get("input"), pair.get("output")
    if not isinstance(stdin, str) or not isinstance(stdout, str):
        raise DataError(f"{where}: input and output of a test must be texts")
    return stdin, stdout


def _parse(source: str, where: str) -> set[str]:
    """The functions that a piece of code defines."""
    try:
        return {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    except (SyntaxError, ValueError) as error:
        raise DataError(f"{where}: its code is no Python of this version: {error}") from error


def code_of(text: str) -> str:
    """The code of an answer: the last Python block in triple backticks, else the last unnamed one, else the answer."""
    blocks = {"python": "", "": ""}
    for match in _FENCE.finditer(text):
        language = (match["language"] or match["inline"] or "").lower()
        is_indented = match.group().startswith((" ", "\t"))  # as in an item of a list
        code = textwrap.dedent(match["code"]) if is_indented else match["code"]
        blocks["python" if language in _PYTHON else language] = code
    return blocks["python"] or blocks[""] or text


def same_output(actual: str, expected: str) -> bool:
    """Whether two outputs are the same but for spaces at the ends of lines and empty lines at the end."""
    return _lines(actual) == _lines(expected)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines
