"""Inputs made of real ones: bits and lengths changed, pieces cut, doubled and mixed; values of JSON exchanged."""

from __future__ import annotations

import json
import random
from typing import Any

INTERESTING = (0, 1, 2, 7, 8, 16, 127, 128, 255, 256, 1023, 4096, 32767, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
TEXTS = (
    "",
    "\x00",
    "\x1b]0;x\x07",
    "‮",
    "\ud800",
    "<script>alert(1)</script>\"'>",
    "../../../etc/passwd",
    "/dev/zero",
    "{{ 9 ** 9 ** 9 }}",
    "{% for a in range(10**10) %}x{% endfor %}",
    "a" * 70_000,
    "9" * 5_000,
    "$\\frac",
    "__class__",
    "os:system",
    "NaN",
    "1e999",
    "\r\n",
    "data:text/html;base64,PHNjcmlwdD4=",
    "(" * 3000,
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    -(2**63),
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    0.5,
    [],
    {},
    [[]],
    [None] * 2000,
    {"a": {"b": []}},
)


def mutate(content: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """One input made of another.

    Args:
        content: a real input.
        others: of which pieces may be mixed in.
        draw: of what is changed.
    """
    if draw.random() < 0.4 and (mutated := _mutate_json(content, draw)) is not None:
        content = mutated
        if draw.random() < 0.7:
            return content
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 6, 16))):
        _change(data, others, draw)
    return bytes(data)


def _change(data: bytearray, others: list[bytes], draw: random.Random) -> None:
    """One change in place."""
    size = len(data)
    # The heads of files say most about the rest, so that half of the changes are there.
    place = draw.randrange(min(size, 256) if draw.random() < 0.5 else size) if size else 0
    length = draw.choice((1, 2, 4, 8, 16, 64, 256, 4096))
    kind = draw.randrange(10)
    if kind == 0 and size:
        data[place] ^= 1 << draw.randrange(8)
    elif kind == 1 and size:
        data[place] = draw.randrange(256)
    elif kind == 2:
        width = draw.choice((1, 2, 4, 8))
        number = draw.choice(INTERESTING) % 256**width
        data[place : place + width] = number.to_bytes(width, draw.choice(("little", "big")))
    elif kind == 3:
        del data[place : place + length]
    elif kind == 4:
        piece = bytes(data[place : place + length])
        data[place:place] = piece * draw.choice((1, 2, 16, 256) if len(piece) <= 64 else (1, 2))
    elif kind == 5:
        data[place:place] = draw.randbytes(min(length, 64))
    elif kind == 6:
        other = draw.choice(others)
        start = draw.randrange(len(other)) if other else 0
        data[place : place + length] = other[start : start + length]
    elif kind == 7:
        del data[place:]
    elif kind == 8:
        text = draw.choice(TEXTS).encode("utf-8", "surrogatepass")
        data[place : place + draw.choice((0, 1, len(text)))] = text
    elif kind == 9:
        digits = [number for number, byte in enumerate(data[:100_000]) if 48 <= byte <= 57]
        if digits:
            at = draw.choice(digits)
            data[at : at + 1] = str(draw.choice(INTERESTING) * draw.choice((1, 1, -1, 10**9))).encode()


def _mutate_json(content: bytes, draw: random.Random) -> bytes | None:
    """A JSON text, or one of several lines, with a value exchanged; None where it is none."""
    lines = content.splitlines()
    if not 0 < len(content) < 2**20:
        return None
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        place = draw.randrange(len(lines)) if lines else 0
        try:
            value = json.loads(lines[place])
        except (ValueError, RecursionError, IndexError):
            return None
        return b"\n".join([*lines[:place], _dumped(_exchanged(value, draw)), *lines[place + 1 :]])
    return _dumped(_exchanged(value, draw))


def _dumped(value: Any) -> bytes:
    text = json.dumps(value).replace('"DEEP"', "[" * 5000 + "]" * 5000).replace('"DEEPER"', '{"a":' * 150_000 + "1")
    return text.encode()


def _exchanged(value: Any, draw: random.Random) -> Any:
    """The value with something in it exchanged, doubled, or left out."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        if draw.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        if draw.random() < 0.1:
            return value | {draw.choice(TEXTS): value[key]}
        return value | {key: _exchanged(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        place = draw.randrange(len(value))
        if draw.random() < 0.1:
            return value[:place] + value[place + 1 :]
        if draw.random() < 0.1:
            return value * draw.choice((2, 50))
        return [*value[:place], _exchanged(value[place], draw), *value[place + 1 :]]
    chosen = draw.random()
    if chosen < 0.03:
        return draw.choice(("DEEP", "DEEPER"))
    return draw.choice(TEXTS) if chosen < 0.5 else draw.choice(VALUES)
