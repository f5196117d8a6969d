"""How answers end: what folders, tokenizers and chat templates say, and what of it is learned."""

import copy
import datetime
import json
import pickle
import re

import pytest

from sfumato.data.text.answer_end import facts_of, plain_answer_end, tokens_without_text
from sfumato.data.text.chat import build_chat_template
from sfumato.data.text.format import fingerprint_of
from sfumato.data.text.generation_blocks import GENERATION
from sfumato.data.text.prompt_template import PromptTemplate
from sfumato.errors import ConfigError, DataError
from tests import model_folders
from tests.model_folders import FOLDERS, published_templates
from tests.tiny_tokenizers import build_tokenizer

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def tokenizer_of(name, folder=None, template=None):
    """The tokenizer of a folder with its generation_config.json, or without one."""
    tokenizer = model_folders.build_tokenizer(name, template)
    if folder is not None:
        ends = tokenizer.convert_tokens_to_ids(list(FOLDERS[name].ends))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        facts_of(tokenizer).model_folder = folder
    return tokenizer


def learned(tokenizer, encoded):
    ids, loss_mask = encoded
    return tokenizer.decode(ids[loss_mask].tolist(), clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", FOLDERS)
def test_answers_end_where_the_published_model_ends(name, tmp_path):
    tokenizer, about = tokenizer_of(name, tmp_path), FOLDERS[name]
    end = build_chat_template(None, tokenizer).answer_end
    assert end.taught.text == about.taught
    assert set(end.stop_token_ids) == set(tokenizer.convert_tokens_to_ids([*about.ends, about.eos]))
    assert list(end.stop_token_ids) == sorted(end.stop_token_ids)
    said = " ".join(end.describe())
    assert about.taught in said and "generation_config.json" in said


@pytest.mark.parametrize("name", FOLDERS)
def test_the_last_answer_learns_its_end_and_no_more(name, tmp_path):
    tokenizer, about = tokenizer_of(name, tmp_path), FOLDERS[name]
    template = build_chat_template(None, tokenizer)
    encoded = template.encode([user("who?"), assistant("me")], "row")
    assert len(encoded) == 1
    assert learned(tokenizer, encoded[0]).endswith(f"me{about.taught}")
    assert learned(tokenizer, encoded[0]).count(about.taught) == 1


@pytest.mark.parametrize("name", FOLDERS)
def test_every_answer_of_a_conversation_learns_the_end(name, tmp_path):
    tokenizer, taught = tokenizer_of(name, tmp_path), FOLDERS[name].taught
    messages = [user("a"), assistant("first"), user("b"), assistant("second"), user("c"), assistant("third")]
    encoded = build_chat_template(None, tokenizer).encode(messages, "row")
    whole = "".join(learned(tokenizer, encoding) for encoding in encoded)
    for answer in ("first", "second", "third"):
        assert f"{answer}{taught}" in whole
    assert len(encoded) == (3 if name == "gpt_oss" else 1)  # it ends earlier answers with <|end|>, as it shows history


def test_glm_learns_the_marker_that_follows_an_answer_and_after_a_call_the_other(tmp_path):
    tokenizer = tokenizer_of("glm4_5", tmp_path)
    template = build_chat_template(None, tokenizer)
    assert template.answer_end.taught_after_call.text == "<|observation|>"
    called = [user("look"), assistant("", tool_calls=[CALL])]
    result = {"role": "tool", "name": "look", "content": "seen"}
    for messages in ([*called, result, assistant("so")], called):
        ((ids, loss_mask),) = template.encode(messages, "row")
        text = learned(tokenizer, (ids, loss_mask))
        assert "</tool_call><|observation|>" in text
        assert text.endswith("so<|user|>" if len(messages) > 2 else "<|observation|>")
        assert tokenizer.decode(ids.tolist()).count("<|observation|>") == 1
    asked = [user("a"), assistant("x"), {"role": "system", "content": "s"}, user("b"), assistant("y")]
    encoded = template.encode(asked, "row")  # <|system|> is no end: the first answer gets one in a text of its own
    assert [learned(tokenizer, encoding) for encoding in encoded] == ["x<|user|>", "y<|user|>"]


def test_a_reward_model_is_given_conversations_as_the_template_writes_them(tmp_path):
    tokenizer = tokenizer_of("glm4_5", tmp_path)
    facts_of(tokenizer).appends_end = False
    ((ids, _),) = build_chat_template(None, tokenizer).encode([user("a"), assistant("x")], "row")
    messages = [user("a"), assistant("x")]
    assert ids.tolist() == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


def test_without_a_generation_config_the_template_and_the_tokenizer_say_it(tmp_path):
    end = build_chat_template(None, tokenizer_of("gemma3")).answer_end
    assert [token.text for token in end.tokens] == ["<eos>", "<end_of_turn>"]
    end = build_chat_template(None, tokenizer_of("phi4_mini")).answer_end
    assert end.taught.text == "<|endoftext|>", "where transformers' generate ends by itself"
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [4, 1]}}))
    tokenizer = model_folders.build_tokenizer("gemma3")
    facts_of(tokenizer).model_folder = tmp_path
    assert [str(token) for token in plain_answer_end(tokenizer).tokens] == ["<eos> (1)", "<end_of_turn> (4)"]


