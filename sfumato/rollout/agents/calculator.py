"""Arithmetic in a text, worked out without running the text as a program."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

MAX_TEXT = 1000
"""Characters of an expression."""
MAX_BITS = 8192
"""Bits of an integer that stands in an expression or is computed."""

_OPERATORS: dict[type, Callable[[Any, Any], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_SIGNS = {0xD7: "*", 0xF7: "/", 0x2212: "-", 0x5E: "**"}  # typographic signs of Unicode, and the circumflex
_FUNCTIONS: dict[str, Callable[..., object]] = {"sqrt": math.sqrt, "abs": abs, "min": min, "max": max, "round": round}


class CalculationError(ValueError):
    """An expression that cannot be worked out; the message says why."""


def calculate(expression: str) -> str:
    """The value of an arithmetic expression.

    It may hold numbers, + - * / // % ** (or ^), parentheses, and sqrt, abs, min, max, round; commas within numbers and
    zeros in front of them are ignored.

    Returns:
        An integer as such, else up to twelve digits.

    Raises:
        CalculationError: when it is something else, is longer than ``MAX_TEXT``, or would be larger than ``MAX_BITS``.
    """
    if len(expression) > MAX_TEXT:
        raise CalculationError(f"the expression has {len(expression)} letters, more than {MAX_TEXT}")
    text = expression.strip().translate(_SIGNS)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<![\w.])0+(?=\d)", "", text)  # Python refuses integers that begin with zeros, such as 007
    try:
        return _format_number(_evaluate_node(ast.parse(text, mode="eval").body))
    except CalculationError:
        raise
    except SyntaxError as error:
        raise CalculationError(f"{expression.strip()!r} is no arithmetic expression") from error
    except ZeroDivisionError as error:
        raise CalculationError("division by zero") from error
    except (OverflowError, RecursionError, MemoryError) as error:
        raise CalculationError("the expression is too large") from error
    except (ValueError, TypeError) as error:  # such as the root of a negative number
        raise CalculationError(str(error)) from error


def _evaluate_node(node: ast.AST) -> int | float:
    """The value of a node of the syntax tree. Raises CalculationError for what is no arithmetic."""
    # A bool is an int to ``isinstance``, and no number of an expression.
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _check_number(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _evaluate_node(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        first = _evaluate_node(node.left)
        second = _evaluate_node(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(first, second)
        return _check_number(_OPERATORS[type(node.op)](first, second))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id not in _FUNCTIONS:
            raise CalculationError(f"unknown function {node.func.id!r}; known are {', '.join(_FUNCTIONS)}")
        return _check_number(_FUNCTIONS[node.func.id](*map(_evaluate_node, node.args)))
    raise CalculationError("only numbers, + - * / // % **, parentheses and functions of numbers can be worked out")


def _check_power(base: int | float, exponent: int | float) -> None:
    """Refuses a power of integers before it is computed, which could take all memory and hours."""
    if not (isinstance(base, int) and isinstance(exponent, int)):
        return
    if abs(base) > 1 and exponent * base.bit_length() > MAX_BITS:
        raise CalculationError("the power is too large")


def _check_number(value: object) -> int | float:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise CalculationError("the number is too large")
    if not isinstance(value, (int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        raise CalculationError("the result is no real number")
    return value


def _format_number(value: int | float) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"
    return str(value)
