"""Calls that an agent makes of the policy, recorded as token sequences.

A call whose messages begin with those of an earlier call and the policy's answer goes on from the tokens of that
answer: tokens that the policy drew are never made from text again. Any other call begins a new sequence.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np

from sfumato.config.open_mappings import JsonObject
from sfumato.data.text.chat_message import Message
from sfumato.data.text.messages import without_nulls
from sfumato.data.text.prompt_template import PromptTemplate, Tools, check_prompt
from sfumato.errors import DataError
from sfumato.rollout.agents.tool_calls import ToolCall, read_calls, without_calls
from sfumato.rollout.engines.base import Engine, FinishReason, Sampling
from sfumato.rollout.kinds.base import LengthLimits, SampleKeys
from sfumato.rollout.text.tokens import GrowingSequence, TokenSequence
from sfumato.rollout.text.turn_tokens import end_token, tokens_between

if TYPE_CHECKING:
    _ComparableMessage = tuple[str | None, object, list[tuple[str | None, str]]]


class RefusedCallError(Exception):
    """A call that cannot be answered. The message, status and code are sent to the caller."""

    def __init__(self, text: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class PolicyReply:
    """The policy's answer to a call."""

    text: str
    """The whole answer."""
    message: Message
    """The answer as a message of role assistant, with ``tool_calls`` where the request named tools."""
    finish_reason: FinishReason
    """Why it ended."""
    token_ids: list[int]
    """The tokens that were drawn."""
    log_probs: list[float]
    """The log-probability of each."""
    num_prompt_tokens: int
    """Tokens before the answer."""


