"""Stop strings: texts that end an answer, found in its tokens while they are drawn.

The token that completes a stop string is the last of the answer, as in vLLM and SGLang: it was drawn, so it is learned
from like all others. The answer that rewards and tools see ends before the stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into their text, including special tokens."""

CONTEXT = 4
"""Tokens that are decoded in front of those that can make up a stop string, since a tokenizer may drop the space in
front of the first token that it decodes."""


def num_looked_at(stop: Sequence[str]) -> int:
    """How many of the last tokens to look at: each token of a stop string has at least one byte of it."""
    return max((len(text.encode()) for text in stop), default=0) + CONTEXT


def completes_stop(token_ids: Sequence[int], stop: Sequence[str], decode: Decode) -> bool:
    """Whether the last token completes a stop string. The tokens before it must not hold one.

    Args:
        token_ids: of an answer; the last ``num_looked_at`` are enough.
        stop: the stop strings.
        decode: of the tokenizer.
    """
    if not stop or not token_ids:
        return False
    tail = decode(list(token_ids)[-num_looked_at(stop) :])
    return any(text in tail for text in stop)


def before_stop(token_ids: Sequence[int], stop: Sequence[str], decode: Decode) -> str:
    """The text of an answer up to the stop string that its last token completes; all of it where there is none."""
    text = decode(token_ids)
    before = len(decode(token_ids[:-1]))
    places = [text.find(string, max(before - len(string) - 2, 0)) for string in stop]  # 2: half a character before
    return text[: min((place for place in places if place >= 0), default=len(text))]
