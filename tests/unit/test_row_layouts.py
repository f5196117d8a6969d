"""Rows as data is published: told by their columns, said, and made the tokens of the same conversation as messages."""

import json

import numpy as np
import pytest

from sfumato.config.text_data import TextDataConfig
from sfumato.data.files.sources import open_sources
from sfumato.data.text.format import build_transform
from sfumato.data.text.messages import unread_keys
from sfumato.data.text.notes import describe_text_data
from sfumato.errors import DataError
from tests.tiny_tokenizers import build_tokenizer

WHERE = "rows.jsonl, line 1"
TOKENIZER = build_tokenizer()
CALL = {"name": "look", "arguments": {"city": "Rome"}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def samples_of(row, data_type="conversation", template="chatml", **data):
    config = TextDataConfig(train_path="rows.jsonl", data_type=data_type, chat_template=template, **data)
    return build_transform(config, TOKENIZER)(row, WHERE)


def arrays_of(samples):
    """Tokens, loss mask and numbers of all documents."""
    documents = [document for sample in samples for document in sample.documents]
    return [
        (
            document.input_ids.tolist(),
            document.loss_mask.tolist(),
            None if document.numbers is None else document.numbers[-1].item(),
        )
        for document in documents
    ]


HISTORY = [user("hi"), assistant("yes?"), user("Add.\n1 and 2")]
ANSWERS = {
    "Alpaca": ({"instruction": "Add.", "input": "1 and 2", "output": "3"}, [user("Add.\n1 and 2"), assistant("3")]),
    "Alpaca without input": (
        {"instruction": "Add.", "input": "", "output": "3", "history": ""},
        [user("Add."), assistant("3")],
    ),
    "Alpaca with system and history": (
        {"instruction": "Add.", "input": "1 and 2", "output": "3", "system": "s", "history": [["hi", "yes?"]]},
        [{"role": "system", "content": "s"}, *HISTORY, assistant("3")],
    ),
    "ShareGPT": (
        {
            "system": "s",
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "sunny"},
                {"from": "gpt", "value": "It is sunny."},
            ],
            "tools": json.dumps(TOOLS),
        },
        [
            {"role": "system", "content": "s"},
            user("q"),
            assistant("", tool_calls=[{"type": "function", "function": CALL}]),
            {"role": "tool", "content": "sunny"},
            assistant("It is sunny."),
        ],
    ),
    "TRL prompt and completion": ({"prompt": "Add.", "completion": "3"}, [user("Add."), assistant("3")]),
    "a prompt that begins with a bracket": (
        {"prompt": "[3, 1]: sort it.", "completion": "[1, 3]"},
        [user("[3, 1]: sort it."), assistant("[1, 3]")],
    ),
    "TRL conversational prompt and completion": (
        {"prompt": HISTORY, "completion": [assistant("3")]},
        [user("hi"), assistant("yes?", loss_mask=0), HISTORY[2], assistant("3")],
    ),
    "GSM8K": ({"question": "1+2?", "answer": "1+2=3\n#### 3"}, [user("1+2?"), assistant("1+2=3\n#### 3")]),
    "UltraFeedback": (
        {"prompt": "q", "messages": [user("q"), assistant("a")], "chosen": [], "rejected": [], "score_chosen": 1.0},
        [user("q"), assistant("a")],
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_the_tokens_and_mask_of_the_same_messages(name):
    row, messages = ANSWERS[name]
    expected = {"messages": messages} | ({"tools": TOOLS} if "tools" in row else {})
    template = "hermes" if "tools" in row else "chatml"
    result = arrays_of(samples_of(row, template=template))
    assert result == arrays_of(samples_of(expected, template=template)) and any(result[0][1])


PAIR = {"chosen": [user("q"), assistant("good")], "rejected": [user("q"), assistant("bad")]}
ALPACA_PAIR = {"chosen": [user("q\ni"), assistant("good")], "rejected": [user("q\ni"), assistant("bad")]}
PAIRS = {
    "TRL": ({"prompt": "q", "chosen": "good", "rejected": "bad"}, PAIR),
    "TRL conversational": (
        {"prompt": [user("q")], "chosen": PAIR["chosen"][1:], "rejected": PAIR["rejected"][1:]},
        PAIR,
    ),
    "UltraFeedback": (
        {"prompt": "q", **PAIR, "messages": PAIR["chosen"], "score_chosen": 8.0, "score_rejected": 6},
        PAIR,
    ),
    "LLaMA-Factory ShareGPT": (
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        PAIR,
    ),
    "LLaMA-Factory Alpaca": ({"instruction": "q", "input": "i", "chosen": "good", "rejected": "bad"}, ALPACA_PAIR),
    "question": ({"question": "q", "chosen": "good", "rejected": "bad"}, PAIR),
    "transcripts": ({"chosen": "\n\nHuman: q\n\nAssistant: good", "rejected": "\n\nHuman: q\n\nAssistant: bad"}, PAIR),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_has_the_tokens_and_masks_of_two_conversations(name):
    row, expected = PAIRS[name]
    result = arrays_of(samples_of(row, "preference"))
    assert result == arrays_of(samples_of(expected, "preference"))
    assert [sum(mask) for _, mask, _ in result] == [5, 4], "the letters of the answer and the end of its turn"


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_taken_apart_for_answers_that_are_good_or_bad(name):
    row, expected = PAIRS[name]
    good, bad = arrays_of(samples_of(row, "unpaired"))
    assert [good[:2], bad[:2]] == [array[:2] for array in arrays_of(samples_of(expected, "preference"))]
    assert (good[2], bad[2]) == (1.0, 0.0)


LABELLED = {
    "LLaMA-Factory Alpaca": {"instruction": "q", "input": "", "output": "a", "kto_tag": False},
    "LLaMA-Factory ShareGPT": {"messages": [user("q"), assistant("a")], "kto_tag": False},
    "TRL conversational": {"prompt": [user("q")], "completion": [assistant("a")], "label": False},
    "TRL conversational in a .csv": {
        "prompt": json.dumps([user("q")]),
        "completion": json.dumps([assistant("a")]),
        "label": False,
    },
}


@pytest.mark.parametrize("name", LABELLED)
def test_a_labelled_answer_is_that_of_texts(name):
    expected = arrays_of(samples_of({"prompt": "q", "completion": "a", "label": False}, "unpaired"))
    assert arrays_of(samples_of(LABELLED[name], "unpaired")) == expected and expected[0][2] == 0.0
    with pytest.raises(DataError, match=r"as data\.data_type unpaired reads them"):
        samples_of(LABELLED[name])  # a bad answer is not learned as if it were good


def test_scores_of_ultrafeedback_are_a_margin():
    row = PAIRS["UltraFeedback"][0]
    ((_, _, margin), (_, _, other)) = arrays_of(samples_of(row, "preference_margin"))
    assert margin == 2.0 and np.isnan(other)


REFUSED = [
    (
        {"text": "a"},
        "conversation",
        "its columns are text.*Alpaca .instruction, input, output.*GSM8K .question, answer",
    ),
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, "conversation", "as data.data_type preference reads them"),
    ({"prompt": "q", "completion": "a", "label": "False"}, "conversation", "as data.data_type unpaired reads them"),
    ({"query": "q", "response": "a"}, "conversation", "Name a column of messages in data.text_keys, or any columns in"),
    ({"chosen": "The sky is blue", "rejected": "The sky is red"}, "preference", "implicit prompt"),
    ({"instruction": "", "input": "", "output": "a"}, "conversation", "one of them must not be empty"),
    ({"instruction": "q", "output": "a", "history": ["x"]}, "conversation", "history' must be a list of"),
    ({"prompt": "q", "completion": [user("a")]}, "conversation", "completion' must begin with the assistant"),
    (
        {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "4"}},
        "conversation",
        "no column",
    ),
]


@pytest.mark.parametrize(("row", "data_type", "reason"), REFUSED)
def test_a_row_of_no_format_is_refused_with_the_formats_that_there_are(row, data_type, reason):
    with pytest.raises(DataError, match=reason) as error:
        samples_of(row, data_type)
    assert str(error.value).startswith(WHERE)


@pytest.mark.parametrize("kind", ["mapping", "iterable"])
def test_what_rows_are_read_as_is_said(tmp_path, kind):
    rows = [ANSWERS["Alpaca"][0]] * 3 + [ANSWERS["GSM8K"][0] | {"id": 1}] + [ANSWERS["UltraFeedback"][0]]
    rows[-1] = rows[-1] | {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = TextDataConfig(train_path=str(tmp_path / "rows.jsonl"), chat_template="chatml", datasets_type=kind)
    lines = describe_text_data(data, open_sources(data), None, build_transform(data, TOKENIZER), 1)
    assert lines[0] == (
        "rows: rows read as Alpaca (instruction, input, output) in 3 rows, GSM8K (question, answer) in 1 rows, OpenAI "
        "messages (messages) in 1 rows; ShareGPT (conversations) would fit, too, and is not read"
    )
    if kind == "mapping":
        assert lines[1].startswith("rows: not read: column 'id'")


def test_columns_behind_an_empty_one_are_looked_at():
    row = {"empty": None, "source": "web", "messages": [{"role": "user", "content": "q", "id": 1}]}
    assert unread_keys([row], {"messages"}, "") == ["column 'source'", "key 'id' of messages"]


@pytest.mark.parametrize("kind", ["mapping", "iterable"])
def test_messages_that_carry_turn_markers_are_said(tmp_path, kind):
    rendered = "<|im_start|>user\nq<|im_end|>\n"
    rows = [
        {"prompt": "q", "completion": "a", "text": rendered},  # a column that is not read
        {"prompt": "q", "completion": "a<|im_end|>"},
        {"prompt": rendered, "completion": "a"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = TextDataConfig(train_path=str(tmp_path / "rows.jsonl"), chat_template="chatml", datasets_type=kind)
    (line,) = [
        line
        for line in describe_text_data(data, open_sources(data), None, build_transform(data, TOKENIZER), 1)
        if "template" in line
    ]
    assert line.startswith("rows: 2 of the rows looked at, the first is ")
    assert "line 2, have" in line and "(<|im_end|>, <|im_start|>)" in line


def write_info(folder, **entry):
    (folder / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "rows.json", **entry}}))


def samples_of_info(folder, rows, data_type="conversation", kind="mapping", name="mine"):
    (folder / "rows.json").write_text(json.dumps(rows))
    data = TextDataConfig(
        train_path=f"{folder}:{name}", data_type=data_type, chat_template="chatml", datasets_type=kind
    )
    sources = open_sources(data)
    transform = build_transform(data, TOKENIZER)
    (line, *_) = describe_text_data(data, sources, None, transform, 1)
    assert f"data set mine of {folder}/dataset_info.json" in line
    table = sources.rows[0] if kind == "mapping" else sources.files[0][0].open()
    return [sample for index in range(len(table)) for sample in transform(table[index], table.describe(index))]


TAGS = {"role_tag": "who", "content_tag": "says", "user_tag": "U", "assistant_tag": "A"}
SAID = [{"who": "U", "says": "q"}, {"who": "A", "says": "good"}]
INFO = {
    "alpaca": (
        {"columns": {"prompt": "ask", "response": "reply", "system": "rules"}},
        {"ask": "q", "reply": "good", "rules": "s", "input": "not named, so not read"},
        "conversation",
        {"messages": [{"role": "system", "content": "s"}, *PAIR["chosen"]]},
    ),
    "sharegpt": (
        {"formatting": "sharegpt", "columns": {"messages": "talk"}, "tags": TAGS},
        {"talk": SAID},
        "conversation",
        {"messages": PAIR["chosen"]},
    ),
    "ranking": (
        {"ranking": True, "columns": {"prompt": "ask", "chosen": "up", "rejected": "down"}},
        {"ask": "q", "up": "good", "down": "bad"},
        "preference",
        PAIR,
    ),
    "sharegpt ranking": (
        {
            "formatting": "sharegpt",
            "ranking": True,
            "columns": {"messages": "talk", "chosen": "up", "rejected": "down"},
            "tags": TAGS,
        },
        {"talk": SAID[:1], "up": SAID[1], "down": {"who": "A", "says": "bad"}},
        "preference",
        PAIR,
    ),
    "kto": (
        {"formatting": "sharegpt", "columns": {"messages": "talk", "kto_tag": "ok"}, "tags": TAGS},
        {"talk": SAID, "ok": True},
        "unpaired",
        {"prompt": "q", "completion": "good", "label": True},
    ),
    "openai": (
        {"formatting": "openai", "columns": {"messages": "messages"}},
        {"messages": PAIR["chosen"]},
        "conversation",
        {"messages": PAIR["chosen"]},
    ),
    "pretraining": ({"columns": {"prompt": "body"}}, {"body": "a text"}, "plaintext", {"text": "a text"}),
}


@pytest.mark.parametrize("kind", ["mapping", "iterable"])
@pytest.mark.parametrize("name", INFO)
def test_a_data_set_of_dataset_info_is_read_by_its_entry(tmp_path, name, kind):
    entry, row, data_type, expected = INFO[name]
    write_info(tmp_path, **entry)
    if data_type == "plaintext":
        (tmp_path / "rows.json").write_text(json.dumps([row]))
        (tmp_path / "mix.yaml").write_text('sources: ["dataset_info.json:mine"]')
        for path in (f"{tmp_path}/dataset_info.json:mine", f"{tmp_path}/mix.yaml"):
            (table,) = open_sources(TextDataConfig(train_path=path, data_type=data_type)).rows
            assert table[0] == expected
        return
    assert arrays_of(samples_of_info(tmp_path, [row], data_type, kind)) == arrays_of(samples_of(expected, data_type))


WRONG_ENTRIES = [
    ({"hf_hub_url": "a/b"}, "hf_hub_url a/b is not downloaded: fetch it"),
    ({"file_name": "gone.json"}, "file_name gone.json is not there"),
    ({"formatting": "other"}, "formatting must be alpaca, sharegpt or openai"),
    ({"columns": {"promt": "a"}}, "unknown key 'promt' of columns"),
    ({"rank": True}, "unknown key 'rank'"),
    ({"num_samples": 3}, "num_samples has no meaning for a file"),
    ({"ranking": True}, "ranking needs chosen and rejected"),
]


@pytest.mark.parametrize(("entry", "reason"), WRONG_ENTRIES)
def test_an_entry_that_cannot_be_followed_is_refused(tmp_path, entry, reason):
    write_info(tmp_path, **entry)
    with pytest.raises(DataError, match=reason):
        samples_of_info(tmp_path, [])


def test_a_data_set_that_is_not_listed_is_named(tmp_path):
    write_info(tmp_path)
    with pytest.raises(DataError, match="no data set 'mein'; did you mean 'mine'"):
        samples_of_info(tmp_path, [], name="mein")
    data = TextDataConfig(train_path=f"{tmp_path}/dataset_info.json", chat_template="chatml")
    with pytest.raises(DataError, match=r"Name one as .*it has mine"):
        open_sources(data)
