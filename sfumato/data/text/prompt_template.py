"""Prompts of language models: how a conversation becomes the tokens that the model continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, cast

from sfumato.config.characters import whole_characters
from sfumato.config.open_mappings import JsonObject
from sfumato.config.text_rl_data import PLAIN, TextPromptDataConfig
from sfumato.data.text.answer_end import AnswerEnd, plain_answer_end
from sfumato.data.text.chat_message import ROLES, Message, has_content
from sfumato.data.text.shown_messages import template_names
from sfumato.data.text.stop_strings import before_stop, completes_stop
from sfumato.data.text.tokenise import Encoder, begins_texts, check_fast, stay_in_one_thread
from sfumato.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sfumato.data.media.vision import MediaProcessor
    from sfumato.data.text.chat import ChatTemplate
    from sfumato.data.text.stop_strings import Decode

Tools = list[JsonObject]


@dataclass(frozen=True)
class PromptTemplate:
    """Renders prompts with the chat template of a tokenizer, or leaves them unchanged."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatTemplate | None = None
    """None leaves prompts unchanged."""
    system_prompt: str | None = None
    """Content of a system message in front of conversations that do not begin with one."""
    reader: MediaProcessor | None = None
    """For a model with images or sound: contents of messages may then be lists of parts."""
    stop: tuple[str, ...] = ()
    """Stop strings, which end an answer and are not part of its text."""
    without_text: frozenset[int] = frozenset()
    """Token ids that the model can draw but that the tokenizer does not have."""

    @cached_property
    def answer_end(self) -> AnswerEnd:
        """How answers end.

        Prompts that are left unchanged may have been rendered before, so that the end of the tokenizer's own chat
        template counts for them, too.
        """
        if self.chat is not None:
            return self.chat.answer_end
        plain = plain_answer_end(self.tokenizer)
        if not self.tokenizer.chat_template:
            return plain
        from sfumato.data.text.chat import build_chat_template

        try:
            chat_end = build_chat_template(None, self.tokenizer).answer_end
        except ConfigError:  # the template is broken, but it is not used for rendering
            return plain
        return replace(chat_end, taught=None, taught_after_call=None, declared=chat_end.tokens)

    @property
    def media_tokens(self) -> set[int]:
        """Tokens that stand for media. An answer ends where one is drawn, since no medium belongs to it."""
        return set() if self.reader is None else self.reader.media_tokens()

    def messages_of(self, content: str | list[Message], where: str) -> list[Message] | None:
        """The checked messages of a prompt; None for a text that no chat template renders.

        Raises DataError that names ``where`` and the message.
        """
        if self.chat is None:
            if isinstance(content, str):
                return None
            raise DataError(
                f"{where}: the prompt is a list of messages, which data.chat_template none cannot render: give a chat "
                "template"
            )
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        check_prompt(messages, where, has_parts=self.reader is not None)
        if self.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            return [{"role": "system", "content": self.system_prompt}, *messages]
        return messages

    def render(self, messages: list[Message], where: str, tools: Tools | None = None, prompt: bool = True) -> str:
        """The text of a conversation. ``prompt`` adds the beginning of an answer. Raises as ``ChatTemplate.render``."""
        assert self.chat is not None, "there is no chat template"
        return self.chat.render(messages, where, tools, prompt=prompt)

    def encode(self, texts: Sequence[str], is_beginning: bool = True) -> list[list[int]]:
        """Encodes rendered texts, or plain prompts.

        Args:
            texts: special tokens written in them are encoded as such.
            is_beginning: whether nothing precedes the texts. A plain prompt then gets the beginning-of-sequence token
                if the tokenizer puts one there by itself; chat templates write it themselves.
        """
        # Tools and agents may return halves of surrogate pairs, which a tokenizer refuses.
        valid_texts = [whole_characters(text) for text in texts]
        encoded = [tokens.input_ids.tolist() for tokens in Encoder(self.tokenizer, with_offsets=False)(valid_texts)]
        begins = is_beginning and self.chat is None and begins_texts(self.tokenizer)
        bos = cast(int, self.tokenizer.bos_token_id)  # used only if there is one
        # A prompt that was rendered before may begin with the token already.
        return [[bos, *ids] if begins and ids[:1] != [bos] else ids for ids in encoded]

    def decode(self, token_ids: Sequence[int], stop: Sequence[int] | None = None, is_cut: bool = True) -> str:
        """Decodes the tokens of an answer.

        Args:
            token_ids: the tokens.
            stop: token ids of which one at the end is left out, while other special tokens are shown, such as those
                that mark a call of a tool. None leaves out all special tokens.
            is_cut: whether the text ends before a stop string. Calls of tools may end with one, and need it.
        """
        ids = list(token_ids)
        if ids and ids[-1] in (self.answer_end.stop_token_ids if stop is None else stop):
            ids = ids[:-1]
        decode = partial(self.tokenizer.decode, skip_special_tokens=stop is None, clean_up_tokenization_spaces=False)
        return before_stop(ids, self.stop, cast("Decode", decode)) if self.stop and is_cut else cast(str, decode(ids))

    def completes_stop(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token of an answer completes a stop string."""
        decode = partial(self.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return completes_stop(token_ids, self.stop, cast("Decode", decode))

    def encode_one(self, content: str | list[Message], where: str, tools: Tools | None = None) -> list[int]:
        """Renders and encodes a single prompt. Raises DataError as ``messages_of`` and ``render``."""
        messages = self.messages_of(content, where)
        text = content if messages is None else self.render(messages, where, tools)
        return self.encode([str(text)])[0]


def build_prompt_template(
    config: TextPromptDataConfig, tokenizer: PreTrainedTokenizerBase, reader: MediaProcessor | None = None
) -> PromptTemplate:
    """Builds the template of a configuration; ``reader`` is the one of a model with images or sound.

    Raises ConfigError when it does not fit the tokenizer.
    """
    stay_in_one_thread()
    if config.chat_template == PLAIN:
        check_fast(tokenizer)
        return PromptTemplate(tokenizer)
    if config.chat_template is None and not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer has no chat template: set data.chat_template to {', '.join(template_names())} or a Jinja "
            "file, or to none, which leaves prompts as they are"
        )
    from sfumato.data.text.chat import build_chat_template

    chat = build_chat_template(config.chat_template, tokenizer, config.chat_template_options)
    return PromptTemplate(tokenizer, chat, config.system_prompt, reader)


def check_prompt(messages: list[Message], where: str, has_parts: bool = False) -> None:
    """Raises DataError for an unknown role, missing content, or a conversation that ends with the assistant.

    With ``has_parts`` a content may be a list of parts, which was checked when it was read.
    """
    for index, message in enumerate(messages):
        role = message.get("role")
        content = message.get("content")
        place = f"{where}: message {index + 1}"
        if role not in ROLES:
            raise DataError(f"{place}: unknown role {role!r}; known are {', '.join(ROLES)}")
        if not has_content(message) and not (has_parts and isinstance(content, list)):
            raise DataError(f"{place} ({role}): content must be a non-empty text, not {content!r}")
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        last = repr(messages[-1]["role"]) if messages else "nothing"
        raise DataError(f"{where}: a prompt must end with a message of role user or tool, not with {last}")
