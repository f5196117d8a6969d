"""Agents that speak the chat protocol: what they see, and the token sequences that become of their calls."""

import asyncio
import json
import re
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
import torch

from sfumato.config.text_rl_data import TextPromptDataConfig
from sfumato.data.text.prompt_template import build_prompt_template
from sfumato.data.text.prompts import TextPrompt
from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.models.language.load import build_byte_tokenizer
from sfumato.rollout.engines.base import EngineError, Sampling
from sfumato.rollout.engines.embedded.engine import EmbeddedEngine
from sfumato.rollout.kinds.agent import Agent
from sfumato.rollout.kinds.base import LengthLimits, SampleKeys
from tests.plain_engine import log_probs_of, tiny_model
from tests.scripted_engine import ScriptedEngine

TOKENIZER = build_byte_tokenizer()
END, BEGIN = "<|im_end|>", "<|im_start|>"
LIMITS = LengthLimits(600, 1200)
SAMPLING = Sampling(temperature=0.7, stop_token_ids=(0, 2))
CALLS: dict = {}
"""What a test's agent does, by name."""


def agent(prompt, base_url, api_key, model):
    """Not async: the calls are plain HTTP from another thread."""
    assert model == "policy" and threading.current_thread() is not threading.main_thread()

    def ask(messages, path="chat/completions", key=api_key, wait_s=30, **fields):
        body = {"model": model, "messages": messages, **fields}
        request = urllib.request.Request(
            f"{base_url}/{path}",
            json.dumps(body).encode() if path != "models" else None,
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=wait_s) as answer:
            content = answer.read().decode()
            return content if fields.get("stream") else json.loads(content)

    return CALLS["do"](ask, prompt)


async def async_agent(prompt, base_url, api_key, model):
    return await CALLS["do"](prompt)


def draw(do, script, path="agent", limits=LIMITS, chat="hermes", number=0, engine=None, stop=(), **fields):
    CALLS["do"] = do
    kind = Agent(path=f"{__name__}:{path}", **fields)
    template = build_prompt_template(TextPromptDataConfig(synthetic={}, chat_template=chat), TOKENIZER)
    kind.prepare(template)
    prompt = TextPrompt((5,), "What is 1+1?", None, {"answer": "2"}, "row")
    engine = engine or ScriptedEngine(TOKENIZER, script)
    sampling = replace(SAMPLING, stop=stop)
    drawn = asyncio.run(kind.draw(engine, prompt, SampleKeys(0, 0, number), sampling, template, limits))
    return drawn, drawn.sample(prompt, 0), engine


def user(text):
    return {"role": "user", "content": text}


def said(answer):
    """The message of an answer, as a client sends it back."""
    message = answer["choices"][0]["message"]
    return {**message, "annotations": [], "audio": None}


def texts_of(drawn):
    """Each sequence's text, and what of it was drawn."""
    return [
        (TOKENIZER.decode(sequence.token_ids), TOKENIZER.decode(sequence.token_ids[sequence.drawn]))
        for sequence in drawn.sequences
    ]


