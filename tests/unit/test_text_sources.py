"""Sources: single paths, YAML files with weights, and every mistake in them named with file and entry."""

import json
import pickle

import pytest

from sfumato.config.text_data import SyntheticTextConfig, TextDataConfig
from sfumato.data.files.sources import open_sources, open_validation
from sfumato.errors import ConfigError, DataError, UserError


def write_jsonl(path, *texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_yaml(tmp_path, text):
    write_jsonl(tmp_path / "a.jsonl", "a1", "a2")
    write_jsonl(tmp_path / "deep" / "b.jsonl", "b1")
    path = tmp_path / "mix.yaml"
    path.write_text(text)
    return path


def opened(path, **config):
    return open_sources(TextDataConfig(train_path=str(path), **config))


def refusal(tmp_path, text):
    path = write_yaml(tmp_path, text)
    with pytest.raises(UserError) as caught:
        opened(path)
    assert str(caught.value).startswith(f"{path}")
    return str(caught.value).removeprefix(f"{path}")


FULL = """
sources: [a.jsonl, deep]
names: [first, second]
schedule:
  - schedule_type: const
    weights: [3, 0.5]
level: token
stopping_strategy: all_exhausted
"""


def test_a_yaml_file_with_everything(tmp_path):
    sources = opened(write_yaml(tmp_path, FULL))
    assert (sources.names, sources.weights) == (["first", "second"], [3.0, 0.5])
    assert (sources.level, sources.stopping) == ("token", "all_exhausted")
    assert [[rows[index]["text"] for index in range(len(rows))] for rows in sources.rows] == [["a1", "a2"], ["b1"]]
    assert pickle.loads(pickle.dumps(sources)).rows[1].describe(0) == f"{tmp_path / 'deep' / 'b.jsonl'}, line 1"


def test_defaults_of_a_yaml_file(tmp_path):
    sources = opened(write_yaml(tmp_path, "sources: [a.jsonl, deep]"))
    assert (sources.names, sources.weights) == (["a.jsonl", "deep"], None)
    assert (sources.level, sources.stopping) == ("sample", "first_exhausted")


def test_one_source_needs_no_weights(tmp_path):
    yaml = "sources: [a.jsonl]\nschedule: [{schedule_type: const, weights: [0.3]}]"
    assert opened(write_yaml(tmp_path, yaml)).weights is None


def test_paths_are_sought_beside_the_yaml_file_and_then_in_the_working_directory(tmp_path, monkeypatch):
    here = tmp_path / "elsewhere"
    write_jsonl(here / "a.jsonl", "not this one")
    write_jsonl(here / "c.jsonl", "c1")
    write_jsonl(here / "d.jsonl", "d1")
    monkeypatch.chdir(here)
    sources = opened(write_yaml(tmp_path, 'sources: [a.jsonl, c.jsonl, "deep, d.jsonl"]'))
    texts = [[rows[index]["text"] for index in range(len(rows))] for rows in sources.rows]
    assert texts == [["a1", "a2"], ["c1"], ["b1", "d1"]]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("level", "lever", ": lever: unknown key; did you mean 'level'?"),
        ("weights", "weigths", ": schedule.0.weights: required"),
        ("weights", "weigths", ": schedule.0.weigths: unknown key; did you mean 'weights'?"),
        ("0.5", "0", ": schedule.0.weights.1: Input should be greater than 0 (given: 0)"),
        ("0.5", "-1", ": schedule.0.weights.1: Input should be greater than 0 (given: -1)"),
        ("0.5", ".nan", ": schedule.0.weights.1: Input should be a finite number"),
        ("0.5", ".inf", ": schedule.0.weights.1: Input should be a finite number"),
        ("0.5", "'1'", ": schedule.0.weights.1: Input should be a valid number (given: '1')"),
        ("[3, 0.5]", "[3]", ": 1 weights for 2 sources"),
        ("[first, second]", "[first]", ": 1 names for 2 sources"),
        ("[first, second]", "[first, first]", ": sources need different names; twice there is first"),
        ("names: [first, second]\n", "", None),
        ("const", "changing", ": schedule.0.schedule_type: Input should be 'const' (given: 'changing')"),
        ("token", "tokens", ": level: Input should be 'sample' or 'token' (given: 'tokens')"),
        (
            "all_exhausted",
            "never_exhausted",
            ": stopping_strategy: Input should be 'first_exhausted' or 'all",
        ),
        ("a.jsonl", "b.jsonl", ": sources.0: file not found: b.jsonl"),
        ("a.jsonl", "mix.yaml", ": sources.0: mix.yaml is a YAML file"),
        ("[a.jsonl, deep]", "[]", ": sources: "),
    ],
)
def test_a_mistake_is_named_with_file_and_entry(tmp_path, old, new, reason):
    if reason is None:
        assert opened(write_yaml(tmp_path, FULL.replace(old, new))).names == ["a.jsonl", "deep"]
    else:
        assert reason in refusal(tmp_path, FULL.replace(old, new))


def test_a_single_path_and_no_validation(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", "a")
    sources = opened(path)
    assert (sources.names, len(sources.rows), sources.weights) == (["train"], 1, None)
    assert open_validation(TextDataConfig(train_path=str(path))) is None


def test_validation_has_a_path_of_its_own(tmp_path):
    path, other = write_jsonl(tmp_path / "train.jsonl", "a"), write_jsonl(tmp_path / "eval.jsonl", "e")
    validation = open_validation(TextDataConfig(train_path=str(path), eval_path=str(other)))
    assert validation.names == ["eval"] and validation.rows[0][0] == {"text": "e"}
    with pytest.raises(DataError, match=r"^data\.eval_path: file not found"):
        open_validation(TextDataConfig(train_path=str(path), eval_path=str(tmp_path / "none.jsonl")))
    with pytest.raises(ConfigError, match="configuration file not found"):
        opened(tmp_path / "none.yaml")


def test_a_text_file_has_the_column_that_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    assert opened(tmp_path / "a.txt").rows[0][0] == {"text": "one"}
    assert opened(tmp_path / "a.txt", text_keys=["body"]).rows[0][0] == {"body": "one"}


def test_synthetic_problems_and_those_that_are_held_out():
    config = TextDataConfig(synthetic=SyntheticTextConfig(num_rows=100))
    training, validation = open_sources(config), open_validation(config)
    assert (training.names, training.weights) == (["synthetic"], None)
    assert (len(training.rows[0]), len(validation.rows[0])) == (100, 5)
    assert training.rows[0].describe(0) != validation.rows[0].describe(0)
