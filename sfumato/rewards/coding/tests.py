"""Tests of a row, in any of the layouts that data sets have, and where the code of an answer stands."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sfumato.errors import DataError

_FENCE = re.compile(r"^```[ \t]*(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
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
    """The code of an answer: the last block in triple backticks that is Python or unnamed, else the whole answer."""
    blocks = [code for language, code in _FENCE.findall(text) if language.lower() in ("", "python", "python3", "py")]
    return blocks[-1] if blocks else text


def same_output(actual: str, expected: str) -> bool:
    """Whether two outputs are the same but for spaces at the ends of lines and empty lines at the end."""
    return _lines(actual) == _lines(expected)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines
