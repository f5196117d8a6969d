"""Texts that can be written as UTF-8."""

from __future__ import annotations

import re

_HALVES = re.compile("[\ud800-\udfff]")


def whole_characters(text: str) -> str:
    """A text with U+FFFD in the place of each half of a surrogate pair.

    JSON can stand for such halves, so that programs of other people's may return them; UTF-8 and tokenizers have none.
    """
    return text if text.isascii() else _HALVES.sub("\ufffd", text)
