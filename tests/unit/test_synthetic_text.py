"""Synthetic problems: right answers are right, wrong ones wrong, and held-out problems are never shown in training."""

import io
import pickle
import re
import wave

import numpy as np
import pytest
from PIL import Image

from sfumato.config.text_data import SyntheticTextConfig, TextDataConfig
from sfumato.config.text_rl_data import TextPromptDataConfig
from sfumato.data.synthetic import keypad
from sfumato.data.synthetic.digits import EDGE, label_scan, scans_of
from sfumato.data.synthetic.text import QUESTIONS, Problem, SyntheticRows
from sfumato.errors import DataError
from sfumato.rollout.agents.calculator import calculate

KINDS = ["reverse", "sort", "add", "multiply"]
NUMBERS = ("add", "multiply")


def is_correct(prompt, answer):
    """Whether an answer, apart from white space around it, is the correct one of a prompt of these problems."""
    for kind, question in QUESTIONS.items():
        operand = "([0-9]+)" if kind in NUMBERS else "([a-z]+)"
        if match := re.fullmatch(re.escape(question).replace(r"\{\}", operand), prompt):
            return answer.strip() == Problem(kind, match.groups()).answer
    raise AssertionError(f"not a synthetic problem: {prompt!r}")


def rows_of(kind="reverse", unseen=False, seed=0, **config):
    return SyntheticRows(SyntheticTextConfig(problem=kind, **config), seed, held_out=unseen)


def solved(kind, operands):
    if kind == "add":
        return str(int(operands[0]) + int(operands[1]))
    if kind == "multiply":
        return str(int(operands[0]) * int(operands[1]))
    return "".join(reversed(operands[0])) if kind == "reverse" else "".join(sorted(operands[0]))


def shown(row):
    """Every problem that stands anywhere in a row, as sets of operands."""
    text = " ".join([row["text"], row["prompt"], *(message["content"] for message in row["messages"])])
    words = re.findall(r"letters of (\w+)|(\w+) reversed|(\w+) sorted", text)
    sums = re.findall(r"Add (\d+) and (\d+)|(\d+) plus (\d+)|Multiply (\d+) by (\d+)|(\d+) times (\d+)", text)
    return {tuple(sorted(filter(None, word))) for word in words + sums}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held_out", [False, True])
def test_every_column_of_a_row(kind, held_out):
    rows = rows_of(kind, held_out, num_rows=2000, max_length=5)
    assert len(rows) == (100 if held_out else 2000)
    for index in range(60):
        row = rows[index]
        operands = re.findall(r"\d+" if kind in NUMBERS else r"\w+(?=\.)", row["prompt"])
        answer = solved(kind, operands)
        assert row["answer"] == row["chosen"] == answer
        assert row["messages"] == [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": answer},
        ]
        said = {
            "reverse": "{} reversed is {}.",
            "sort": "{} sorted is {}.",
            "add": "{} plus {} is {}.",
            "multiply": "{} times {} is {}.",
        }[kind]
        assert row["text"] == said.format(*operands, answer)
        assert all(2 <= len(operand) <= 5 for operand in operands)
        assert is_correct(row["prompt"], answer) and is_correct(row["prompt"], f" {answer}\n")
        assert row["rejected"] != answer and not is_correct(row["prompt"], row["rejected"])
        assert len(row["rejected"]) == len(answer) and row["rejected"].isalnum()
        assert kind not in NUMBERS or str(int(row["rejected"])) == row["rejected"]


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_problems_appear_nowhere_in_training(kind):
    config = {"min_length": 1, "max_length": 2, "held_out": 0.2, "turns": 3, "num_rows": 2000}
    training = set().union(*(shown(row) for row in map(rows_of(kind, **config).__getitem__, range(2000))))
    held_out = set().union(*(shown(row) for row in map(rows_of(kind, True, **config).__getitem__, range(400))))
    assert len(training) > 300 and len(held_out) > 50
    assert not training & held_out
    if kind == "reverse":
        assert not {(word[::-1],) for (word,) in training} & held_out, "whose answer training has shown"


def test_turns():
    row = rows_of(turns=4)[3]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * 4
    assert all(
        is_correct(q["content"], a["content"]) for q, a in zip(row["messages"][::2], row["messages"][1::2], strict=True)
    )
    assert row["text"].count(" reversed is ") == 4
    assert (row["prompt"], row["answer"]) == (row["messages"][-2]["content"], row["messages"][-1]["content"])


def test_a_row_is_a_function_of_seed_and_index():
    rows = rows_of()
    again = pickle.loads(pickle.dumps(rows))
    assert [rows[index] for index in (5, 2, 5)] == [again[index] for index in (5, 2, 5)]
    assert [rows[index] for index in range(20)] != [rows_of(seed=1)[index] for index in range(20)]
    assert len({rows[index]["prompt"] for index in range(200)}) > 150
    assert rows.describe(2) == "synthetic reverse row 3"
    assert rows_of(unseen=True).describe(2) == "synthetic held-out reverse row 3"
    prints = {rows_of(kind, held, seed).fingerprint() for kind in KINDS for held in (False, True) for seed in (0, 1)}
    assert len(prints) == 4 * len(KINDS) and rows.fingerprint() == again.fingerprint()
    with pytest.raises(IndexError):
        rows[len(rows)]


@pytest.mark.parametrize("kind", KINDS)
def test_single_letters_and_digits(kind):
    rows = rows_of(kind, min_length=1, max_length=1, held_out=0.5)
    assert all(not is_correct(rows[index]["prompt"], rows[index]["rejected"]) for index in range(40))


@pytest.mark.parametrize(("held_out", "share"), [(False, 0.9999), (True, 0.0001)])
def test_too_few_problems_are_an_error(held_out, share):
    config = SyntheticTextConfig(min_length=1, max_length=1, held_out=share)
    with pytest.raises(DataError, match=rf"no {'held-out' if held_out else 'training'} problem .*: raise max_length"):
        SyntheticRows(config, 0, held_out)[0]


def test_a_share_of_answers_shows_a_call_of_the_calculator():
    plain = rows_of("multiply", num_rows=400, max_length=3)
    rows = rows_of("multiply", num_rows=400, max_length=3, calculator_calls=0.3)
    calls = 0
    for index in range(400):
        row, said = rows[index], rows[index]["messages"][1]["content"]
        assert row == plain[index] | {"messages": row["messages"]}, "the problems are the same"
        if said != row["answer"]:
            expression, result = re.fullmatch(r"calc\((\d+\*\d+)\)=(\d+)", said).groups()
            assert calculate(expression) == result == row["answer"]
            assert expression.split("*") == re.findall(r"\d+", row["prompt"])
            calls += 1
    assert 80 < calls < 160
    assert rows_of("add", calculator_calls=1.0)[0]["messages"][1]["content"].startswith("calc(")
    with pytest.raises(ValueError, match="calculator_calls has no meaning with problem sort"):
        SyntheticTextConfig(problem="sort", calculator_calls=0.5)


def test_numbers_are_read_and_drawn_by_turns_of_chance():
    rows = rows_of("read_or_draw", num_rows=40)
    asked = [rows[index]["prompt"] for index in range(40)]
    assert 10 < sum(text.startswith("<image>Read it") for text in asked) < 30
    assert all(text.startswith(("<image>Read it", 'Draw "')) for text in asked)


def test_numbers_are_dialled_in_the_tones_of_their_keys(monkeypatch):
    monkeypatch.setattr(keypad, "NOISE", (0.0, 0.0))
    rows = rows_of("dial", num_rows=40, min_length=1, max_length=4)
    for index in range(40):
        row = rows[index]
        assert row["prompt"] == "<audio>Which number?" and row["messages"][1]["content"] == row["answer"]
        with wave.open(io.BytesIO(row["audios"][0])) as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16000, 1, 2)
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(float)
        silent = np.convolve(np.abs(samples), np.ones(160), "same") < 1  # 10 ms
        edges = np.flatnonzero(np.diff(silent.astype(int)))
        tones = [samples[begin:end] for begin, end in edges.reshape(-1, 2)]
        assert len(tones) == len(row["answer"])
        for tone, digit in zip(tones, row["answer"], strict=True):
            bins = np.abs(np.fft.rfft(tone, 16000))  # of 1 Hz
            low, high = int(bins[600:1000].argmax()) + 600, int(bins[1100:1600].argmax()) + 1100
            keys = keypad.KEYS[int(np.abs(np.array(keypad.ROWS) - low).argmin())]
            assert keys[int(np.abs(np.array(keypad.COLUMNS) - high).argmin())] == digit
    assert rows[0] == rows[0] and rows[0]["audios"] != rows[1]["audios"]
    unseen = rows_of("dial", True, num_rows=400, min_length=1, max_length=2, held_out=0.2)
    shown = rows_of("dial", num_rows=400, min_length=1, max_length=2, held_out=0.2)
    answers = [{part[index]["answer"] for index in range(len(part))} for part in (unseen, shown)]
    assert answers[0].isdisjoint(answers[1])


@pytest.mark.parametrize(
    ("problem", "kind"), [("dial", "conversation"), ("dial", "image_conversation"), ("add", "media_conversation")]
)
def test_problems_that_are_heard_need_a_format_with_audio(problem, kind):
    with pytest.raises(ValueError, match="need"):
        TextDataConfig(synthetic={"problem": problem}, data_type=kind)
    prompts = {"conversation": "prompts", "image_conversation": "image_prompts", "media_conversation": "media_prompts"}
    with pytest.raises(ValueError, match="need each other"):
        TextPromptDataConfig(synthetic={"problem": problem}, data_type=prompts[kind])


def test_handwritten_digits_have_their_labels_and_scans_that_are_held_out():
    datasets = pytest.importorskip("sklearn.datasets")
    labels, seen = datasets.load_digits().target, []
    for unseen in (False, True):
        assert len(scans_of(0.2, unseen)) + len(scans_of(0.2, not unseen)) == len(labels)
        rows = rows_of("digits", unseen, num_rows=600, min_length=1, max_length=3, held_out=0.2)
        pictures = [Image.open(io.BytesIO(rows[index]["images"][0])) for index in range(30)]
        answers = [rows[index]["answer"] for index in range(30)]
        assert {len(answer) for answer in answers} == {1, 2, 3}
        assert all(
            picture.size == (EDGE * len(answer), EDGE) for picture, answer in zip(pictures, answers, strict=True)
        )
        assert all(rows[index]["prompt"] == "<image>Read it." for index in range(30))
        seen.append({int(scan) for scan in scans_of(0.2, unseen)})
        scan = int(scans_of(0.2, unseen)[0])
        assert label_scan(scan) == str(labels[scan])
    assert seen[0].isdisjoint(seen[1])
