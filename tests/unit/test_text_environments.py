"""Environments by import path: observations, rewards, limits, and what goes wrong in one sample."""

import asyncio
import re
import time

import numpy as np
import pytest

from sfumato.config.text_rl_data import TextPromptDataConfig
from sfumato.data.text.prompt_template import build_prompt_template
from sfumato.data.text.prompts import TextPrompt
from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.models.language.load import build_byte_tokenizer
from sfumato.rewards.base import Failure
from sfumato.rewards.environment import EnvironmentReward
from sfumato.rollout.engines.base import Sampling
from sfumato.rollout.kinds.base import LengthLimits, SampleKeys
from sfumato.rollout.kinds.environment import Environment
from tests.scripted_engine import ScriptedEngine

TOKENIZER = build_byte_tokenizer()
END = "<|im_end|>"
LIMITS = LengthLimits(2000, 3000)


class Guess:
    """Guess a number: told whether it is higher or lower."""

    closed = 0

    def __init__(self, low=0):
        self.low = low

    def reset(self, prompt):
        self.number = int(prompt.metadata["number"])
        return f"A number above {self.low}."

    def step(self, action):
        if not action.isdigit():
            return "A number, please.", -0.1, False
        guess = int(action)
        if guess == self.number:
            return None, 1.0, True
        return ("Higher." if guess < self.number else "Lower."), 0, False

    def close(self):
        Guess.closed += 1


class Later(Guess):
    """The same, async, and it begins with the prompt."""

    async def reset(self, prompt):
        super().reset(prompt)

    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)

    async def close(self):
        await asyncio.sleep(0)


class Broken:
    how = ""

    def reset(self, prompt):
        if self.how == "reset":
            raise ZeroDivisionError("by zero")
        return 5 if self.how == "observation" else None

    def step(self, action):
        if self.how == "hang":
            time.sleep(20)
        if self.how == "leave":
            raise SystemExit(3)
        if self.how == "user":
            raise MissingDependencyError("pip install game")
        return {
            "two": ("x", 1),
            "reward": ("x", "much", False),
            "nan": ("x", float("nan"), False),
            "vast": ("x", 10**400, False),
            "array": ("x", 0.0, np.array([True, False])),
        }[self.how]


class Spends:
    """One that changes what it is given."""

    def __init__(self, lives):
        self.lives = lives

    def reset(self, prompt):
        prompt.metadata["number"] = "spent"
        prompt.messages.clear()

    def step(self, action):
        self.lives.pop()
        return "Go on.", float(len(self.lives)), False


class NoStep:
    def reset(self, prompt):
        return None


def draw(cls, script, chat="chatml", limits=LIMITS, **fields):
    kind = Environment(path=f"{__name__}:{cls}", **fields)
    template = build_prompt_template(TextPromptDataConfig(synthetic={}, chat_template=chat), TOKENIZER)
    kind.prepare(template)
    messages = template.messages_of("Guess!", "row")
    prompt = TextPrompt(tuple(template.encode_one("Guess!", "row")), "Guess!", messages, {"number": "7"}, "row")
    engine = ScriptedEngine(TOKENIZER, script)
    sampling = Sampling(stop_token_ids=(0, 2))
    drawn = asyncio.run(kind.draw(engine, prompt, SampleKeys(0, 0, 0), sampling, template, limits))
    return drawn, drawn.sample(prompt, 0), engine


def test_observations_are_messages_and_rewards_add_up():
    closed = Guess.closed
    drawn, sample, engine = draw("Guess", [f"5{END}", f"x{END}", f"7{END}"], arguments={"low": 3})
    (sequence,) = drawn.sequences
    begin = "<|im_start|>"
    whole = (
        f"{begin}user\nA number above 3.{END}\n{begin}assistant\n5{END}\n{begin}user\nHigher.{END}\n{begin}assistant\n"
        f"x{END}\n{begin}user\nA number, please.{END}\n{begin}assistant\n7{END}"
    )
    assert TOKENIZER.decode(sequence.token_ids) == whole
    assert TOKENIZER.decode(sequence.token_ids[sequence.drawn]) == f"5{END}x{END}7{END}"
    assert drawn.metadata == {
        "environment_reward": 0.9,
        "environment_rewards": [0.0, -0.1, 1.0],
        "environment_done": True,
    }
    assert not drawn.is_truncated and not sample.damage and drawn.text == "7" and Guess.closed == closed + 1
    assert [message["content"] for message in drawn.messages] == [
        "A number above 3.", "5", "Higher.", "x", "A number, please.", "7",
    ]  # fmt: skip
    assert len({request.seed for request in engine.requests}) == 3
    assert EnvironmentReward().score([sample]) == [0.9]
    (failure,) = EnvironmentReward(key="other").score([sample])
    assert isinstance(failure, Failure) and "gave no number 'other'; what it gave is environment_done" in failure.reason


