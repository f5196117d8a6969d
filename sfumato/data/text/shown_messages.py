"""Whether a rendered conversation shows what its messages say, so that nothing of the data is lost silently."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from sfumato.config.open_mappings import JsonObject

TEMPLATES = Path(__file__).parent / "templates"

THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an answer that hold its thoughts: Qwen's and DeepSeek's, OpenRouter's, and that of gpt-oss."""

OPENING = re.compile(r"<[^<>\s/]+>\s*\Z")
"""A tag at the end of a prompt, such as the ``<think>`` with which it begins the answer."""

FIRST_TAG = re.compile(r"<[^<>\s/]+>")


def opening_of(prompt: str) -> str:
    """The tag with which a prompt begins the answer, or nothing."""
    match = OPENING.search(prompt)
    return "" if match is None else match.group()


def shows_message(message: JsonObject, text: str) -> bool:
    """Whether a text shows the content of a message that is no answer."""
    # A template may trim a content, or quote it as a JSON string.
    contents = [content.strip() for content in texts_in(message)]
    return all(content in text or _in_json(content) in text for content in contents)


def repeated_tag(message: JsonObject, text: str) -> str | None:
    """The tag with which a message begins, where a text has it in front of the message, too; None for others.

    Published rows hold results of tools as some template writes them, ``<tool_response>`` and all.
    """
    for content in texts_in(message):
        tag = FIRST_TAG.match(content.strip())
        if tag and re.search(re.escape(tag.group()) + r"\s*" + re.escape(content.strip()), text):
            return tag.group()
    return None


def find_problem(message: JsonObject, answer: str) -> str | None:
    """Says what is wrong with how a template shows an answer, or returns None.

    Args:
        message: of the assistant, with its thoughts and calls of tools.
        answer: as the model would write it, with the tag with which the prompt begins it.
    """
    contents = texts_in(message)
    squeezed = _remove_whitespace(answer)
    for content in contents:
        if not _is_shown(content, squeezed):
            return "the chat template leaves out some of what it says"
        if content.lstrip().startswith("<think>") and answer.count("<think>") > content.count("<think>"):
            return (
                "the chat template opens <think> by itself, and its content opens another: put the thoughts in "
                "reasoning_content"
            )
    for key in THOUGHT_KEYS:
        thoughts = message.get(key)
        if isinstance(thoughts, str) and not _is_shown(thoughts, squeezed):
            return (
                f"the chat template leaves out some of what it says, its thoughts in {key!r}: templates read one of "
                f"{', '.join(THOUGHT_KEYS)}, or <think> in the content"
            )
    for name in tool_names(message.get("tool_calls") or []):
        if name not in answer:
            return f"the chat template leaves out its call of {name!r}{advise_tool_template()}"
    return None


def texts_in(message: JsonObject) -> list[str]:
    """The texts of a message's content, without its media."""
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def tool_names(tools: Iterable[object]) -> list[str]:
    """Names of tools or of calls of tools, which may be at the top of each or below ``function``."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return [name for name in names if isinstance(name, str)]


def advise_tool_template() -> str:
    """What a message says of templates that show tools and calls."""
    return f"; data.chat_template hermes shows tools (templates by name: {', '.join(template_names())})"


def template_names() -> list[str]:
    """Names of the templates that come with sfumato, for ``data.chat_template``."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def join_blocks(text: str, blocks: Sequence[tuple[int, int]]) -> str:
    """The text within generation blocks."""
    return "".join(text[start:end] for start, end in blocks)


def _is_shown(said: str, squeezed_answer: str) -> bool:
    """Whether an answer without white space contains a text, as it is or as a JSON string."""
    return any(_remove_whitespace(form) in squeezed_answer for form in (said, _in_json(said)))


def _in_json(text: str) -> str:
    """A text as it is inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _remove_whitespace(text: str) -> str:
    """A text without its white space."""
    return "".join(text.split())
