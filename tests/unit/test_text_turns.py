"""Samples of language models: tokens given and drawn, single turns, and what their noise is keyed by."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sfumato.config.text_rl_data import TextPromptDataConfig
from sfumato.data.text.prompt_template import build_prompt_template
from sfumato.data.text.prompts import TextPrompt, load_text_prompts
from sfumato.models.language.load import build_byte_tokenizer
from sfumato.rollout.agents.turns import LengthLimits, SampleKeys, request_seed
from sfumato.rollout.engines.base import Completion, Sampling
from sfumato.rollout.kinds.single_turn import SingleTurn
from sfumato.rollout.text.growing_sequence import GrowingSequence
from tests.plain_engine import PlainEngine, log_probs_of, tiny_model

TOKENIZER = build_byte_tokenizer()
CONFIG = TextPromptDataConfig(synthetic={"problem": "add", "max_length": 2, "num_rows": 8})
TEMPLATE = build_prompt_template(CONFIG, TOKENIZER)
PROMPTS = load_text_prompts(CONFIG, TEMPLATE, "train")
SAMPLING = Sampling(temperature=0.7, stop_token_ids=(2,))
LIMITS = LengthLimits(12, 100)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def draw(engine, prompt, sample_id=0, limits=LIMITS, kind=None, iteration=0):
    return (kind or SingleTurn()).draw(engine, prompt, SampleKeys(5, iteration, sample_id), SAMPLING, TEMPLATE, limits)


def test_log_probs_are_those_of_a_pass_over_the_whole_sequence(model):
    drawn = asyncio.run(draw(PlainEngine(model), PROMPTS[0]))
    (sequence,) = drawn.sequences
    length = len(PROMPTS[0].token_ids)
    assert sequence.token_ids[:length].tolist() == list(PROMPTS[0].token_ids)
    assert sequence.drawn.tolist() == [False] * length + [True] * drawn.num_tokens and drawn.num_tokens > 0
    expected = log_probs_of(model, sequence.token_ids, 0.7)[length - 1 :]
    torch.testing.assert_close(torch.tensor(sequence.log_probs[length:]), expected, atol=1e-5, rtol=0)
    assert not sequence.log_probs[:length].any() and (sequence.versions[:length] == -1).all()
    assert (sequence.versions[length:] == 0).all()


def test_a_sample_is_a_function_of_its_keys(model):
    """Alone or together, in whatever order: and of another iteration, sample or seed another."""

    async def together(numbers):
        engine = PlainEngine(model)
        return dict(
            zip(numbers, await asyncio.gather(*(draw(engine, PROMPTS[n % 2], n) for n in numbers)), strict=True)
        )

    all_at_once = asyncio.run(together([3, 1, 0, 2]))
    for number in range(4):
        alone = asyncio.run(draw(PlainEngine(model), PROMPTS[number % 2], number))
        np.testing.assert_array_equal(alone.sequences[0].token_ids, all_at_once[number].sequences[0].token_ids)
        np.testing.assert_array_equal(alone.sequences[0].log_probs, all_at_once[number].sequences[0].log_probs)
    later = asyncio.run(draw(PlainEngine(model), PROMPTS[0], 0, iteration=1))
    assert later.sequences[0].token_ids.tolist() != all_at_once[0].sequences[0].token_ids.tolist()


def test_seeds_are_63_bits_and_differ_in_each_key():
    base = (0, "rollout", 3, 17, 0)
    others = [(1, *base[1:]), (0, "evaluation", *base[2:]), (0, "rollout", 4, 17, 0), (0, "rollout", 3, 18, 0)]
    seeds = [request_seed(*keys) for keys in (base, *others, (*base[:4], 1))]
    assert len(set(seeds)) == 6 and all(0 <= seed < 2**63 for seed in seeds)
    many = [request_seed(0, "rollout", 0, number) for number in range(200)]
    assert max(many) > 2**62 and len(set(many)) == 200
    assert SampleKeys(0, 3, 17).request_seed() == seeds[0] == 1008018927065835704
    assert SampleKeys(0, 3, 17, "evaluation").request_seed(1) == request_seed(0, "evaluation", 3, 17, 1)


def test_what_was_aborted_goes_on_as_if_it_had_not_been(model):
    whole = asyncio.run(draw(PlainEngine(model), PROMPTS[0])).sequences[0]
    assert whole.num_drawn > 5
    engine = PlainEngine(model)
    engine.abort_after = 4
    parted = asyncio.run(draw(engine, PROMPTS[0])).sequences[0]
    np.testing.assert_array_equal(parted.token_ids, whole.token_ids)
    length = len(PROMPTS[0].token_ids)
    assert parted.versions[length:].tolist() == [0] * 4 + [1] * (whole.num_drawn - 4)
    first, second = engine.requests
    assert (second.first_position, second.max_new_tokens) == (4, first.max_new_tokens - 4) and first.seed == second.seed
    assert list(second.prompt_ids) == parted.token_ids[: length + 4].tolist()


def scripted(*completions):
    """An engine that gives these completions."""
    remaining = list(completions)

    async def generate(request, sampling):
        return remaining.pop(0)

    return SimpleNamespace(generate=generate)


def completion(text, reason="stop", log_prob=-1.0):
    ids = TOKENIZER(text)["input_ids"]
    return Completion(ids, [log_prob] * len(ids), [0] * len(ids), reason)


def test_an_abort_after_the_last_token_is_the_limit():
    drawn = asyncio.run(draw(scripted(completion("x" * 12, "abort")), PROMPTS[0]))
    assert drawn.is_truncated and drawn.sequences[0].finish_reason == "length" and drawn.text == "x" * 12


def test_what_rewards_see():
    drawn = asyncio.run(draw(scripted(completion("4<|im_end|>")), PROMPTS[1]))
    sample = drawn.sample(PROMPTS[1], group_id=3)
    assert (sample.text, sample.prompt, sample.num_tokens, sample.group_id) == ("4", PROMPTS[1].text, 2, 3)
    assert sample.metadata == PROMPTS[1].metadata and not sample.is_truncated and not sample.damage
    assert sample.messages == [*PROMPTS[1].messages, {"role": "assistant", "content": "4"}]
    cut = asyncio.run(draw(scripted(completion("44", "length")), PROMPTS[1])).sample(PROMPTS[1], 0)
    assert cut.is_truncated and cut.text == "44"
    empty = asyncio.run(draw(scripted(completion("<|im_end|>")), PROMPTS[1])).sample(PROMPTS[1], 0)
    assert (empty.text, empty.num_tokens, empty.is_truncated) == ("", 1, False)
    plain = TextPrompt((5,), "x", None)
    assert asyncio.run(draw(scripted(completion("4")), plain)).messages is None


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.5])
def test_log_probs_that_cannot_be_are_damage(value):
    drawn = asyncio.run(draw(scripted(completion("4", log_prob=value)), PROMPTS[1]))
    assert drawn.sample(PROMPTS[1], 0).damage == f"the engine gave a drawn token the log-probability {value}"


def test_limits():
    assert LengthLimits(10, 100).room(20, 20) == 10 and LengthLimits(10, 100).room(20, 27) == 3
    assert (
        LengthLimits(10, 25).room(20, 20) == 5
        and LengthLimits(10, 25).room(20, 25) == LengthLimits(10, 25).room(30, 30) == 0
    )
    length = len(PROMPTS[0].token_ids)
    drawn = asyncio.run(draw(scripted(), PROMPTS[0], limits=LengthLimits(5, length)))
    assert (drawn.num_tokens, drawn.is_truncated, drawn.text) == (0, True, "")


def test_given_tokens_are_no_decisions():
    sequence = GrowingSequence.after_prompt([1, 2])
    sequence.append_drawn(Completion([3], [-0.5], [7], "stop"))
    sequence.append_given([4, 5])
    sequence.append_drawn(Completion([6], [-0.25], [8], "length"))
    sequence.finish_reason = "length"
    result = sequence.freeze()
    assert result.token_ids.tolist() == [1, 2, 3, 4, 5, 6] and result.token_ids.dtype == np.int32
    assert result.drawn.tolist() == [False, False, True, False, False, True]
    assert result.log_probs.tolist() == [0, 0, -0.5, 0, 0, -0.25] and result.versions.tolist() == [-1, -1, 7, -1, -1, 8]
    assert (result.num_drawn, result.finish_reason, sequence.num_prompt_tokens, len(sequence)) == (2, "length", 2, 6)
    with pytest.raises(AssertionError, match="equally many"):
        sequence.append_drawn(Completion([6], [], [8], "stop"))
