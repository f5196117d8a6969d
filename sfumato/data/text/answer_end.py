"""How an answer of a language model ends, according to its folder, its tokenizer and its chat template.

Training, generation, exports and ``sfumato check`` all take the tokens that end an answer from here.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sfumato.config.file_checks import read_json_object
from sfumato.config.open_mappings import JsonObject
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = JsonObject
Render = Callable[[list[Message], list[JsonObject] | None], str]
"""Renders a conversation, perhaps with tools, without the beginning of a further answer."""

_QUESTION, _ANSWER, _ARGUMENT = "sfumatoquestion", "sfumatoanswer", "sfumatoargument"
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"at": _ARGUMENT}}}
_PARAMETERS = {"type": "object", "properties": {"at": {"type": "string", "description": "What."}}, "required": ["at"]}
EXAMPLE_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": _PARAMETERS}}
"""The tool with which templates that show tools are tested."""


@dataclass(frozen=True)
class EndToken:
    """A token that ends an answer."""

    token_id: int
    text: str
    source: str
    """What names it as an end, for messages."""

    def __str__(self) -> str:
        return f"{self.text} ({self.token_id})"


@dataclass(frozen=True)
class AnswerEnd:
    """The tokens at which answers end, and what training appends to an answer."""

    declared: tuple[EndToken, ...] = ()
    """Tokens that the model's folder and the tokenizer name."""
    taught: EndToken | None = None
    """The token that training teaches after an answer; None if it could not be found out, or the tokenizer has none."""
    taught_after_call: EndToken | None = None
    """The token that training teaches after a call of a tool, where it is another one."""
    tail: str | None = None
    """The text that the chat template writes after the last answer; None where it could not be found out."""
    tail_end: int = 0
    """Characters of ``tail`` up to the end of ``taught``; 0 where the template does not write it."""
    notes: tuple[str, ...] = ()
    """Oddities of the files, for messages."""

    @property
    def tokens(self) -> tuple[EndToken, ...]:
        """All tokens that end an answer, each once, by token id."""
        taught = [token for token in (self.taught, self.taught_after_call) if token is not None]
        by_id = {token.token_id: token for token in reversed([*self.declared, *taught])}
        return tuple(by_id[token_id] for token_id in sorted(by_id))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Token ids at which generation stops, ascending."""
        return tuple(token.token_id for token in self.tokens)

    @property
    def is_appended(self) -> bool:
        """Whether training appends ``taught``, since the template does not write it after the last answer."""
        return self.taught is not None and self.tail is not None and self.tail_end == 0

    def fingerprint(self, appends: bool) -> str:
        """Identifies how the end changes tokens or loss masks, for caches of tokens.

        Empty where these are the same as if an answer ended with the last special token of its turn. ``appends`` is
        ``TokenizerFacts.appends_end``.
        """
        if appends and (self.is_appended or self.taught_after_call is not None):
            return f"appends {self.taught if self.is_appended else None}, {self.taught_after_call}"
        rest = (self.tail or "")[self.tail_end :]
        return f"ends with {self.taught}" if rest.strip() else ""

    def describe(self) -> list[str]:
        """Lines for the log."""
        lines = []
        if self.taught is not None:
            lines.append(f"answers end with {self.taught}: {self.taught.source}")
        if self.taught_after_call is not None:
            lines.append(f"calls of tools end with {self.taught_after_call}: {self.taught_after_call.source}")
        stops = ", ".join(
            f"{token} of {token.source}" if token in self.declared else str(token) for token in self.tokens
        )
        return [*lines, f"drawing stops at {stops or 'no token'}", *self.notes]


@dataclass
class TokenizerFacts:
    """What a run knows about a tokenizer beyond transformers' object, of which it is an attribute."""

    model_folder: Path | None = None
    """Folder of the model that it is used with, whose generation_config.json may name tokens that end an answer."""
    is_pad_added: bool = False
    """Whether the tokenizer's folder names no padding token, so that the one that ends a text is used for padding."""
    appends_end: bool = True
    """Whether training appends the end of an answer where the template writes none. False for a reward model, which
    gets conversations as the template writes them."""
    begins_chats: bool = False
    """Whether the model's processor, which calls it, begins chats with the beginning-of-sequence token where their
    template writes none, as those of LLaVA and Emu3 do. Tokenizers alone leave that to the template."""
    date: datetime.date | None = None
    """The date that chat templates write as today's; None: today."""
    fingerprint: str = ""
    """``AnswerEnd.fingerprint`` of the chat template in use."""
    answer_end: AnswerEnd | None = None
    """How answers end in training, once a chat template has been chosen."""


