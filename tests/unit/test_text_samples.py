"""From rows to samples: plain text in pieces, conversations, pairs, and what is wrong with a row."""

import functools
import json
import pickle

import numpy as np
import pytest

from sfumato.config.text_data import SyntheticTextConfig, TextDataConfig
from sfumato.data.text.format import build_transform
from sfumato.errors import ConfigError, DataError, OverlongError
from tests.tiny_tokenizers import build_tokenizer

WHERE = "f.jsonl, line 3"
SYNTHETIC = SyntheticTextConfig()


@functools.cache
def tokenizer():
    return build_tokenizer()


def transform(data_type, **config):
    template = None if data_type == "plaintext" else "chatml"
    config = TextDataConfig(**{"synthetic": SYNTHETIC, "data_type": data_type, "chat_template": template, **config})
    return build_transform(config, tokenizer())


def tokens(text):
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def text_of(document, learned_only=False):
    ids = document.input_ids[document.loss_mask] if learned_only else document.input_ids
    return tokenizer().decode(ids.tolist(), clean_up_tokenization_spaces=False)


def user(content, **more):
    return {"role": "user", "content": content, **more}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def refusal(data_type, row, **config):
    with pytest.raises(DataError) as caught:
        transform(data_type, **config)(row, WHERE)
    assert str(caught.value).startswith(WHERE)
    return caught.value


TURN = [user("q"), assistant("a")]
TEXT = "Reverse the letters of abc. The answer is 日本 😀."


def test_plain_text_is_cut_into_pieces_that_lose_nothing():
    for max_seq_len in range(3, 50):
        samples = transform("plaintext", max_seq_len=max_seq_len)({"text": TEXT}, WHERE)
        pieces = [sample.documents[0] for sample in samples]
        expected = [*tokens(TEXT), tokenizer().eos_token_id]
        assert np.concatenate([piece.input_ids for piece in pieces]).tolist() == expected
        lengths = [len(piece.input_ids) for piece in pieces]
        assert lengths == [sample.num_tokens for sample in samples]
        assert len(pieces) == -(-len(expected) // max_seq_len)
        assert min(lengths) >= 2 and max(lengths) <= max_seq_len
        assert sum(length < max_seq_len for length in lengths) <= 1 + (len(expected) % max_seq_len == 1)
        for piece in pieces:
            assert piece.loss_mask.tolist() == [False] + [True] * (len(piece.input_ids) - 1)
            assert (piece.input_ids.dtype, piece.loss_mask.dtype) == ("int32", "bool")


def test_the_first_column_of_the_row_is_taken():
    plain = transform("plaintext")
    assert text_of(plain({"content": "c", "text": "t"}, WHERE)[0].documents[0]) == "t<|endoftext|>"
    assert text_of(plain({"text": None, "content": "c"}, WHERE)[0].documents[0]) == "c<|endoftext|>"
    from_body = transform("plaintext", text_keys=["body"])
    assert text_of(from_body({"body": "b", "text": "t"}, WHERE)[0].documents[0]) == "b<|endoftext|>"


@pytest.mark.parametrize(
    ("data_type", "row", "reason"),
    [
        (
            "plaintext",
            {"title": "a", "n": 1},
            "no column 'content_split' or 'text' or 'content'; its columns are title, n",
        ),
        ("plaintext", {"text": " \n"}, "column 'text' must be a non-empty text, not ' \\n'"),
        ("plaintext", {"text": ["a"]}, "column 'text' must be a non-empty text, not ['a']"),
        ("conversation", {"text": "a"}, "no column 'messages' or 'conversations'; its columns are text"),
        ("conversation", {"messages": []}, "a conversation must be a list of messages"),
        ("conversation", {"messages": ["a"]}, "a conversation must be a list of messages"),
        ("conversation", {"messages": "hello"}, "neither a list nor its JSON text"),
        ("conversation", {"messages": [user("q")]}, "the conversation has nothing to learn from"),
        ("conversation", {"conversations": [{"from": "narrator", "value": "a"}]}, "unknown role 'narrator'"),
        (
            "conversation",
            {"messages": [user("q"), assistant("a")], "tools": "none"},
            "neither a list nor its JSON text",
        ),
        (
            "conversation",
            {"messages": [user("q"), assistant("a")], "tools": [1]},
            "'tools' must be a list of JSON schemas",
        ),
        ("preference", {"prompt": "q", "chosen": "a"}, "no column 'rejected'; its columns are prompt, chosen"),
        ("preference", {"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same"),
        (
            "preference",
            {"prompt": "q", "chosen": "a", "rejected": ""},
            ", rejected: message 2 (assistant): content must",
        ),
        (
            "preference",
            {"chosen": [user("q"), assistant("a")], "rejected": [user("other"), assistant("b")]},
            "must differ in the assistant's answer only, but message 1 of chosen is of role 'user'",
        ),
        (
            "preference",
            {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("a"), user("r"), assistant("b")]},
            "but message 3 of chosen is missing",
        ),
        (
            "preference",
            {"prompt": "q", "chosen": [user("p"), assistant("a")], "rejected": [user("p"), assistant("b")]},
            "an answer that does not begin with the assistant must repeat the prompt",
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_named(data_type, row, reason):
    error = refusal(data_type, row)
    assert reason in str(error) and not error.fatal


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("q", loss_mask=0), assistant("a", loss_mask=1)]},
        {"messages": [{"role": "user", "content": "q", "loss_mask": None}, {**assistant("a"), "tool_calls": None}]},
        {"messages": json.dumps([user("q"), assistant("a")])},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a"}], "id": 3},
        {"messages": None, "conversations": [user("q"), assistant("a")], "tools": None},
    ],
)
def test_conversations_of_every_style(row):
    (sample,) = transform("conversation")(row, WHERE)
    (document,) = sample.documents
    assert text_of(document) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    assert text_of(document, learned_only=True) == "a<|im_end|>"
    assert sample.num_tokens == len(document.input_ids) == len(document.loss_mask)


