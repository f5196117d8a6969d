"""JSON of strangers: its size, number of values and depth are limited before anything is made of it."""

from __future__ import annotations

import json

BYTES_OF_A_VALUE = 256
"""About the memory that the smallest value with most overhead takes: a mapping of one key, ``{"a":0},``."""


class JSONLimitError(ValueError):
    """JSON that is larger, longer or deeper than is read here."""


def count_values(text: str | bytes) -> int:
    """An upper bound of the number of values in JSON, found without parsing it: commas and brackets in texts count."""
    marks = ("{", "[", ",") if isinstance(text, str) else (b"{", b"[", b",")
    return 1 + sum(text.count(mark) for mark in marks)  # type: ignore[arg-type]


def load_json(text: str | bytes, *, max_values: int, max_depth: int = 100) -> object:
    """What JSON holds.

    Args:
        text: the JSON.
        max_values: the most values in it.
        max_depth: the most lists and mappings within each other.

    Raises:
        ValueError: it is no JSON, or more than that (JSONLimitError).
    """
    if count_values(text) > max_values:
        raise JSONLimitError(f"more than {max_values:,} values")
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise JSONLimitError(f"nested more than {max_depth} times") from error
    brackets = ("{", "[") if isinstance(text, str) else (b"{", b"[")
    # few brackets cannot nest deeply, so most values need no walk
    if sum(text.count(bracket) for bracket in brackets) > max_depth and _nesting_depth(value) > max_depth:  # type: ignore[arg-type]
        raise JSONLimitError(f"nested more than {max_depth} times")
    return value


def _nesting_depth(value: object) -> int:
    depth = 0
    level = [value]
    while level := [inner for inner in level if isinstance(inner, dict | list)]:
        depth += 1
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return depth