def facts_of(tokenizer: PreTrainedTokenizerBase) -> TokenizerFacts:
    """The facts of a tokenizer, made at the first call. Callers may change them."""
    return vars(tokenizer).setdefault("sfumato_facts", TokenizerFacts())


def read_declared_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[EndToken, ...], tuple[str, ...]]:
    """Reads which tokens end an answer according to the model's folder and the tokenizer.

    The folder names them in generation_config.json, or else in config.json.

    Returns:
        The tokens, and messages about oddities of the files.

    Raises:
        ConfigError: when one of the files is broken.
    """
    folder = facts_of(tokenizer).model_folder
    numbers, file = ([], "") if folder is None else _read_eos(folder)
    sources = dict.fromkeys(numbers, file)
    eos = cast(int | None, tokenizer.eos_token_id)
    if eos is not None:
        sources[eos] = f"{sources[eos]} and the tokenizer" if eos in sources else "the tokenizer"
    special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    notes = []
    end_tokens = []
    for token_id, source in sources.items():
        text = cast(str, tokenizer.convert_ids_to_tokens(token_id)) if 0 <= token_id < len(tokenizer) else None
        if text is None or token_id not in special:
            reason = "which the tokenizer has not" if text is None else f"which is {text!r} in the tokenizer"
            notes.append(f"{source} names {token_id} as the end of an answer, {reason}: it is left out")
        else:
            end_tokens.append(EndToken(token_id, text, source))
    texts = [] if folder is None else read_json_file(folder / "generation_config.json").get("stop_strings")
    if texts:
        notes.append(
            f"generation_config.json names stop_strings {texts}, which end an answer here as rollout.stop alone"
        )
    return tuple(end_tokens), tuple(notes)


def _read_eos(folder: Path) -> tuple[list[int], str]:
    """The token ids that a model's folder names as ends, and the name of the file that does; empty if none does."""
    for name, inner in (("generation_config.json", ()), ("config.json", ("text_config",))):
        settings = read_json_file(folder / name)
        places = [settings, *(settings[key] for key in inner if isinstance(settings.get(key), dict))]
        value = next((place["eos_token_id"] for place in places if place.get("eos_token_id") is not None), None)
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        numbers = [number for number in values if isinstance(number, int) and not isinstance(number, bool)]
        if len(numbers) < len(values):
            raise ConfigError(
                f"{folder / name}: eos_token_id must be a token's number or a list of them, not {value!r}"
            )
        return list(dict.fromkeys(numbers)), name
    return [], ""


def read_json_file(path: Path) -> JsonObject:
    """Reads a JSON file of a model's folder; empty if there is none. Raises ConfigError when it is broken."""
    if not path.is_file():
        return {}
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def plain_answer_end(tokenizer: PreTrainedTokenizerBase) -> AnswerEnd:
    """How texts end that no chat template renders: with the tokenizer's end-of-sequence token."""
    declared, notes = read_declared_ends(tokenizer)
    eos = _make_end_token(tokenizer, cast(int | None, tokenizer.eos_token_id), "the tokenizer's end of a text")
    return AnswerEnd(declared, eos, notes=notes)


def answer_end_of(tokenizer: PreTrainedTokenizerBase) -> AnswerEnd:
    """How answers end in a run that uses a tokenizer."""
    return facts_of(tokenizer).answer_end or plain_answer_end(tokenizer)


def tokens_without_text(tokenizer: PreTrainedTokenizerBase, vocabulary_size: int) -> frozenset[int]:
    """Token ids of a model that its tokenizer does not have: embeddings are often padded to a round size.

    A model could draw them, although they have no text.
    """
    return frozenset(range(vocabulary_size)) - frozenset(tokenizer.get_vocab().values())


