"""``data.chat_template_options``: what is rendered is what transformers renders with the same variables."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from sfumato.commands.check_config import check_config
from sfumato.config.text_data import TextDataConfig
from sfumato.data.files.sources import open_sources
from sfumato.data.text.chat import build_chat_template
from sfumato.data.text.format import build_transform
from sfumato.data.text.notes import describe_text_data
from sfumato.errors import ConfigError, DataError
from sfumato.evaluation.options import GenerationOptions
from sfumato.evaluation.sources import find_sources
from sfumato.evaluation.texts import text_models
from tests.question_answer import QuestionAnswer
from tests.tiny import run_task_here, tiny_text_config
from tests.tiny_tokenizers import build_tokenizer
from tests.unit.test_chat import CHATML, CONTENTS, MARKED, THINKING, assistant, user

# as Qwen3's own, which closes the thoughts in the prompt
QWEN3 = THINKING.replace(
    "{{- '<|im_start|>assistant\n' }}{%- endif %}",
    """{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}""",
)
assert "enable_thinking" in QWEN3

SHOWN = "{{ a | default('-') }}{{ b | default('-') }}{% for m in messages %}{{ m.content }}{% endfor %}"
BEGINNINGS = {
    "as it is": "",
    "line breaks": "\n\n",
    "spaces before a tag": "   {% if true %}x{% endif %}\n",
    "spaces before a text": "   x",
    "a comment": "  {# a comment #}\n  ",
    "a macro": "{% macro show() %}{{ a | default('-') }}{% endmacro %}\n{{ show() }}",
    "a loop": "{% for _ in 'xy' %}{{ a | default('-') }}{% endfor %}",
    "set again": "{% set b = b | default('c') %}",
}
VALUES = {
    "a": [False, 1, -2.5, 1e20, 'it\'s "both" \\ {{ x }} %} \n é 😀', None, [1, "x", None], {"k": [True, {"l": "m"}]}],
    "b": ["b", 0],
}


def render(tokenizer, messages, template, **variables):
    """As transformers does."""
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **variables)


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_a_template_with_options_renders_as_transformers_does_with_these_variables(tmp_path, beginning):
    tokenizer = build_tokenizer()
    text = BEGINNINGS[beginning] + SHOWN
    (tmp_path / "t.jinja").write_text(text, encoding="utf-8")
    choices = [{"a": value} for value in VALUES["a"]] + [{"a": "x", "b": value} for value in VALUES["b"]]
    for options in choices:
        template = build_chat_template(str(tmp_path / "t.jinja"), tokenizer, options)
        for messages in ([user(content)] for content in CONTENTS):
            expected = render(tokenizer, messages, text, **options)
            assert template.render(messages, "row", prompt=False) == expected, options
            assert render(tokenizer, messages, template.text) == expected, "and for whoever loads an export"
        later = render(tokenizer, [user("q")], template.text, a="another")
        assert later == render(tokenizer, [user("q")], text, **options | {"a": "another"}), (
            "who says otherwise, is followed"
        )


def config_of(tmp_path, rows, template, **values):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "t.jinja").write_text(template, encoding="utf-8")
    return TextDataConfig(train_path=str(tmp_path / "rows.jsonl"), chat_template=str(tmp_path / "t.jinja"), **values)


ANSWERED = [user("q"), assistant("a")]
ROWS = {
    "conversation": {"messages": ANSWERED},
    "preference": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "preference_margin": {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1.0},
    "unpaired": {"prompt": "q", "completion": "a", "label": True},
}


@pytest.mark.parametrize("data_type", ROWS)
@pytest.mark.parametrize("marked", [False, True])
def test_what_is_learned_begins_where_the_prompt_with_these_options_ends(tmp_path, data_type, marked):
    tokenizer = build_tokenizer("byte_level")
    template = QWEN3
    if marked:  # a template with generation blocks writes the empty thoughts itself
        empty = (
            "{%- if enable_thinking is false and m.role == 'assistant' %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
        )
        template = MARKED.replace("{%- if m.role == 'assistant' %}", empty + "{%- if m.role == 'assistant' %}")
    fingerprints = set()
    for options in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        config = config_of(tmp_path, [ROWS[data_type]], template, data_type=data_type, chat_template_options=options)
        transform = build_transform(config, tokenizer)
        fingerprints.add(transform.fingerprint)
        document = transform(dict(ROWS[data_type]), "row")[0].documents[0]
        expected = render(tokenizer, ANSWERED, template, **options).rstrip("\n")
        assert tokenizer.decode(document.input_ids).rstrip("\n") == expected
        prompt = render(tokenizer, ANSWERED[:1], template, add_generation_prompt=True, **options)
        if marked:
            prompt = expected.removesuffix("a<|im_end|>")
        learned = tokenizer.decode(document.input_ids[document.loss_mask])
        assert learned == expected.removeprefix(prompt)
        assert learned == (
            "a<|im_end|>" if marked or options == {"enable_thinking": False} else "<think>\n\n</think>\n\na<|im_end|>"
        )
    assert len(fingerprints) == 3


def test_the_steps_of_a_process_are_rendered_with_options(tmp_path):
    tokenizer = build_tokenizer("byte_level")
    row = {"prompt": "q", "steps": ["one", "two"], "labels": [1, 0]}
    template = "{{- mood | default('') }}" + CHATML
    config = config_of(tmp_path, [row], template, data_type="process", chat_template_options={"mood": "glad"})
    (sample,) = build_transform(config, tokenizer)(dict(row), "row")
    expected = render(tokenizer, [user("q"), assistant("one\n\ntwo")], template, mood="glad")
    assert tokenizer.decode(sample.documents[0].input_ids) == expected and "glad" in expected


def test_a_run_its_chat_and_its_export_have_the_options(tmp_path):
    rows = [{"messages": [user(f"q{index}"), assistant("a")]} for index in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.jinja").write_text(QWEN3)
    data = {
        "train_path": str(tmp_path / "rows.jsonl"),
        "eval_path": str(tmp_path / "rows.jsonl"),
        "synthetic": None,
        "data_type": "conversation",
        "chat_template": str(tmp_path / "t.jinja"),
        "chat_template_options": {"enable_thinking": False},
    }
    config = tiny_text_config(tmp_path / "run", train={"max_steps": 1}, data=data)
    run = run_task_here("train_text", config)
    line = "the chat template is rendered with enable_thinking False"
    assert line in (run / "log.txt").read_text()
    assert any(line in answer for answer in check_config(run / "config.yaml").data.answers)
    expected = render(build_tokenizer(), [user("hi")], QWEN3, add_generation_prompt=True, enable_thinking=False)
    assert expected.endswith("</think>\n\n")
    for source in (run, run / "hf_ckpt"):
        ((_, model),) = text_models(find_sources([str(source)], False, print), GenerationOptions())
        (prompt,) = model.prompts_of([{"prompt": "hi"}])
        assert model.template.decode(prompt.token_ids, stop=(), is_cut=False) == expected
        if importlib.util.find_spec("lm_eval") is not None:
            from sfumato.evaluation.harness_model import HarnessModel

            assert HarnessModel(model).apply_chat_template([user("hi")]) == expected
    exported = AutoTokenizer.from_pretrained(run / "hf_ckpt")
    assert exported.apply_chat_template([user("hi")], tokenize=False, add_generation_prompt=True) == expected
    thinking = exported.apply_chat_template(
        [user("hi")], tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    assert thinking == expected.removesuffix("<think>\n\n</think>\n\n")


def test_a_tokenizer_with_several_templates_exports_the_options_in_those_that_were_used(tmp_path):
    tokenizer = build_tokenizer()
    by_name = {"default": "d" + SHOWN, "tool_use": "t" + SHOWN + "{{ tools[0].function.name }}", "rag": "r" + SHOWN}
    tokenizer.chat_template = dict(by_name)
    build_chat_template(None, tokenizer).adopt()
    assert tokenizer.chat_template == by_name
    build_chat_template(None, tokenizer, {"a": "x"}).adopt()
    adopted = dict(tokenizer.chat_template)
    assert adopted["rag"] == by_name["rag"]
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    for name, tools in (("default", None), ("tool_use", [tool])):
        messages = [user("q")]
        mine = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        assert mine == render(tokenizer, messages, by_name[name], tools=tools, a="x") and "x" in mine
    build_chat_template(None, tokenizer, {"a": "x"}).adopt()
    assert tokenizer.chat_template == adopted, "a run that goes on puts nothing in front again"


REFUSED = [
    ({"c": 1}, "the chat template has no variable 'c'; its variables are a, b$"),
    ({"not a name": 1}, "the chat template has no variable 'not a name'"),
    ({"eos_token": "x"}, "eos_token is no variable of its own of a chat template"),
    ({"range": 1}, "range is no variable of its own"),
    ({"tools": []}, "tools is no variable of its own"),
    ({"a": float("nan")}, "data.chat_template_options.a: nan is no value of JSON"),
    ({"a": {1, 2}}, "is no value of JSON"),
]


@pytest.mark.parametrize(("options", "why"), REFUSED)
def test_options_without_effect_are_refused(tmp_path, options, why):
    (tmp_path / "t.jinja").write_text(SHOWN)
    with pytest.raises(ConfigError, match=why):
        build_chat_template(str(tmp_path / "t.jinja"), build_tokenizer(), options)


@dataclass(frozen=True)
class NoTemplate(QuestionAnswer):
    type: ClassVar[str] = "no_template"


def test_formats_that_make_no_use_of_options_refuse_them():
    with pytest.raises(ValidationError, match=r"data\.chat_template_options has no effect with data\.data_type plain"):
        TextDataConfig(train_path="a.txt", data_type="plaintext", chat_template_options={"a": 1})
    config = TextDataConfig(train_path="a.jsonl", data_type=f"{__name__}:NoTemplate", chat_template_options={"a": 1})
    with pytest.raises(ConfigError, match="the format no_template does not give them to its chat template"):
        build_transform(config, build_tokenizer())


@pytest.mark.parametrize(
    ("data_type", "row"),
    [
        ("conversation", {"messages": [user("q"), assistant("a")]}),
        ("preference", {"prompt": "q", "chosen": "a", "rejected": "b"}),
        ("unpaired", {"messages": [user("q"), assistant("a")], "label": True}),
    ],
)
def test_a_row_has_values_of_its_own_in_its_column(tmp_path, data_type, row):
    options = {"enable_thinking": False, "xml_tools": [], "custom_instructions": ""}  # as all rows of SmolTalk 2
    column = "chat_template_kwargs"
    data = config_of(tmp_path, [row | {column: options}], QWEN3, data_type=data_type)
    tokenizer = build_tokenizer()
    transform = build_transform(data, tokenizer)
    for value in (options, json.dumps(options)):
        (sample,) = transform(row | {column: value}, "row 1")
        document = sample.documents[0]
        prompt = render(tokenizer, [user("q")], QWEN3, add_generation_prompt=True, enable_thinking=False)
        assert tokenizer.decode(document.input_ids[~document.loss_mask]).startswith(prompt)
    for value, reason in (([1], "must be a mapping"), ({"xml_tools": ["f"]}, "has no variable 'xml_tools'")):
        with pytest.raises(DataError, match=f"row 1.*{reason}"):
            transform(row | {column: value}, "row 1")
    lines = describe_text_data(data, open_sources(data), None, transform, 1)
    assert not any("not read" in line for line in lines)
