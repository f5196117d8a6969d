"""Prompts of language models: formats, tokens, those that are too long, and the order in which they are taken."""

import importlib.util
import json
import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from sfumato.algorithms.noise import keyed_generator
from sfumato.config.text_rl_data import TextPromptDataConfig
from sfumato.data.prompt_loader import check_prompts
from sfumato.data.synthetic.text import Problem
from sfumato.data.text.prompt_formats.base import PromptFormat, PromptRow
from sfumato.data.text.prompt_template import build_prompt_template
from sfumato.data.text.prompts import TextPromptLoader, draw_by_weight, load_text_prompts
from sfumato.errors import ConfigError, DataError, MissingDependencyError
from sfumato.models.language.load import build_byte_tokenizer
from tests.tiny_tokenizers import build_tokenizer

TOKENIZER = build_byte_tokenizer()


def config_of(tmp_path, rows, **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TextPromptDataConfig(train_path=str(path), eval_path=str(path), **options)


def load(config, split="train", tokenizer=TOKENIZER, **options):
    said = []
    prompts = load_text_prompts(config, build_prompt_template(config, tokenizer), split, log=said.append, **options)
    return prompts, said


def refusal(config, **options):
    with pytest.raises(DataError) as caught:
        load(config, **options)
    return str(caught.value)


def chatml(*messages):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages) + "<|im_start|>assistant\n"


def text_of(prompt):
    return TOKENIZER.decode(list(prompt.token_ids))


def test_texts_become_messages_and_other_columns_metadata(tmp_path):
    rows = [
        {"prompt": "hello", "answer": "4", "level": 2, "none": None},
        {"prompt": [{"role": "user", "content": "b"}]},
    ]
    (first, second), said = load(config_of(tmp_path, rows))
    assert text_of(first) == chatml(("user", "hello")) and text_of(second) == chatml(("user", "b"))
    assert first.metadata == {"answer": "4", "level": 2} and first.messages == [{"role": "user", "content": "hello"}]
    assert (first.text, second.text) == ("hello", "b")
    assert said == ["data.train_path: rows read as prompts (prompt)"]
    assert first.where == f"{tmp_path / 'rows.jsonl'}, line 1" and isinstance(first.token_ids, tuple)


def test_a_system_prompt_stands_first_where_the_row_has_none(tmp_path):
    conversation = [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}]
    prompts, _ = load(config_of(tmp_path, [{"prompt": "a"}, {"prompt": conversation}], system_prompt="Be brief."))
    assert text_of(prompts[0]) == chatml(("system", "Be brief."), ("user", "a"))
    assert text_of(prompts[1]) == chatml(("system", "own"), ("user", "b"))


def test_plain_prompts_stay_as_they_are(tmp_path):
    config = config_of(tmp_path, [{"prompt": "1+1="}], chat_template="none")
    (prompt,), _ = load(config)
    assert text_of(prompt) == "1+1=" and prompt.messages is None
    assert list(prompt.token_ids) == TOKENIZER("1+1=")["input_ids"]
    messages = config_of(tmp_path, [{"prompt": [{"role": "user", "content": "b"}]}], chat_template="none")
    assert "line 1: the prompt is a list of messages, which data.chat_template none cannot render" in refusal(messages)


def test_a_plain_prompt_begins_as_the_tokenizer_begins_texts(tmp_path):
    from tokenizers import processors

    config = config_of(tmp_path, [{"prompt": "hello"}], chat_template="none")
    tokenizer = build_tokenizer("byte_level", bos_token="<s>")
    without = load(config, tokenizer=tokenizer)[0][0].token_ids
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", tokenizer.convert_tokens_to_ids("</s>"))]
    )
    assert load(config, tokenizer=tokenizer)[0][0].token_ids == (bos, *without), "but no token that ends it"


def test_variables_and_tools_reach_the_template(tmp_path):
    text = (
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{{ messages[0].content }}|"
        "{{ mood | default('none') }}"
    )
    (tmp_path / "t.jinja").write_text(text)
    tool, other = ({"type": "function", "function": {"name": name}} for name in ("add", "sub"))
    rows = [{"prompt": "a"}, {"prompt": "b", "tools": [other]}]
    options = {"chat_template": str(tmp_path / "t.jinja"), "chat_template_options": {"mood": "glad"}}
    prompts, _ = load(config_of(tmp_path, rows, **options), tools=[tool, other])
    assert [text_of(prompt) for prompt in prompts] == ["[add][sub]a|glad", "[sub]b|glad"]
    assert [prompt.tools for prompt in prompts] == [[tool, other], [other]]
    with pytest.raises(DataError, match="line 2: its column tools offers sub, calls of which nothing would answer"):
        load(config_of(tmp_path, rows, **options), tools=[tool])


GSM = "Natalia sold 48/2 = 24 clips in May.\n#### 1,072"


def test_gsm8k(tmp_path):
    rows = [{"question": "How many?", "answer": GSM}, {"question": "b", "answer": "so #### 3, 4 or 5"}]
    (first, second), _ = load(config_of(tmp_path, rows, data_type="gsm8k"))
    assert first.text == "How many?" and first.metadata == {"answer": "1072", "solution": GSM}
    assert second.metadata["answer"] == "3, 4 or 5"
    assert "line 1: column 'answer' holds no '####'" in refusal(
        config_of(tmp_path, [{"question": "q", "answer": "5"}], data_type="gsm8k")
    )
    (whole,), _ = load(
        config_of(tmp_path, [{"question": "q", "answer": "5"}], data_type={"type": "gsm8k", "marker": ""})
    )
    assert whole.metadata["answer"] == "5"
    assert "nothing stands after" in refusal(
        config_of(tmp_path, [{"question": "q", "answer": "5 #### "}], data_type="gsm8k")
    )


def test_the_parquet_files_of_verl_and_dapo(tmp_path):
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": "Solve 1+1.", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4", "split": None},
        }
    ]
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (prompt,), _ = load(TextPromptDataConfig(train_path=str(path), eval_path=str(path), data_type="verl"))
    assert text_of(prompt) == chatml(("user", "Solve 1+1."))
    assert prompt.metadata == {
        "answer": "2",
        "data_source": "math_dapo",
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    }
    broken = config_of(tmp_path, [rows[0], {"prompt": "a", "reward_model": {"style": "x"}}], data_type="verl")
    assert re.search(r"line 2: column 'reward_model' must hold ground_truth, not \{'style': 'x'\}", refusal(broken))


def test_sharegpt(tmp_path):
    turns = [("human", "hi"), ("gpt", "hello"), ("human", "2+2?"), ("gpt", "4")]
    rows = [
        {"system": "Be kind.", "conversations": [{"from": who, "value": what} for who, what in turns], "id": 7},
        {"conversations": [{"from": "human", "value": "and now?"}]},
    ]
    (first, second), _ = load(config_of(tmp_path, rows, data_type="sharegpt"))
    said = [("system", "Be kind."), ("user", "hi"), ("assistant", "hello"), ("user", "2+2?")]
    assert text_of(first) == chatml(*said) and first.text == "2+2?"
    assert first.metadata == {"answer": "4", "id": 7} and second.metadata == {}
    only = [{"conversations": [{"from": "gpt", "value": "4"}]}]
    assert "is an answer without a prompt" in refusal(config_of(tmp_path, only, data_type="sharegpt"))


