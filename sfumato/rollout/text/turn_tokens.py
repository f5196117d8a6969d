"""The tokens between two turns of the policy: the end of its turn, what others say, the beginning of its next one.

Only they are tokenised. What stands before them, drawn or given, stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sfumato.data.text.chat import Message
from sfumato.data.text.prompt_template import PromptTemplate, Tools
from sfumato.errors import ConfigError, DataError
from sfumato.rollout.engines.base import Sampling

_ANSWER = "sfumatoanswer"


def tokens_between(
    template: PromptTemplate, messages: list[Message], last_token: int | None, tools: Tools | None = None
) -> list[int]:
    """The tokens that follow an answer of the policy.

    They are found by rendering the messages after an answer that is known.

    Args:
        template: with a chat template.
        messages: what others say; special tokens in them are broken up, so that nobody can end a turn that is not
            theirs.
        last_token: of the answer, where it is the stop token that ends a turn; None where it has none.
        tools: as the prompt has shown them.

    Raises:
        ConfigError: when the chat template cannot render such messages.
    """
    shown = [_defused(message, template.tokenizer) for message in messages]
    history = [{"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = template.render([*history, *shown], "the messages between two turns", tools)
    except DataError as error:
        raise ConfigError(f"the chat template has no place for what stands between two turns: {error}") from error
    if text.count(_ANSWER) != 1:
        raise ConfigError("the chat template does not show the assistant's answer as it is: give one that does")
    tail = text.partition(_ANSWER)[2]
    if last_token is None:
        return template.encode([tail], is_beginning=False)[0]
    tail = tail.removeprefix(template.tokenizer.decode([last_token], skip_special_tokens=False))
    return tokens_after(template, last_token, tail)


def end_token(drawn: Sequence[int], sampling: Sampling) -> int | None:
    """The token that ended a drawn answer; None where a text did (``Sampling.stop``), or the limit of its length."""
    return drawn[-1] if drawn and drawn[-1] in sampling.stop_token_ids else None


def tokens_after(template: PromptTemplate, last_token: int, text: str) -> list[int]:
    """The tokens of a text that goes on after a token.

    Tokenised with that token's text in front of it where this leaves the token as it is, since some tokenizers put a
    space in front of what they take for the beginning of a text.
    """
    if not text:
        return []
    before = template.tokenizer.decode([last_token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    first, both, alone = template.encode([before, before + text, text], is_beginning=False)
    return both[len(first) :] if first and both[: len(first)] == first else alone


def _defused(message: Message, tokenizer: Any) -> Message:
    content = message.get("content")
    return {**message, "content": defused(content, tokenizer)} if isinstance(content, str) else message


def defused(text: str, tokenizer: Any) -> str:
    """A text in which the names of special tokens are broken up by a space after their first letter."""
    for name in special_names(tokenizer):
        if name in text:
            text = text.replace(name, f"{name[0]} {name[1:]}")
    return text


def special_names(tokenizer: Any) -> Sequence[str]:
    """Texts that the tokenizer takes for special tokens, the longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
