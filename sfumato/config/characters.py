"""Texts that can be written as UTF-8, and shown without doing anything to what shows them."""

from __future__ import annotations

import re

_HALVES = re.compile("[\ud800-\udfff]")

_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters of ASCII and Latin-1 (escape sequences begin with one), other ends of lines, what changes the
direction of reading, and halves of surrogate pairs."""

_PLAIN = re.compile(r"[\t\n\x20-\x7e]*")


def whole_characters(text: str) -> str:
    """A text with U+FFFD in the place of each half of a surrogate pair.

    JSON can stand for such halves, so that programs of other people's may return them; UTF-8 and tokenizers have none.
    """
    return text if text.isascii() else _HALVES.sub("\ufffd", text)


def printable(text: str) -> str:
    """A text that a terminal, a log or a page only shows: what would act on them stands by its number, ``⟨U+001B⟩``.

    Line breaks and tabs stay.
    """
    if _PLAIN.fullmatch(text):
        return text
    return _ACTING.sub(lambda letter: f"⟨U+{ord(letter[0]):04X}⟩", text)


def in_one_line(text: str) -> str:
    """A printable text as one line: each stretch of white space, line breaks included, is a space."""
    return " ".join(printable(text).split())