BROKEN = {
    "no column": ({"question": "x"}, "no column 'prompt'; its columns are question"),
    "empty": ({"prompt": " "}, "column 'prompt' must be a non-empty text"),
    "number": ({"prompt": 3}, "a conversation must be a list of messages"),
    "role": ({"prompt": [{"role": "boss", "content": "x"}]}, "message 1: unknown role 'boss'"),
    "content": ({"prompt": [{"role": "user", "content": ["x"]}]}, "content must be a non-empty text"),
    "as Python shows it": ({"prompt": "[{'role': 'user', 'content': 'x'}]"}, "neither a list nor its JSON text"),
    "answered": ({"prompt": [{"role": "assistant", "content": "x"}]}, "must end with a message of role user or tool"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_is_named(tmp_path, name):
    row, why = BROKEN[name]
    message = refusal(config_of(tmp_path, [{"prompt": "fine"}, row]))
    assert message.startswith(f"{tmp_path / 'rows.jsonl'}, line 2: ") and why in message


def test_a_template_that_leaves_a_message_out_is_refused(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[-1].content }}")
    config = config_of(tmp_path, [{"prompt": "a"}], chat_template=str(tmp_path / "t.jinja"), system_prompt="You are B.")
    assert "line 1: message 1 (system): the chat template leaves it out" in refusal(config)


def test_prompts_that_are_too_long(tmp_path):
    rows = [{"prompt": "x" * length} for length in (3, 50, 4, 60)]
    options = {"chat_template": "none", "max_prompt_tokens": 10}
    assert "line 2: the prompt has 50 tokens, more than data.max_prompt_tokens 10: raise it, or set" in refusal(
        config_of(tmp_path, rows, **options)
    )
    prompts, said = load(config_of(tmp_path, rows, overlong="drop", **options))
    assert [len(prompt.token_ids) for prompt in prompts] == [3, 4]
    assert said == [
        "data.train_path: rows read as prompts (prompt)",
        "data.train_path: 2 of 4 prompts are longer than data.max_prompt_tokens 10 and were left out; the first is "
        f"{tmp_path / 'rows.jsonl'}, line 2 (50 tokens)",
    ]
    long = [{"prompt": "abcdefghijklmnop"}]
    prompts, said = load(config_of(tmp_path, long, overlong="truncate_left", **options))
    assert text_of(prompts[0]) == "ghijklmnop" and "1 of 1 prompts" in said[1] and "last 10 tokens" in said[1]
    prompts, said = load(config_of(tmp_path, rows, overlong="drop", **options), split="eval", limit=2)
    assert [len(prompt.token_ids) for prompt in prompts] == [3, 4] and "1 of 3 prompts" in said[1]
    message = refusal(config_of(tmp_path, rows, overlong="drop", **options), split="eval", limit=3)
    assert "data.eval_path: has 2 usable prompts and 2 too long, but 3 are asked for (eval.num_prompts)" in message


def test_synthetic_problems_are_held_out(tmp_path):
    synthetic = {"problem": "multiply", "min_length": 1, "max_length": 2, "num_rows": 400, "held_out": 0.2}
    config = TextPromptDataConfig(synthetic=synthetic)
    train, held_out = (load(config, split, seed=3)[0] for split in ("train", "eval"))
    assert len(train) == 400 and len(held_out) == 80
    for prompt in (*train, *held_out):
        a, b = map(int, re.fullmatch(r"Multiply (\d+) by (\d+)\.", prompt.text).groups())
        assert prompt.metadata == {"answer": str(a * b), "problem": "multiply"}
        is_held_out = Problem("multiply", (str(a), str(b))).fraction() < 0.2
        assert is_held_out == (prompt in held_out)
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in held_out}
    assert load(config, seed=3)[0] == train != load(config, seed=4)[0]


REFUSED = [
    ({}, "data.train_path and data.eval_path are required, or data.synthetic"),
    ({"train_path": "a.jsonl"}, "data.train_path and data.eval_path are required"),
    ({"synthetic": {}, "train_path": "a"}, "data.train_path has no effect with data.synthetic"),
    ({"synthetic": {}, "data_type": "gsm8k"}, "data.data_type has no effect with data.synthetic"),
    ({"synthetic": {"turns": 2}}, "data.synthetic.turns must be 1"),
    ({"synthetic": {}, "chat_template": "none", "system_prompt": "x"}, "data.system_prompt has no effect with"),
    ({"synthetic": {}, "data_type": {"type": "gsm9k"}}, "unknown type 'gsm9k'"),
]


@pytest.mark.parametrize(("values", "why"), REFUSED)
def test_what_cannot_be_meant_is_refused(values, why):
    with pytest.raises(ValidationError, match=re.escape(why)):
        TextPromptDataConfig(**values)


def test_a_format_of_ones_own_and_one_whose_package_is_missing(tmp_path):
    path = f"{__name__}:Riddles"
    (prompt,), _ = load(config_of(tmp_path, [{"riddle": "What has keys?", "is": "a piano"}], data_type={"type": path}))
    assert prompt.text == "What has keys?" and prompt.metadata == {"answer": "a piano"}
    if importlib.util.find_spec("verifiers") is None:
        config = TextPromptDataConfig(data_type={"type": "verifiers", "environment": "x"})
        with pytest.raises(MissingDependencyError, match=r"pip install 'verifiers>=0\.4'"):
            load(config)


@dataclass(frozen=True)
class Riddles(PromptFormat):
    type: ClassVar[str] = "riddles"

    def read(self, row, where):
        return PromptRow(row["riddle"], {"answer": row["is"]})


