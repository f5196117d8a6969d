"""Reads what judges say. Strict: what is not clearly there counts as not said."""

from __future__ import annotations

import re

from sfumato.rewards.http.chat_completions import Reply

_DECORATION = r"[\s*_`]*"
_OPENING = r"[\s*_`\[(]*"
# Neither the beginning of a longer word or number, nor of a span such as 7-8, nor a percentage.
_NUMBER = re.compile(
    r"([-+]?\d+(?:\.\d+)?)(?![^\W_]|[ \t]*%|[.,]\d|[ \t]*[-\u2013\u2014][ \t]*\d)"
    r"(?:\s*(?:/|out\s+of)\s*(\d+(?:\.\d+)?))?",
    re.IGNORECASE,
)
_BROKEN_OFF = ("abort", "error")  # what vLLM, SGLang and gateways say of half a reply
_ANSWER = re.compile(rf"<answer>|\banswer{_DECORATION}:", re.IGNORECASE)
_CHOICE = re.compile(rf"{_OPENING}(?:(?:image|video|text|response)\s*)?(1|2|tie)\b(?![.,]\d)", re.IGNORECASE)


class UnreadableError(ValueError):
    """A reply does not hold what was asked for; the message says what is missing."""


def final_text(reply: Reply) -> str:
    """What a reply says in the end, after any ``<think>`` block.

    Raises:
        UnreadableError: the judge refused, was cut off, or broke off.
    """
    if reply.refusal or reply.finish_reason == "content_filter":
        raise UnreadableError("the judge refused")
    if reply.finish_reason == "length":
        raise UnreadableError("the reply was cut off at max_tokens")
    if reply.finish_reason in _BROKEN_OFF:
        raise UnreadableError(f"the reply broke off ({reply.finish_reason})")
    return reply.text.rpartition("</think>")[2]


def number_after(text: str, marker: str, low: float, high: float) -> float:
    """The number that follows the last ``marker:`` of a text, such as ``Score: 7`` or ``**Score:** 7/10``.

    Raises:
        UnreadableError: there is none, or it is not from ``low`` to ``high``.
    """
    wanted = f"no '{marker}:' with a number from {low:g} to {high:g}"
    marks = list(re.finditer(rf"\b{re.escape(marker)}{_DECORATION}:{_OPENING}", text, re.IGNORECASE))
    found = _NUMBER.match(text, marks[-1].end()) if marks else None
    if found is None or not low <= float(found.group(1)) <= high or float(found.group(2) or high) != high:
        raise UnreadableError(wanted)
    return float(found.group(1))


def choice_after_answer(text: str) -> float:
    """What follows the last ``Answer:`` or ``<answer>``: 1.0 for the first of two, 0.0 for the second, 0.5 for a tie.

    Raises:
        UnreadableError: there is no such choice.
    """
    marks = list(_ANSWER.finditer(text))
    found = _CHOICE.match(text, marks[-1].end()) if marks else None
    if found is None:
        raise UnreadableError("no 'Answer:' with 1, 2 or tie")
    return {"1": 1.0, "2": 0.0, "tie": 0.5}[found.group(1).casefold()]
