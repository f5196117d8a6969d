"""Texts that end an answer: where drawing stops, what is learned, what the answer says."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from sfumato.config.load import load_config
from sfumato.config.text_rl import TextRLConfig
from sfumato.config.text_rl_data import TextPromptDataConfig
from sfumato.data.text.prompt_template import build_prompt_template
from sfumato.data.text.prompts import TextPrompt
from sfumato.data.text.stop_strings import before_stop, completes_stop, num_looked_at
from sfumato.errors import ConfigError
from sfumato.models.language.parts import build_byte_tokenizer
from sfumato.rollout.debug.dumps import read_dump
from sfumato.rollout.engines import sglang, vllm
from sfumato.rollout.engines.base import Completion, GenerationRequest, Sampling
from sfumato.rollout.engines.embedded.complete import complete_requests
from sfumato.rollout.engines.embedded.engine import EmbeddedEngine
from sfumato.rollout.kinds.base import LengthLimits, SampleKeys
from sfumato.rollout.kinds.environment import Environment
from sfumato.rollout.kinds.single_turn import SingleTurn
from sfumato.rollout.kinds.tools import ToolUse
from sfumato.tracking.samples import read_samples
from tests.tiny import run_task_here, tiny_text_config, tiny_text_rl_config
from tests.tiny_tokenizers import build_tokenizer
from tests.unit.test_embedded_engine import make_module, make_requests

BYTES = build_byte_tokenizer()
END, LIMITS = "<|im_end|>", LengthLimits(200, 6000)


def decode(ids):
    return BYTES.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def first_end(tokenizer, ids, stop):
    """By the text of all tokens so far, after each."""
    texts = [tokenizer.decode(ids[: place + 1]) for place in range(len(ids))]
    return next((place for place, text in enumerate(texts) if any(end in text for end in stop)), None)


@pytest.mark.parametrize("kind", ["byte_level", "qwen", "metaspace", "trimmed"])
@pytest.mark.parametrize(
    "stop", [["\nHuman:"], ["."], ["Straße"], ["日本"], ["😀"], [" the", "no way"], ["<|im_end|>"], ["o"], ["ere, and"]]
)
def test_a_look_at_the_last_tokens_finds_what_the_whole_text_shows(kind, stop):
    tokenizer = build_tokenizer(kind)
    text = "The answer is here, and Straße 日本語 😀\nHuman: hello <|im_end|> you.\nuser"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = first_end(tokenizer, ids, stop)
    seen = [completes_stop(ids[: place + 1], stop, tokenizer.decode) for place in range(len(ids))]
    assert (seen.index(True) if True in seen else None) == whole
    if whole is not None:
        said = before_stop(ids[: whole + 1], stop, tokenizer.decode)
        text = tokenizer.decode(ids[: whole + 1])
        assert said == text[: min(text.find(end) for end in stop if end in text)]


def test_few_tokens_are_looked_at():
    assert num_looked_at(["abc", "日本"]) == 6 + 4 and num_looked_at([]) == 4
    assert not completes_stop([], ["a"], decode) and not completes_stop([40], [], decode)


def drawn_text_stop(module, requests):
    """A text of two letters that some of the completions hold, and what is drawn without it."""
    free = complete_requests(EmbeddedEngine(module), requests, Sampling())
    texts = [decode(sequence.token_ids) for sequence in free]
    stop = next(text[5:7] for text in texts if "\ufffd" not in text[5:7])
    return (stop,), free


def test_the_embedded_engine_ends_with_the_token_that_completes_a_text():
    module, requests = make_module(), make_requests()
    stop, free = drawn_text_stop(module, requests)
    result = complete_requests(EmbeddedEngine(module, decode=decode), requests, Sampling(stop=stop))
    num_stopped = 0
    for output, other in zip(result, free, strict=True):
        place = first_end(BYTES, other.token_ids, stop)
        length = len(other.token_ids) if place is None else place + 1
        assert output.token_ids == other.token_ids[:length] and output.log_probs == other.log_probs[:length]
        assert output.finish_reason == ("length" if place is None else "stop")
        num_stopped += place is not None
    assert num_stopped


def test_a_text_that_an_interruption_cuts_in_two_is_found():
    module, requests = make_module(), make_requests()
    stop, free = drawn_text_stop(module, requests)
    engine, tried = EmbeddedEngine(module, decode=decode), 0
    for request, whole in zip(requests, free, strict=True):
        place = first_end(BYTES, whole.token_ids, stop)
        if not place:
            continue
        before = whole.token_ids[:place]
        rest = replace(
            request, prompt_ids=[*request.prompt_ids, *before], first_position=place,
            max_new_tokens=request.max_new_tokens - place,
        )  # fmt: skip
        (result,) = complete_requests(engine, [rest], Sampling(stop=stop))
        assert result.token_ids == [whole.token_ids[place]] and result.finish_reason == "stop"
        tried += 1
    assert tried


def test_rows_with_other_texts_share_a_batch():
    module, requests = make_module(), make_requests()
    stop, free = drawn_text_stop(module, requests)
    engine = EmbeddedEngine(module, decode=decode)

    async def both():
        draws = [
            engine.generate(request, Sampling(stop=stop if row % 2 else ())) for row, request in enumerate(requests)
        ]
        return await asyncio.gather(*draws)

    result = asyncio.run(both())
    for row, (sequence, other) in enumerate(zip(result, free, strict=True)):
        place = first_end(BYTES, other.token_ids, stop) if row % 2 else None
        assert sequence.token_ids == other.token_ids[: None if place is None else place + 1]


def test_an_engine_without_a_tokenizer_refuses_texts():
    with pytest.raises(ConfigError, match="need an engine that was given a tokenizer's decode"):
        complete_requests(EmbeddedEngine(make_module()), make_requests(n=1), Sampling(stop=("a",)))


def test_engines_elsewhere_are_told_by_their_own_names():
    request = GenerationRequest([1], 3, 8)
    params = vllm.sampling_params(request, Sampling(stop=("\n\n", "Q:"), stop_token_ids=(2,)))
    assert params["stop"] == ["\n\n", "Q:"] and params["detokenize"] is True
    assert params["skip_special_tokens"] is False and params["stop_token_ids"] == [2]
    assert "stop" not in vllm.sampling_params(request, Sampling())
    assert vllm.sampling_params(request, Sampling())["detokenize"] is False
    assert sglang.sampling_params(request, Sampling(stop=("Q:",)))["stop"] == ["Q:"]
    assert "stop" not in sglang.sampling_params(request, Sampling())


class Speaker:
    """Says texts, byte by byte, up to what ends them."""

    version = 0

    def __init__(self, *texts):
        self.texts, self.prompts = list(texts), []

    async def generate(self, request, sampling):
        self.prompts.append(decode(request.prompt_ids))
        ids, drawn = BYTES(self.texts.pop(0), add_special_tokens=False)["input_ids"], []
        for token in ids[: request.max_new_tokens]:
            drawn.append(token)
            if token in sampling.stop_token_ids or completes_stop(drawn, sampling.stop, decode):
                return self.completion(drawn, "stop")
        return self.completion(drawn, "length")

    def completion(self, ids, reason):
        return Completion(ids, [-0.5] * len(ids), [0] * len(ids), reason)


def play(kind, engine, stop, chat="hermes"):
    template = replace(build_prompt_template(data(chat), BYTES), stop=stop)
    kind.prepare(template)
    tools = kind.tools()
    messages = template.messages_of("go", "row")
    prompt = TextPrompt(tuple(template.encode_one("go", "row", tools)), "go", messages, {}, "row", tools)
    sampling = Sampling(stop=stop, stop_token_ids=template.answer_end.stop_token_ids)
    return asyncio.run(kind.draw(engine, prompt, SampleKeys(0, 0, 0), sampling, template, LIMITS))


def data(chat):
    return TextPromptDataConfig(train_path="a.jsonl", eval_path="a.jsonl", chat_template=chat)


def test_what_is_learned_holds_the_text_and_what_is_said_does_not():
    drawn = play(SingleTurn(), Speaker("408.\nQ: more?"), ("\nQ:",))
    (sequence,) = drawn.sequences
    assert drawn.text == "408." and not drawn.is_truncated and drawn.messages[-1]["content"] == "408."
    assert decode(sequence.token_ids[sequence.drawn]) == "408.\nQ:"


def test_a_call_that_a_text_ends_is_answered_after_the_end_of_its_turn():
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "2*3"}}</tool_call>'
    engine = Speaker(call + " and then", "6\nQ: no")
    drawn = play(ToolUse(), engine, ("</tool_call>", "\nQ:"))
    assert drawn.text == "6" and drawn.metadata["tool_calls"] == 1, "a text that ends a call is a part of it"
    assert f"{call}{END}\n<|im_start|>user\n" in decode(drawn.sequences[0].token_ids)
    drawn = play(ToolUse(), Speaker(call + "\nOK", "6\nQ: no"), ("\nOK", "\nQ:"))
    (sequence,) = drawn.sequences
    assert drawn.text == "6" and drawn.metadata["tool_calls"] == 1
    whole = decode(sequence.token_ids)
    assert f"{call}\nOK{END}\n<|im_start|>user\n<tool_response>\n6\n</tool_response>{END}\n" in whole


def test_inline_calls_end_at_a_text_too():
    drawn = play(ToolUse(calls="inline"), Speaker("calc(2*3)=", " is it\nQ: no"), ("\nQ:",), "none")
    assert drawn.text == "calc(2*3)=6 is it" and not drawn.is_truncated


class Echo:
    """Says again what it is told, twice."""

    def __init__(self):
        self.steps = []

    def reset(self, prompt):
        return None

    def step(self, action):
        self.steps.append(action)
        return f"you said {action}", 1.0, len(self.steps) == 2


def test_an_environment_sees_what_was_said():
    drawn = play(Environment(path=f"{__name__}:Echo"), Speaker("up;", f"down{END}"), (";",), "chatml")
    (sequence,) = drawn.sequences
    assert drawn.text == "down" and drawn.metadata["environment_reward"] == 2.0
    said = f"<|im_start|>assistant\nup;{END}\n<|im_start|>user\nyou said up{END}\n<|im_start|>assistant\ndown{END}"
    assert decode(sequence.token_ids).endswith(said)


@pytest.mark.slow
def test_a_run_draws_up_to_a_text(tmp_path):
    config = tiny_text_rl_config(tmp_path, rollout={"stop": ["a", "e"]}, train={"max_steps": 1})
    config["rollout"]["dump"] = True
    run = run_task_here("rl_text", config)
    dump = read_dump(next((run / "rollouts").rglob("*rank0*")))
    sequences = [sequence for of_sample in dump.rollout.sequences for sequence in of_sample]
    assert any(sequence.finish_reason == "stop" for sequence in sequences)
    for sequence in sequences:
        text = decode(sequence.token_ids[sequence.drawn])
        assert not any(letter in text[:-1] for letter in "ae")
        assert np.isfinite(sequence.log_probs[sequence.drawn]).all()


def test_answers_of_the_evaluation_end_at_a_text(tmp_path):
    config = tiny_text_config(tmp_path, data={"eval_path": None}, train={"max_steps": 1})
    config["eval"] = {"num_samples": 2, "max_new_tokens": 6, "stop": ["a"]}
    run = run_task_here("train_text", config)
    records = [record for of_step in read_samples(run).values() for record in of_step]
    assert records and all("a" not in record["text"][:-1] for record in records)


@pytest.mark.parametrize("value", [[""], "Q:", [1]])
def test_a_text_must_be_a_text(tmp_path, value):
    config = tiny_text_rl_config(tmp_path, rollout={"stop": value})
    with pytest.raises(ConfigError, match=r"rollout\.stop"):
        load_config(TextRLConfig, overrides=config)