@dataclass
class _Point:
    """Where an answer ended in a sequence, from which a later call may go on."""

    history: list[_ComparableMessage] | str | None
    """The conversation up to and with this answer, or the text; None where the prompt was given as token ids."""
    tools: str
    """The tools that the conversation was rendered with, as JSON: a prompt with others has other tokens."""
    sequence: GrowingSequence
    length: int
    """Tokens of the sequence up to the end of the answer."""
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
    """Calls with this key belong to this sample."""
    error: Exception | None = None
    """The first error in drawing that is not the caller's fault; it ends the run."""
    is_over: bool = False
    tasks: set[asyncio.Task[PolicyReply]] = field(default_factory=set)
    """Calls that are being answered."""
    text: str = ""
    """The last answer."""
    messages: list[Message] | None = None
    """The conversation that ends with the last answer; None where that continued a text."""
    is_truncated: bool = False
    """Whether the last answer ended at a limit of its length, or the last call had no room for an answer."""
    _sequences: list[GrowingSequence] = field(default_factory=list)
    _points: list[_Point] = field(default_factory=list)
    _repeats: Counter[bytes] = field(default_factory=Counter)

    @property
    def sequences(self) -> list[TokenSequence]:
        """The sequences in which the policy drew tokens; each drawn token is a decision of one of them."""
        return [sequence.freeze() for sequence in self._sequences if any(sequence.drawn)]

    async def chat(self, messages: list[Message], tools: Tools | None, max_new_tokens: int | None) -> PolicyReply:
        """Answers a conversation.

        Args:
            messages: with ``role`` and ``content``.
            tools: JSON schemas.
            max_new_tokens: limit of the answer; None: as long as there is room.

        Raises:
            RefusedCallError: when messages cannot be rendered, or leave no room for an answer.
        """
        if self.template.chat is None:
            raise RefusedCallError("there is no chat template (data.chat_template none): use /v1/completions")
        messages = [_template_message(message) for message in messages]
        history = [_comparable_message(message) for message in messages]
        tool_key = json.dumps(tools, sort_keys=True)
        points = [
            point for point in self._points if point.tools == tool_key and _extends_earlier(history, point.history)
        ]
        point = self._longest_point(points)
        try:
            if point is None:
                check_prompt(messages, "messages")
                text = self.template.render(messages, "messages", tools)
                new_tokens = self.template.encode([text])[0]
            else:
                assert isinstance(point.history, list)
                new_messages = messages[len(point.history) :]
                check_prompt(new_messages, "messages")
                new_tokens = tokens_between(self.template, new_messages, point.last_token, tools)
        except DataError as error:
            raise RefusedCallError(str(error)) from error
        reply, end = await self._draw(point, new_tokens, max_new_tokens, tools=tools)
        # a result names the call that it answers, so no two calls of a conversation may have the same id
        used = {call.get("id") for message in messages for call in message.get("tool_calls") or []}
        unused = (name for name in map("call_{}".format, itertools.count(len(used))) if name not in used)
        for call, name in zip(reply.message.get("tool_calls", []), unused, strict=False):
            call["id"] = name
        self.text = reply.text
        self.messages = [*messages, reply.message]
        end.history = [*history, _comparable_message(reply.message)]
        end.tools = tool_key
        self._points.append(end)
        return reply

    async def complete(self, prompt: str | Sequence[int], max_new_tokens: int | None) -> PolicyReply:
        """Continues a text, or tokens. Raises RefusedCallError when the prompt is empty, has unknown tokens or leaves
        no room."""
        if isinstance(prompt, str):
            points = [
                point for point in self._points if isinstance(point.history, str) and prompt.startswith(point.history)
            ]
            point = self._longest_point(points)
            rest = prompt if point is None else prompt[len(cast(str, point.history)) :]
            new_tokens = self.template.encode([rest], is_beginning=point is None)[0] if rest else []
        else:
            ids = list(prompt)
            if max(ids, default=0) >= len(self.template.tokenizer):
                raise RefusedCallError(f"token ids must be below {len(self.template.tokenizer)}, not {max(ids)}")
            points = [
                point for point in self._points if ids[: point.length] == point.sequence.token_ids[: point.length]
            ]
            point = self._longest_point(points)
            new_tokens = ids if point is None else ids[point.length :]
        if point is None and not new_tokens:
            raise RefusedCallError("the prompt is empty")
        reply, end = await self._draw(point, new_tokens, max_new_tokens, tools=None)
        self.text = reply.text
        self.messages = None
        end.history = prompt + reply.text if isinstance(prompt, str) else None
        self._points.append(end)
        return reply

    def end(self) -> None:
        """Takes no more calls, and ends those under way."""
        self.is_over = True
        for task in self.tasks:
            task.cancel()

    def _longest_point(self, points: list[_Point]) -> _Point | None:
        """The point with most tokens; of equally long ones the one at the end of its sequence, which can grow there."""
        return max(points, key=lambda point: (point.length, point.length == len(point.sequence)), default=None)

    async def _draw(
        self, point: _Point | None, new_tokens: list[int], max_new_tokens: int | None, tools: Tools | None
    ) -> tuple[PolicyReply, _Point]:
        """Draws an answer.

        Args:
            point: whose tokens the answer goes on from; None begins a sequence.
            new_tokens: of the caller, after those of the point.
            max_new_tokens: as in ``chat``.
            tools: whose calls are read from the answer; None reads none.

        Returns:
            The reply, and where it ends, whose ``history`` and ``tools`` the caller fills in.

        Raises:
            RefusedCallError: when there is no room for a token.
        """
        before = [] if point is None else point.sequence.token_ids[: point.length]
        prompt = [*before, *new_tokens]
        # a sequence only grows at its end: a second call that goes on from an earlier point branches off
        grows = point is not None and point.length == len(point.sequence)
        prompt_tokens = point.sequence.num_prompt_tokens if grows and point is not None else len(prompt)
        room = self.limits.room(prompt_tokens, len(prompt))
        if room == 0:
            self.is_truncated = True
            raise RefusedCallError(
                f"the prompt has {len(prompt)} tokens, and there is no room for more: rollout.max_new_tokens is "
                f"{self.limits.max_new_tokens}, and a sequence may have {self.limits.max_sequence_tokens}",
                code="context_length_exceeded",
            )
        if grows and point is not None:
            sequence = point.sequence
            sequence.append_given(new_tokens)
        else:  # tokens drawn earlier are decisions of their own sequence only; here they are part of the prompt
            sequence = GrowingSequence.after_prompt(prompt)
            self._sequences.append(sequence)
        limit = room if max_new_tokens is None else min(max_new_tokens, room)
        try:
            drawn_tokens = await sequence.draw(self.engine, self._seed(prompt), limit, self.sampling)
        except asyncio.CancelledError:  # nobody gets this answer
            sequence.truncate(len(before) if grows else 0)
            raise
        assert sequence.finish_reason is not None
        self.is_truncated = sequence.finish_reason == "length"
        text = self.template.decode(drawn_tokens, self.sampling.stop_token_ids)
        log_probs = sequence.log_probs[-len(drawn_tokens) :] if drawn_tokens else []
        whole_text = self.template.decode(drawn_tokens, self.sampling.stop_token_ids, is_cut=False)
        message = _assistant_message(text, read_calls(whole_text, tools) if tools else [], whole_text)
        reply = PolicyReply(text, message, sequence.finish_reason, drawn_tokens, log_probs, len(prompt))
        last_token = None if self.is_truncated else end_token(drawn_tokens, self.sampling)
        return reply, _Point(None, "", sequence, len(sequence), last_token)

    def _seed(self, token_ids: list[int]) -> int:
        """Key of an answer's noise: made of the tokens before it and of how many answers to these were drawn already.

        So calls that an agent makes at the same time have the same noise in whatever order they arrive.
        """
        digest = hashlib.blake2b(np.array(token_ids, np.int64).tobytes(), digest_size=8).digest()
        self._repeats[digest] += 1
        return self.keys.request_seed((int.from_bytes(digest, "big") >> 1) + self._repeats[digest])


