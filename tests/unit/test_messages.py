"""Messages in the forms of published data, and what of them reaches a chat template."""

import datetime
import json

import pytest

from sfumato.config.text_data import TextDataConfig
from sfumato.data.files.arrow_values import StructValue
from sfumato.data.text.chat import build_chat_template
from sfumato.data.text.format import build_transform
from sfumato.data.text.messages import read_messages, read_tools
from sfumato.errors import DataError
from tests.tiny_tokenizers import build_tokenizer

WHERE = "f.jsonl, line 3"
ASK = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
ARGUMENTS = {"city": "Rome", "unit": None}
CALL = {"type": "function", "function": {"name": "look", "arguments": ARGUMENTS}}


def calls_of(message):
    return read_messages([ASK, message], WHERE)[1]["tool_calls"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "tool_calls": [{"name": "look", "arguments": ARGUMENTS}]},
        {"role": "assistant", "tool_calls": [{"name": "look", "arguments": json.dumps(ARGUMENTS)}]},
        {"role": "assistant", "tool_calls": {"name": "look", "parameters": ARGUMENTS}},
        {"role": "assistant", "function_call": {"name": "look", "arguments": json.dumps(ARGUMENTS)}},
        {"from": "function_call", "value": json.dumps({"name": "look", "arguments": ARGUMENTS})},
        {"role": "tool_call", "content": json.dumps({"name": "look", "arguments": ARGUMENTS})},
    ],
)
def test_calls_of_every_form_become_one(message):
    assert calls_of(message) == [CALL]
    assert read_messages([ASK, message], WHERE)[1]["content"] == ""


def test_calls_one_after_the_other_are_made_together():
    calls = [{"from": "function_call", "value": json.dumps({"name": name, "arguments": {}})} for name in "fg"]
    messages = read_messages([{"from": "human", "value": "q"}, *calls, {"from": "observation", "value": "r"}], WHERE)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert [call["function"]["name"] for call in messages[1]["tool_calls"]] == ["f", "g"]


def test_a_call_without_arguments_has_none():
    for arguments in ({}, {"arguments": None}, {"arguments": ""}, {"arguments": "{}"}):
        (call,) = calls_of({"role": "assistant", "tool_calls": [{"function": {"name": "now", **arguments}}]})
        assert call["function"] == {"name": "now", "arguments": {}}


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"name": "f", "arguments": "{city: Rome}"}, "message 2: arguments of f: not valid JSON"),
        ({"name": "f", "arguments": "[1]"}, "arguments of f must be a JSON object"),
        ({"function": {"arguments": {}}}, "must have a name"),
        ("f()", "tool_calls must be a list"),
        (
            {"name": "f", "arguments": {"at": datetime.date(2024, 1, 2)}},
            "arguments of f: Object of type date is not JSON",
        ),
    ],
)
def test_a_call_that_cannot_be_read_is_named(call, reason):
    with pytest.raises(DataError, match="line 3: message 2") as caught:
        calls_of({"role": "assistant", "tool_calls": [call]})
    assert reason in str(caught.value)


def test_nulls_of_a_person_stay_and_those_of_a_table_go():
    function = {"name": "f", "parameters": {"unit": {"default": None, "enum": ["c", None]}}}
    tool = {"type": "function", "function": function}
    assert read_tools({"tools": [tool]}, WHERE) == [tool] == read_tools({"tools": json.dumps([tool])}, WHERE)
    for nothing in (None, "", " \n", [], "[]", "null"):
        assert read_tools({"tools": nothing}, WHERE) is None is read_tools({"functions": nothing}, WHERE)
    struct = StructValue(city="Rome", unit=None)
    (call,) = calls_of({"role": "assistant", "tool_calls": [{"name": "look", "arguments": struct}]})
    assert call["function"]["arguments"] == {"city": "Rome"}


@pytest.mark.parametrize("name", ["Human", " human ", "USER", "user"])
@pytest.mark.parametrize("answerer", ["GPT", "bot", "model", "Assistant "])
def test_roles_are_read_by_their_names(name, answerer):
    messages = read_messages([{"from": name, "value": "q"}, {"from": answerer, "value": "a"}], WHERE)
    assert messages == [ASK, ANSWER]


@pytest.mark.parametrize(
    ("keys", "loss_mask"),
    [
        ({"loss": False}, 0),
        ({"train": 1}, 1),
        ({"weight": 0.0}, 0),
        ({"trainable": True}, 1),
        ({"train_on_turn": False}, 0),
        ({"masked": True}, 0),
        ({"masked": 0, "weight": 1}, 1),
        ({"weight": None}, None),
    ],
)
def test_keys_that_say_whether_a_message_is_learned(keys, loss_mask):
    message = read_messages([ASK, ANSWER | keys], WHERE)[1]
    assert message == (ANSWER if loss_mask is None else ANSWER | {"loss_mask": loss_mask})


