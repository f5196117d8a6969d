"""Several turns of the policy, between which the tools that it has called return their results."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

from sfumato.data.text.prompt_template import PromptTemplate, Tools
from sfumato.data.text.prompts import TextPrompt
from sfumato.errors import ConfigError, DataError
from sfumato.rollout.agents.tool_calls import INLINE_END, ToolCall, inline_call, read_calls, tokens_that_end_in
from sfumato.rollout.agents.tools import Tool, ToolResult, build_tool
from sfumato.rollout.engines.base import Engine, Sampling
from sfumato.rollout.kinds.base import DrawnText, LengthLimits, RolloutKind, SampleKeys
from sfumato.rollout.text.tokens import GrowingSequence
from sfumato.rollout.text.turn_tokens import defuse_tokens, end_token, tokens_after, tokens_between

SHORT = {"calc": "calculator"}
"""Short names of tools for inline calls, which take fewer tokens."""

_build = cache(build_tool)


@dataclass(frozen=True, kw_only=True)
class ToolUse(RolloutKind):
    """Turns of the policy with results of tools between them. Metadata for rewards: tool_calls, tool_errors."""

    type: ClassVar[str] = "tools"

    use: tuple[str, ...] = ("calculator",)
    """Tools: calculator, python (in the sandbox), or functions of your own by import path, my_module:my_function."""
    calls: Literal["hermes", "inline"] = "hermes"
    """How they are called: hermes is `<tool_call>` with JSON, or as Qwen3.5 and GLM write it, answered by messages of
    role tool; inline is `calculator(12*34)=`, or `calc(12*34)=`, within an answer, which goes on after the result."""
    max_turns: int = 8
    """Most turns of the policy; who calls a tool in the last one is cut off."""
    tool_timeout_s: float = 10.0
    """Seconds that one call may take; the model is told when it took longer."""
    max_output_chars: int = 4000
    """Letters of a result that the model sees; that the rest was cut off is said."""

    def __post_init__(self) -> None:
        if not self.use or len(set(self.use)) < len(self.use):
            raise ConfigError("rollout.kind.use must name at least one tool, each once")
        if self.max_turns < 1 or self.max_output_chars < 1 or not self.tool_timeout_s > 0:
            raise ConfigError("rollout.kind: max_turns, max_output_chars and tool_timeout_s must be positive")

    def tools_by_name(self) -> dict[str, Tool]:
        """The tools by name. Raises ConfigError when two have the same name, and whatever ``build_tool`` raises."""
        built = [_build(name, self.tool_timeout_s) for name in self.use]
        if len({tool.name for tool in built}) < len(built):
            raise ConfigError(f"rollout.kind.use: two tools have the same name: {[tool.name for tool in built]}")
        return {tool.name: tool for tool in built}

    def prepare(self, template: PromptTemplate) -> None:
        tools = self.tools_by_name()
        if self.calls == "inline":
            wrong = [name for name, tool in tools.items() if len(tool.parameters) != 1]
            if wrong:
                raise ConfigError(f"rollout.kind.calls inline takes tools of one argument, which {wrong[0]} is not")
            if not tokens_that_end_in(template.tokenizer, INLINE_END):
                raise ConfigError("rollout.kind.calls inline: no token of the tokenizer ends in '='")
            return
        if template.chat is None:
            raise ConfigError("rollout.kind.calls hermes needs a chat template: set data.chat_template, or take inline")
        try:
            template.render([{"role": "user", "content": "."}], "a prompt with tools", self.tools())
        except DataError as error:
            raise ConfigError(f"rollout.kind.calls hermes needs a chat template that shows tools: {error}") from error
        self._check_syntax(template, next(iter(tools)))
        tokens_between(template, [{"role": "tool", "name": next(iter(tools)), "content": "1"}], None, self.tools())

    def _check_syntax(self, template: PromptTemplate, name: str) -> None:
        """Raises ConfigError where the chat template, and so the model, writes calls in another form than is read."""
        call = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": {}}}
        messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            question = template.render(messages[:1], "a call of a tool", self.tools(), prompt=False)
            whole = template.render(messages, "a call of a tool", self.tools(), prompt=False)
        except DataError as error:
            raise ConfigError(
                f"rollout.kind.calls hermes needs a chat template that shows calls of tools: {error}"
            ) from error
        answer = whole.removeprefix(question) if whole.startswith(question) else ""
        if name in answer:
            is_read = name in [read.name for read in read_calls(answer)]
            form = f"writes one as {answer.strip()!r}"
        else:  # the template leaves calls out: what it says of them before is all that tells their form
            is_read = "<tool_call>" in question
            form = "asks for none in this form"
        if not is_read:
            raise ConfigError(
                f"rollout.kind.calls hermes reads calls in <tool_call>, but the chat template {form}, and so will the "
                "model: set data.chat_template hermes to teach it the other form, or read this one in an agent or "
                "environment of your own"
            )

    def tools(self) -> Tools | None:
        return [tool.schema for tool in self.tools_by_name().values()] if self.calls == "hermes" else None

    async def draw(
        self,
        engine: Engine,
        prompt: TextPrompt,
        keys: SampleKeys,
        sampling: Sampling,
        template: PromptTemplate,
        limits: LengthLimits,
    ) -> DrawnText:
        draw = self._draw_inline if self.calls == "inline" else self._draw_hermes
        return await draw(engine, prompt, keys, sampling, template, limits)

    async def _draw_hermes(
        self,
        engine: Engine,
        prompt: TextPrompt,
        keys: SampleKeys,
        sampling: Sampling,
        template: PromptTemplate,
        limits: LengthLimits,
    ) -> DrawnText:
        """Turns of a conversation: each call of a tool is answered by a message of role tool."""
        sequence = GrowingSequence.after_prompt(prompt.token_ids)
        messages = list(prompt.messages or [])
        tools = self.tools_by_name()
        schemas = [tool.schema for tool in tools.values()]
        results: list[ToolResult] = []
        text = ""
        is_truncated = True  # unless the policy ends a turn by itself
        for turn in range(self.max_turns):
            room = limits.room(sequence.num_prompt_tokens, len(sequence))
            if not room:
                break
            drawn = await sequence.draw(engine, keys.request_seed(turn), room, sampling)
            text = template.decode(drawn, sampling.stop_token_ids, is_cut=False)
            calls = read_calls(text, schemas)
            text = text if calls else template.decode(drawn, sampling.stop_token_ids)
            messages.append({"role": "assistant", "content": text})
            if sequence.finish_reason == "length" or not calls:
                is_truncated = sequence.finish_reason == "length"
                break
            if turn == self.max_turns - 1:
                break
            answers = await asyncio.gather(*(self._call(tools, call) for call in calls))
            results += answers
            tool_messages = [
                {"role": "tool", "name": call.name or "unknown", "content": answer.text or "(no output)"}
                for call, answer in zip(calls, answers, strict=True)
            ]
            tokens = tokens_between(template, tool_messages, end_token(drawn, sampling), prompt.tools)
            if len(tokens) >= limits.room(sequence.num_prompt_tokens, len(sequence)):
                break
            sequence.append_given(tokens)
            messages += tool_messages
        return DrawnText([sequence.freeze()], text, messages, is_truncated, _tool_metrics(results))

    async def _draw_inline(
        self,
        engine: Engine,
        prompt: TextPrompt,
        keys: SampleKeys,
        sampling: Sampling,
        template: PromptTemplate,
        limits: LengthLimits,
    ) -> DrawnText:
        """One answer, within which results of tools are inserted after the calls."""
        sequence = GrowingSequence.after_prompt(prompt.token_ids)
        tools = self.tools_by_name()
        results: list[ToolResult] = []
        # Drawing stops at every token that could end a call; if it was none, the same turn goes on.
        ends = tokens_that_end_in(template.tokenizer, INLINE_END) - set(sampling.stop_token_ids)
        stopping = dataclasses.replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *sorted(ends)))
        turn = 0
        turn_start = len(sequence)
        is_truncated = True
        while room := limits.room(sequence.num_prompt_tokens, len(sequence)):
            first_position = len(sequence) - turn_start
            await sequence.draw(engine, keys.request_seed(turn), room, stopping, first_position=first_position)
            is_stopped = sequence.token_ids[-1] in sampling.stop_token_ids
            turn_ids = sequence.token_ids[turn_start:]
            if sequence.finish_reason == "length" or is_stopped or template.completes_stop(turn_ids):
                is_truncated = sequence.finish_reason == "length"
                break
            text = template.decode(turn_ids)
            call = inline_call(text)
            tool = None if call is None else tools.get(SHORT.get(call[0], call[0]))
            if call is None or tool is None:
                continue  # the same turn goes on
            if turn == self.max_turns - 1:
                break
            results.append(await tool.call({tool.parameters[0]: call[1]}, self.max_output_chars))
            text_of_result = defuse_tokens(results[-1].text, template.tokenizer)
            tokens = tokens_after(template, sequence.token_ids[-1], text_of_result)
            if len(tokens) >= limits.room(sequence.num_prompt_tokens, len(sequence)):
                break
            sequence.append_given(tokens)
            turn += 1
            turn_start = len(sequence)
        text = template.decode(sequence.token_ids[sequence.num_prompt_tokens :])
        messages = prompt.messages and [*prompt.messages, {"role": "assistant", "content": text}]
        return DrawnText([sequence.freeze()], text, messages, is_truncated, _tool_metrics(results))

    async def _call(self, tools: dict[str, Tool], call: ToolCall) -> ToolResult:
        """The result that the model is shown; for a call that cannot be made, a text that says why."""
        if call.problem:
            return ToolResult(f"Error: {call.problem}", True)
        if call.name not in tools:
            return ToolResult(f"Error: there is no tool {call.name!r}; there are {', '.join(tools)}", True)
        return await tools[call.name].call(call.arguments, self.max_output_chars)


def _tool_metrics(results: Sequence[ToolResult]) -> dict[str, object]:
    """Metadata for rewards."""
    return {"tool_calls": len(results), "tool_errors": sum(result.is_error for result in results)}