def _assistant_message(text: str, calls: Sequence[ToolCall], whole: str) -> Message:
    """The policy's answer as a message of role assistant, whose calls have no id yet.

    Where any of its calls cannot be read, the whole answer remains a text.

    Args:
        text: the answer without the stop string that ended it.
        calls: that were read from ``whole``.
        whole: the answer with the stop string, which may be the end of a call.
    """
    if not calls or any(call.problem for call in calls):
        return {"role": "assistant", "content": text}
    functions = [{"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)} for call in calls]
    tool_calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": without_calls(whole), "tool_calls": tool_calls}


def _template_message(message: Message) -> Message:
    """A message of the protocol as chat templates take it: content is a text, arguments of calls are mappings."""
    message = without_nulls(message)
    content = message.get("content", "")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise RefusedCallError("only parts of type text are taken")
        content = "".join(str(part.get("text", "")) for part in content)
    plain = {**message, "content": content}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise RefusedCallError("tool_calls must be a list of calls, each with function, name and arguments")
        plain["tool_calls"] = [_with_arguments(call) for call in calls]
    return plain


def _with_arguments(call: object) -> JsonObject:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RefusedCallError("each of tool_calls must have a function with name and arguments")
    function = dict(function)
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            raise RefusedCallError("arguments of a tool call must be JSON") from error
    return {**call, "function": function}


def _comparable_message(message: Message) -> _ComparableMessage:
    """Role, content and calls of a message, by which two are the same whatever other fields a client adds."""
    functions = [call.get("function") or {} for call in _template_message(message).get("tool_calls") or []]
    calls = [(function.get("name"), json.dumps(function.get("arguments"), sort_keys=True)) for function in functions]
    content = message.get("content") or ""
    # Clients may strip what they send back. The tokens that go on are those that were drawn, in any case.
    return message.get("role"), content.strip() if isinstance(content, str) else content, calls


def _extends_earlier(history: list[_ComparableMessage], earlier: list[_ComparableMessage] | str | None) -> bool:
    """Whether a conversation begins with all messages of an earlier one, and has more."""
    return isinstance(earlier, list) and len(history) > len(earlier) and history[: len(earlier)] == earlier
