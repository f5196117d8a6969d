"""How an answer of a language model ends, as its folder, its tokenizer and its chat template say.

One place for what learning teaches, what drawing stops at, what an export carries and what ``sfumato check`` says.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfumato.config.file_checks import read_json_object
from sfumato.errors import ConfigError

Message = dict[str, Any]
Render = Callable[[list[Message], list[dict[str, Any]] | None], str]
"""Renders a conversation, perhaps with tools, without the beginning of an answer."""

_QUESTION, _ANSWER, _ARGUMENT = "sfumatoquestion", "sfumatoanswer", "sfumatoargument"
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"at": _ARGUMENT}}}
_PARAMETERS = {"type": "object", "properties": {"at": {"type": "string", "description": "What."}}, "required": ["at"]}
EXAMPLE_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": _PARAMETERS}}
"""What templates that show tools are asked with."""


@dataclass(frozen=True)
class EndToken:
    """A token that ends an answer."""

    token_id: int
    text: str
    source: str
    """Who says so, for people."""

    def __str__(self) -> str:
        return f"{self.text} ({self.token_id})"


@dataclass(frozen=True)
class AnswerEnd:
    """How answers end."""

    declared: tuple[EndToken, ...] = ()
    """What the model's folder and the tokenizer name."""
    taught: EndToken | None = None
    """What training teaches after an answer; None where there is neither a chat template nor plain text."""
    taught_after_call: EndToken | None = None
    """The same after a call of a tool, where that is another one."""
    tail: str | None = None
    """What the chat template writes after the last answer; None where it could not be asked."""
    tail_end: int = 0
    """Characters of ``tail`` up to the end of ``taught``; 0 where the template does not write it."""
    notes: tuple[str, ...] = ()
    """What is odd."""

    @property
    def tokens(self) -> tuple[EndToken, ...]:
        """All of them, each once."""
        taught = [token for token in (self.taught, self.taught_after_call) if token is not None]
        by_id = {token.token_id: token for token in reversed([*self.declared, *taught])}
        return tuple(by_id[token_id] for token_id in sorted(by_id))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens at which drawing stops, in order."""
        return tuple(token.token_id for token in self.tokens)

    @property
    def is_appended(self) -> bool:
        """Whether learning appends ``taught``, since the template does not write it after the last answer."""
        return self.taught is not None and self.tail is not None and self.tail_end == 0

    def fingerprint(self, appends: bool) -> str:
        """What of it makes other tokens, or another loss mask, than the last special token of a turn would; else
        nothing. ``appends`` is that of ``TokenizerFacts``."""
        if appends and (self.is_appended or self.taught_after_call is not None):
            return f"appends {self.taught if self.is_appended else None}, {self.taught_after_call}"
        rest = (self.tail or "")[self.tail_end :]
        return f"ends with {self.taught}" if rest.strip() else ""

    def describe(self) -> list[str]:
        """Lines for people."""
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
    """What a run knows of a tokenizer that transformers' object has no place for. It goes where the tokenizer goes."""

    model_folder: Path | None = None
    """Folder of the model that it is used with, whose generation_config.json names tokens that end an answer."""
    is_pad_added: bool = False
    """Whether its folder names no padding token, and the one that ends a text stands in for it."""
    appends_end: bool = True
    """Whether learning appends the end of an answer where the template writes none: not for a model of rewards, which
    is given conversations as the template writes them."""
    date: datetime.date | None = None
    """What chat templates take for today; None: today."""
    fingerprint: str = ""
    """``AnswerEnd.fingerprint`` of the template that conversations are rendered with."""
    answer_end: AnswerEnd | None = None
    """How the answers end that are trained with it, once that is known."""


def facts_of(tokenizer: Any) -> TokenizerFacts:
    """The facts of a tokenizer, which may be changed."""
    return vars(tokenizer).setdefault("sfumato_facts", TokenizerFacts())


def read_declared_ends(tokenizer: Any) -> tuple[tuple[EndToken, ...], tuple[str, ...]]:
    """The tokens that end an answer by generation_config.json of the model's folder (config.json where it names none)
    and by the tokenizer.

    Returns:
        The tokens, and what is odd about the files.

    Raises:
        ConfigError: when one of the files is broken.
    """
    folder = facts_of(tokenizer).model_folder
    numbers, file = ([], "") if folder is None else _read_eos(folder)
    sources = dict.fromkeys(numbers, file)
    eos = tokenizer.eos_token_id
    if eos is not None:
        sources[eos] = f"{sources[eos]} and the tokenizer" if eos in sources else "the tokenizer"
    special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    notes = []
    found = []
    for token_id, source in sources.items():
        text = tokenizer.convert_ids_to_tokens(token_id) if 0 <= token_id < len(tokenizer) else None
        if text is None or token_id not in special:
            what = "which the tokenizer has not" if text is None else f"which is {text!r} in the tokenizer"
            notes.append(f"{source} names {token_id} as the end of an answer, {what}: it is left out")
        else:
            found.append(EndToken(token_id, text, source))
    texts = [] if folder is None else read_json_file(folder / "generation_config.json").get("stop_strings")
    if texts:
        notes.append(
            f"generation_config.json names stop_strings {texts}, which end an answer here as rollout.stop alone"
        )
    return tuple(found), tuple(notes)


def _read_eos(folder: Path) -> tuple[list[int], str]:
    """What a model's folder says, and the file that does."""
    for name, inner in (("generation_config.json", ()), ("config.json", ("text_config",))):
        said = read_json_file(folder / name)
        places = [said, *(said[key] for key in inner if isinstance(said.get(key), dict))]
        value = next((place["eos_token_id"] for place in places if place.get("eos_token_id") is not None), None)
        numbers = value if isinstance(value, list) else [value]
        if value is None:
            continue
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            raise ConfigError(
                f"{folder / name}: eos_token_id must be a token's number or a list of them, not {value!r}"
            )
        return list(dict.fromkeys(numbers)), name
    return [], ""


