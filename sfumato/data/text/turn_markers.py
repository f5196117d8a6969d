"""Turn markers of a chat template within messages: of texts that were rendered before, or that carry their own end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from sfumato.errors import DataError

if TYPE_CHECKING:
    from sfumato.data.text.chat import ChatTemplate

RENDERED_ROWS = "rows that were rendered before are data.data_type plaintext, and answers need no end of their own"
"""What to do about such rows of conversations."""

RENDERED_PROMPTS = "prompts that were rendered before need data.chat_template none"
"""What to do about such prompts."""


def describe_turn_markers(
    name: str, rows: Iterable[tuple[str, object]], template: ChatTemplate, remedy: str
) -> list[str]:
    """A line about rows with special tokens that tell turns apart, which would begin and end turns within a message.

    Args:
        name: of the data.
        rows: place and content of each row; the content may be nested lists and mappings.
        template: renders the messages.
        remedy: what to do.

    Returns:
        One line; none where no row has such a token, or where the template renders no plain conversation.
    """
    markers = find_turn_markers(template)
    present: set[str] = set()
    places: list[str] = []
    for place, content in rows:
        inside = {marker for text in _texts_in(content) for marker in markers if marker in text}
        present |= inside
        places += [place] * bool(inside)
    if not places:
        return []
    return [
        f"{name}: {len(places)} of the rows looked at, the first is {places[0]}, have special tokens of the chat "
        f"template within a message ({', '.join(sorted(present))}), where they begin and end turns: {remedy}"
    ]


def find_turn_markers(template: ChatTemplate) -> frozenset[str]:
    """The special tokens that a template writes around the messages of a plain conversation."""
    roles = ("user", "assistant", "user")
    try:
        text = template.render([{"role": role, "content": "."} for role in roles], "a conversation")
    except DataError:
        return frozenset()
    tokenizer = template.tokenizer
    names = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return frozenset(token for token in names | {*tokenizer.all_special_tokens} if token in text)


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(item)
