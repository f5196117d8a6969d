"""What a message of a conversation is, in the form of chat templates: role, content and tool_calls."""

from __future__ import annotations

from sfumato.config.open_mappings import JsonObject
from sfumato.errors import DataError

ROLES = ("system", "user", "assistant", "tool", "developer")

Message = JsonObject
Messages = list[JsonObject]


def check_messages(messages: list[Message], where: str, parts: bool = False) -> list[int]:
    """Checks messages. Returns the indices of the answers that are trained on.

    With ``parts`` a content may be a list of texts and media.

    Raises:
        DataError: for an unknown role, missing content, a wrong ``loss_mask``, or when no answer is trained on.
    """
    trained = []
    for index, message in enumerate(messages):
        role = message.get("role")
        content = message.get("content")
        mask = message.get("loss_mask")
        place = f"{where}: message {index + 1}"
        if role not in ROLES:
            raise DataError(f"{place}: unknown role {role!r}; known are {', '.join(ROLES)}")
        place = f"{place} ({role})"
        if not has_content(message) and not (parts and isinstance(content, list) and content):
            raise DataError(f"{place}: content must be a non-empty text, not {content!r}")
        if mask not in (None, 0, 1):
            raise DataError(f"{place}: loss_mask must be 0 or 1, not {mask!r}")
        if mask and role != "assistant":
            raise DataError(f"{place}: loss_mask is 1, but only what the assistant says can be learned")
        if role == "assistant" and mask != 0:
            trained.append(index)
    if not trained:
        raise DataError(f"{where}: the conversation has nothing to learn from: no assistant message with loss_mask 1")
    return trained


def has_content(message: Message) -> bool:
    """Whether a message has the content that its role requires.

    The text of a system message, of a tool's result, or beside calls of tools may be empty.
    """
    content = message.get("content")
    if message.get("role") == "assistant" and message.get("tool_calls"):
        return content is None or isinstance(content, str | list)
    may_be_empty = message.get("role") in ("system", "developer", "tool")
    return isinstance(content, str) and (may_be_empty or bool(content.strip()))


def as_text(content: str | list[JsonObject] | None) -> str:
    """The content of a message as people read it, with ``<image>`` in the place of an image."""
    parts = [{"type": "text", "text": content or ""}] if content is None or isinstance(content, str) else content
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in parts)
