"""The formats of text data: plain text, conversations, pairs of a better and a worse answer, answers that are good or
bad, and answers whose steps are right or wrong."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import numpy as np

from sfumato.config.text_data import TextDataConfig
from sfumato.data.files.rows import text_field
from sfumato.data.media.image_answers import OmniConversation
from sfumato.data.media.image_conversation import ImageConversation, MediaConversation
from sfumato.data.media.image_preference import ImagePreference, MediaPreference
from sfumato.data.text.chat import ChatTemplate, Encoded
from sfumato.data.text.chat_message import Messages
from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.format import (
    TextFormat,
    TextTransform,
    build_template,
    find_key,
    fingerprint_of,
    fit,
    refuse_equal,
    single_answer,
)
from sfumato.data.text.messages import ROW_OPTIONS, read_row_options, read_tools
from sfumato.data.text.pairs import as_messages, read_pair, with_explicit_prompt
from sfumato.data.text.row_layouts import (
    CONVERSATION_KEYS,
    LABELLED,
    PAIRS,
    PREFERENCE_KEYS,
    UNPAIRED_KEYS,
    convert_row,
    read_conversation,
)
from sfumato.data.text.step_labels import (
    SEPARATORS,
    place_steps,
    read_label,
    read_list,
    read_margin,
    step_ends,
    with_last,
)
from sfumato.data.text.tokenise import Asking, Encoder, Tokens, ask_alone, with_bos
from sfumato.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "ImageConversation",
    "ImagePreference",
    "MediaConversation",
    "MediaPreference",
    "OmniConversation",
]  # formats from files of their own


@dataclass(frozen=True)
class PlainText(TextFormat):
    """Texts, every token of which is in the loss; columns content_split, text or content."""

    type: ClassVar[str] = "plaintext"
    has_answers: ClassVar[bool] = False
    ignores: ClassVar[tuple[str, ...]] = ("chat_template", "chat_template_options", "overlong")

    def transform(self, config: TextDataConfig, tokenizer: PreTrainedTokenizerBase) -> TextTransform:
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end-of-sequence token, with which plain texts end: set eos_token")
        keys = config.text_keys or ["content_split", "text", "content"]
        return PlainTextTransform(tokenizer, keys, config.max_seq_len, fingerprint_of(config, tokenizer, []))


@dataclass(frozen=True)
class Conversation(TextFormat):
    """Conversations, of which the assistant's messages are in the loss; columns messages or conversations."""

    type: ClassVar[str] = "conversation"

    def transform(self, config: TextDataConfig, tokenizer: PreTrainedTokenizerBase) -> TextTransform:
        template, fingerprint = build_template(config, tokenizer)
        keys = config.text_keys or CONVERSATION_KEYS
        return ConversationTransform(template, keys, config.max_seq_len, config.overlong, fingerprint)


@dataclass(frozen=True)
class Preference(TextFormat):
    """Pairs of a better and a worse answer; columns prompt, chosen and rejected."""

    type: ClassVar[str] = "preference"
    documents_per_sample: ClassVar[int] = 2

    def transform(self, config: TextDataConfig, tokenizer: PreTrainedTokenizerBase) -> TextTransform:
        keys = config.text_keys or PREFERENCE_KEYS
        if len(keys) not in (2, 3):
            raise ConfigError(
                "data.text_keys of preference data must be two columns (better and worse conversation) or three "
                f"(prompt, better and worse answer), not {keys}"
            )
        template, fingerprint = build_template(config, tokenizer)
        return PreferenceTransform(template, keys, config.max_seq_len, config.overlong, fingerprint)


@dataclass(frozen=True)
class PreferenceMargin(TextFormat):
    """Pairs with how much better the one answer is; columns prompt, chosen, rejected and margin, a number."""

    type: ClassVar[str] = "preference_margin"
    documents_per_sample: ClassVar[int] = 2
    numbers: ClassVar[str] = "margins"

    def transform(self, config: TextDataConfig, tokenizer: PreTrainedTokenizerBase) -> TextTransform:
        keys = config.text_keys or [*PREFERENCE_KEYS, "margin"]
        if len(keys) not in (3, 4):
            raise ConfigError(
                "data.text_keys of preference_margin data must be three columns (better and worse conversation, margin)"
                f" or four (prompt, better and worse answer, margin), not {keys}"
            )
        template, fingerprint = build_template(config, tokenizer)
        return MarginTransform(template, keys[:-1], config.max_seq_len, config.overlong, fingerprint, keys[-1])


@dataclass(frozen=True)
class Unpaired(TextFormat):
    """Answers that are good or bad; columns prompt, completion and label (true or false), or pairs, which are taken
    apart."""

    type: ClassVar[str] = "unpaired"
    numbers: ClassVar[str] = "labels"

    def transform(self, config: TextDataConfig, tokenizer: PreTrainedTokenizerBase) -> TextTransform:
        keys = config.text_keys or UNPAIRED_KEYS
        if len(keys) != 3:
            raise ConfigError(
                f"data.text_keys of unpaired data must be three columns (prompt, answer, label), not {keys}"
            )
        template, fingerprint = build_template(config, tokenizer)
        return UnpairedTransform(template, keys, config.max_seq_len, config.overlong, fingerprint)


