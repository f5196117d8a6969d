"""Formats of text data: found by name, brought by import path, told apart by settings and source."""

import json
import pickle

import pytest

from sfumato.commands.check_config import FITS, check_config
from sfumato.config.help import format_help
from sfumato.config.load import load_config
from sfumato.config.text import TrainTextConfig, TrainTextDpoConfig
from sfumato.config.text_data import TextDataConfig
from sfumato.config.yaml_text import config_text
from sfumato.data.text import format as text
from sfumato.data.text.format import build_transform
from sfumato.data.text.formats import Conversation, PlainText, Preference
from sfumato.errors import ConfigError, DataError
from sfumato.models.language.load import build_byte_tokenizer
from sfumato.tracking.json_lines import read_jsonl
from tests.question_answer import QuestionAnswer
from tests.tiny import run_task_here, tiny_text_config, write_config

OWN = "tests.question_answer:QuestionAnswer"


def questions(folder, count=40):
    """Additions of one digit."""
    rows = [{"question": f"{n % 7} + {n % 3}", "answer": str(n % 7 + n % 3)} for n in range(count)]
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def settings(folder, data_type, **data):
    path = questions(folder)
    return tiny_text_config(
        folder, data={"data_type": data_type, "synthetic": None, "train_path": path, "eval_path": path, **data}
    )


@pytest.mark.parametrize("name", ["plaintext", "conversation", "preference"])
def test_a_format_of_the_library_is_written_as_its_name(tmp_path, name):
    schema = TrainTextDpoConfig if name == "preference" else TrainTextConfig
    config = load_config(schema, overrides=tiny_text_config(tmp_path, data={"data_type": name}))
    assert config.data.data_type == {"plaintext": PlainText, "conversation": Conversation}.get(name, Preference)()
    assert config.model_dump(mode="json")["data"]["data_type"] == name, "as runs of before have it in their folders"
    (tmp_path / "dumped.yaml").write_text(config_text(config))
    assert load_config(schema, tmp_path / "dumped.yaml") == config


def test_a_format_of_ones_own_trains_with_the_task_as_it_is(tmp_path):
    data_type = {"type": OWN, "separator": " = "}
    run = run_task_here("train_text", settings(tmp_path, data_type))
    lines = [line for line in read_jsonl(run / "metrics.jsonl") if line["step"]]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert all(line["tokens"] % 2 == 0 for line in lines), "a digit and the end of each answer"
    saved = load_config(TrainTextConfig, run / "config.yaml")
    assert saved.data.data_type == QuestionAnswer(" = ")
    (sample,) = read_jsonl(next((run / "samples").glob("step_000000")) / "samples.jsonl")
    assert sample["prompt"] == "0 + 0 = "


def test_what_a_format_makes_follows_from_its_settings_and_its_source(tmp_path, monkeypatch):
    tokenizer = build_byte_tokenizer()

    def made(data_type):
        config = load_config(TrainTextConfig, overrides=settings(tmp_path, data_type)).data
        return build_transform(config, tokenizer)

    transform = pickle.loads(pickle.dumps(made(OWN)))
    (sample,) = transform({"question": "ab", "answer": "c"}, "row 1")
    (document,) = sample.documents
    assert tokenizer.decode(document.input_ids[:-1]) == "ab c" and document.input_ids[-1] == tokenizer.eos_token_id
    assert document.loss_mask.tolist() == [False] * 3 + [True] * 2
    assert made(OWN).fingerprint == made(OWN).fingerprint != made({"type": OWN, "separator": "-"}).fingerprint
    before = made(OWN).fingerprint
    monkeypatch.setattr(text.inspect, "getsource", lambda module: "another source")
    assert made(OWN).fingerprint != before, "tokens that were stored are not those of the changed format"


WRONG = {
    "plaintxt": "unknown type 'plaintxt'; did you mean 'plaintext'",
    "tests.nowhere:Format": "cannot import type 'tests.nowhere:Format': No module named 'tests.nowhere'",
    "tests.question_answer:Missing": "cannot import type .* has no attribute 'Missing'",
    "tests.question_answer:NotAFormat": "cannot import type .* it is not a dataclass",
    "tests.question_answer:Transform": "it has no draws, has_answers, has_images, ignores, limited, ",
    "tests.question_answer:Unfinished": "cannot make Unfinished: .* abstract",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_name_is_one_clear_line(tmp_path, name):
    with pytest.raises(ConfigError, match=WRONG[name]) as caught:
        load_config(TrainTextConfig, overrides=settings(tmp_path, name))
    assert [line for line in str(caught.value).splitlines() if "data_type" in line] == [str(caught.value)]


def test_formats_are_in_the_help_and_checked(tmp_path):
    shown = format_help(TrainTextConfig)
    names = "conversation|image_conversation|image_preference|media_conversation|media_preference|omni_conversation|"
    names += "plaintext|preference|preference_margin|process|unpaired"
    assert f"--data.data_type {{type: {names}}}" in shown
    assert "type: plaintext  Texts, every token of which is in the loss" in shown
    path = write_config(settings(tmp_path, {"type": OWN, "separator": " = "}), tmp_path / "own.yaml")
    result = check_config(path)
    (source,) = result.data.training
    assert result.exit_code == FITS and source.name == "questions" and source.bad_rows == []
    assert (source.num_samples, source.num_learned) == (40, 80)


def test_fields_that_a_format_ignores_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.chat_template has no effect with data\.data_type question_answer"):
        load_config(TrainTextConfig, overrides=settings(tmp_path, OWN, chat_template="chatml"))
    with pytest.raises(ConfigError, match=r"data\.data_type preference is trained by tasks/train_text_dpo\.py"):
        load_config(TrainTextConfig, overrides=tiny_text_config(tmp_path, data={"data_type": "preference"}))
    with pytest.raises(ConfigError, match="or another format of two documents a sample"):
        load_config(TrainTextDpoConfig, overrides=tiny_text_config(tmp_path, data={"data_type": "plaintext"}))


def made(data_type, rows, folder, **data):
    """Samples of rows, with the tokenizer of bytes and ChatML."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TextDataConfig(data_type=data_type, train_path=str(path), **data)
    transform = build_transform(config, build_byte_tokenizer())
    return [sample for index, row in enumerate(rows) for sample in transform(row, f"row {index + 1}")]


def text_of(tokens):
    return build_byte_tokenizer().decode(tokens.tolist())


def marked(document):
    """What stands before each token with a number, and the number."""
    return [
        (text_of(document.input_ids[: place + 1]), float(document.numbers[place]))
        for place in range(len(document.numbers))
        if document.numbers[place] == document.numbers[place]
    ]


BEGIN = "<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n"


def test_the_tokens_that_end_steps_have_their_labels(tmp_path):
    row = {"prompt": "Add.", "completions": ["One. ", "Two\nthree.", "One."], "labels": [True, False, 0.25]}
    sample, other = made("process", [row, {**row, "steps": row["completions"]}], tmp_path)
    (document,) = sample.documents
    assert marked(document) == [
        (BEGIN + "One.", 1.0),
        (BEGIN + "One.\n\nTwo\nthree.", 0.0),
        (BEGIN + "One.\n\nTwo\nthree.\n\nOne.", 0.25),
    ]
    assert (document.loss_mask == (document.numbers == document.numbers)).all()
    assert (other.documents[0].input_ids == document.input_ids).all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": [True]}, "2 steps have 1 labels"),
        ({"labels": [True, 2]}, "a number from 0 to 1, not 2"),
        ({"labels": [True, None]}, "not None"),
        ({"steps": ["One.", " "]}, "texts that are not empty"),
        ({"steps": [], "labels": []}, "texts that are not empty"),
        ({"steps": 3}, "the steps must be a list"),
    ],
)
def test_steps_that_cannot_be_labelled_are_named(tmp_path, changes, reason):
    row = {"prompt": "Add.", "steps": ["One.", "Two."], "labels": [True, False]} | changes
    with pytest.raises(DataError, match=f"row 1: .*{reason}"):
        made("process", [row], tmp_path)


def test_answers_have_their_label_and_pairs_are_taken_apart(tmp_path):
    chat = [{"role": "user", "content": "Add."}]
    rows = [
        {"prompt": "Add.", "completion": "3", "label": True},
        {"prompt": chat, "completion": [{"role": "assistant", "content": "4"}], "label": 0},
        {"prompt": "Add.", "chosen": "3", "rejected": "4"},
        {"prompt": "Add.", "completion": "4", "label": "False"},  # as .csv files have it
    ]
    results = [sample.documents[0] for sample in made("unpaired", rows, tmp_path)]
    answers = [(text_of(document.input_ids[document.loss_mask]), float(document.numbers[-1])) for document in results]
    good, bad = ("3<|im_end|>", 1.0), ("4<|im_end|>", 0.0)
    assert answers == [good, bad, good, bad, bad]
    with pytest.raises(DataError, match="row 1: a label in column 'label' must be true, false"):
        made("unpaired", [{"prompt": "Add.", "completion": "3"}], tmp_path)


def test_pairs_have_margins(tmp_path):
    row = {"prompt": "Add.", "chosen": "3", "rejected": "4", "margin": 1.5}
    for sample in made("preference_margin", [row, row | {"margin": "1.5"}], tmp_path):
        chosen, rejected = sample.documents
        assert [number for _, number in marked(chosen)] == [1.5] and chosen.numbers[-1] == 1.5 and not marked(rejected)
    scores = {"margin": None, "score_chosen": 3.0, "score_rejected": 5.0}
    for wrong, reason in (({"margin": "much"}, "must be a finite number, not 'much'"), (scores, "margin is -2")):
        with pytest.raises(DataError, match=reason):
            made("preference_margin", [{**row, **wrong}], tmp_path)


@pytest.mark.parametrize("data_type", ["process", "unpaired", "preference_margin"])
def test_plain_training_refuses_numbers(tmp_path, data_type):
    with pytest.raises(ConfigError, match=r"is trained by tasks/train_text_(reward|dpo)\.py"):
        load_config(TrainTextConfig, overrides=settings(tmp_path, data_type))
