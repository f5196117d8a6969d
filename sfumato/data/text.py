"""From a row to token sequences: plain text, conversations, and pairs of a better and a worse answer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from sfumato.config.text_data import TextDataConfig
from sfumato.data.chat import ChatTemplate, Encoded, build_chat_template, check_fast
from sfumato.data.json_rows import parse_json
from sfumato.data.rows import text_field
from sfumato.errors import ConfigError, DataError, OverlongError

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
DEFAULT_KEYS = {
    "plaintext": ["content_split", "text", "content"],
    "conversation": ["messages", "conversations"],
    "preference": ["prompt", "chosen", "rejected"],
}

Messages = list[dict[str, Any]]


VERSION = 1
"""Raise it when the same rows become other tokens, so that stored tokens are not used any more."""


@dataclass(frozen=True)
class Document:
    """Tokens that see each other, L of them."""

    input_ids: np.ndarray
    """int32 ``[L]``, L is at least 2."""
    learned: np.ndarray
    """bool ``[L]``: whether the token is a target; the first never is, since nothing predicts it."""


@dataclass(frozen=True)
class Sample:
    """What is never taken apart: one document, or a better and a worse one."""

    documents: tuple[Document, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(len(document.input_ids) for document in self.documents)


class TextTransform(Protocol):
    """Turns rows into samples. It can be pickled, since it runs in worker processes."""

    documents_per_sample: int
    fingerprint: str
    """Identifies everything that changes the samples of a row."""

    def __call__(self, row: dict[str, Any], where: str) -> list[Sample]:
        """The samples of a row, at least one. Raises DataError that names ``where``."""
        ...


@dataclass(frozen=True)
class PlainTextTransform:
    """A text and the end-of-sequence token, cut into pieces of at most ``max_seq_len`` tokens, which are learned."""

    documents_per_sample: ClassVar[int] = 1
    tokenizer: Any
    keys: list[str]
    max_seq_len: int
    fingerprint: str

    def __call__(self, row: dict[str, Any], where: str) -> list[Sample]:
        """The pieces of a row's text, which follow each other and leave nothing out."""
        text = text_field(row, find_key(row, self.keys, where), where)
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not tokens:
            raise DataError(f"{where}: the tokenizer makes no token of {text!r}")
        input_ids = np.array([*tokens, self.tokenizer.eos_token_id], dtype=np.int32)
        cuts = list(range(self.max_seq_len, len(input_ids), self.max_seq_len))
        if cuts and cuts[-1] == len(input_ids) - 1:
            cuts[-1] -= 1  # a piece of one token would have nothing to learn
        return [Sample((Document(piece, np.arange(len(piece)) > 0),)) for piece in np.split(input_ids, cuts)]


@dataclass(frozen=True)
class ConversationTransform:
    """A conversation, of which the assistant's tokens are learned."""

    documents_per_sample: ClassVar[int] = 1
    template: ChatTemplate
    keys: list[str]
    max_seq_len: int
    overlong: str
    fingerprint: str

    def __call__(self, row: dict[str, Any], where: str) -> list[Sample]:
        """One sample, or one for each answer when the template renders the history of each in another way."""
        messages = read_messages(row[find_key(row, self.keys, where)], where)
        encoded = self.template.encode(messages, where, read_tools(row, where))
        return [Sample((fit(each, self.max_seq_len, self.overlong, where),)) for each in encoded]


@dataclass(frozen=True)
class PreferenceTransform:
    """A better and a worse answer to the same prompt, of which the assistant's tokens are learned."""

    documents_per_sample: ClassVar[int] = 2
    template: ChatTemplate
    keys: list[str]
    """Columns of the prompt, the better and the worse answer; without the first when conversations are whole."""
    max_seq_len: int
    overlong: str
    fingerprint: str

    def __call__(self, row: dict[str, Any], where: str) -> list[Sample]:
        """One sample: the better document, then the worse one."""
        pair, tools = self._conversations(row, where), read_tools(row, where)
        documents = []
        for name, messages in zip(self.keys[-2:], pair, strict=True):
            encoded = self.template.encode(messages, f"{where}, {name}", tools)
            if len(encoded) > 1:
                raise DataError(
                    f"{where}, {name}: the chat template renders earlier answers anew after each message, so an "
                    "answer of several assistant messages is no single text"
                )
            documents.append(fit(encoded[0], self.max_seq_len, self.overlong, f"{where}, {name}"))
        return [Sample(tuple(documents))]

    def _conversations(self, row: dict[str, Any], where: str) -> tuple[Messages, Messages]:
        """Both conversations from their beginning; what they share is not learned."""
        *prompt_key, chosen_key, rejected_key = self.keys
        prompt_value = row.get(prompt_key[0]) if prompt_key else None
        answers = [row[find_key(row, [key], where)] for key in (chosen_key, rejected_key)]
        if prompt_value is None:
            chosen, rejected = (read_messages(answer, where) for answer in answers)
        else:
            prompt = _as_messages(prompt_value, "user", where)
            chosen, rejected = (
                _after_prompt(prompt, _as_messages(each, "assistant", where), where) for each in answers
            )
        if chosen == rejected:
            raise DataError(f"{where}: {chosen_key} and {rejected_key} are the same")
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        for name, messages in ((chosen_key, chosen), (rejected_key, rejected)):
            if shared == len(messages) or messages[shared].get("role") != "assistant":
                raise DataError(
                    f"{where}: {chosen_key} and {rejected_key} must differ in the assistant's answer only, but "
                    f"message {shared + 1} of {name} is {_role_at(messages, shared)}"
                )
        history = [{**message, "loss_mask": 0} for message in chosen[:shared]]
        return [*history, *chosen[shared:]], [*history, *rejected[shared:]]