TURNS = "{% for m in messages %}{% if m.role == 'assistant' %}ANSWER{% else %}QUESTION{% endif %}{% endfor %}"
OTHERS = {
    "mistral": ("[INST] {{ m.content }}[/INST]", " {{ m.content }}</s>", "", "</s>", " x</s>"),
    "command-r7b": (
        "<|START_OF_TURN|><|USER|>{{ m.content }}<|END_OF_TURN|>",
        "<|START_OF_TURN|><|CHATBOT|><|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|><|END_OF_TURN|>",
        "<|START_OF_TURN|><|CHATBOT|><|START_RESPONSE|>",
        "<|END_OF_TURN|>",
        "x<|END_RESPONSE|><|END_OF_TURN|>",
    ),
    "kimi": (
        "<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>{{ m.content }}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>",
        "[EOS]",
        "x<|im_end|>",
    ),
    "granite": (
        "<|start_of_role|>user<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
        "<|end_of_text|>",
        "x<|end_of_text|>",
    ),
    "smollm3": (
        "<|im_start|>user\n{{ m.content }}<|im_end|>\n",
        "{% generation %}{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}{% endgeneration %}",
        "<|im_start|>assistant\n",
        "<|im_end|>",
        "<|im_start|>assistant\nx<|im_end|>\n",
    ),
    "llama2": ("<s>[INST] {{ m.content }} [/INST]", " {{ m.content }} </s>", "", "</s>", " x </s>"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_templates_of_other_families(name, tmp_path):
    question, answer, prompt, eos, expected = OTHERS[name]
    path, tokenizer = tmp_path / f"{name}.jinja", build_tokenizer()
    text = TURNS.replace("QUESTION", question).replace("ANSWER", answer)
    path.write_text(f"{text}{{% if add_generation_prompt %}}{{{{ {prompt!r} }}}}{{% endif %}}", encoding="utf-8")
    specials = sorted({eos, *re.findall(r"<\|[A-Za-z_]+\|>|\[/?INST\]|</?s>", text)})
    tokenizer.add_special_tokens({"eos_token": eos, "additional_special_tokens": specials})
    encoded = build_chat_template(str(path), tokenizer).encode([user("a"), assistant("x"), user("b")], "row")
    assert [learned(tokenizer, encoding) for encoding in encoded] == [expected]


def test_an_end_that_is_an_added_token_and_no_special_one(tmp_path):
    tokenizer = build_tokenizer(chat_template="{% for m in messages %}{{ m.content + '[STOP]\n' }}{% endfor %}")
    tokenizer.add_tokens(["[STOP]"])
    template = build_chat_template(None, tokenizer)
    assert template.answer_end.taught.text == "[STOP]"
    prompts = PromptTemplate(tokenizer, template)
    ids = tokenizer("yes[STOP]", add_special_tokens=False)["input_ids"]
    assert prompts.decode(ids) == "yes", "rewards do not see it"
    ((ids, loss_mask),) = template.encode([user("a "), assistant("yes")], "row")
    assert learned(tokenizer, (ids, loss_mask)) == "yes[STOP]"


@pytest.mark.parametrize("name", ["chatml", "hermes"])
def test_a_base_model_learns_the_end_of_chatml_beside_that_of_texts(name):
    end = build_chat_template(name, build_tokenizer()).answer_end
    assert [token.text for token in end.tokens] == ["<|endoftext|>", "<|im_end|>"]
    assert end.taught.text == "<|im_end|>"


def test_a_template_that_ends_answers_with_plain_text_learns_the_end_of_a_text(tmp_path):
    path = tmp_path / "alpaca.jinja"
    path.write_text("{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}{% endfor %}")
    path.write_text(path.read_text() + "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}")
    tokenizer = build_tokenizer()
    template = build_chat_template(str(path), tokenizer)
    encoded = template.encode([user("a"), assistant("x"), user("b"), assistant("y")], "row")
    assert [learned(tokenizer, encoding) for encoding in encoded] == ["x\n\n<|endoftext|>", "y\n\n<|endoftext|>"]
    assert "appends the end of a text" in template.answer_end.describe()[0]


def test_parts_that_models_that_see_are_shown_are_asked_too(tmp_path):
    path = tmp_path / "parts.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.role }}: {% for p in m.content %}{{ p.text }}{% endfor %}</s>\n{% endfor %}"
    )
    assert build_chat_template(str(path), build_tokenizer()).answer_end.taught.text == "</s>"


def test_numbers_that_end_nothing_in_this_tokenizer_are_left_out_and_said(tmp_path):
    tokenizer = tokenizer_of("qwen3")
    facts_of(tokenizer).model_folder = tmp_path
    said = {"eos_token_id": [2, 40, 99999], "stop_strings": ["Q:"]}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    end = build_chat_template(None, tokenizer).answer_end
    assert end.stop_token_ids == (2,)
    notes = " ".join(end.describe())
    assert "stop_strings ['Q:'], which end an answer here as rollout.stop alone" in notes
    assert "99999 as the end of an answer, which the tokenizer has not" in notes
    assert f"40 as the end of an answer, which is {tokenizer.convert_ids_to_tokens(40)!r}" in notes


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"eos_token_id": "2"}', "must be a token's number"), ('{"eos_token_id": [true]}', "must be a token's number"),
     ("{", "cannot be read"), ("[1]", "not a JSON object")],
)  # fmt: skip
def test_a_broken_file_is_named(tmp_path, text, message):
    tokenizer = tokenizer_of("qwen3")
    facts_of(tokenizer).model_folder = tmp_path
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"generation_config\.json: .*{message}"):
        build_chat_template(None, tokenizer)


