"""The tokens between two turns of the policy: the end of its turn, messages of others, the beginning of its next one.

Only these are tokenised. The tokens before them, drawn or not, stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sfumato.data.text.chat_message import Message
from sfumato.data.text.prompt_template import PromptTemplate, Tools
from sfumato.data.text.token_ids import decode_text
from sfumato.errors import ConfigError, DataError
from sfumato.rollout.engines.base import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "sfumatoanswer"
"""The text of an answer that is then searched for in a rendered conversation."""


def tokens_between(
    template: PromptTemplate, messages: list[Message], last_token: int | None, tools: Tools | None = None
) -> list[int]:
    """The tokens that follow an answer of the policy, up to where its next turn begins.

    To find them, a conversation whose answer is ``_ANSWER`` is rendered with the messages after it; the tokens are made
    from the text behind that answer.

    Args:
        template: with a chat template.
        messages: of others; the texts of special tokens in them are broken up, so that a message cannot end its turn.
        last_token: the stop token that the answer ended with; None where it ended without one.
        tools: as the prompt has shown them.

    Raises:
        ConfigError: when the chat template cannot render such messages.
    """
    shown = [_defuse_message(message, template.tokenizer) for message in messages]
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
    return tokens_after(template, last_token, _without_end(template, tail, last_token))


def _without_end(template: PromptTemplate, tail: str, last_token: int) -> str:
    """What the template writes behind an answer, without the token that ends the turn: the policy has drawn one.

    Models have several, of which the template writes one: gpt-oss draws ``<|return|>`` where its history has
    ``<|end|>``. Line breaks in front of the token belong to the answer, too. A template that writes no end begins the
    next message with the token that was drawn, or with another one, which stays.
    """
    drawn_end = decode_text(template.tokenizer, [last_token], skip_special_tokens=False)
    assert template.chat is not None, "there is no chat template"
    writes_end = not template.chat.answer_end.is_appended
    names = special_names(template.tokenizer) if writes_end else []
    stripped = tail.lstrip()
    end = next((name for name in (drawn_end, *names) if stripped.startswith(name)), "")
    return stripped.removeprefix(end) if end else tail


def end_token(drawn: Sequence[int], sampling: Sampling) -> int | None:
    """The stop token that ended a drawn answer; None where a text (``Sampling.stop``) or its length ended it."""
    return drawn[-1] if drawn and drawn[-1] in sampling.stop_token_ids else None


def tokens_after(template: PromptTemplate, last_token: int, text: str) -> list[int]:
    """The tokens of a text that follows a token.

    The text is tokenised behind that token's own text, because some tokenizers put a space in front of the beginning of
    a text. Where the two texts merge into other tokens, it is tokenised alone.
    """
    if not text:
        return []
    before = decode_text(
        template.tokenizer, [last_token], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    prefix, joined, separate = template.encode([before, before + text, text], is_beginning=False)
    return joined[len(prefix) :] if prefix and joined[: len(prefix)] == prefix else separate


def _defuse_message(message: Message, tokenizer: PreTrainedTokenizerBase) -> Message:
    content = message.get("content")
    return {**message, "content": defuse_tokens(content, tokenizer)} if isinstance(content, str) else message


def defuse_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text in which the texts of special tokens are broken up by a space after their first character."""
    for name in special_names(tokenizer):
        if name in text:
            text = text.replace(name, f"{name[0]} {name[1:]}")
    return text


def special_names(tokenizer: PreTrainedTokenizerBase) -> Sequence[str]:
    """Texts that the tokenizer takes for special tokens, the longest first, since one may contain another."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