@pytest.mark.parametrize("keys", [{"weight": 0.5}, {"loss": "no"}, {"loss": 1, "masked": 1}, {"train_detail": [1]}])
def test_other_values_of_these_keys_are_refused(keys):
    with pytest.raises(DataError, match="message 2"):
        read_messages([ASK, ANSWER | keys], WHERE)


def test_the_column_system_is_the_first_message():
    first = {"role": "system", "content": "s"}
    assert (
        read_messages([ASK, ANSWER], WHERE, "s")
        == [first, ASK, ANSWER]
        == read_messages([first, ASK, ANSWER], WHERE, "s")
    )
    assert read_messages([ASK, ANSWER], WHERE, " ") == [ASK, ANSWER]
    with pytest.raises(DataError, match="differ"):
        read_messages([first, ASK], WHERE, "t")


def test_lists_by_name_are_turned_around():
    turned = {"from": ["human", "gpt"], "value": ["q", "a"]}
    assert read_messages(turned, WHERE) == [ASK, ANSWER]


TEMPLATE = (
    "{{% for m in messages %}}{{{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}}}"
    "{{% for c in m.tool_calls or [] %}}{{{{ {call} }}}}{{% endfor %}}{{{{ '<|im_end|>\n' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}"
)


def learned(tmp_path, template, messages, **row):
    path = tmp_path / "t.jinja"
    path.write_text(template)
    tokenizer = build_tokenizer()
    transform = build_transform(TextDataConfig(train_path="x", chat_template=str(path)), tokenizer)
    (sample,) = transform({"messages": messages, **row}, WHERE)
    (document,) = sample.documents
    whole = tokenizer.decode(document.input_ids)
    return whole, tokenizer.decode(document.input_ids[document.loss_mask])


@pytest.mark.parametrize("call", ["c.function.arguments | tojson", "'json ' + c.function.arguments"])
@pytest.mark.parametrize("arguments", [{"unit": None}, '{"unit": null}'])
def test_arguments_are_escaped_once_by_either_kind_of_template(tmp_path, call, arguments):
    message = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
    _, text = learned(tmp_path, TEMPLATE.format(call="c.function.name + " + call), [ASK, message])
    assert text == f"f{'json ' if 'json ' in call else ''}" + '{"unit": null}<|im_end|>'


def test_what_public_sets_leave_empty_is_taken(tmp_path):
    call = {"role": "assistant", "content": "\n\n", "tool_calls": [{"name": "now"}]}
    messages = [{"role": "system", "content": ""}, ASK, call, {"role": "tool", "content": ""}, ANSWER]
    whole, text = learned(tmp_path, TEMPLATE.format(call="c.function.name"), messages)
    assert whole.startswith("<|im_start|>system\n<|im_end|>") and text == "\n\nnow<|im_end|>a<|im_end|>"
    for empty in ({**ASK, "content": " "}, {**ANSWER, "content": ""}):
        with pytest.raises(DataError, match="must be a non-empty text"):
            learned(tmp_path, TEMPLATE.format(call="c.function.name"), [empty, ASK, ANSWER])


def test_what_a_row_says_besides_is_learned_from(tmp_path):
    messages = [ASK, ANSWER | {"weight": 0}, ASK, {**ANSWER, "content": "b"}]
    whole, text = learned(tmp_path, TEMPLATE.format(call="''"), messages, system="be kind")
    assert "system\nbe kind" in whole and text == "b<|im_end|>"


def test_a_named_template_begins_as_the_tokenizer_does(tmp_path):
    from tokenizers import processors

    plain = build_tokenizer()
    plain.bos_token = "<s>"
    assert not build_chat_template("chatml", plain).render([ASK], WHERE).startswith("<s>")
    bos = plain.convert_tokens_to_ids("<s>")
    plain.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
    assert build_chat_template("chatml", plain).render([ASK], WHERE).startswith("<s><|im_start|>")
    transform = build_transform(TextDataConfig(train_path="x", data_type="plaintext"), plain)
    for text in ("a b", "<s>a b"):
        (sample,) = transform({"text": text}, WHERE)
        assert sample.documents[0].input_ids.tolist() == [*plain("a b")["input_ids"], plain.eos_token_id]


def test_functions_are_tools_of_an_older_form():
    add = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    wanted = [{"type": "function", "function": add}]
    for functions in ([add], add, json.dumps([add])):
        assert read_tools({"functions": functions}, "row 1") == wanted
    newer = {"type": "function", "function": {"name": "newer"}}
    assert read_tools({"functions": [add], "tools": [newer]}, "row 1") == [newer]
    for tool in (add, {"type": "function", **add}, {"function": add}):
        assert read_tools({"tools": [tool]}, "row 1") == wanted
    search = {"type": "web_search", "name": "search"}
    assert read_tools({"tools": [search]}, "row 1") == [search]
    assert read_tools({"functions": []}, "row 1") is None is read_tools({"functions": None}, "row 1")
    for functions in ([{"parameters": {}}], [3], "[1, 2]"):
        with pytest.raises(DataError, match="row 1: column 'functions' must be a list of descriptions with a name"):
            read_tools({"functions": functions}, "row 1")