def marked(tmp_path, block, after=""):
    path = tmp_path / "marked.jinja"
    path.write_text(
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}"
        + block
        + "{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}"
        + after
        + "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    )
    return build_chat_template(str(path), build_tokenizer())


@pytest.mark.parametrize(
    "block",
    ["{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}",
     "{% generation %}{{ m.content }}{% endgeneration %}\n<|im_end|>\n",
     "{% generation %}{{ m.content + ('<|im_end|>' if loop.last else '') }}{% endgeneration %}"
     "{{ '' if loop.last else '<|im_end|>' }}"],
)  # fmt: skip
def test_blocks_that_leave_the_end_outside_are_refused(tmp_path, block):
    with pytest.raises(ConfigError, match=r"marked\.jinja: its generation block leaves out <\|im_end\|>.*endgenerat"):
        marked(tmp_path, block)


def test_blocks_without_any_end_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"writes nothing after an answer that ends it.*<\|endoftext\|>"):
        marked(tmp_path, "{% generation %}{{ m.content }}{% endgeneration %}")


@pytest.mark.parametrize(
    "block",
    ["{{ m.content[:5] }}{% generation %}{{ m.content[5:] + '<|im_end|>' }}{% endgeneration %}",
     "{% generation %}{{ m.content[:5] }}{% endgeneration %}{{ m.content[5:] }}"
     "{% generation %}{{ '<|im_end|>' }}{% endgeneration %}"],
)  # fmt: skip
def test_blocks_that_leave_a_part_of_the_answer_outside_are_refused(tmp_path, block):
    with pytest.raises(ConfigError, match=r"leave out \(a part of\) what the assistant says"):
        marked(tmp_path, block)


def test_a_row_of_which_a_block_leaves_a_part_outside_is_named(tmp_path):
    long = "{% generation %}{{ m.content[:60] }}{% endgeneration %}{{ m.content[60:] }}"
    long += "{% generation %}{{ '<|im_end|>' }}{% endgeneration %}"
    template = marked(tmp_path, long)
    assert template.encode([user("a"), assistant("short")], "row")
    with pytest.raises(DataError, match=r"^row 3: message 2 \(assistant\): the generation blocks .* leave out some"):
        template.encode([user("a"), assistant("word " * 20)], "row 3")


def test_blocks_around_the_header_and_several_in_an_answer_are_taken(tmp_path):
    template = marked(tmp_path, "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}")
    ((ids, loss_mask),) = template.encode([user("a"), assistant("x"), user("b"), assistant("y")], "row")
    assert learned(build_tokenizer(), (ids, loss_mask)) == "x<|im_end|>y<|im_end|>"
    several = "{% generation %}{{ m.content }}{% endgeneration %}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}"
    assert marked(tmp_path, several).encode([user("a"), assistant("x")], "row")


def test_the_date_of_a_template_is_that_of_the_run(tmp_path):
    tokenizer = tokenizer_of("gpt_oss", tmp_path)
    facts_of(tokenizer).date = datetime.date(2024, 2, 29)
    template = build_chat_template(None, tokenizer)
    text = template.render([user("hi")], "row")
    assert "first start, 2024-02-29" in template.answer_end.describe()[-1]
    assert "Current date: 2024-02-29" in text and "strftime_now" in tokenizer.chat_template
    facts_of(tokenizer).date = None
    today = build_chat_template(None, tokenizer).render([user("hi")], "row")
    assert today.replace(f"{datetime.date.today():%Y-%m-%d}", "2024-02-29") == text


