"""Tests of a row, in any of the layouts that data sets have, and where the code of an answer stands."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sfumato.errors import DataError

_PYTHON = ("python", "python3", "py")
_FENCE = re.compile(
    r"(?:^(?P<indent>[ \t]*)```[ \t]*(?P<language>\w*)|```[ \t]*(?P<inline>python3?|py)\b)[^\n`]*\n"
    r"(?P<code>.*?)^(?:(?P=indent) {0,3}| {0,3})```",
    re.MULTILINE | re.DOTALL | re.IGNORECASE,
)
"""A block in triple backticks; one that says it is Python may begin behind other text, such as ``<think>``.

As in Markdown, backticks that are indented by four spaces more, as those in a docstring, end none."""
_CALLED = ("function_call", "functional", "call_based")
"""Kinds of tests, by ``type`` or ``testtype``, whose input is the arguments of a function."""
_FUTURE_IMPORT = re.compile(r"^from __future__ import [^\n(]+$", re.MULTILINE)
_WRITTEN_AS_JSON = ("[", "{")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class CodeTests:
    """What an answer is put to: pieces of code with assertions, or inputs and outputs, never both."""

    assertions: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    """Standard input, and the standard output that is expected."""
    setup: str = ""
    """Code that stands before the answer and before the tests."""
    entry_point: str = ""
    """The function that is tested, such as ``add`` or ``Solution().add``; empty: whatever the tests name."""


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
    if entry_point:
        _parse(entry_point, where, "entry_point")
    if isinstance(value, str) and value.lstrip().startswith(_WRITTEN_AS_JSON):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{where}: the tests are no JSON: {error}") from error
    before: list[ast.stmt] = []
    with contextlib.suppress(SyntaxError, ValueError):  # an answer may complete a setup that is no Python by itself
        before = ast.parse(setup).body
    _refuse_missing_modules(before, where)
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
    statements = [statement for source in value for statement in _parse(source, where)]
    _refuse_missing_modules(statements, where)
    _refuse_idle(statements, entry_point, where)
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


def _refuse_missing_modules(statements: Sequence[ast.stmt], where: str) -> None:
    """Raises DataError for code that imports what the sandbox does not have, with which no answer passes."""
    for node in statements:
        modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for module in modules:
            if module.partition(".")[0] not in sys.stdlib_module_names:
                raise DataError(
                    f"{where}: its code imports {module!r}, which the sandbox does not have: leave the import out "
                    "(names of the answer need none), or write the test without it"
                )


def _refuse_idle(statements: Sequence[ast.stmt], entry_point: str, where: str) -> None:
    """Raises DataError for code that every answer would pass, since nothing of it runs.

    Args:
        statements: of all pieces of code.
        entry_point: the function that ``check`` is called with; empty where nothing calls it.
        where: reward, column and prompt, for messages.
    """
    defined = [node for node in statements if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    if any(node.name == "check" for node in defined) and not entry_point:
        raise DataError(f"{where}: tests that define check(candidate) need a column entry_point with the function")
    read = [node for node in statements if not _is_main_guard(node)]
    named = {inner.id for node in read for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    for node in defined:
        if _is_test(node) and node.name not in named:
            raise DataError(
                f"{where}: its code defines {node.name}, which nothing calls, so that every answer would pass: call it "
                "on a line of its own (of unittest, write the assertions out)"
            )
    runs_check = entry_point and any(node.name == "check" for node in defined)
    running = [inner for node in read if not isinstance(node, _DEFINITIONS) for inner in ast.walk(node)]
    if not runs_check and not any(isinstance(inner, ast.Assert | ast.Raise | ast.Call) for inner in running):
        raise DataError(f"{where}: its code asserts nothing, so that every answer would pass")


def _is_test(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether a test runner would call it: by name as pytest, or by class as unittest."""
    if not isinstance(node, ast.ClassDef):
        return node.name.startswith("test")
    return node.name.startswith("Test") or any("TestCase" in ast.unparse(base) for base in node.bases)


def _is_main_guard(node: ast.stmt) -> bool:
    """Whether a statement runs in a program alone, which tests are not: ``if __name__ == "__main__"``."""
    return isinstance(node, ast.If) and "__name__" in {
        inner.id for inner in ast.walk(node.test) if isinstance(inner, ast.Name)
    }


def _parse(source: str, where: str, what: str = "code") -> list[ast.stmt]:
    """The statements of a piece of code."""
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        raise DataError(f"{where}: its {what} is no Python of this version: {error}") from error


def code_of(text: str) -> str:
    """The code of an answer: the last Python block in triple backticks, else the last unnamed one, else the answer."""
    blocks = {"python": "", "": ""}
    for match in _FENCE.finditer(text):
        language = (match["language"] or match["inline"] or "").lower()
        is_indented = match.group().startswith((" ", "\t"))  # as in an item of a list
        code = textwrap.dedent(match["code"]) if is_indented else match["code"]
        blocks["python" if language in _PYTHON else language] = code
    return blocks["python"] or blocks[""] or text


def put_behind(setup: str, code: str) -> str:
    """A program of the setup and the code of an answer, whose imports of ``__future__`` must stand before all."""
    if not setup:
        return code
    return "\n".join([*_FUTURE_IMPORT.findall(code), setup, _FUTURE_IMPORT.sub("", code)])


def same_output(actual: str, expected: str) -> bool:
    """Whether two outputs are the same but for spaces at the ends of lines and empty lines at the end.

    Where a number is expected that has a decimal point, another one may be 1e-6 away, or that part of it, as judges of
    programming contests allow: nobody knows how many digits a program is to print. Whole numbers must be equal.
    """
    actual_lines = _split_lines(actual)
    expected_lines = _split_lines(expected)
    return len(actual_lines) == len(expected_lines) and all(map(_same_line, actual_lines, expected_lines))


def _same_line(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    words = re.split(r"(\s+)", actual)  # with the spaces between them, which count
    expected_words = re.split(r"(\s+)", expected)
    return len(words) == len(expected_words) and all(map(_same_word, words, expected_words))


def _same_word(actual: str, expected: str) -> bool:
    if "." not in expected or not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(actual)):
        return actual == expected
    return math.isclose(float(actual), float(expected), rel_tol=1e-6, abs_tol=1e-6)


def _split_lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines
