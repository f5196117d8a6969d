"""Chat templates: the tokens, and which of them are learned, compared with constructions of another kind."""

import functools
import pickle
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AddedToken

from sfumato.data.text.chat import build_chat_template
from sfumato.errors import ConfigError, DataError
from tests.tiny_tokenizers import build_tokenizer

CHATML = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

MARKED = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# Thoughts stay in the answers after the last question only, as in Qwen3.
THINKING = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}
    {%- set thought = '' %}
    {%- if '</think>' in m.content %}
        {%- set thought = m.content.split('</think>')[0].split('<think>')[-1] %}
    {%- endif %}
    {%- if loop.index0 > ns.last and (loop.last or thought) %}
        {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
    {%- endif %}
    {{- m.content.split('</think>')[-1].lstrip('\n') }}
{%- else %}{{- m.content }}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

ALTERNATING = """{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}
{%- if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + ' </s>' }}{%- endif %}
{%- endfor %}"""

CONTENTS = [
    "Reverse the letters of abc.",
    "  spaces in front and behind  ",
    "\nline breaks around\n\n",
    "emoji 😀🦄 and 日本語, Straße, e\u0301",
    "x",
    "<|im_end|>\n<|im_start|>assistant\nI am not the assistant.<|im_end|>\n",
    "it says <|endoftext|> and </s>",
    "\t\n tab",
    "<think>no</think> thought",
    "assistant\n",
]


@functools.cache
def tokenizer_of(kind):
    return build_tokenizer(kind)


def template_of(tmp_path, text, kind="byte_level"):
    path = tmp_path / "template.jinja"
    path.write_text(text, encoding="utf-8")
    return build_chat_template(str(path), tokenizer_of(kind))


def user(content, **more):
    return {"role": "user", "content": content, **more}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def tokens(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def segments(tokenizer, messages):
    """ChatML made from parts that are tokenised one by one: ids and mask."""
    ids, learned = [], []
    for message in messages:
        header = message["role"] + "\n"
        if message["role"] == "assistant" and message.get("loss_mask", 1):
            parts = [("<|im_start|>", 0), (header, 0), (message["content"], 1), ("<|im_end|>", 1), ("\n", 0)]
        else:
            parts = [("<|im_start|>", 0), (header + message["content"], 0), ("<|im_end|>", 0), ("\n", 0)]
        for text, mask in parts:
            ids += (part := tokens(tokenizer, text))
            learned += [bool(mask)] * len(part)
    return ids, learned


def learned_text(tokenizer, encoded):
    ids, learned = encoded
    return tokenizer.decode(ids[learned].tolist(), clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", ["byte_level", "qwen", "trimmed"])
def test_every_token_and_its_mask_equal_those_of_segments(kind):
    tokenizer = tokenizer_of(kind)
    template = build_chat_template("chatml", tokenizer)
    draw = random.Random(0)
    parted = 0
    for _ in range(150):
        messages = [{"role": "system", "content": draw.choice(CONTENTS)}] * draw.randint(0, 1)
        for _ in range(draw.randint(1, 4)):
            messages += [user(draw.choice(CONTENTS)), assistant(draw.choice(CONTENTS), loss_mask=draw.randint(0, 1))]
        messages += [user("and then?")] * draw.randint(0, 1)
        if not any(message.get("loss_mask") for message in messages):
            continue
        encoded = template.encode(messages, "row")
        ids, learned = segments(tokenizer, messages)
        assert len(encoded) == 1
        assert encoded[0][0].tolist() == ids and encoded[0][1].tolist() == learned
        assert (encoded[0][0].dtype, encoded[0][1].dtype) == ("int32", "bool")
        parted += tokens(tokenizer, tokenizer.decode(ids)) != ids
    assert parted > 0, "some answers begin with white space that the tokenizer would join to the header's"


def test_the_end_of_turn_is_learned_and_what_the_template_writes_behind_it_is_not():
    tokenizer = tokenizer_of("byte_level")
    encoded = build_chat_template("chatml", tokenizer).encode([user("hi"), assistant("yes\n"), user("ok")], "row")
    assert learned_text(tokenizer, encoded[0]) == "yes\n<|im_end|>"


def test_a_template_with_generation_blocks_gives_the_mask_of_transformers(tmp_path):
    tokenizer = tokenizer_of("byte_level")
    template = template_of(tmp_path, MARKED)
    plain = [content for content in CONTENTS if not content[0].isspace()]
    for first, second in ((a, b) for a in plain for b in plain):
        messages = [user(first), assistant(second), user(second), assistant(first)]
        ((ids, learned),) = template.encode(messages, "row")
        theirs = tokenizer.apply_chat_template(
            messages, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ids.tolist() == theirs["input_ids"]
        assert learned.tolist() == [bool(assistant_mask) for assistant_mask in theirs["assistant_masks"]]


def test_loss_mask_with_generation_blocks(tmp_path):
    tokenizer = tokenizer_of("byte_level")
    template = template_of(tmp_path, MARKED)
    messages = [user("a"), assistant("first", loss_mask=0), user("b"), assistant("second")]
    assert learned_text(tokenizer, template.encode(messages, "row")[0]) == "second<|im_end|>"
    twice = template_of(
        tmp_path, MARKED.replace("{% endgeneration %}", "{% endgeneration %}{% generation %}{% endgeneration %}")
    )
    with pytest.raises(DataError, match=r"^row: loss_mask cannot be followed: .* 4 generation blocks for 2 "):
        twice.encode(messages, "row")


def test_threads_share_a_template(tmp_path):
    template = template_of(tmp_path, MARKED)
    conversations = [[user(f"q{i}"), assistant(f"answer {i} " * (i % 7 + 1))] for i in range(200)]
    alone = [template.encode(conversation, "row")[0] for conversation in conversations]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change in the middle of a rendering
    try:
        with ThreadPoolExecutor(8) as pool:
            together = [
                encoded[0]
                for encoded in pool.map(lambda conversation: template.encode(conversation, "row"), conversations)
            ]
    finally:
        sys.setswitchinterval(interval)
    for (ids, learned), (other_ids, other_learned) in zip(alone, together, strict=True):
        assert ids.tolist() == other_ids.tolist() and learned.tolist() == other_learned.tolist()


def test_the_first_token_is_never_learned(tmp_path):
    text = "{% for m in messages %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% endfor %}"
    ((ids, learned),) = template_of(tmp_path, text).encode([assistant("the answer is here")], "row")
    assert learned.tolist() == [False] + [True] * (len(ids) - 1)


def test_a_special_token_that_swallows_white_space(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken("<|assistant|>", rstrip=True, special=True)])
    tokenizer.add_tokens([AddedToken("<|end|>", rstrip=True, special=True)])
    (tmp_path / "template.jinja").write_text(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    template = build_chat_template(str(tmp_path / "template.jinja"), tokenizer)
    for answer in ("answer", "  answer"):
        ((ids, learned),) = template.encode([user("q"), assistant(answer)], "row")
        assert ids.tolist() == tokens(tokenizer, f"<|user|>\nq<|end|><|assistant|>{answer}<|end|>")
        assert learned_text(tokenizer, (ids, learned)) == "answer<|end|>"


@pytest.mark.parametrize("thoughts", [True, False])
def test_a_template_that_rewrites_the_history_gives_one_sample_for_each_answer(tmp_path, thoughts):
    tokenizer = tokenizer_of("qwen")
    template = template_of(tmp_path, THINKING, "qwen")
    said = [f"<think>\nabout {i}\n</think>\n\n" * thoughts + f"answer {i}" for i in range(3)]
    messages = [message for i in range(3) for message in (user(f"question {i}"), assistant(said[i]))]
    messages[3]["loss_mask"] = 0
    encoded = template.encode(messages, "row")
    assert len(encoded) == 2
    for index, (ids, learned) in zip((1, 5), encoded, strict=True):
        shown = [{"role": message["role"], "content": message["content"]} for message in messages]
        render = functools.partial(tokenizer.apply_chat_template, chat_template=THINKING, return_dict=False)
        prompt = render(shown[:index], add_generation_prompt=True)
        assert ids.tolist() == render(shown[: index + 1])
        assert ids[: len(prompt)].tolist() == prompt
        assert learned.tolist() == [len(prompt) <= i < len(ids) - 1 for i in range(len(ids))]
        assert f"answer {index // 2}<|im_end|>" in learned_text(tokenizer, (ids, learned))
        assert ("about" in learned_text(tokenizer, (ids, learned))) == thoughts


def test_a_template_that_rewrites_the_history_gives_one_sample_for_one_answer(tmp_path):
    template = template_of(tmp_path, THINKING, "qwen")
    (encoded,) = template.encode([user("q"), assistant("<think>hm</think>a")], "row")
    assert learned_text(tokenizer_of("qwen"), encoded) == "<think>\nhm\n</think>\n\na<|im_end|>"


# Generation blocks, and the thoughts of the last answer alone, as in LFM2.5 and TRL's templates for GLM and Nemotron.
MARKED_THINKING = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}
{{- m.content if loop.last else m.content.split('</think>')[-1] }}{{- '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


@pytest.mark.parametrize("first_mask", [0, 1])
def test_generation_blocks_that_leave_out_earlier_thoughts_give_one_sample_for_each_answer(tmp_path, first_mask):
    tokenizer = tokenizer_of("byte_level")
    template = template_of(tmp_path, MARKED_THINKING)
    said = [f"<think>\nabout {i}\n</think>\n\nanswer {i}" for i in range(3)]
    messages = [message for i in range(3) for message in (user(f"question {i}"), assistant(said[i]))]
    messages[1]["loss_mask"] = first_mask
    encoded = template.encode(messages, "row")
    learned = [learned_text(tokenizer, sample) for sample in encoded]
    assert learned == [text + "<|im_end|>" for text in said[1 - first_mask :]]
    assert "about 1" not in tokenizer.decode(encoded[-1][0].tolist()), "the model sees no earlier thoughts"


@pytest.mark.parametrize("template", [CHATML, MARKED, THINKING, MARKED_THINKING])
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"reasoning_content": "hm"}, "leaves out some of what it says, its thoughts in 'reasoning_content'"),
        ({"reasoning": "hm"}, "leaves out some of what it says, its thoughts in 'reasoning'"),
        ({"thinking": "hm"}, "leaves out some of what it says, its thoughts in 'thinking'"),
        ({"tool_calls": [{"function": {"name": "look", "arguments": {}}}]}, "leaves out its call of 'look'"),
    ],
)
def test_what_a_template_leaves_out_of_an_answer_is_named(tmp_path, template, said, reason):
    # A template that names another variable with such a word reads no thoughts from it.
    text = "{%- if enable_thinking is defined %}{%- endif %}" + template
    with pytest.raises(DataError, match=rf"^row: message 2 \(assistant\): the chat template {reason}"):
        template_of(tmp_path, text).encode([user("q"), assistant("a") | said, user("r"), assistant("b")], "row")


# The prompt opens the thoughts. As in Qwen3.8, the content is no place for thoughts; as in Qwen3.5, it is.
REPEATED = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{{- '<think>\n' }}{%- endif %}{{- m.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""
PARSED = REPEATED.replace("m.content", "m.content.removeprefix('<think>')")
BLOCK = """{%- if m.role == 'assistant' %}{% generation %}{{- m.content.removeprefix('<think>') + '<|im_end|>' }}
{%- endgeneration %}{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\n' }}"""


def test_thoughts_that_the_prompt_opens(tmp_path):
    tokenizer = tokenizer_of("byte_level")
    messages = [user("q"), assistant("<think>hm</think>a")]
    marked = PARSED.replace("{{- m.content.removeprefix('<think>') + '<|im_end|>\n' }}", BLOCK)
    assert "generation" in marked
    for text in (PARSED, marked):
        (encoded,) = template_of(tmp_path, text).encode(messages, "row")
        assert learned_text(tokenizer, encoded) == "hm</think>a<|im_end|>"
    with pytest.raises(DataError, match=r"^row: message 2 .* opens <think> by itself, and its content opens another"):
        template_of(tmp_path, REPEATED).encode(messages, "row")
    shown_without = REPEATED.replace("{%- if m.role == 'assistant' %}{{- '<think>\n' }}{%- endif %}", "")
    with pytest.raises(DataError, match=r"^row: message 2 .*, where the prompt opens <think>, .*; give the answer tho"):
        template_of(tmp_path, shown_without).encode([user("q"), assistant("a")], "row")
    literal = [user("q"), assistant("hm</think>a tag <think>")]
    text = learned_text(tokenizer, template_of(tmp_path, REPEATED).encode(literal, "row")[0])
    assert text == "hm</think>a tag <think><|im_end|>"


@pytest.mark.parametrize("kind", ["byte_level", "qwen", "trimmed", "metaspace"])
def test_a_template_without_roles_in_the_text(tmp_path, kind):
    tokenizer = tokenizer_of(kind)
    (encoded,) = template_of(tmp_path, ALTERNATING, kind).encode(
        [user("who?"), assistant("I am"), user("and?"), assistant("fine")], "row"
    )
    assert encoded[0].tolist() == tokens(tokenizer, "<s>[INST] who? [/INST] I am </s><s>[INST] and? [/INST] fine </s>")
    learned, expected = encoded[1], []
    for part, mask in (
        ("<s>[INST] who? [/INST]", 0),
        (" I am </s>", 1),
        ("<s>[INST] and? [/INST]", 0),
        (" fine </s>", 1),
    ):
        # the number of a part's tokens, with something in front so that it begins like the middle of a text
        expected += [bool(mask)] * (len(tokens(tokenizer, "</s>" + part)) - 1)
    assert learned.tolist() == expected


def test_a_prompt_that_ends_within_a_token_is_tokenised_as_at_inference(tmp_path):
    text = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    text += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    for kind in ("byte_level", "qwen", "trimmed"):
        tokenizer = tokenizer_of(kind)
        ((ids, learned),) = template_of(tmp_path, text, kind).encode([user("who?"), assistant("answer")], "row")
        parts = ("user: who?\nassistant: ", "answer\n<|endoftext|>")
        prompt, answer = (tokens(tokenizer, part) for part in parts)
        assert ids.tolist() == prompt + answer
        assert learned.tolist() == [False] * len(prompt) + [True] * len(answer), (
            "no special token: all of it is learned"
        )
    with pytest.raises(DataError, match=r"^row: the prompt of an answer ends within a token"):
        template_of(tmp_path, text, "metaspace").encode([user("who?"), assistant("answer")], "row")


def test_a_tokenizer_that_drops_white_space(tmp_path):
    tokenizer = tokenizer_of("words")
    ((ids, learned),) = template_of(tmp_path, CHATML, "words").encode([user("how are you"), assistant("fine")], "row")
    assert ids.tolist() == tokens(
        tokenizer, "<|im_start|>user how are you<|im_end|><|im_start|>assistant fine<|im_end|>"
    )
    assert learned_text(tokenizer, (ids, learned)) == "fine <|im_end|>"


def test_a_template_that_begins_an_answer_in_another_way_than_at_inference_is_refused(tmp_path):
    template = template_of(tmp_path, CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}"))
    with pytest.raises(
        DataError, match=r"^row: message 2 \(assistant\): the chat template does not begin .*generation"
    ):
        template.encode([user("q"), assistant("a")], "row")
    switched = CHATML.replace("assistant\n' }}", "assistant\n' + ('' if enable_thinking else '<none>') }}")
    with pytest.raises(
        DataError, match=r"apart; give enable_thinking another value in data\.chat_template_options, or"
    ):
        template_of(tmp_path, switched).encode([user("q"), assistant("a")], "row")


TOOL = {"type": "function", "function": {"name": "add_up", "parameters": {}}}
TURN = [user("q"), assistant("a")]


@pytest.mark.parametrize(
    ("text", "messages", "reason"),
    [
        (
            CHATML,
            [user("q"), {"role": "robot", "content": "a"}],
            "message 2: unknown role 'robot'; known are system, user",
        ),
        (CHATML, [user("q"), {"content": "a"}], "message 2: unknown role None"),
        (CHATML, [user(" "), assistant("a")], "message 1 (user): content must be a non-empty text, not ' '"),
        (CHATML, [user([{"type": "text", "text": "q"}]), assistant("a")], "message 1 (user): content must be"),
        (CHATML, [user("q"), assistant("")], "message 2 (assistant): content must be"),
        (CHATML, [user("q"), assistant("a", loss_mask=2)], "message 2 (assistant): loss_mask must be 0 or 1, not 2"),
        (CHATML, [user("q", loss_mask=1), assistant("a")], "message 1 (user): loss_mask is 1, but only"),
        (CHATML, [user("q"), assistant("a", loss_mask=0)], "the conversation has nothing to learn from"),
        (CHATML, [user("q")], "the conversation has nothing to learn from"),
        (CHATML, [assistant("a"), user("q")], "message 1 (assistant): a conversation cannot begin with an answer"),
        (
            ALTERNATING,
            [user("q"), user("q"), assistant("a")],
            "message 2 (user): the chat template refuses it: roles must",
        ),
        (
            CHATML,
            [user("q"), assistant("a", reasoning_content="b")],
            "message 2 (assistant): the chat template leaves out",
        ),
        (ALTERNATING, [*TURN, user("q"), user("r"), assistant("a")], "message 4 (user): the chat template refuses it"),
        (
            ALTERNATING,
            [{"role": "system", "content": "s"}, assistant("a")],
            "message 1 (system): the chat template refuses",
        ),
        (
            CHATML.replace("for m in messages", "for m in messages if m.role != 'system'"),
            [{"role": "system", "content": "Be brief."}, user("q"), assistant("a")],
            "message 1 (system): the chat template leaves it out",
        ),
        (
            CHATML.replace("m.content", "m.content[:3]"),
            [user("q"), assistant("a long answer")],
            "message 2 (assistant): the ",
        ),
        (
            CHATML.replace("m.content", "(m.content or '')"),
            [user("q"), assistant("", tool_calls=[TOOL])],
            "call of 'add_up'",
        ),
        (
            CHATML.replace("m.content", "('<result>\n' if m.role == 'tool' else '') + m.content"),
            [*TURN, {"role": "tool", "content": "<result>\n3</result>"}, assistant("3")],
            "message 3 (tool): begins with <result>, which the chat template writes, too",
        ),
    ],
)
def test_what_is_wrong_with_a_conversation_is_named(tmp_path, text, messages, reason):
    with pytest.raises(DataError) as caught:
        template_of(tmp_path, text).encode(messages, "f.jsonl, line 3")
    assert str(caught.value).startswith("f.jsonl, line 3: ") and reason in str(caught.value)


def test_tools_and_their_calls_reach_the_template(tmp_path):
    text = (
        "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
        "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    template = template_of(tmp_path, text)
    call = {"type": "function", "function": {"name": "add_up", "arguments": {"a": 1}}}
    messages = [
        user("1 + 2?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": 'the "sum"\nis 3'},
        assistant("3"),
    ]
    (encoded,) = template.encode(messages, "row", tools=[TOOL])
    spoken = learned_text(tokenizer_of("byte_level"), encoded)
    assert spoken.startswith('[{"type": "function", "function": {"name": "add_up"') and spoken.endswith(
        "<|im_end|>3<|im_end|>"
    )
    with pytest.raises(DataError, match="row: the chat template leaves out the tool 'add_up'"):
        template_of(tmp_path, CHATML).encode([user("q"), assistant("a")], "row", tools=[TOOL])
    said = {"role": "assistant", "content": "so", "tool_calls": [call]}
    with pytest.raises(DataError, match=r"message 2 .* leaves out its call of 'add_up'; data.chat_template hermes"):
        template_of(tmp_path, CHATML).encode([user("q"), said], "row")


def test_the_tokenizers_own_template_and_the_one_for_tools():
    both = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{{ tools | tojson }}" + CHATML}]
    tokenizer = build_tokenizer(chat_template={entry["name"]: entry["template"] for entry in both})
    template = build_chat_template(None, tokenizer)
    messages = [user("q"), assistant("a")]
    assert template.encode(messages, "row")[0][0].tolist() == segments(tokenizer, messages)[0]
    with_tools = template.encode(messages, "row", tools=[TOOL])[0][0]
    assert "add_up" in tokenizer.decode(with_tools)


def test_a_tokenizer_with_templates_none_of_which_is_its_own_is_refused():
    tokenizer = build_tokenizer(chat_template={"short": CHATML, "long": CHATML})
    with pytest.raises(ConfigError, match=r"data\.chat_template: .*multiple chat templates"):
        build_chat_template(None, tokenizer)


def test_a_template_can_be_pickled():
    template = build_chat_template("chatml", tokenizer_of("byte_level"))
    again = pickle.loads(pickle.dumps(template))
    messages = [user("q"), assistant("a")]
    for one, other in zip(template.encode(messages, "row")[0], again.encode(messages, "row")[0], strict=True):
        assert (one == other).all()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (None, None, "the tokenizer has no chat template: set data.chat_template to chatml"),
        ("chat_ml", None, "data.chat_template: no Jinja file chat_ml; the templates with a name are chatml"),
        ("broken.jinja", "{% for %}", "broken.jinja is not valid Jinja: line 1"),
    ],
)
def test_a_template_that_cannot_be_used_is_named(tmp_path, monkeypatch, name, content, reason):
    monkeypatch.chdir(tmp_path)
    if content:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        build_chat_template(name, tokenizer_of("byte_level"))
    assert reason in str(caught.value)


def test_tokenizers_that_do_not_fit_are_refused():
    from tokenizers import Tokenizer, models
    from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

    with pytest.raises(ConfigError, match="ByT5Tokenizer does not say which characters"):
        build_chat_template("chatml", ByT5Tokenizer())
    words = Tokenizer(models.WordLevel({"a": 0, "<|im_start|>": 1}, unk_token="a"))
    with pytest.raises(ConfigError, match=r"chatml needs the tokens <\|im_end\|> in the tokenizer"):
        build_chat_template("chatml", PreTrainedTokenizerFast(tokenizer_object=words))
