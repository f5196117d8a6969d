"""Checks that ``{% generation %}`` blocks of a chat template hold whole answers and the tokens that end them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sfumato.data.text.answer_end import AnswerEnd, marker_pattern
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The beginning of a generation block."""

_ANSWER, _QUESTION = "sfumatoanswer", "sfumatoquestion"

Span = tuple[int, int]
RenderMarked = Callable[[list[dict[str, object]]], tuple[str, list[Span]]]
"""Renders a conversation; returns its text and the spans of its generation blocks."""


def check_blocks(name: str, answer_end: AnswerEnd, render: RenderMarked, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError when the blocks of a template leave out a part of an answer, or the token that ends it, in the
    middle or at the end of a conversation.

    Args:
        name: of the template, for messages.
        answer_end: of the template.
        render: marks its blocks.
        tokenizer: has the special tokens.
    """
    if answer_end.tail is None:
        return  # the template renders no test conversation; each conversation of the data is checked, too
    as_parts = _needs_parts(render)
    ends = {token.text for token in answer_end.tokens}
    markers = marker_pattern(tokenizer, ends)
    for following in ([], [_build_message("user", _QUESTION, as_parts)]):
        messages = [_build_message("user", ".", as_parts), _build_message("assistant", _ANSWER, as_parts), *following]
        try:
            text, blocks = render(messages)
        except Exception:  # a template may raise anything; it does not take such a conversation
            continue
        start = text.find(_ANSWER)
        if start < 0:
            continue
        stop = start + len(_ANSWER)
        limit = text.find(_QUESTION) if following else len(text)
        _check_answer(name, text, (start, stop), blocks)
        markers_after = list(markers.finditer(text, stop, limit))
        ending = next((marker for marker in markers_after if marker.group() in ends), None)
        if ending is None and not following:
            raise ConfigError(
                f"data.chat_template {name} writes nothing after an answer that ends it, and its generation blocks "
                f"decide what is learned, so that no answer would learn to end: write {answer_end.taught} after the "
                "answer, inside the block"
            )
        if ending is not None and not _is_covered(ending.span(), blocks):
            where = "in the middle of a conversation" if following else "at the end of a conversation"
            raise ConfigError(
                f"data.chat_template {name}: its generation block leaves out {ending.group()}, which ends an answer "
                f"{where}, so that no answer would learn to end: move {{% endgeneration %}} behind it"
            )


def _check_answer(name: str, text: str, answer: Span, blocks: Sequence[Span]) -> None:
    if not _is_covered(answer, blocks):
        raise ConfigError(
            f"data.chat_template {name}: its generation blocks leave out (a part of) what the assistant says, which "
            f"would not be learned; a block ends within {text[max(answer[0] - 20, 0) : answer[1] + 20]!r}: put the "
            "whole content between {% generation %} and {% endgeneration %}"
        )


def is_in_blocks(content: str, text: str, blocks: Sequence[Span]) -> bool:
    """Whether the content of a message stands inside the generation blocks of a conversation, white space aside.

    Also true when the template does not show the content unchanged.
    """
    squeezed = "".join(content.split())
    block_texts = "".join("".join(text[slice(*block)].split()) for block in blocks)
    return squeezed in block_texts or squeezed not in "".join(text.split())


def _is_covered(span: Span, blocks: Sequence[Span]) -> bool:
    """Whether blocks without gaps between them cover a span."""
    place = span[0]
    for start, end in sorted(blocks):
        if start <= place < end:
            place = end
    return place >= span[1]


def _needs_parts(render: RenderMarked) -> bool:
    """Whether the template shows a content only if it is a list of parts."""
    for as_parts in (False, True):
        try:
            text, _ = render([_build_message("user", ".", as_parts), _build_message("assistant", _ANSWER, as_parts)])
        except Exception:  # as in ``check_blocks``
            continue
        if _ANSWER in text:
            return as_parts
    return False


def _build_message(role: str, text: str, as_parts: bool) -> dict[str, object]:
    return {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}