SYSTEM = {"role": "system", "content": "s"}
ASK = [user("q")]
HISTORY = [user("p"), assistant("past"), user("q")]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "q", "chosen": "yes", "rejected": "no"}, [user("q")]),
        ({"prompt": HISTORY, "chosen": "yes", "rejected": "no"}, HISTORY),
        ({"prompt": HISTORY, "chosen": [assistant("yes")], "rejected": [assistant("no")]}, HISTORY),
        ({"chosen": [*HISTORY, assistant("yes")], "rejected": [*HISTORY, assistant("no")]}, HISTORY),
        (
            {"prompt": "q", "chosen": [user("q"), assistant("yes")], "rejected": [user("q"), assistant("no")]},
            [user("q")],
        ),
        (
            {
                "prompt": "q",
                "chosen": [SYSTEM, user("q"), assistant("yes")],
                "rejected": [SYSTEM, user("q"), assistant("no")],
            },
            [SYSTEM, user("q")],
        ),
    ],
)
def test_pairs_share_a_prompt_that_is_not_learned(row, prompt):
    pairs = transform("preference")
    (sample,) = pairs(row, WHERE)
    assert pairs.documents_per_sample == len(sample.documents) == 2
    shared = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in prompt)
    for document, answer in zip(sample.documents, ("yes", "no"), strict=True):
        assert text_of(document) == f"{shared}<|im_start|>assistant\n{answer}<|im_end|>\n"
        assert text_of(document, learned_only=True) == f"{answer}<|im_end|>"
    assert sample.num_tokens == sum(len(document.input_ids) for document in sample.documents)


def test_pairs_with_columns_of_other_names():
    (sample,) = transform("preference", text_keys=["better", "worse"])(
        {"better": [user("q"), assistant("yes")], "worse": json.dumps([user("q"), assistant("no")]), "prompt": 3}, WHERE
    )
    assert [text_of(document, learned_only=True) for document in sample.documents] == ["yes<|im_end|>", "no<|im_end|>"]
    (sample,) = transform("preference", text_keys=["x", "y", "z"])({"x": "q", "y": "yes", "z": "no"}, WHERE)
    assert [text_of(document, learned_only=True) for document in sample.documents] == ["yes<|im_end|>", "no<|im_end|>"]
    with pytest.raises(ConfigError, match="text_keys of preference data must be two columns"):
        transform("preference", text_keys=["chosen"])


def test_an_answer_that_a_template_renders_anew_is_no_single_text(tmp_path):
    without_earlier_answers = tmp_path / "template.jinja"
    without_earlier_answers.write_text(
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    one = {"chat_template": str(without_earlier_answers)}
    (sample,) = transform("preference", **one)({"prompt": "q", "chosen": "yes", "rejected": "no"}, WHERE)
    assert [text_of(document, True) for document in sample.documents] == ["yes<|im_end|>", "no<|im_end|>"]
    rest = [user("r"), assistant("yes")]
    row = {"chosen": [user("q"), assistant("a"), *rest], "rejected": [user("q"), assistant("b"), *rest]}
    assert f"{WHERE}, chosen: the chat template renders earlier answers anew" in str(refusal("preference", row, **one))


LONG = {"messages": [user("q"), assistant("a long answer " * 20)]}


def test_overlong_conversations_stop_the_run():
    error = refusal("conversation", LONG, max_seq_len=40)
    assert isinstance(error, OverlongError) and error.fatal
    length = len(transform("conversation")(LONG, WHERE)[0].documents[0].input_ids)
    assert f"has {length} tokens, more than data.max_seq_len 40; raise it, or set data.overlong" in str(error)
    assert transform("conversation", max_seq_len=length)(LONG, WHERE)[0].num_tokens == length


def test_overlong_conversations_are_left_out_like_broken_rows():
    error = refusal("conversation", LONG, max_seq_len=40, overlong="skip")
    assert not error.fatal and "more than data.max_seq_len 40" in str(error)


def test_overlong_conversations_are_cut_at_the_end():
    whole = transform("conversation")(LONG, WHERE)[0].documents[0]
    cut = transform("conversation", max_seq_len=40, overlong="truncate")(LONG, WHERE)[0].documents[0]
    assert cut.input_ids.tolist() == whole.input_ids[:40].tolist()
    assert cut.loss_mask.tolist() == whole.loss_mask[:40].tolist() and cut.loss_mask.any()
    row = {"messages": [user("a long question " * 20), assistant("a")]}
    error = refusal("conversation", row, max_seq_len=40, overlong="truncate")
    assert not error.fatal and "and the first 40 hold nothing to learn" in str(error)


def test_overlong_pairs_are_named_with_the_answer():
    row = {"prompt": "q", "chosen": "a", "rejected": "a long answer " * 20}
    assert f"{WHERE}, rejected: has " in str(refusal("preference", row, max_seq_len=40))


@pytest.mark.parametrize("data_type", ["plaintext", "conversation", "preference"])
def test_a_transform_can_be_pickled(data_type):
    row = {"text": TEXT, "messages": [user("q"), assistant("a")], "prompt": "q", "chosen": "a", "rejected": "b"}
    one = transform(data_type)
    other = pickle.loads(pickle.dumps(one))
    assert other.fingerprint == one.fingerprint and other.documents_per_sample == one.documents_per_sample
    for mine, theirs in zip(one(row, WHERE)[0].documents, other(row, WHERE)[0].documents, strict=True):
        assert (
            mine.input_ids.tolist() == theirs.input_ids.tolist()
            and mine.loss_mask.tolist() == theirs.loss_mask.tolist()
        )


def test_a_fingerprint_tells_apart_what_changes_tokens_and_nothing_else(tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    same = transform("conversation").fingerprint
    tokenizer()("a text", truncation=True, max_length=2)  # leaves its mark on the tokenizer
    assert transform("conversation", shuffle=False, num_workers=3, max_bad_rows=5).fingerprint == same
    others = [
        transform("plaintext").fingerprint,
        transform("conversation", max_seq_len=77).fingerprint,
        transform("conversation", overlong="skip").fingerprint,
        transform("conversation", text_keys=["messages"]).fingerprint,
        transform("conversation", chat_template=str(tmp_path / "own.jinja")).fingerprint,
        build_transform(
            TextDataConfig(synthetic=SYNTHETIC, chat_template="chatml"), build_tokenizer("qwen")
        ).fingerprint,
    ]
    assert len({same, *others}) == 1 + len(others)


def test_plain_text_needs_a_token_for_its_end():
    tokens_without_end = build_tokenizer()
    tokens_without_end.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        build_transform(TextDataConfig(synthetic=SYNTHETIC, data_type="plaintext"), tokens_without_end)
