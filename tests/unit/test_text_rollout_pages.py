"""The examples of docs/text_rl/data.md and rollouts.md do what the pages say."""

import asyncio
import re
import sys
import types
from pathlib import Path

import pytest
import yaml

from sfumato.config.text_rl import TextRolloutConfig
from sfumato.config.text_rl_data import TextPromptDataConfig
from sfumato.data.text.prompt_template import build_prompt_template
from sfumato.data.text.prompts import TextPrompt, TextPromptLoader, load_text_prompts
from sfumato.models.language.load import build_byte_tokenizer
from sfumato.rollout.engines.base import Sampling
from sfumato.rollout.kinds.agent import Agent
from sfumato.rollout.kinds.base import LengthLimits, SampleKeys
from sfumato.rollout.kinds.environment import Environment
from sfumato.rollout.kinds.tools import ToolUse
from tests.scripted_engine import ScriptedEngine

PAGES = Path(__file__).parents[2] / "docs" / "text_rl"
TOKENIZER = build_byte_tokenizer()
END = "<|im_end|>"


def blocks(page, kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", (PAGES / page).read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture
def example(monkeypatch):
    """Makes a module of the block of a page that holds a word."""

    def make(page, word):
        (code,) = [block for block in blocks(page, "python") if word in block]
        assert len(code.splitlines()) <= 20, "short enough to be read"
        name = f"example_{len(word)}_{word.split()[-1].lower()}"
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(code, name, "exec"), module.__dict__)
        return name

    return make


def draw(kind, script, answer="7"):
    template = build_prompt_template(TextPromptDataConfig(synthetic={}, chat_template="hermes"), TOKENIZER)
    kind.prepare(template)
    ids, messages = template.encode_one("Go!", "row", kind.tools()), template.messages_of("Go!", "row")
    prompt = TextPrompt(tuple(ids), "Go!", messages, {"answer": answer}, "row", kind.tools())
    sampling, limits = Sampling(stop_token_ids=(0, 2)), LengthLimits(900, 2000)
    engine = ScriptedEngine(TOKENIZER, script)
    return asyncio.run(kind.draw(engine, prompt, SampleKeys(0, 0, 0), sampling, template, limits))


def test_the_tool(example):
    kind = ToolUse(use=(f"{example('rollouts.md', 'def look_up')}:look_up",))
    calls = [
        f'<tool_call>{{"name": "look_up", "arguments": {{"country": "{c}"}}}}</tool_call>{END}' for c in ("Japan", "X")
    ]
    drawn = draw(kind, [*calls, f"Tokyo{END}"])
    assert [m["content"] for m in drawn.messages if m["role"] == "tool"] == ["Tokyo", "Error: KeyError: 'no country X'"]


def test_the_environment(example):
    kind = Environment(path=f"{example('rollouts.md', 'class Guess')}:Guess", max_turns=6)
    drawn = draw(kind, [f"5{END}", f"{END}", f"7{END}"])
    assert drawn.metadata["environment_rewards"] == [0.0, -0.1, 1.0] and drawn.messages[2]["content"] == "Higher."


def test_the_agent(example):
    pytest.importorskip("openai")
    drawn = draw(Agent(path=f"{example('rollouts.md', 'def solve')}:solve"), [f"I think 6{END}", f"7{END}"])
    assert (drawn.text, len(drawn.sequences), drawn.damage) == ("7", 1, "")


def test_the_format_and_the_curriculum(example, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"riddle": "What has keys?", "solution": "a piano"}\n')
    path, name = str(tmp_path / "rows.jsonl"), example("data.md", "class Riddles")
    config = TextPromptDataConfig(
        train_path=path, eval_path=path, data_type={"type": f"{name}:Riddles"}, chat_template="none"
    )
    (prompt,) = load_text_prompts(config, build_prompt_template(config, TOKENIZER), "train")
    assert (prompt.text, prompt.metadata) == ("What has keys?", {"answer": "a piano"})
    prompts = [TextPrompt((5,), "x", None, {"answer": "1" * length}) for length in (1, 2, 3, 4, 5)]
    loader = TextPromptLoader(prompts, 2, 2, 0, f"{example('data.md', 'def short_first')}:short_first")
    assert sorted(loader.groups(0)) == [0, 1] and {row for i in range(50, 90) for row in loader.groups(i)} == {0, 1, 2}


def test_the_configurations(tmp_path):
    for page in ("data.md", "rollouts.md"):
        for block in blocks(page, "yaml"):
            read = yaml.safe_load(block)
            if "data" in read:
                TextPromptDataConfig(**read["data"])
    shown = [read["rollout"] for block in blocks("rollouts.md", "yaml") if "rollout" in (read := yaml.safe_load(block))]
    kinds = [rollout["kind"] for rollout in shown if "kind" in rollout]
    (partial,) = (TextRolloutConfig(**rollout) for rollout in shown if "kind" not in rollout)
    assert partial.partial_rollout and partial.max_age == 4
    assert [kind.pop("type") for kind in kinds] == ["tools", "verifiers"]
    assert ToolUse(**{**kinds[0], "use": tuple(kinds[0]["use"])}).max_turns == 4