@dataclass(frozen=True)
class Process(TextFormat):
    """Answers in steps that are right or wrong; columns prompt, steps or completions, and labels, one for each step."""

    type: ClassVar[str] = "process"
    numbers: ClassVar[str] = "steps"

    steps_by: Literal["paragraph", "line"] = "paragraph"
    """What stands between two steps of an answer: an empty line, or a line break."""

    def transform(self, config: TextDataConfig, tokenizer: PreTrainedTokenizerBase) -> TextTransform:
        keys = config.text_keys or ["prompt", "steps", "completions", "labels"]
        if len(keys) < 3:
            raise ConfigError(
                f"data.text_keys of process data must be the columns of prompt, steps and labels, not {keys}"
            )
        template, fingerprint = build_template(config, tokenizer)
        settings = (config.max_seq_len, config.overlong, fingerprint)
        return ProcessTransform(template, keys, *settings, separator=SEPARATORS[self.steps_by])


@dataclass(frozen=True)
class PlainTextTransform:
    """Cuts a text into pieces of at most ``max_seq_len`` tokens.

    The text gets the end-of-sequence token, and in front the token that begins texts where the tokenizer puts one,
    unless it has them already.
    """

    documents_per_sample: ClassVar[int] = 1
    tokenizer: PreTrainedTokenizerBase
    keys: list[str]
    max_seq_len: int
    fingerprint: str

    def __call__(self, row: dict[str, object], where: str) -> list[TextSample]:
        """The pieces of a row's text, in order and without gaps."""
        return ask_alone(self.asks(row, where), self.encode)

    def encode(self, texts: list[str]) -> list[Tokens]:
        """The tokens of texts, without the characters that they come from."""
        return Encoder(self.tokenizer, with_offsets=False)(texts)

    def asks(self, row: dict[str, object], where: str) -> Asking[list[TextSample]]:
        """As a call."""
        text = text_field(row, find_key(row, self.keys, where), where)
        (tokens,) = yield [text]
        if len(tokens.input_ids) == 0:
            raise DataError(f"{where}: the tokenizer makes no token of {text!r}")
        input_ids = with_bos(tokens.input_ids, self.tokenizer)
        end = np.int32(cast(int, self.tokenizer.eos_token_id))
        if input_ids[-1] != end:  # texts for tools that add none carry their own
            input_ids = np.append(input_ids, end)
        cuts = list(range(self.max_seq_len, len(input_ids), self.max_seq_len))
        if cuts and cuts[-1] == len(input_ids) - 1:
            cuts[-1] -= 1  # a piece of one token would have nothing to learn
        return [TextSample((Document(piece, np.arange(len(piece)) > 0),)) for piece in np.split(input_ids, cuts)]


@dataclass(frozen=True)
class ConversationTransform:
    """Encodes a conversation, whose loss mask holds the assistant's tokens."""

    documents_per_sample: ClassVar[int] = 1
    has_row_options: ClassVar[bool] = True
    """Whether rows may have values of their own of variables of the template (``ROW_OPTIONS``)."""
    template: ChatTemplate
    keys: list[str]
    max_seq_len: int
    overlong: str
    fingerprint: str

    def __call__(self, row: dict[str, object], where: str) -> list[TextSample]:
        """One sample; one for each answer where the template renders the history of each answer in another way."""
        return ask_alone(self.asks(row, where), self.encode)

    def encode(self, texts: list[str]) -> list[Tokens]:
        """The tokens of texts, with the characters that they come from."""
        return self.template.encoder(texts)

    def asks(self, row: dict[str, object], where: str) -> Asking[list[TextSample]]:
        """As a call."""
        messages = read_conversation(row, self.keys, where)
        encoded = yield from self._encode_row(messages, row, where)
        return [TextSample((fit(tokens, self.max_seq_len, self.overlong, where),)) for tokens in encoded]

    def _encode_row(self, messages: Messages, row: dict[str, object], where: str) -> Asking[list[Encoded]]:
        """As ``ChatTemplate.asks``, with the tools and the values of variables of the template that the row has."""
        options = read_row_options(row, self.template.variables, where) if row.get(ROW_OPTIONS) else None
        return (yield from self.template.asks(messages, where, read_tools(row, where), options=options))