def test_a_conversation_that_goes_on_is_one_sequence():
    def do(ask, prompt):
        messages = [{"role": "system", "content": "Be brief."}, user(prompt.text)]
        first = ask(messages)
        assert first["choices"][0]["finish_reason"] == "stop" and first["object"] == "chat.completion"
        assert first["usage"]["completion_tokens"] == len("two") + 1
        prompt_text = f"{BEGIN}system\nBe brief.{END}\n{BEGIN}user\nWhat is 1+1?{END}\n{BEGIN}assistant\n"
        assert first["usage"]["prompt_tokens"] == len(TOKENIZER(prompt_text)["input_ids"])
        second = ask([*messages, said(first), user("Sure?")])
        assert second["choices"][0]["message"]["content"] == "yes "
        prompt.metadata.clear()  # which is a copy for this sample
        return {"reward": 0.5, "turns": 2}

    drawn, sample, engine = draw(do, [f"two{END}", f"yes {END}"])
    whole = (
        f"{BEGIN}system\nBe brief.{END}\n{BEGIN}user\nWhat is 1+1?{END}\n{BEGIN}assistant\ntwo{END}\n"
        f"{BEGIN}user\nSure?{END}\n{BEGIN}assistant\nyes {END}"
    )
    assert texts_of(drawn) == [(whole, f"two{END}yes {END}")]
    assert engine.requests[1].prompt_ids == drawn.sequences[0].token_ids[: len(engine.requests[1].prompt_ids)].tolist()
    assert sample.metadata == {"answer": "2", "environment_reward": 0.5, "turns": 2}
    assert (sample.text, sample.num_tokens, sample.damage) == ("yes ", 9, "")
    assert [message["role"] for message in sample.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert (drawn.sequences[0].versions[drawn.sequences[0].drawn] == 3).all()


def test_what_was_drawn_is_not_tokenised_again():
    """A special token that is drawn within an answer reads like nothing, and stays in the sequence."""

    def do(ask, prompt):
        first = ask([user("a")])
        ask([user("a"), {"role": "assistant", "content": first["choices"][0]["message"]["content"]}, user("b")])

    drawn, _, _ = draw(do, [f"x {BEGIN} y  {END}", f"z{END}"])
    ((_, learned),) = texts_of(drawn)
    assert learned == f"x {BEGIN} y  {END}z{END}", "though the client has cut off spaces"


def test_another_conversation_is_another_sequence():
    def do(ask, prompt):
        ask([user("a")])
        ask([user("b")])
        ask([user("a"), {"role": "assistant", "content": "another answer"}, user("c")])

    drawn, _, _ = draw(do, [f"1{END}", f"2{END}", f"3{END}"])
    assert [learned for _, learned in texts_of(drawn)] == [f"1{END}", f"2{END}", f"3{END}"]
    assert "another answer" in texts_of(drawn)[2][0]


def test_two_continuations_learn_from_what_they_share_once():
    def do(ask, prompt):
        first = ask([user("a")])
        for text in ("b", "c"):
            second = ask([user("a"), said(first), user(text)])
        ask([user("a"), said(first), user("c"), said(second), user("d")])

    drawn, _, _ = draw(do, [f"1{END}", f"2{END}", f"3{END}", f"4{END}"])
    begin = f"{BEGIN}user\na{END}\n{BEGIN}assistant\n1{END}\n{BEGIN}user\n"
    tail = f"{END}\n{BEGIN}assistant\n"
    assert texts_of(drawn) == [
        (f"{begin}b{tail}2{END}", f"1{END}2{END}"),
        (f"{begin}c{tail}3{END}\n{BEGIN}user\nd{tail}4{END}", f"3{END}4{END}"),
    ]


def test_tool_calls_go_out_and_come_back():
    tool = {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
    }
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    def do(ask, prompt):
        first = ask([user("1+1")], tools=[tool])
        choice = first["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I call."
        (made,) = choice["message"]["tool_calls"]
        assert made["function"]["name"] == "add" and json.loads(made["function"]["arguments"]) == {"a": 1}
        answer = {"role": "tool", "tool_call_id": made["id"], "content": "2"}
        ask([user("1+1"), said(first), answer], tools=[tool])
        ask([user("1+1")])  # without tools: another text, in which a call is a text

    drawn, _, engine = draw(do, [f"I call.{call}{END}", f"2{END}", f"{call}{END}"])
    (first, learned), (_, other) = texts_of(drawn)
    assert learned == f"I call.{call}{END}2{END}" and other == f"{call}{END}"
    assert f"{call}{END}\n{BEGIN}user\n<tool_response>\n2\n</tool_response>{END}" in first and '"name": "add"' in first
    assert '"name": "add"' not in engine.prompts[2]


def test_no_two_calls_of_a_conversation_have_the_same_id():
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    ids = []

    def do(ask, prompt):
        messages = [user("1+1")]
        for _ in range(2):
            answer = said(ask(messages, tools=[tool]))
            calls = answer["tool_calls"]
            ids.extend(made["id"] for made in calls)
            messages += [answer, *({"role": "tool", "tool_call_id": made["id"], "content": "2"} for made in calls)]
        shortened = [messages[0], *messages[4:]]  # by an agent that drops what is old
        ids.extend(made["id"] for made in said(ask(shortened, tools=[tool]))["tool_calls"])

    draw(do, [f"{call}{call}{END}", f"{call}{END}", f"{call}{call}{END}"])
    assert ids == ["call_0", "call_1", "call_2", "call_1", "call_3"]


def test_texts_and_tokens_go_on_too():
    def do(ask, prompt):
        first = ask(None, "completions", prompt="Once")["choices"][0]["text"]
        ask(None, "completions", prompt=f"Once{first} a")
        ids = TOKENIZER("other")["input_ids"]
        ask(None, "completions", prompt=ids, logprobs=1)

    drawn, sample, _ = draw(do, [f" upon{END}", f" time{END}", f" words{END}"], chat="none")
    assert texts_of(drawn) == [
        (f"Once upon{END} a time{END}", f" upon{END} time{END}"),
        (f"other words{END}", f" words{END}"),
    ]
    assert sample.messages is None and sample.text == " words"


def test_streams_log_probs_and_models():
    def do(ask, prompt):
        events = ask([user("a")], stream=True, stream_options={"include_usage": True}).split("\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events if "{" in event]
        assert events[-2] == "data: [DONE]" and chunks[0]["choices"][0]["delta"]["content"] == "hi"
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:2]] == [None, "stop"]
        assert chunks[2]["usage"]["completion_tokens"] == 3
        answer = ask([user("a")], logprobs=True, max_tokens=2)
        assert [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]] == [-0.5, -0.5]
        assert answer["choices"][0]["finish_reason"] == "length"
        assert ask(None, "models")["data"][0]["id"] == "policy"
        return "my own answer"

    drawn, sample, _ = draw(do, [f"hi{END}", f"abcdef{END}"])
    assert drawn.text == "my own answer" and drawn.num_tokens == 5 and sample.is_truncated


WRONG = [
    ({"messages": [user("a")], "n": 2}, 400, "n 2 is not offered"),
    ({"messages": [user("a")], "stop": ["x"]}, 400, "list its texts in rollout.stop"),
    ({"messages": [user("a")], "response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"messages": [user("a")], "repetition_penalty": 1.2}, 400, "repetition_penalty 1.2 is not offered"),
    ({"messages": [user("a")], "functions": [{"name": "add"}]}, 400, "functions"),
    (
        {"messages": [user("a")], "chat_template_kwargs": {"enable_thinking": False}},
        400,
        "is not offered: set data.chat_template_options for the run and leave it out",
    ),
    ({"messages": [user("a")], "guided_choice": ["yes", "no"]}, 400, "guided_choice"),
    ({"messages": "a"}, 400, "messages must be a list"),
    ({"messages": []}, 400, "a prompt must end with a message of role user or tool, not with nothing"),
    ({"messages": [{"role": "boss", "content": "x"}]}, 400, "unknown role 'boss'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "only parts of type text"),
    ({"messages": [user("a")], "max_tokens": 0}, 400, "max_tokens must be a positive integer"),
    ({"messages": [user("a")], "tools": "x"}, 400, "tools must be a list"),
    ({"messages": [user("a" * 1300)]}, 400, "there is no room for more"),
    ({"messages": [user("a")], "key": "other"}, 401, "this key is of no sample"),
    ({"messages": None, "path": "completions"}, 400, "prompt must be one text"),
    ({"messages": None, "path": "completions", "prompt": ""}, 400, "the prompt is empty"),
    ({"messages": None, "path": "completions", "prompt": [10**30]}, 400, "prompt must be one text"),
    ({"messages": None, "path": "completions", "prompt": [-1]}, 400, "prompt must be one text"),
    ({"messages": [], "max_tokens": 10**30}, 400, "max_tokens must be a positive integer"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]}, 400, "tool_calls must be a list of calls"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [5]}]}, 400, "must have a function"),
    ({"messages": [], "path": "responses"}, 404, "there is no /v1/responses: ask /v1/chat/completions"),
    ({"messages": [], "path": "completions", "prompt": [10**6]}, 400, "token ids must be below"),
    ({"messages": [], "max_completion_tokens": 0, "max_tokens": 5}, 400, "must be a positive integer"),
    ({"messages": [], "thinking": {"type": "disabled"}}, 400, "set data.chat_template_options for the run"),
    ({"messages": [], "enable_thinking": False}, 400, "set data.chat_template_options for the run"),
    ({"messages": [], "stream": True, "stream_options": "text"}, 400, "stream_options must be an object"),
    ({"messages": [], "stream": True, "stream_options": [1]}, 400, "stream_options must be an object"),
]