def measure_answer_end(tokenizer: PreTrainedTokenizerBase, render: Render) -> AnswerEnd:
    """How answers end in conversations: what the chat template writes after one, and what the folder declares.

    The token that training teaches is the first declared one that the template writes after the last answer, such as
    Phi-3's ``<|end|>`` before ``<|endoftext|>``, else the last special token that it writes there. Where it writes
    none, training appends one: the token that follows an answer in the middle of a conversation if it is declared
    (GLM's ``<|user|>``), else the tokenizer's end-of-sequence token.

    Args:
        tokenizer: with its facts.
        render: renders with the chat template.

    Raises:
        ConfigError: as ``read_declared_ends``.
    """
    declared, notes = read_declared_ends(tokenizer)
    by_text = {token.text: token for token in declared}
    markers = marker_pattern(tokenizer, by_text)
    tail, between = _render_tail(render)
    if tail is None:
        notes = (*notes, "what the chat template writes after an answer could not be found out")
        return AnswerEnd(declared, notes=notes)
    tail_markers = list(markers.finditer(tail))
    end_marker = next((marker for marker in tail_markers if marker.group() in by_text), None)
    # No declared token: the last special token counts, unless text follows it, as where it opens the next turn.
    if end_marker is None and tail_markers and not tail[tail_markers[-1].end() :].strip():
        end_marker = tail_markers[-1]
    after_call = _find_end_after_call(render, markers, by_text)
    if end_marker is not None:
        source = "the chat template writes it after an answer"
        taught = _make_end_token(tokenizer, cast(int, tokenizer.convert_tokens_to_ids(end_marker.group())), source)
        return AnswerEnd(declared, taught, after_call, tail, end_marker.end(), notes)
    next_marker = markers.match(between.lstrip())
    if next_marker is not None and next_marker.group() in by_text:
        source = "the next message begins with it, and learning appends it to the last answer"
        taught = _make_end_token(tokenizer, by_text[next_marker.group()].token_id, source)
    else:
        source = "the chat template writes nothing that ends an answer, so that learning appends the end of a text"
        taught = _make_end_token(tokenizer, cast(int | None, tokenizer.eos_token_id), source)
    return AnswerEnd(declared, taught, after_call, tail, 0, notes)


def marker_pattern(tokenizer: PreTrainedTokenizerBase, more: Collection[str] = ()) -> re.Pattern[str]:
    """A pattern that matches special and added tokens of a tokenizer, and the texts in ``more``; the longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    texts = sorted(added | {*tokenizer.all_special_tokens} | {*more}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")


def _make_end_token(tokenizer: PreTrainedTokenizerBase, token_id: int | None, source: str) -> EndToken | None:
    if token_id is None:
        return None
    return EndToken(token_id, cast(str, tokenizer.convert_ids_to_tokens(token_id)), source)


def _render_tail(render: Render) -> tuple[str | None, str]:
    """Renders test conversations.

    Returns:
        What the template writes after the last answer, None if it renders no such conversation; and what it writes
        between an answer and the next question.
    """
    said = (("user", "."), ("assistant", _ANSWER), ("user", _QUESTION))
    for as_parts in (False, True):  # templates of models with images may take contents only as lists of parts
        messages: list[Message] = [
            {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text} for role, text in said
        ]
        last = _render_or_empty(render, messages[:2])
        if last.count(_ANSWER) == 1:
            middle = _render_or_empty(render, messages)
            between = middle.partition(_ANSWER)[2].partition(_QUESTION)[0] if _QUESTION in middle else ""
            return last.partition(_ANSWER)[2], between
    return None, ""


def _find_end_after_call(render: Render, markers: re.Pattern[str], declared: Mapping[str, EndToken]) -> EndToken | None:
    """The declared token that a tool's result begins with, where the template writes none after the call itself."""
    call = [{"role": "user", "content": "."}, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]
    result = {"role": "tool", "name": "look", "tool_call_id": "call00000", "content": _ANSWER}
    text_to_call = _render_or_empty(render, call, [EXAMPLE_TOOL])
    text_to_result = _render_or_empty(render, [*call, result], [EXAMPLE_TOOL])
    if _ARGUMENT not in text_to_call or not text_to_result.startswith(text_to_call):
        return None
    written_markers = markers.findall(text_to_call.rpartition(_ARGUMENT)[2])
    next_marker = markers.match(text_to_result[len(text_to_call) :].lstrip())
    if next_marker is None or next_marker.group() not in declared or any(text in declared for text in written_markers):
        return None
    token = declared[next_marker.group()]
    source = "the result of a tool begins with it, and learning appends it to a call"
    return EndToken(token.token_id, token.text, source)


def _render_or_empty(render: Render, messages: list[Message], tools: list[dict[str, object]] | None = None) -> str:
    """Renders messages; the empty text when the template refuses them."""
    import jinja2

    from sfumato.data.text.template_limits import EXPRESSION_ERRORS

    try:
        return render(messages, tools)
    except (jinja2.TemplateError, *EXPRESSION_ERRORS, RecursionError):
        return ""
