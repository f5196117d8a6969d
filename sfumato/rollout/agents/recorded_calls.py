"""Calls that an agent makes of the policy, recorded as token sequences.

A call whose messages go on from those of an earlier one, the answer included, goes on from its tokens, too: what the
policy drew is never tokenised again. Any other call begins a new sequence.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sfumato.data.text.chat import Message
from sfumato.data.text.messages import without_nulls
from sfumato.data.text.prompt_template import PromptTemplate, Tools, check_prompt
from sfumato.errors import DataError
from sfumato.rollout.agents.tool_calls import ToolCall, hermes_calls, without_hermes_calls
from sfumato.rollout.agents.turns import LengthLimits, SampleKeys
from sfumato.rollout.engines.base import Engine, Sampling
from sfumato.rollout.text.growing_sequence import GrowingSequence
from sfumato.rollout.text.tokens import FinishReason, TokenSequence
from sfumato.rollout.text.turn_tokens import end_token, tokens_between


class RefusedCallError(Exception):
    """A call that cannot be answered, as its sender is told."""

    def __init__(self, text: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(text)
        self.status, self.code = status, code


@dataclass(frozen=True)
class PolicyReply:
    """What the policy answered to a call."""

    text: str
    """All that it said."""
    message: Message
    """The same as a message of role assistant, with ``tool_calls`` where the call named tools."""
    finish_reason: FinishReason
    """Why it ended."""
    token_ids: list[int]
    """What was drawn."""
    log_probs: list[float]
    """Their log-probabilities."""
    num_prompt_tokens: int
    """Tokens that stood before."""


@dataclass
class _Point:
    """Where an answer ended: what had been said, and the tokens of it."""

    said: Any
    """Messages in a form that can be compared, or a text."""
    tools: str
    sequence: GrowingSequence
    length: int
    last_token: int | None
    """The stop token that ended the answer; None where the limit did."""


@dataclass
class Session:
    """The calls of one sample."""

    engine: Engine
    keys: SampleKeys
    sampling: Sampling
    template: PromptTemplate
    limits: LengthLimits
    api_key: str = field(default_factory=lambda: f"sample-{secrets.token_hex(16)}")
    """By which calls are known to be of this sample."""
    error: Exception | None = None
    """What went wrong with the engine, or must be mended by a person: it ends the run."""
    is_over: bool = False
    tasks: set[asyncio.Task[PolicyReply]] = field(default_factory=set)
    """Calls under way."""
    text: str = ""
    """The last answer."""
    messages: list[Message] | None = None
    """The conversation that it ended; None where it was of a text."""
    is_truncated: bool = False
    """Whether the last call came to a limit."""
    _sequences: list[GrowingSequence] = field(default_factory=list)
    _points: list[_Point] = field(default_factory=list)
    _repeats: Counter[bytes] = field(default_factory=Counter)

    @property
    def sequences(self) -> list[TokenSequence]:
        """What was drawn, each token in one of them."""
        return [sequence.freeze() for sequence in self._sequences if any(sequence.drawn)]

    async def chat(self, messages: list[Message], tools: Tools | None, max_new_tokens: int | None) -> PolicyReply:
        """Answers a conversation.

        Args:
            messages: with ``role`` and ``content``.
            tools: JSON schemas.
            max_new_tokens: limit of the answer; None: as long as there is room.

        Raises:
            RefusedCallError: when messages cannot be rendered, or are too long.
        """
        if self.template.chat is None:
            raise RefusedCallError("there is no chat template (data.chat_template none): use /v1/completions")
        messages = [_plain(message) for message in messages]
        said, tool_key = [_comparable(message) for message in messages], json.dumps(tools, sort_keys=True)
        point = self._best([each for each in self._points if each.tools == tool_key and _goes_on(said, each.said)])
        try:
            if point is None:
                check_prompt(messages, "messages")
                text = self.template.render(messages, "messages", tools)
                prefix, given = None, self.template.encode([text])[0]
            else:
                new = messages[len(point.said) :]
                check_prompt(new, "messages")
                prefix, given = point, tokens_between(self.template, new, point.last_token, tools)
        except DataError as error:
            raise RefusedCallError(str(error)) from error
        reply, point = await self._draw(prefix, given, max_new_tokens, has_tools=bool(tools))
        self.text, self.messages = reply.text, [*messages, reply.message]
        point.said, point.tools = [*said, _comparable(reply.message)], tool_key
        self._points.append(point)
        return reply

    async def complete(self, prompt: str | Sequence[int], max_new_tokens: int | None) -> PolicyReply:
        """Goes on with a text, or with tokens. Raises RefusedCallError when it is empty or too long."""
        if isinstance(prompt, str):
            points = [each for each in self._points if isinstance(each.said, str) and prompt.startswith(each.said)]
            point = self._best(points)
            rest = prompt if point is None else prompt[len(point.said) :]
            given = self.template.encode([rest], is_beginning=point is None)[0] if rest else []
        else:
            ids = list(prompt)
            points = [each for each in self._points if ids[: each.length] == each.sequence.token_ids[: each.length]]
            point = self._best(points)
            given = ids if point is None else ids[point.length :]
        if point is None and not given:
            raise RefusedCallError("the prompt is empty")
        reply, new = await self._draw(point, given, max_new_tokens, has_tools=False)
        self.text, self.messages = reply.text, None
        new.said = prompt + reply.text if isinstance(prompt, str) else None
        self._points.append(new)
        return reply

    def end(self) -> None:
        """Takes no more calls, and ends those under way."""
        self.is_over = True
        for task in self.tasks:
            task.cancel()

    def _best(self, points: list[_Point]) -> _Point | None:
        """The longest, of equal ones one whose sequence can grow."""
        return max(points, key=lambda each: (each.length, each.length == len(each.sequence)), default=None)

    async def _draw(
        self, point: _Point | None, given: list[int], max_new_tokens: int | None, has_tools: bool
    ) -> tuple[PolicyReply, _Point]:
        """Draws an answer to what was said at a point, or to a prompt."""
        before = [] if point is None else point.sequence.token_ids[: point.length]
        whole = [*before, *given]
        grows = point is not None and point.length == len(point.sequence)
        prompt_tokens = point.sequence.num_prompt_tokens if grows and point is not None else len(whole)
        room = self.limits.room(prompt_tokens, len(whole))
        if room == 0:
            self.is_truncated = True
            raise RefusedCallError(
                f"the prompt has {len(whole)} tokens, and there is no room for more: rollout.max_new_tokens is "
                f"{self.limits.max_new_tokens}, and a sequence may have {self.limits.max_sequence_tokens}",
                code="context_length_exceeded",
            )
        if grows and point is not None:
            sequence = point.sequence
            sequence.append_given(given)
        else:  # what was drawn before is a decision of the sequence in which it was drawn
            sequence = GrowingSequence.after_prompt(whole)
            self._sequences.append(sequence)
        most = room if max_new_tokens is None else min(max_new_tokens, room)
        drawn = await sequence.draw(self.engine, self._seed(whole), most, self.sampling)
        self.is_truncated = sequence.finish_reason == "length"
        text = self.template.decode(drawn, self.sampling.stop_token_ids)
        log_probs = sequence.log_probs[-len(drawn) :] if drawn else []
        whole = self.template.decode(drawn, self.sampling.stop_token_ids, is_cut=False)
        message = _message(text, hermes_calls(whole) if has_tools else [], whole)
        reply = PolicyReply(text, message, sequence.finish_reason, drawn, log_probs, len(whole))
        last = None if self.is_truncated else end_token(drawn, self.sampling)
        return reply, _Point(None, "", sequence, len(sequence), last)

    def _seed(self, token_ids: list[int]) -> int:
        """Key of the noise: of what stands before, and how often it did, so that the order of calls does not matter."""
        digest = hashlib.blake2b(np.array(token_ids, np.int64).tobytes(), digest_size=8).digest()
        self._repeats[digest] += 1
        return self.keys.request_seed((int.from_bytes(digest, "big") >> 1) + self._repeats[digest])


def _message(text: str, calls: Sequence[ToolCall], whole: str) -> Message:
    """What the policy said, as a message. A text with a call that cannot be read is no call; ``whole`` has the text
    that ended it, too, which may be that of a call."""
    if not calls or any(call.problem for call in calls):
        return {"role": "assistant", "content": text}
    functions = [{"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)} for call in calls]
    tool_calls = [
        {"id": f"call_{number}", "type": "function", "function": function} for number, function in enumerate(functions)
    ]
    return {"role": "assistant", "content": without_hermes_calls(whole), "tool_calls": tool_calls}


def _plain(message: Message) -> Message:
    """A message of the protocol as chat templates take it: content a text, arguments of calls as mappings."""
    message = without_nulls(message)
    content = message.get("content", "")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise RefusedCallError("only parts of type text are taken")
        content = "".join(str(part.get("text", "")) for part in content)
    plain = {**message, "content": content}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
    return plain


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            raise RefusedCallError("arguments of a tool call must be JSON") from error
    return {**call, "function": function}


def _comparable(message: Message) -> Any:
    """What makes two messages the same, whatever fields a client adds."""
    calls = [each.get("function") or {} for each in _plain(message).get("tool_calls") or []]
    called = [(call.get("name"), json.dumps(call.get("arguments"), sort_keys=True)) for call in calls]
    content = message.get("content") or ""
    return message.get("role"), content.strip() if isinstance(content, str) else content, called


def _goes_on(said: list[Any], before: Any) -> bool:
    """Whether messages begin with others, and say more."""
    return isinstance(before, list) and len(said) > len(before) and said[: len(before)] == before