@dataclass(frozen=True)
class PreferenceTransform(ConversationTransform):
    """Encodes a better and a worse answer to the same prompt; the loss masks hold the assistant's tokens.

    ``keys`` are the columns of the prompt, the better and the worse answer, or of two whole conversations.
    """

    documents_per_sample: ClassVar[int] = 2

    def asks(self, row: dict[str, object], where: str) -> Asking[list[TextSample]]:
        """One sample: the better document, then the worse one."""
        if self.keys == PREFERENCE_KEYS:
            row = convert_row(PAIRS, row, "preference", where)
        pair = read_pair(row, self.keys, where)
        documents = []
        for name, messages in zip(self.keys[-2:], pair, strict=True):
            encoded = yield from self._encode_row(messages, row, f"{where}, {name}")
            answer = single_answer(encoded, f"{where}, {name}")
            documents.append(fit(answer, self.max_seq_len, self.overlong, f"{where}, {name}"))
        refuse_equal(documents, self.keys[-2:], where)
        return [TextSample(tuple(documents))]


@dataclass(frozen=True)
class MarginTransform(PreferenceTransform):
    """As ``PreferenceTransform``; ``numbers`` has the margin at the last token of the better document."""

    has_numbers: ClassVar[bool] = True
    margin_key: str = "margin"

    def asks(self, row: dict[str, object], where: str) -> Asking[list[TextSample]]:
        """One sample."""
        margin = read_margin(row, self.margin_key, where)
        (sample,) = yield from super().asks(row, where)
        chosen, rejected = sample.documents
        return [TextSample((with_last(chosen, margin), with_last(rejected, nan)))]


@dataclass(frozen=True)
class UnpairedTransform(ConversationTransform):
    """Encodes an answer that is good or bad; ``numbers`` has the label, 1 or 0, at its last token.

    ``keys`` are the columns of the prompt, the answer and the label.
    """

    has_numbers: ClassVar[bool] = True

    def asks(self, row: dict[str, object], where: str) -> Asking[list[TextSample]]:
        """One sample; of a row with a pair, two: the better one first."""
        samples = []
        for messages, label in self._read_answers(row, where):
            encoded = yield from self._encode_row(messages, row, where)
            document = fit(single_answer(encoded, where), self.max_seq_len, self.overlong, where)
            samples.append(TextSample((with_last(document, label),)))
        if len(samples) == 2:
            refuse_equal([sample.documents[0] for sample in samples], ["chosen", "rejected"], where)
        return samples

    def _read_answers(self, row: dict[str, object], where: str) -> list[tuple[Messages, float]]:
        """Conversations and their labels: one, or two of a row that holds a pair."""
        prompt_key, answer_key, label_key = self.keys
        if self.keys == UNPAIRED_KEYS:
            row = convert_row(LABELLED, row, "unpaired", where)
            row = with_explicit_prompt(row, where)
        prompt = as_messages(row[find_key(row, [prompt_key], where)], "user", where, row.get("system"))
        prompt = [{**message, "loss_mask": 0} if message.get("role") == "assistant" else message for message in prompt]
        pairs: list[tuple[str, float | None]] = [(answer_key, None)]
        if row.get(answer_key) is None and row.get("chosen") is not None:
            pairs = [("chosen", 1.0), ("rejected", 0.0)]
        answers = []
        for key, fixed_label in pairs:
            answer = as_messages(row[find_key(row, [key], where)], "assistant", where)
            if answer[0].get("role") != "assistant":
                raise DataError(f"{where}: column {key!r} must begin with the assistant: the prompt has its own column")
            label = read_label(row.get(label_key), label_key, where) if fixed_label is None else fixed_label
            answers.append((prompt + answer, label))
        return answers


@dataclass(frozen=True)
class ProcessTransform(ConversationTransform):
    """Encodes an answer in steps; ``numbers`` has the label of a step at the token that ends it.

    ``keys`` are the columns of the prompt, of the steps (several names, of which a row has one) and of the labels.
    """

    has_numbers: ClassVar[bool] = True
    has_row_options: ClassVar[bool] = False
    separator: str = "\n\n"

    def asks(self, row: dict[str, object], where: str) -> Asking[list[TextSample]]:
        """One sample."""
        prompt_key, *step_keys, label_key = self.keys
        prompt = as_messages(row[find_key(row, [prompt_key], where)], "user", where, row.get("system"))
        steps = read_list(row[find_key(row, step_keys, where)], "the steps", where)
        labels = read_list(row[find_key(row, [label_key], where)], "the labels", where)
        if len(steps) != len(labels):
            raise DataError(f"{where}: {len(steps)} steps have {len(labels)} labels: each step needs one")
        text, places = place_steps(self.template, prompt, steps, self.separator, where)
        (tokens,) = yield [text]
        ends = step_ends(tokens, places)
        mask = np.zeros(len(tokens.input_ids), bool)
        mask[ends] = True
        if len(set(ends.tolist())) < len(ends):
            raise DataError(f"{where}: two steps end in one token of this tokenizer: join them, or part them further")
        numbers = np.full(len(mask), nan, np.float32)
        numbers[ends] = [read_label(label, label_key, where) for label in labels]
        document = fit((tokens.input_ids, mask), self.max_seq_len, self.overlong, where)
        numbers = numbers[: len(document.input_ids)]
        return [TextSample((Document(document.input_ids, document.loss_mask, numbers),))]