@pytest.mark.parametrize(
    ("call", "shown"),
    [("strftime_now('%d %b %Y')", "05 Mar 2025"), ('strftime_now( format="%H:%M o\'clock" )', "00:00 o'clock"),
     ("(strftime_now('%Y') if strftime_now is defined else 'x')", "2025")],
)  # fmt: skip
def test_forms_of_the_date(tmp_path, call, shown):
    path, tokenizer = tmp_path / "dated.jinja", build_tokenizer()
    path.write_text("{{ " + call + " }}{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    facts_of(tokenizer).date = datetime.date(2025, 3, 5)
    assert build_chat_template(str(path), tokenizer).render([user("hi")], "row") == f"{shown}hi</s>"


def test_a_date_whose_form_is_not_known_is_refused(tmp_path):
    path = tmp_path / "dated.jinja"
    path.write_text("{% set f = '%Y' %}{{ strftime_now(f) }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ConfigError, match=r"dated\.jinja calls strftime_now .* write the format in quotes"):
        build_chat_template(str(path), build_tokenizer())


def test_stored_tokens_are_made_again_only_where_ends_or_dates_change_them(tmp_path):
    from sfumato.config.text_data import TextDataConfig

    def fingerprint(name, folder, day=1):
        tokenizer = tokenizer_of(name, folder)
        facts_of(tokenizer).date = datetime.date(2025, 1, day)
        template = build_chat_template(None, tokenizer)
        return fingerprint_of(TextDataConfig(train_path="x.jsonl"), tokenizer, [template.text, template.tool_text])

    for name in ("llama3_1", "qwen3", "gemma3"):
        assert fingerprint(name, tmp_path) == fingerprint(name, None), name
    assert fingerprint("glm4_5", tmp_path) != fingerprint("glm4_5", None)
    assert fingerprint("phi4_mini", tmp_path) != fingerprint("phi4_mini", None)
    assert fingerprint("qwen3", None, 1) == fingerprint("qwen3", None, 2)
    assert fingerprint("gpt_oss", None, 1) != fingerprint("gpt_oss", None, 2)


def test_numbers_beyond_the_tokenizer_have_no_text():
    tokenizer = build_tokenizer()
    assert tokens_without_text(tokenizer, len(tokenizer)) == frozenset()
    assert tokens_without_text(tokenizer, len(tokenizer) + 3) == {len(tokenizer) + index for index in range(3)}


@pytest.mark.slow
def test_published_templates_with_blocks_are_taken():
    """Those of TRL, each with its own special tokens beside the bytes."""
    paths = [path for path in published_templates() if GENERATION.search(path.read_text(encoding="utf-8"))]
    assert len(paths) > 30
    names = re.compile(r"<\|[A-Za-z_|]*?\|>|<\uFF5C[^<>]*?\uFF5C>|<[a-z_]*turn[a-z_]*\|?>|<end_of_utterance>|</s>")
    for path in paths:
        specials = sorted({*names.findall(path.read_text(encoding="utf-8")), "<s>"})
        tokenizer = build_tokenizer(bos_token="<s>")
        tokenizer.add_special_tokens({"additional_special_tokens": specials})
        end = build_chat_template(str(path), tokenizer).answer_end
        assert end.taught is not None and not end.is_appended, path.name


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_published_templates_say_the_same(name, tmp_path):
    tokenizer = tokenizer_of(name, tmp_path, model_folders.published_template(name))
    template = build_chat_template(None, tokenizer)
    assert template.answer_end.taught.text == FOLDERS[name].taught
    encoded = template.encode([user("who?"), assistant("me")], "row")
    assert learned(tokenizer, encoded[-1]).endswith(f"me{FOLDERS[name].taught}")


def test_what_is_known_of_a_tokenizer_goes_to_worker_processes(tmp_path):
    tokenizer = tokenizer_of("glm4_5", tmp_path)
    facts_of(tokenizer).appends_end, facts_of(tokenizer).date = False, datetime.date(2024, 2, 29)
    template = build_chat_template(None, tokenizer)
    other = pickle.loads(pickle.dumps(template))
    assert facts_of(other.tokenizer) == facts_of(tokenizer) and other.answer_end == template.answer_end
    one, two = (text.encode([user("a"), assistant("x")], "row")[0][0].tolist() for text in (template, other))
    assert one == two
    assert facts_of(copy.deepcopy(tokenizer)) == facts_of(tokenizer)