def test_stop_texts_of_the_run_may_be_asked_for():
    def do(ask, prompt):
        return "".join(said(ask([user("a")], stop=stop))["content"] for stop in (["Result:", "x"], "x", []))

    assert draw(do, [f"a{END}", f"b{END}", f"c{END}"], stop=("Result:", "x"))[0].text == "abc"


def test_what_cannot_be_answered_is_said():
    def do(ask, prompt):
        for fields, status, why in WRONG:
            with pytest.raises(urllib.error.HTTPError) as caught:
                ask(**fields)
            about = json.loads(caught.value.read())["error"]
            assert caught.value.code == status and why in about["message"], about
        parts = [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]
        ask([{"role": "user", "content": parts}], repetition_penalty=1.0, chat_template_kwargs={}, bad_words=None)
        raise RuntimeError("enough")

    drawn, sample, engine = draw(do, [f"1{END}"])
    assert sample.damage == "the agent: RuntimeError: enough" and drawn.num_tokens == 2
    assert "in parts" in engine.prompts[0] and len(engine.prompts) == 1


class HangingEngine(ScriptedEngine):
    """One whose second answer comes only after the third has been asked for."""

    async def generate(self, request, sampling):
        number = len(self.requests)
        if number == 0:
            self.asked_again = asyncio.Event()
        answer = await super().generate(request, sampling)
        if number == 1:
            await self.asked_again.wait()
        elif number == 2:
            self.asked_again.set()
        return answer


