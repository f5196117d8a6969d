"""What rewards share that ask a language model over an OpenAI-compatible API, and how its replies are read.

Replies are read strictly: what is not clearly there counts as not said.
"""

from __future__ import annotations

import json
import re
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from sfumato.errors import ConfigError
from sfumato.rewards.base import Failure, Sample, load_once
from sfumato.rewards.http.caller import HttpCaller, HttpError
from sfumato.rewards.http.chat_completions import ChatReply, Content, decode_reply, encode_question
from sfumato.rewards.http_reward import START_WAIT_S, HttpReward
from sfumato.rewards.judging.template import JudgeTemplate, load_template

_DECORATION = r"[\s*_`]*"
_OPENING = r"[\s*_`\[(]*"
# Neither the beginning of a longer word or number, nor of a span such as 7-8 or 7 to 8, nor a percentage.
_NUMBER = re.compile(
    r"([-+]?\d+(?:\.\d+)?)(?![^\W_]|[ \t]*%|[.,]\d|[ \t]*[-\u2013\u2014][ \t]*\d|[ \t]+(?:(?:to|or|and)[ \t]+)?\d)"
    r"(?:\s*\(?(?:/|out\s+of)\s*(\d+(?:\.\d+)?))?",
    re.IGNORECASE,
)
_CUT_OFF = ("length", "max_tokens", "model_length")  # of OpenAI's protocol, of gateways to other ones, of Mistral
_BROKEN_OFF = ("abort", "error")  # what vLLM, SGLang and gateways say of half a reply
_COLON = "[:\uff1a]"
_ANSWER = re.compile(rf"<answer>|\banswer{_DECORATION}{_COLON}", re.IGNORECASE)
_CHOSEN = r"(?:(?:image|video|text|response)\s*)?"
_CHOICE = re.compile(
    rf"{_OPENING}{_CHOSEN}(1|2|tie)\b(?![.,]\d|\s*(?:[/=&,]|\b(?:or|and)\b)\s*{_CHOSEN}[12]\b)", re.IGNORECASE
)


class UnreadableError(ValueError):
    """A reply does not hold what was asked for; the message says what is missing."""


def final_text(reply: ChatReply) -> str:
    """The text of a reply after any ``<think>`` block.

    Raises:
        UnreadableError: the judge refused, was cut off, broke off, or ended within its thoughts.
    """
    if reply.refusal or reply.finish_reason == "content_filter":
        raise UnreadableError("the judge refused")
    if reply.finish_reason.lower() in _CUT_OFF:
        raise UnreadableError("the reply was cut off at max_tokens")
    if reply.finish_reason in _BROKEN_OFF:
        raise UnreadableError(f"the reply broke off ({reply.finish_reason})")
    text = reply.text.rpartition("</think>")[2]
    if text.lstrip().startswith("<think>"):
        raise UnreadableError("the reply ends within its <think> block")
    return text


def number_after(text: str, marker: str, low: float, high: float) -> float:
    """The number that follows the last ``marker:`` of a text, such as ``Score: 7`` or ``**Score:** 7/10``.

    Raises:
        UnreadableError: there is none, or it is not from ``low`` to ``high``.
    """
    marks = list(re.finditer(rf"\b{re.escape(marker)}{_DECORATION}{_COLON}{_OPENING}", text, re.IGNORECASE))
    number = _NUMBER.match(text, marks[-1].end()) if marks else None
    if number is None or not low <= float(number.group(1)) <= high or float(number.group(2) or high) != high:
        raise UnreadableError(f"no '{marker}:' with a number from {low:g} to {high:g}")
    return float(number.group(1))