def test_a_tokenizer_without_a_template_needs_one():
    with pytest.raises(ConfigError, match=r"set data\.chat_template to chatml, .*hermes or a Jinja file, or to none"):
        build_prompt_template(TextPromptDataConfig(synthetic={}), build_tokenizer())


def test_rewards_check_rows(tmp_path):
    prompts, _ = load(config_of(tmp_path, [{"prompt": "a", "answer": "1"}, {"prompt": "b"}]))

    def check(text, metadata):
        if "answer" not in metadata:
            raise DataError(f"{text} has no answer")

    with pytest.raises(DataError, match="line 2: b has no answer"):
        check_prompts(prompts, [check])


# The order


def prompts_of(count):
    config = TextPromptDataConfig(synthetic={"num_rows": count, "max_length": 4})
    return load(config)[0]


PROMPTS = prompts_of(12)


def easy_first(iteration, metadata, seed):
    assert len(metadata) == 12 and set(metadata[0]) == {"answer", "problem"}
    metadata[0].clear()  # its own matter
    return sorted(range(12), key=lambda row: (row + iteration) % 12)


def by_weight(iteration, metadata, seed):
    return np.array([1.0] * 6 + [0.0] * 6) if iteration < 100 else [0.5] * 12


def test_without_a_curriculum_the_order_is_that_of_epochs():
    loader = TextPromptLoader(PROMPTS, 4, 2, seed=5)
    epoch = [row for iteration in range(3) for row in loader.groups(iteration)]
    assert sorted(epoch) == list(range(12))
    again = TextPromptLoader(PROMPTS, 4, 2, seed=5)
    assert [again.groups(i) for i in (7, 2)] == [loader.groups(i) for i in (7, 2)]


def test_replacements_are_others_and_a_function_of_the_iteration():
    loader = TextPromptLoader(PROMPTS, 4, 2, seed=5)
    for iteration in range(6):
        result = loader.replacements(iteration, 100)
        assert sorted(result + loader.groups(iteration)) == list(range(12))
        assert TextPromptLoader(PROMPTS, 4, 2, seed=5).replacements(iteration, 3) == result[:3]
    assert loader.replacements(0, 8) != loader.replacements(3, 8)


def test_a_curriculum_of_row_numbers():
    loader = TextPromptLoader(PROMPTS, 4, 2, 5, f"{__name__}:easy_first")
    assert loader.groups(0) == [0, 1, 2, 3] and loader.groups(2) == [10, 11, 0, 1]
    assert loader.replacements(2, 3) == [2, 3, 4]


def test_a_curriculum_of_weights_draws_without_repetition():
    loader = TextPromptLoader(PROMPTS, 4, 2, 5, f"{__name__}:by_weight")
    for iteration in range(20):
        rows = loader.groups(iteration)
        assert len(set(rows)) == 4 and max(rows) < 6
        assert len(set(rows + loader.replacements(iteration, 9))) == 6, "rows of weight 0 are never taken"
        assert TextPromptLoader(PROMPTS, 4, 2, 5, f"{__name__}:by_weight").groups(iteration) == rows
    assert len({tuple(loader.groups(iteration)) for iteration in range(20)}) > 10


def test_weights_are_those_of_draws_one_after_the_other():
    """The first row follows the weights; the second those that are left."""
    weights, count = [1.0, 2.0, 0.0, 5.0], 4000
    drawn = [draw_by_weight(weights, keyed_generator(0, "test", number)) for number in range(count)]
    first = np.bincount([rows[0] for rows in drawn], minlength=4) / count
    assert first == pytest.approx([1 / 8, 2 / 8, 0, 5 / 8], abs=0.03)
    second = np.bincount([rows[1] for rows in drawn if rows[0] == 3], minlength=4) / sum(r[0] == 3 for r in drawn)
    assert second == pytest.approx([1 / 3, 2 / 3, 0, 0], abs=0.03)
    assert all(sorted(rows) == [0, 1, 3] for rows in drawn)


GIVEN = [
    ([0, 1], "gave 2 rows for iteration 3, fewer than rollout.num_prompts 4"),
    ([0, 1, 2, 12], "for iteration 3 it gave row 12, but rows are 0 to 11"),
    ([0.5] * 11, "it gave 11 weights for 12 rows"),
    ([0.5] * 11 + [float("nan")], "a weight that is negative or not finite"),
    ([-1.0] + [0.5] * 11, "a weight that is negative or not finite"),
    ([True] * 12, "must return a list of row numbers or of weights, not list"),
    ("no", "must return a list of row numbers or of weights, not str"),
    (None, "must return a list of row numbers or of weights, not NoneType"),
    ([1.0] * 3 + [0.0] * 9, "gave 3 rows for iteration 3"),
    (ZeroDivisionError("by zero"), "raised ZeroDivisionError: by zero for iteration 3"),
]
answer = []


def answers(iteration, metadata, seed):
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]


@pytest.mark.parametrize(("given", "why"), GIVEN)
def test_what_a_curriculum_may_not_return(given, why):
    answer[:] = [given]
    loader = TextPromptLoader(PROMPTS, 4, 2, 5, f"{__name__}:answers")
    with pytest.raises(ConfigError, match=re.escape(why)):
        loader.groups(3)


def test_a_curriculum_that_is_not_there():
    with pytest.raises(ConfigError, match="cannot import function 'nowhere:order'"):
        TextPromptLoader(PROMPTS, 4, 2, 5, "nowhere:order")


def test_a_function_whose_package_is_missing_says_which(tmp_path):
    (tmp_path / "order.py").write_text("import no_such_package.inside\n")
    with pytest.raises(ConfigError, match=r"install the package that has no_such_package$"):
        TextPromptLoader(PROMPTS, 4, 2, 5, f"{tmp_path}/order.py:order")


TOLD = {
    "GSM8K (question, answer)": ({"question": "hi", "answer": "so\n#### 1,200"}, "1200"),
    "verl and DAPO (prompt, reward_model.ground_truth)": (
        {"data_source": "math", "prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": "4"}},
        "4",
    ),
    "conversations (conversations or messages)": (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "4"}]},
        "4",
    ),
    "Alpaca (instruction, input, output)": ({"instruction": "hi", "input": "", "output": "4"}, "4"),
}


@pytest.mark.parametrize("name", TOLD)
def test_prompts_are_told_by_their_columns_and_said(tmp_path, name):
    row, answer = TOLD[name]
    (prompt,), said = load(config_of(tmp_path, [row]))
    assert list(prompt.token_ids) == list(load(config_of(tmp_path, [{"prompt": "hi"}]))[0][0].token_ids)
    assert prompt.metadata["answer"] == answer and said == [f"data.train_path: rows read as {name}"]


def test_messages_as_a_text_are_messages(tmp_path):
    """A .csv file holds them so."""
    (written,), _ = load(config_of(tmp_path, [{"prompt": json.dumps([{"role": "user", "content": "hi"}])}]))
    (prompt,), _ = load(config_of(tmp_path, [{"prompt": "hi"}]))
    assert written.token_ids == prompt.token_ids


def test_prompts_that_were_rendered_before_are_said(tmp_path):
    """Rendered once more they are questions about a conversation, whose turns end within a message."""
    rendered = chatml(("user", "hello"))
    rows = [{"prompt": "hi", "note": rendered}, {"prompt": rendered}]
    (_, twice), said = load(config_of(tmp_path, rows))
    assert text_of(twice) == chatml(("user", rendered)) and len(said) == 2
    assert said[1].startswith("data.train_path: 1 of the rows looked at, the first is ") and "line 2" in said[1]
    assert "(<|im_end|>, <|im_start|>)" in said[1] and said[1].endswith("need data.chat_template none")
    (_, once), said = load(config_of(tmp_path, rows, chat_template="none"))
    assert text_of(once) == rendered and len(said) == 1


def test_a_prompt_of_no_format_is_refused_with_the_formats_that_there_are(tmp_path):
    said = refusal(config_of(tmp_path, [{"text": "hi"}]))
    assert "no column 'prompt'; its columns are text." in said and all(name in said for name in TOLD)


def test_what_rows_are_is_told_from_rows_that_are_used(tmp_path):
    config = config_of(tmp_path, [{"prompt": "hi"}])
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write("{broken\n")
    prompts, said = load(config, split="eval", limit=1)
    assert len(prompts) == 1 and said == ["data.eval_path: rows read as prompts (prompt)"]