def test_what_a_client_no_longer_waits_for_is_no_part_of_the_sample():
    def do(ask, prompt):
        messages = [user("a"), said(ask([user("a")])), user("b")]
        with pytest.raises(TimeoutError):
            ask(messages, wait_s=0.2)
        ask(messages)

    drawn, sample, engine = draw(do, [], engine=HangingEngine(TOKENIZER, [f"1{END}", f"late{END}", f"2{END}"]))
    assert len(engine.requests) == 3 and sample.text == "2"
    assert [learned for _, learned in texts_of(drawn)] == [f"1{END}2{END}"]


def test_an_agent_that_takes_too_long():
    def do(ask, prompt):
        ask([user("a")])
        time.sleep(20)

    drawn, sample, _ = draw(do, [f"1{END}"], timeout_s=0.5)
    assert sample.damage == "the agent: took longer than 0.5 s" and drawn.num_tokens == 2


def test_an_agent_that_asks_nothing_or_returns_something_else():
    assert draw(lambda ask, prompt: 1.0, [])[1].damage == "the agent made no call of the policy that was answered"
    for result, why in (
        (float("nan"), "returned nan as its reward"),
        ({"text": 3}, "a text of type int"),
        (10**400, "cannot be read: OverflowError"),
        ({"answer": "1"}, "gives 'answer' to rewards, which is a column of the row, too"),
        ({"answer": "2"}, "^$"),
        ([], r"\[\]"),
    ):

        def do(ask, prompt, result=result):
            ask([user("a")])
            return result

        assert re.search(why, draw(do, [f"1{END}"])[1].damage)


@pytest.mark.parametrize("error", [SystemExit(2), asyncio.CancelledError("gave up")])
def test_an_async_agent_that_exits_or_was_cancelled_costs_its_sample(error):
    async def do(prompt):
        raise error

    assert f"OwnCallError: {type(error).__name__}: {error}" in draw(do, [], path="async_agent")[1].damage