def test_async_methods_and_the_prompt_as_it_stands():
    drawn, _, engine = draw("Later", [f"9{END}", f"7{END}"])
    assert engine.prompts[0].endswith(f"user\nGuess!{END}\n<|im_start|>assistant\n")
    assert drawn.metadata["environment_rewards"] == [0.0, 1.0] and drawn.messages[2]["content"] == "Lower."


def test_an_environment_changes_nothing_for_other_samples():
    arguments = {"lives": [1, 2, 3]}
    for _ in range(2):
        drawn, sample, engine = draw("Spends", [f"9{END}", f"9{END}"], max_turns=2, arguments=arguments)
        assert drawn.metadata["environment_rewards"] == [2.0, 1.0] and sample.metadata["number"] == "7"
        assert "Guess!" in engine.prompts[0] and len(drawn.messages) == 4


def test_without_a_chat_template_texts_follow_each_other():
    drawn, _, engine = draw("Guess", ["9<|endoftext|>", "7<|endoftext|>"], chat="none")
    text = TOKENIZER.decode(drawn.sequences[0].token_ids)
    assert text == "A number above 0.9<|endoftext|>Lower.7<|endoftext|>" and drawn.messages is None
    assert engine.prompts[0] == "A number above 0."


def test_limits():
    drawn, _, engine = draw("Guess", [f"5{END}"] * 3, max_turns=2)
    assert drawn.is_truncated and len(engine.requests) == 2 and not drawn.metadata["environment_done"]
    assert drawn.sequences[0].finish_reason == "length", "which rollout/truncated counts"
    assert TOKENIZER.decode(drawn.sequences[0].token_ids).endswith(f"5{END}"), "nothing after the last turn"
    drawn, sample, _ = draw("Guess", [f"5{END}"] * 3, limits=LengthLimits(10, 3000))
    assert drawn.is_truncated and drawn.num_tokens == 2 and not sample.damage
    drawn, _, _ = draw("Guess", ["7" * 9], limits=LengthLimits(1, 3000))
    assert not drawn.is_truncated and drawn.metadata["environment_done"], "done all the same"


BROKEN = {
    "reset": "reset: ZeroDivisionError: by zero",
    "observation": "an observation must be a text, not 5",
    "hang": "step: took longer than 0.2 s",
    "leave": "step: OwnCallError: SystemExit: 3",
    "two": "step must return (observation, reward, done), not ('x', 1)",
    "reward": "step gave the reward 'much', which is no finite number",
    "nan": "step gave the reward nan, which is no finite number",
    "vast": f"step gave the reward 1{199 * '0'}, which is no finite number",
    "array": "what step returned cannot be read: ValueError: The truth value of an array",
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_goes_wrong_is_the_samples_own(monkeypatch, how):
    monkeypatch.setattr(Broken, "how", how)
    drawn, sample, _ = draw("Broken", [f"5{END}"], timeout_s=0.2)
    assert sample.damage.startswith(f"{__name__}:Broken: {BROKEN[how]}")
    assert drawn.num_tokens == (0 if how in ("reset", "observation") else 2)


def test_what_a_person_must_mend_ends_the_run(monkeypatch):
    monkeypatch.setattr(Broken, "how", "user")
    with pytest.raises(MissingDependencyError, match="pip install game"):
        draw("Broken", [f"5{END}"])


def test_what_cannot_be_is_refused():
    for fields, why in (
        ({"cls": "Nothing"}, "rollout.kind.path: cannot import function"),
        ({"cls": "NoStep"}, "has no method step"),
        ({"cls": "Guess", "max_turns": 0}, "must be positive"),
    ):
        with pytest.raises(ConfigError, match=re.escape(why)):
            draw(script=[], **fields)