def build_transform(config: TextDataConfig, tokenizer: Any) -> TextTransform:
    """What turns the rows of ``data`` into samples.

    Args:
        config: the data section.
        tokenizer: a fast transformers tokenizer.

    Raises:
        ConfigError: when tokenizer, chat template and data type do not fit together.
    """
    check_fast(tokenizer)
    keys = config.text_keys or DEFAULT_KEYS[config.data_type]
    if config.data_type == "plaintext":
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end-of-sequence token, with which plain texts end: set eos_token")
        fingerprint = _fingerprint(config, tokenizer, [])
        return PlainTextTransform(tokenizer, keys, config.max_seq_len, fingerprint)
    if config.data_type == "preference" and len(keys) not in (2, 3):
        raise ConfigError(
            "data.text_keys of preference data must be two columns (better and worse conversation) or three (prompt, "
            f"better and worse answer), not {keys}"
        )
    template = build_chat_template(config.chat_template, tokenizer)
    fingerprint = _fingerprint(config, tokenizer, [template.text, template.tool_text])
    kind = ConversationTransform if config.data_type == "conversation" else PreferenceTransform
    return kind(template, keys, config.max_seq_len, config.overlong, fingerprint)


def find_key(row: dict[str, Any], keys: list[str], where: str) -> str:
    """The first of the columns that the row has. Raises DataError that lists the row's columns."""
    for key in keys:
        if row.get(key) is not None:
            return key
    raise DataError(f"{where}: no column {' or '.join(map(repr, keys))}; its columns are {', '.join(map(str, row))}")


def read_messages(value: Any, where: str) -> Messages:
    """Messages of a column: a list, or its JSON text; ShareGPT's from and value become role and content.

    Raises DataError that names the row.
    """
    value = _parsed(value, where)
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise DataError(f"{where}: a conversation must be a list of messages, each with role and content")
    return [_read_message(message) for message in value]


def read_tools(row: dict[str, Any], where: str) -> list[dict[str, Any]] | None:
    """The descriptions of tools in the column ``tools``, if there is one. Raises DataError that names the row."""
    if row.get("tools") is None:
        return None
    tools = without_none(_parsed(row["tools"], where))
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: column 'tools' must be a list of JSON schemas")
    return tools or None


def without_none(value: Any) -> Any:
    """Leaves out keys without a value: tables give each row the keys of all rows."""
    if isinstance(value, dict):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value


def fit(encoded: Encoded, max_seq_len: int, overlong: str, where: str) -> Document:
    """A document of at most ``max_seq_len`` tokens.

    Raises:
        OverlongError: when it is longer and ``overlong`` is ``stop``.
        DataError: when it is longer and ``overlong`` is ``skip``, or nothing learned remains of it.
    """
    input_ids, learned = encoded
    if len(input_ids) > max_seq_len:
        too_long = f"{where}: has {len(input_ids)} tokens, more than data.max_seq_len {max_seq_len}"
        if overlong == "stop":
            raise OverlongError(f"{too_long}; raise it, or set data.overlong to skip or truncate")
        if overlong == "skip":
            raise DataError(too_long)
        input_ids, learned = input_ids[:max_seq_len], learned[:max_seq_len]
        if not learned.any():
            raise DataError(f"{too_long}, and the first {max_seq_len} hold nothing to learn")
    return Document(input_ids, learned)


def _read_message(message: dict[str, Any]) -> dict[str, Any]:
    message = without_none(message)
    if "role" in message or "from" not in message:
        return message
    role, content = message.pop("from"), message.pop("value", None)
    return {"role": SHAREGPT_ROLES.get(role, role), "content": content, **message}


def _as_messages(value: Any, role: str, where: str) -> Messages:
    """A conversation as it is, a text as a message of that role."""
    return [{"role": role, "content": value}] if isinstance(value, str) else read_messages(value, where)


def _after_prompt(prompt: Messages, answer: Messages, where: str) -> Messages:
    """The whole conversation, whether or not the column of the answer repeats the prompt."""
    if answer[0].get("role") == "assistant":
        return prompt + answer
    if not all(message in answer for message in prompt):
        raise DataError(f"{where}: an answer that does not begin with the assistant must repeat the prompt")
    return answer


def _role_at(messages: Messages, index: int) -> str:
    return "missing" if index == len(messages) else f"of role {messages[index].get('role')!r}"


def _parsed(value: Any, where: str) -> Any:
    """What JSON text stands for (tables without nested columns hold such texts); anything else as it is."""
    if not isinstance(value, str):
        return value
    return parse_json(value, f"{where}: neither a list nor its JSON text")


def _fingerprint(config: TextDataConfig, tokenizer: Any, templates: list[str]) -> str:
    """A hash of what the tokens of a row depend on."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend = {key: value for key, value in backend.items() if key not in ("truncation", "padding")}  # states of use
    settings = config.model_dump(include={"data_type", "text_keys", "max_seq_len", "overlong"})
    parts = [VERSION, backend, tokenizer.special_tokens_map, templates, settings]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
