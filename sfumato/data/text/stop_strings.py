"""Texts that end an answer, found in its tokens while they are drawn.

The token that completes one is the last of the answer, as vLLM and SGLang have it: it was drawn, so it is learned from
with all others. What the answer says, for rewards and tools, ends before the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""From token ids to their text, special tokens included."""

CONTEXT = 4
"""Tokens before those that can make up a text that are decoded with them: the first of a text may lose its space."""


def num_looked_at(stop: Sequence[str]) -> int:
    """The last tokens that a look takes: each has at least a byte of a text."""
    return max((len(text.encode()) for text in stop), default=0) + CONTEXT


def completes_stop(token_ids: Sequence[int], stop: Sequence[str], decode: Decode) -> bool:
    """Whether the last of some tokens completes one of the texts, of which none was there before it.

    Args:
        token_ids: of an answer; the last ``num_looked_at`` are enough.
        stop: the texts.
        decode: of the tokenizer.
    """
    if not stop or not token_ids:
        return False
    tail = decode(list(token_ids)[-num_looked_at(stop) :])
    return any(text in tail for text in stop)


def before_stop(token_ids: Sequence[int], stop: Sequence[str], decode: Decode) -> str:
    """The text of tokens, without one of the texts that the last of them completes and what stands behind it."""
    text = decode(token_ids)
    before = len(decode(token_ids[:-1]))
    places = [text.find(each, max(before - len(each) - 2, 0)) for each in stop]  # 2: half a character before
    return text[: min((place for place in places if place >= 0), default=len(text))]