def read_json_file(path: Path) -> dict[str, Any]:
    """What a JSON file of a model's folder says; empty when there is none. Raises ConfigError when it is broken."""
    if not path.is_file():
        return {}
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def plain_answer_end(tokenizer: Any) -> AnswerEnd:
    """Of texts that no chat template is laid around: each ends with the tokenizer's end of a text."""
    declared, notes = read_declared_ends(tokenizer)
    eos = _token_of(tokenizer, tokenizer.eos_token_id, "the tokenizer's end of a text")
    return AnswerEnd(declared, eos, notes=notes)


def answer_end_of(tokenizer: Any) -> AnswerEnd:
    """How the answers end that a run trains with a tokenizer."""
    return facts_of(tokenizer).answer_end or plain_answer_end(tokenizer)


def tokens_without_text(tokenizer: Any, vocabulary_size: int) -> frozenset[int]:
    """Numbers below the size of a model's vocabulary that the tokenizer has no token for, since embeddings are filled
    up to a round size: nothing that is drawn there says anything."""
    return frozenset(range(vocabulary_size)) - frozenset(tokenizer.get_vocab().values())


def measure_answer_end(tokenizer: Any, render: Render) -> AnswerEnd:
    """Of conversations: what the chat template writes after an answer, beside what the folder declares.

    The token that is taught is the first after the last answer that is declared, as Phi-3's ``<|end|>`` before
    ``<|endoftext|>``; else the last that the template writes there. Where it writes none, learning appends one: the
    token that follows an answer in the middle of a conversation, if it is declared (GLM's ``<|user|>``), else the
    tokenizer's end of a text.

    Args:
        tokenizer: with its facts.
        render: by the chat template.

    Raises:
        ConfigError: as ``read_declared_ends``.
    """
    declared, notes = read_declared_ends(tokenizer)
    by_text = {token.text: token for token in declared}
    markers = marker_pattern(tokenizer, by_text)
    tail, between = _ask(render)
    if tail is None:
        notes = (*notes, "what the chat template writes after an answer could not be found out")
        return AnswerEnd(declared, notes=notes)
    found = list(markers.finditer(tail))
    ended = next((marker for marker in found if marker.group() in by_text), None)
    if ended is None and found and not tail[found[-1].end() :].strip():
        ended = found[-1]
    after_call = _ask_after_call(render, markers, by_text)
    if ended is not None:
        source = "the chat template writes it after an answer"
        taught = _token_of(tokenizer, tokenizer.convert_tokens_to_ids(ended.group()), source)
        return AnswerEnd(declared, taught, after_call, tail, ended.end(), notes)
    follows = markers.match(between.lstrip())
    if follows is not None and follows.group() in by_text:
        source = "the next message begins with it, and learning appends it to the last answer"
        taught = _token_of(tokenizer, by_text[follows.group()].token_id, source)
    else:
        source = "the chat template writes nothing that ends an answer, so that learning appends the end of a text"
        taught = _token_of(tokenizer, tokenizer.eos_token_id, source)
    return AnswerEnd(declared, taught, after_call, tail, 0, notes)


def marker_pattern(tokenizer: Any, more: Mapping[str, Any] | Sequence[str] = ()) -> re.Pattern[str]:
    """What finds the tokens of a tokenizer that no text is cut into: special and added ones, and ``more``."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    texts = sorted(added | {*tokenizer.all_special_tokens} | {*more}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")


def _token_of(tokenizer: Any, token_id: int | None, source: str) -> EndToken | None:
    return None if token_id is None else EndToken(token_id, tokenizer.convert_ids_to_tokens(token_id), source)


def _ask(render: Render) -> tuple[str | None, str]:
    """What the template writes after the last answer, and between an answer and the next question."""
    for as_parts in (False, True):  # templates of models that see may want parts

        def said(role: str, text: str, as_parts: bool = as_parts) -> Message:
            return {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}

        asked = [said("user", "."), said("assistant", _ANSWER)]
        last = _attempt(render, asked)
        if last.count(_ANSWER) == 1:
            middle = _attempt(render, [*asked, said("user", _QUESTION)])
            between = middle.partition(_ANSWER)[2].partition(_QUESTION)[0] if _QUESTION in middle else ""
            return last.partition(_ANSWER)[2], between
    return None, ""


def _ask_after_call(render: Render, markers: re.Pattern[str], declared: Mapping[str, EndToken]) -> EndToken | None:
    """The declared token that a result of a tool begins with, where the template writes none after the call."""
    call = [{"role": "user", "content": "."}, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]
    result = {"role": "tool", "name": "look", "tool_call_id": "call00000", "content": _ANSWER}
    called = _attempt(render, call, [EXAMPLE_TOOL])
    whole = _attempt(render, [*call, result], [EXAMPLE_TOOL])
    if _ARGUMENT not in called or not whole.startswith(called):
        return None
    written = markers.findall(called.rpartition(_ARGUMENT)[2])
    follows = markers.match(whole[len(called) :].lstrip())
    if follows is None or follows.group() not in declared or any(text in declared for text in written):
        return None
    token = declared[follows.group()]
    source = "the result of a tool begins with it, and learning appends it to a call"
    return EndToken(token.token_id, token.text, source)


def _attempt(render: Render, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
    """What the template makes of them; empty when it refuses."""
    import jinja2

    from sfumato.data.text.template_limits import EXPRESSION_ERRORS

    try:
        return render(messages, tools)
    except (jinja2.TemplateError, *EXPRESSION_ERRORS, RecursionError):
        return ""
