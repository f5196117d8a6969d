"""An environment of verifiers, unmodified, with its own agent and reward, against the recording endpoint.

Runs where verifiers is installed, which needs Python packages of its own and uv: pip install 'verifiers>=0.4' uv
"""

import asyncio
from pathlib import Path

import pytest

from sfumato.config.text_rl_data import TextPromptDataConfig
from sfumato.data.text.prompt_template import build_prompt_template
from sfumato.data.text.prompts import load_text_prompts
from sfumato.errors import ConfigError, DataError
from sfumato.models.language.load import build_byte_tokenizer
from sfumato.rewards.environment import EnvironmentReward
from sfumato.rollout.engines.base import Sampling
from sfumato.rollout.kinds.base import LengthLimits, SampleKeys
from sfumato.rollout.kinds.verifiers import Verifiers
from tests.scripted_engine import ScriptedEngine

pytest.importorskip("verifiers.v1")
pytestmark = pytest.mark.slow

TOKENIZER = build_byte_tokenizer()
END = "<|im_end|>"


def prompts_of(monkeypatch, split, **data_type):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "verifiers_environment"))
    data_type = {"type": "verifiers", "environment": "sum-of-two", "num_eval": 1, **data_type}
    config = TextPromptDataConfig(data_type=data_type, chat_template="hermes")
    template = build_prompt_template(config, TOKENIZER)
    return template, load_text_prompts(config, template, split)


def test_rollout_and_reward(monkeypatch):
    template, prompts = prompts_of(monkeypatch, "train", config={"taskset": {"num_tasks": 5}})
    assert [prompt.text for prompt in prompts] == ["1+2?", "2+3?", "3+4?", "4+5?"]
    assert [prompt.text for prompt in prompts_of(monkeypatch, "eval")[1]] == ["0+1?"]
    kind = Verifiers(timeout_s=120.0)
    kind.prepare(template)
    engine = ScriptedEngine(TOKENIZER, lambda text: f"{'3' if '1+2?' in text else 'none'}{END}")

    async def draw_all():
        sampling, limits = Sampling(stop_token_ids=(0, 2)), LengthLimits(400, 1600)
        keys = [SampleKeys(0, 0, number) for number in range(2)]
        draws = [
            kind.draw(engine, prompt, key, sampling, template, limits)
            for prompt, key in zip(prompts[:2], keys, strict=True)
        ]
        return await asyncio.gather(*draws)

    drawn_all = asyncio.run(draw_all())
    samples = [drawn.sample(prompt, 0) for drawn, prompt in zip(drawn_all, prompts[:2], strict=True)]
    assert [sample.damage for sample in samples] == ["", ""]
    assert EnvironmentReward().score(samples) == [1.0, 0.0]
    assert [sample.metadata["length"] for sample in samples] == [1.0, 4.0]
    assert [sample.text for sample in samples] == ["3", "none"]
    for drawn, text in zip(drawn_all, ["3", "none"], strict=True):
        (sequence,) = drawn.sequences
        assert TOKENIZER.decode(sequence.token_ids[sequence.drawn]) == f"{text}{END}"


def test_what_goes_wrong(monkeypatch):
    with pytest.raises(ConfigError, match="cannot load environment 'nowhere' of verifiers: ModuleNotFoundError"):
        prompts_of(monkeypatch, "train", environment="nowhere")
    with pytest.raises(DataError, match=r"num_eval is 4, but environment sum-of-two has 4 tasks"):
        prompts_of(monkeypatch, "train", num_eval=4)


AGAIN = "the failed try would be learned from.*set data.data_type.config."


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"retries": {"max_retries": 1}}, f"{AGAIN}retries: "),
        ({"agent": {"retries": {"rules": [{"type": "ProviderError", "max_retries": 2}]}}}, f"{AGAIN}agent.retries: "),
        (
            {"id": "best-of-n"},
            "agent 'agent' .* on machines of Prime Intellect.*set data.data_type.config.agent.runtime",
        ),
    ],
)
def test_settings_that_would_not_do_are_refused(monkeypatch, config, message):
    with pytest.raises(ConfigError, match=message):
        prompts_of(monkeypatch, "train", config=config)