class DeadEngine:
    async def generate(self, request, sampling):
        raise EngineError("it is dead")


def test_a_dead_engine_ends_the_run_whatever_the_agent_makes_of_it():
    def do(ask, prompt):
        with pytest.raises(urllib.error.HTTPError):
            ask([user("a")])
        return 1.0

    with pytest.raises(EngineError, match="it is dead"):
        draw(do, None, engine=DeadEngine())


def test_what_a_person_must_mend_ends_the_run():
    async def do(prompt):
        raise MissingDependencyError("pip install agent")

    with pytest.raises(MissingDependencyError, match="pip install agent"):
        draw(do, [], path="async_agent")
    with pytest.raises(ConfigError, match=r"rollout\.kind\.path: cannot import function"):
        draw(do, [], path="nothing")


def test_many_agents_on_the_embedded_engine_are_reproducible():
    """Real weights: calls of all samples share batches, arrive in any order, and give the same tokens."""
    model = tiny_model()

    def do(ask, prompt):
        first = ask([user("a")], max_tokens=6)
        time.sleep(0.02 * np.random.rand())
        ask([user("a"), said(first), user("b")], max_tokens=6)
        ask([user("a")], max_tokens=6)

    CALLS["do"] = do
    kind = Agent(path=f"{__name__}:agent")
    template = build_prompt_template(TextPromptDataConfig(synthetic={}, chat_template="chatml"), TOKENIZER)
    prompt = TextPrompt((5,), "x", None)

    def draw_all(numbers):
        engine = EmbeddedEngine(model, max_length=200)

        async def together():
            draws = [kind.draw(engine, prompt, SampleKeys(0, 0, n), SAMPLING, template, LIMITS) for n in numbers]
            return await asyncio.gather(*draws)

        drawn = dict(zip(numbers, asyncio.run(together()), strict=True))
        engine.close()
        return drawn

    together, alone = draw_all([0, 1, 2, 3]), draw_all([2])
    for drawn in together.values():
        assert not drawn.damage and len(drawn.sequences) == 2
        firsts = [sequence.token_ids[sequence.drawn][:6].tolist() for sequence in drawn.sequences]
        assert firsts[0] != firsts[1], "the same question, asked again, is answered anew"
        for sequence in drawn.sequences:
            expected = log_probs_of(model, sequence.token_ids, 0.7)[sequence.drawn[1:]]
            torch.testing.assert_close(torch.tensor(sequence.log_probs[sequence.drawn]), expected, atol=1e-5, rtol=0)
    for ours, theirs in zip(together[2].sequences, alone[2].sequences, strict=True):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)


def test_the_openai_client_as_it_is():
    openai = pytest.importorskip("openai")

    def do(ask, prompt):
        raise AssertionError

    async def run(prompt, base_url, api_key, model):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        messages = [user("a")]
        first = await client.chat.completions.create(model=model, messages=messages)
        messages += [first.choices[0].message, user("b")]
        stream = await client.chat.completions.create(model=model, messages=messages, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "two" and first.choices[0].message.content == "one"
        assert [entry.id async for entry in client.models.list()] == ["policy"]
        with pytest.raises(openai.BadRequestError, match="n 3 is not offered"):
            await client.chat.completions.create(model=model, messages=messages, n=3)
        completion = await client.completions.create(model=model, prompt="x", max_tokens=3)
        assert completion.choices[0].text == "abc"
        await client.close()
        return 1.0

    CALLS["run"] = run
    drawn, sample, _ = draw(do, [f"one{END}", f"two{END}", "abcd"], path="client_agent")
    assert not sample.damage and sample.metadata["environment_reward"] == 1.0
    assert [learned for _, learned in texts_of(drawn)] == [f"one{END}two{END}", "abc"]


async def client_agent(prompt, base_url, api_key, model):
    return await CALLS["run"](prompt, base_url, api_key, model)
