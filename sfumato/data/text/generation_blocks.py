"""What the ``{% generation %}`` blocks of a chat template must hold: an answer, and the token that ends it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from sfumato.data.text.answer_end import AnswerEnd, marker_pattern
from sfumato.errors import ConfigError

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The beginning of such a block."""

_ANSWER, _QUESTION = "sfumatoanswer", "sfumatoquestion"

Span = tuple[int, int]
RenderMarked = Callable[[list[dict[str, Any]]], tuple[str, list[Span]]]
"""The text of a conversation and the spans of its blocks."""


def check_blocks(name: str, answer_end: AnswerEnd, render: RenderMarked, tokenizer: Any) -> None:
    """Raises ConfigError when the blocks of a template leave out a part of an answer, or the token that ends it, in the
    middle or at the end of a conversation.

    Args:
        name: of the template, for messages.
        answer_end: of the template.
        render: marks its blocks.
        tokenizer: has the special tokens.
    """
    if answer_end.tail is None:
        return  # a template that cannot be asked; each conversation is looked at, too
    as_parts = _is_of_parts(render)
    ends = {token.text for token in answer_end.tokens}
    markers = marker_pattern(tokenizer, ends)
    for following in ([], [_message("user", _QUESTION, as_parts)]):
        asked = [_message("user", ".", as_parts), _message("assistant", _ANSWER, as_parts), *following]
        try:
            text, blocks = render(asked)
        except Exception:  # whatever a template raises: then it takes no such conversation
            continue
        start = text.find(_ANSWER)
        if start < 0:
            continue
        after = start + len(_ANSWER)
        last = text.find(_QUESTION) if following else len(text)
        _check_answer(name, text, (start, after), blocks)
        found = list(markers.finditer(text, after, last))
        ended = next((marker for marker in found if marker.group() in ends), None)
        if ended is None and not following:
            raise ConfigError(
                f"data.chat_template {name} writes nothing after an answer that ends it, and its generation blocks "
                f"decide what is learned, so that no answer would learn to end: write {answer_end.taught} after the "
                "answer, inside the block"
            )
        if ended is not None and not _is_inside(ended.span(), blocks):
            where = "in the middle of a conversation" if following else "at the end of a conversation"
            raise ConfigError(
                f"data.chat_template {name}: its generation block leaves out {ended.group()}, which ends an answer "
                f"{where}, so that no answer would learn to end: move {{% endgeneration %}} behind it"
            )


def _check_answer(name: str, text: str, answer: Span, blocks: Sequence[Span]) -> None:
    if not _is_inside(answer, blocks):
        raise ConfigError(
            f"data.chat_template {name}: its generation blocks leave out (a part of) what the assistant says, which "
            f"would not be learned; a block ends within {text[max(answer[0] - 20, 0) : answer[1] + 20]!r}: put the "
            "whole content between {% generation %} and {% endgeneration %}"
        )


def is_in_blocks(said: str, text: str, blocks: Sequence[Span]) -> bool:
    """Whether a text that stands in a rendered conversation stands inside its blocks, white space aside.

    True of one that the template does not show as it is.
    """
    squeezed = "".join(said.split())
    inside = "".join("".join(text[slice(*block)].split()) for block in blocks)
    return squeezed in inside or squeezed not in "".join(text.split())


def _is_inside(span: Span, blocks: Sequence[Span]) -> bool:
    """Whether blocks that follow each other cover a span."""
    place = span[0]
    for start, end in sorted(blocks):
        if start <= place < end:
            place = end
    return place >= span[1]


def _is_of_parts(render: RenderMarked) -> bool:
    """Whether the template shows contents as lists of parts alone."""
    for as_parts in (False, True):
        try:
            text, _ = render([_message("user", ".", as_parts), _message("assistant", _ANSWER, as_parts)])
        except Exception:  # as above
            continue
        if _ANSWER in text:
            return as_parts
    return False


def _message(role: str, text: str, as_parts: bool) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}
