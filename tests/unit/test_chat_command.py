"""``sfumato chat``: answers that are transformers' own, shown while they are drawn, and the commands beside them."""

import io
import json
import os
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sfumato.cli import main
from sfumato.commands.chat import _show
from sfumato.evaluation.chat import ChatSession, prepare_chat
from sfumato.evaluation.options import GenerationOptions
from sfumato.evaluation.sources import find_sources
from sfumato.evaluation.texts import text_models
from tests.tiny import run_task_here, tiny_dit_config, tiny_text_config
from tests.tiny_vision import picture, tiny_vision_config

GREEDY = ("--temperature", "0", "--max-new-tokens", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    settings = {"train": {"max_steps": 1}, "data": {"data_type": "conversation"}}
    return run_task_here("train_text", tiny_text_config(path, **settings)) / "hf_ckpt"


@pytest.fixture
def conversation(folder):
    options = GenerationOptions(temperature=0.0, max_new_tokens=8)
    sources = find_sources([str(folder)], False, print)
    ((_, model),) = text_models(sources, options)
    prepare_chat(model, sources[0], options)
    return ChatSession(model)


def chat(monkeypatch, lines, *arguments):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", *map(str, arguments)])


def expected_answers(folder, questions, system=None):
    """The answers of transformers' own ``generate`` in one conversation."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        drawn = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(drawn, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def shown(answers):
    from sfumato.config.characters import printable

    return [printable(answer).replace("\n", "\\n") for answer in answers]


def test_each_line_of_a_pipe_gets_the_answer_of_transformers(folder, monkeypatch, capsys):
    questions = ["reverse abc", "and now?"]
    assert chat(monkeypatch, [questions[0], "", questions[1]], folder, *GREEDY) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == shown(expected_answers(folder, questions))
    assert chat(monkeypatch, [questions[0]], folder, *GREEDY, "--system-prompt", "Be brief.") == 0
    assert capsys.readouterr().out.split("\n")[:-1] == shown(expected_answers(folder, questions[:1], "Be brief."))


def test_commands_take_back_begin_anew_and_save(folder, monkeypatch, capsys, tmp_path):
    lines = [
        "one",
        "reverse xyz",
        "/undo",
        "reverse xyz",
        "/save " + str(tmp_path / "chat.jsonl"),
        "/reset",
        "one",
        "/quit",
        "never",
    ]
    assert chat(monkeypatch, lines, folder, *GREEDY) == 0
    answers = capsys.readouterr().out.split("\n")[:-1]
    assert len(answers) == 4 and answers[1] == answers[2] and answers[0] == answers[3]
    (row,) = map(json.loads, (tmp_path / "chat.jsonl").read_text(encoding="utf-8").splitlines())
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * 2
    assert row["messages"][2]["content"] == "reverse xyz"


def test_lines_that_are_no_text_are_refused_and_those_before_are_answered(folder, monkeypatch, capsys):
    piped = io.TextIOWrapper(io.BytesIO(b"Wh\xc3\xa4?\n\xff\n"), encoding="ascii")
    monkeypatch.setattr("sys.stdin", piped)
    assert main(["chat", str(folder), "--temperature", "0", "--max-new-tokens", "8"]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines() == shown(expected_answers(folder, ["Wh\u00e4?"]))
    assert "not text in UTF-8" in err


@pytest.mark.parametrize(("option", "value"), [("--system-prompt", ""), ("--chat-template", "None")])
def test_a_value_that_no_run_may_have_is_an_error_of_its_option(folder, monkeypatch, capsys, option, value):
    assert chat(monkeypatch, ["Who?"], folder, option, value) == 2
    assert f"error: {option}" in capsys.readouterr().err


def test_an_answer_is_shown_while_it_is_drawn(conversation):
    pieces = []
    answer = conversation.say("reverse abc", [], pieces.append)
    assert "".join(pieces) == answer.text and len(pieces) > 2
    assert answer.ending in ("stop", "length")


def test_ctrl_c_stops_the_answer_and_not_the_conversation(conversation):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    whole = conversation.say("reverse abc", [], lambda text: None)
    conversation.reset()
    pieces = []

    def interrupt(text):
        pieces.append(text)
        if len(pieces) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    answer = conversation.say("reverse abc", [], interrupt)
    assert answer.ending == "interrupted"
    assert len(answer.text) < len(whole.text) and whole.text.startswith(answer.text)
    assert conversation.messages[-1] == {"role": "assistant", "content": answer.text}
    assert conversation.say("go on", [], lambda text: None).ending in ("stop", "length")


def test_a_terminal_is_asked_and_mistakes_end_nothing(folder, monkeypatch, capsys):
    typed = iter(
        ["hello", KeyboardInterrupt, "/nonsense", "/image nothing.png", "/undo", "x" * 300, "//slash", EOFError]
    )

    def read(prompt):
        word = next(typed)
        if isinstance(word, str):
            return word
        raise word

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main(["chat", str(folder), *GREEDY]) == 0
    said = capsys.readouterr()
    assert "there is no /nonsense" in said.err and "nothing.png is no file" in said.err
    assert "the model takes 256" in said.err and "taken back" in said.err
    assert "/quit or Ctrl-D ends" in said.out


def test_an_answer_cannot_act_on_the_terminal(capsys):
    _show("a\x1b[31mb\rc\u202e")
    assert capsys.readouterr().out == "a⟨U+001B⟩[31mb⟨U+000D⟩c⟨U+202E⟩"


def test_what_does_not_chat_is_refused(folder, tmp_path, monkeypatch, capsys):
    run = run_task_here("train_dit", tiny_dit_config(tmp_path, train={"max_steps": 1}))
    assert chat(monkeypatch, [], run) == 2
    assert "take `sfumato sample`" in capsys.readouterr().err
    assert chat(monkeypatch, [], folder, "--chat-template", "none") == 2
    assert "no chat template" in capsys.readouterr().err
    assert chat(monkeypatch, [f"/image {__file__}", "what?"], folder) == 2
    assert "sees no images" in capsys.readouterr().err


def test_a_description_that_was_edited_after_the_run_or_is_gone_is_refused(folder, tmp_path, monkeypatch, capsys):
    """Its weights would load into a model with other rotary positions, and answer something else without a word."""
    run = folder.parent
    description = run.parent / "qwen3.yaml"
    content = description.read_text(encoding="utf-8")
    try:
        description.write_text(f"{content}\nrope_theta: 3.0\n", encoding="utf-8")
        assert chat(monkeypatch, ["a"], run) == main(["export", str(run), str(tmp_path / "out")]) == 3
        said = capsys.readouterr().err
        assert said.count("was trained with another content of model.config_path, named in") == 2
        description.unlink()
        assert chat(monkeypatch, ["a"], run) == main(["export", str(run), str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert said.count(f"is not here: write into {run / 'config.yaml'} where it lies") == 2
    finally:
        description.write_text(content, encoding="utf-8")


def test_a_model_that_sees_is_shown_an_image(tmp_path, monkeypatch, capsys):
    run = run_task_here("train_text", tiny_vision_config(tmp_path, train={"max_steps": 1}))
    (tmp_path / "one.png").write_bytes(picture(56, 56, seed=1))
    (tmp_path / "other.png").write_bytes(picture(56, 84, seed=2))
    lines = [f"/image {tmp_path / 'one.png'}", "what?", "/reset", f"/image {tmp_path / 'other.png'}", "what?"]
    assert chat(monkeypatch, lines, run / "hf_ckpt", *GREEDY) == 0
    said = capsys.readouterr()
    assert len(said.out.split("\n")) == 3
    (tmp_path / "broken.png").write_bytes(b"no picture")
    assert chat(monkeypatch, [f"/image {tmp_path / 'broken.png'}", "what?"], run / "hf_ckpt", *GREEDY) == 2