def choice_after_answer(text: str) -> float:
    """What follows the last ``Answer:`` or ``<answer>``: 1.0 for the first of two, 0.0 for the second, 0.5 for a tie.

    Raises:
        UnreadableError: there is no such choice.
    """
    marks = list(_ANSWER.finditer(text))
    choice = _CHOICE.match(text, marks[-1].end()) if marks else None
    if choice is None:
        raise UnreadableError("no 'Answer:' with 1, 2 or tie")
    return {"1": 1.0, "2": 0.0, "tie": 0.5}[choice.group(1).casefold()]


_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Judge(HttpReward):
    """Base of judges. A subclass has a template of its ``type`` and defines ``read``, and perhaps ``score``.

    Raises ConfigError when a field is out of range or ``extra_body`` is no JSON object.
    """

    takes_video: ClassVar[bool] = True  # every ``frame_step``-th frame, as several images in one question
    shows: ClassVar[tuple[str, ...]] = ("sample",)
    """Variables of the template that are samples, in the order of a question's."""
    options: ClassVar[Mapping[str, object]] = {}
    """Further fields of every request."""

    model: str
    """Name of the model on the servers, whose addresses end in /v1 here."""
    template: str = ""
    """Path of a Jinja file with the question, or its text; empty: the one that comes with this type."""
    max_tokens: int = 1024
    """Length of a reply; one that is cut off does not count."""
    concurrency: int = 16
    """Questions on their way at the same time."""
    extra_body: str = ""
    """JSON object with further fields of a request, such as {"top_k": 1}; null removes one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ConfigError(f"model of reward {self.label!r} is empty: give the name that the server calls it by")
        self._check_positive("max_tokens", "concurrency")
        self._read_extra_body()  # raises for what is no JSON object

    @abstractmethod
    def read(self, reply: ChatReply, *samples: Sample) -> float:
        """The value in a reply to a question about these samples. Raises UnreadableError that says what is missing."""

    @property
    def tally(self) -> Tally:
        """Counts of this judge; equal judges of a process share one object, since a frozen dataclass holds no state."""
        return _build_tally(self)

    def variables(self) -> dict[str, object]:
        """Further variables of the template, besides prompt, metadata, kind, source and the samples."""
        return {}

    def check_reply(self, reply: ChatReply) -> None:
        """Raises ConfigError when the server did not give what ``read`` needs."""

    def prepare(self) -> None:
        """Reads the template and asks every server one short question.

        Raises:
            ConfigError: a variable is missing in the template, or a server did not answer; the message names it.
        """
        self._load_template()
        for url in self.base_urls:
            # a server may still load its model, but a wrong address should not hold the run for the whole timeout
            deadline = time.monotonic() + min(START_WAIT_S, self.call_deadline() - time.monotonic())
            try:
                reply = self._ask(self.caller(url), "Reply with the word Yes.", deadline)
            except HttpError as error:
                raise ConfigError(
                    f"reward {self.label!r} cannot ask its judge: {error}: start the server, or correct base_urls "
                    "(they end in /v1), model, api_key_env or extra_body"
                ) from error
            self.check_reply(reply)

    def check_row(self, prompt: str, metadata: dict[str, object]) -> None:
        """Raises DataError when the template needs something that the row does not have."""
        # nothing has been drawn yet: empty texts in the place of samples show whether the row can fill the template
        placeholders = dict.fromkeys((*self.shows, "source"), "")
        values = {"prompt": prompt, "metadata": metadata, "kind": "image", **placeholders, **self.variables()}
        self._load_template().fill(values, {})

    def take_notes(self) -> list[str]:
        """Attempts that failed, and events that subclasses have noted in the tally."""
        return super().take_notes() + self.tally.take_notes()

    def take_counts(self) -> dict[str, tuple[int, int]]:
        """Replies that could not be read, of all that came."""
        return {f"judge/{self.label}/parse_failures": self.tally.take_counts()}

    def score(self, samples: list[Sample]) -> Sequence[float | Failure]:
        """``read`` of the reply about each sample; a Failure where there is none or it cannot be read."""
        return self.judge([(sample,) for sample in samples])

    def judge(self, questions: Sequence[tuple[Sample, ...]]) -> list[float | Failure]:
        """``read`` of the reply to each question, which is about one sample for each name in ``shows``.

        Raises DataError when a sample does not have what the template needs.
        """
        deadline = self.call_deadline()
        caller = self.caller()

        def ask(question: tuple[Sample, ...]) -> ChatReply:
            return self._ask(caller, self._build_question(question), deadline)

        replies = self.ask_each(questions, ask, self.concurrency)
        values: list[float | Failure] = []
        examples: dict[str, str] = {}
        num_unread = 0
        for reply, question in zip(replies, questions, strict=True):
            if isinstance(reply, Failure):
                values.append(reply)
                continue
            try:
                values.append(self.read(reply, *question))
            except UnreadableError as error:
                num_unread += 1
                example = examples.setdefault(str(error), reply.excerpt)  # one for all, so that messages stay few
                values.append(Failure(f"unreadable reply ({error}), such as {example!r}"))
        self.tally.add(num_unread, sum(not isinstance(value, Failure) for value in replies))
        return values

    def _ask(self, caller: HttpCaller, content: Content, deadline: float) -> ChatReply:
        body = encode_question(self.model, content, self.max_tokens, {**self.options, **self._read_extra_body()})
        try:
            return caller.post("/chat/completions", body, "application/json", decode_reply, deadline)
        except HttpError as error:
            raise HttpError(f"model {self.model!r}: {error}") from error

    def _build_question(self, samples: tuple[Sample, ...]) -> Content:
        first = samples[0]
        values = {"prompt": first.prompt, "metadata": first.metadata, "kind": _kind_of(first), **self.variables()}
        pictures: dict[str, Collection[np.ndarray]] = {} if first.source is None else {"source": [first.source]}
        for name, sample in zip(self.shows, samples, strict=True):
            if sample.text is not None:
                values[name] = sample.text
            else:
                pictures[name] = sample.frames[:: self.frame_step]
        return self._load_template().fill(values, pictures)

    def _load_template(self) -> JudgeTemplate:
        variables = ("prompt", "metadata", "kind", "source", *self.variables())
        try:
            return load_template(self.template or self.type, self.shows, variables)
        except ConfigError as error:
            raise ConfigError(f"reward {self.label!r}: {error}") from error

    def _read_extra_body(self) -> dict[str, object]:
        try:
            more = json.loads(self.extra_body or "{}")
        except json.JSONDecodeError as error:
            raise ConfigError(f"extra_body of reward {self.label!r} is not valid JSON: {error}") from error
        if not isinstance(more, dict):
            raise ConfigError(f"extra_body of reward {self.label!r} must be a JSON object, not {self.extra_body}")
        return more


def _kind_of(sample: Sample) -> str:
    if sample.image is None:
        return "text"
    return "video" if sample.image.ndim == 4 else "image"


@dataclass
class Tally:
    """Counts of a judge's replies, and notes, since they were last taken. Threads may share it."""

    num_unread: int = 0
    num_replies: int = 0
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, num_unread: int, num_replies: int) -> None:
        """Counts replies."""
        with _lock:
            self.num_unread += num_unread
            self.num_replies += num_replies

    def note(self, text: str) -> None:
        """Counts an event that the log should mention."""
        with _lock:
            self.notes[text] += 1

    def take_counts(self) -> tuple[int, int]:
        """The number of unreadable replies and of all replies, since the last call."""
        with _lock:
            counts = self.num_unread, self.num_replies
            self.num_unread = self.num_replies = 0
        return counts

    def take_notes(self) -> list[str]:
        """The notes since the last call, each with its count."""
        with _lock:
            notes, self.notes = self.notes, Counter()
        return [f"{text} ({count})" for text, count in notes.items()]


@load_once
def _build_tally(judge: Judge) -> Tally:
    del judge  # one for each
    return Tally()
