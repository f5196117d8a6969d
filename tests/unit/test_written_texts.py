"""Text fields hold what was written in YAML files and overrides, where YAML reads a boolean, a number or a date."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
import yaml
from pydantic import Field

from sfumato.config.base import Section, Variant
from sfumato.config.dit import TrainDitConfig
from sfumato.config.load import load_config, parse_overrides
from sfumato.config.paths import FilePath
from sfumato.config.sections import ModelConfig
from sfumato.config.yaml_text import config_text, read_yaml
from sfumato.errors import ConfigError
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.estimate.meta_models import diffusion_model_on_meta
from tests import tiny_families
from tests.tiny import tiny_dit_config, write_config


@dataclass(frozen=True)
class Told:
    """A part that is chosen by type."""

    type: ClassVar[str] = "told"

    name: str = "x"
    words: list[str] = field(default_factory=list)
    scale: float = 1.0
    note: str | None = None


class Inner(Section):
    name: str = ""


class Texts(Section):
    """Every kind of field that takes text."""

    text: str = ""
    path: FilePath = "here"
    maybe: str | None = "x"
    choice: Literal["no", "off", "5", "bf16"] = "bf16"
    number_or_auto: float | Literal["auto"] = 0.0
    text_or_number: str | int = ""
    switch: bool = False
    number: float = 0.0
    count: int = 0
    texts: list[str] = []
    pair: tuple[str, int] = ("", 0)
    by_name: dict[str, str] = {}
    numbers_by_name: dict[str, float] = {}
    anything: dict[str, Any] = {}
    inner: Inner = Inner()
    inners: list[Inner] = []
    part: Annotated[Any, Variant("tests.unit.test_written_texts")] = Told()
    parts: list[Annotated[Any, Variant("tests.unit.test_written_texts")]] = Field(default_factory=list)


WORDS = ["no", "off", "on", "yes", "Yes", "NO", "true", "False", "1e5", "007", "1_000", "0x1F", "2024-01-01", "1:30"]
WORDS += ["2024-01-01 10:00:00", "1.10", "+1", ".5", ".inf", "12345678901234567890123", "-0", "~x", "nULL", "0o7"]


def load(content: str, folder: Path, *overrides: str) -> Texts:
    (folder / "config.yaml").write_text(content)
    return load_config(Texts, folder / "config.yaml", parse_overrides(list(overrides)))


@pytest.mark.parametrize("word", WORDS)
def test_what_was_written_arrives_from_files_and_overrides(word: str, tmp_path: Path) -> None:
    content = f"""
text: {word}
path: {word}
maybe: {word}
texts: [{word}, "{word}", a]
pair: [{word}, 3]
by_name: {{{word}: {word}}}
inner: {{name: {word}}}
inners: [{{name: {word}}}]
part: {{type: told, name: {word}, words: [{word}], note: {word}}}
parts: [{{type: told, name: {word}}}]
"""
    part = f"{{type: told, name: {word}}}"
    overrides = ["--text", word, f"--path={word}", "--texts.1", word, "--by_name.k", word, "--inner.name", word]
    result = load(content, tmp_path)
    assert (result.text, result.path, result.maybe, result.texts, result.pair) == (
        word,
        word,
        word,
        [word, word, "a"],
        (word, 3),
    )
    assert result.by_name == {word: word}
    assert (result.inner.name, result.inners[0].name) == (word, word)
    assert (result.part.name, result.part.words, result.part.note, result.parts[0].name) == (word, [word], word, word)
    said = load("texts: [a, b]\n", tmp_path, *overrides, "--part", part, "--parts", f"[{part}]")
    assert (said.text, said.path, said.texts, said.by_name) == (word, word, ["a", word], {"k": word})
    assert (said.inner.name, said.part.name, said.parts[0].name) == (word, word, word)
    (tmp_path / "dumped.yaml").write_text(config_text(said))
    assert load_config(Texts, tmp_path / "dumped.yaml") == said, "a resolved configuration can be run again"


NUMBERS = {"010": 10, "-007": -7, "0x1F": 31, "0b11": 3, "1_000": 1000, "08": 8, "+3": 3, "0": 0}
DECIMALS = {**NUMBERS, "1e-4": 1e-4, "1.e2": 100.0, ".5": 0.5, "-.5E+1": -5.0, "1_0.5": 10.5, "007.5": 7.5, "2.": 2.0}


@pytest.mark.parametrize("written", DECIMALS)
def test_numbers_are_those_of_yaml_1_2(written: str, tmp_path: Path) -> None:
    """YAML 1.1 reads 010 as 8, and 1e-4 as a text."""
    for result in (load(f"number: {written}\n", tmp_path), load("", tmp_path, "--number", written)):
        assert result.number == DECIMALS[written]
    if written in NUMBERS:
        assert load(f"count: {written}\n", tmp_path).count == NUMBERS[written]


@pytest.mark.parametrize("written", ["1:30", "1:30.5", "0o10", "1_e4", "_1", "1-2"])
def test_what_is_no_number_is_refused(written: str, tmp_path: Path) -> None:
    """YAML 1.1 reads 1:30 as 90."""
    with pytest.raises(ConfigError, match="valid number"):
        load(f"number: {written}\n", tmp_path)


def test_paths_that_nobody_means_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("$HOME/data", "runs/${NAME}", "a_$RUN_ID", "${oc.env:HOME}/data", "runs/$(date +%F)"):
        with pytest.raises(ConfigError, match=r"path: \$.+ would be a part of the path.*not replaced here"):
            load(f"path: '{path}'\n", tmp_path)
        (tmp_path / path).mkdir(parents=True)
        assert load(f"path: '{path}'\n", tmp_path).path == path
    with pytest.raises(ConfigError, match="path: None would be a path of this name: write null"):
        load("path: None\n", tmp_path)
    assert load("path: 'cost $5'\n", tmp_path).path == "cost $5"


def test_a_name_of_a_file_that_no_file_system_takes_is_refused(tmp_path: Path) -> None:
    config = tiny_dit_config(tmp_path, model={"model_path": None, "config_path": "x" * 300})
    with pytest.raises(ConfigError, match="a path of 300 bytes with a name of 300"):
        load_config(TrainDitConfig, write_config(config, tmp_path / "config.yaml"))


def test_values_of_other_fields_are_what_yaml_says(tmp_path: Path) -> None:
    content = "switch: yes\nnumber: 1e-5\ncount: 1_000\nnumbers_by_name: {a: 3}\nanything: {a: no, b: 2}\nmaybe: null\n"
    result = load(content + "number_or_auto: 5\ntext_or_number: 5\npart: {type: told, scale: 2, note: ~}\n", tmp_path)
    assert (result.switch, result.number, result.count, result.numbers_by_name) == (True, 1e-5, 1000, {"a": 3.0})
    assert (result.anything, result.maybe, result.part.note) == ({"a": False, "b": 2}, None, None)
    assert (result.number_or_auto, result.text_or_number, result.part.scale) == (5.0, 5, 2.0)
    assert load("number_or_auto: auto\n", tmp_path).number_or_auto == "auto"
    assert load("choice: no\n", tmp_path).choice == "no"
    assert load("", tmp_path, "--choice", "5").choice == "5"
    assert load("texts: [null, ~]\n", tmp_path).texts == ["null", "~"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("choice: yes", "Input should be 'no', 'off', '5' or 'bf16'.*given: 'yes'"),
        ("text:", "valid string"),
        ("number: no", "valid number.*given: False"),
        ("switch: 1", "valid boolean"),
        ("text: [no]", "valid string"),
        ("part: {type: no}", "unknown type"),
    ],
)
def test_what_is_wrong_is_still_refused(content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(content + "\n", tmp_path)


@pytest.mark.parametrize("value", ["run #3", "a # b", "x: y"])
def test_what_looks_like_a_comment_in_an_override_arrives(value: str, tmp_path: Path) -> None:
    if ":" in value:
        with pytest.raises(ConfigError, match="reads this as a mapping"):
            load("", tmp_path, "--text", value)
        return
    assert load("", tmp_path, "--text", value).text == value
    assert load("", tmp_path, "--text", f"'{value}'").text == value


def test_aliases_and_merged_mappings_are_texts_as_well(tmp_path: Path) -> None:
    content = "text: &word no\ntexts: [*word, on]\nanything: &more {name: off}\ninner:\n  <<: *more\n"
    result = load(content, tmp_path)
    assert (result.text, result.texts, result.inner.name) == ("no", ["no", "on"], "off")


def test_words_of_a_described_tokenizer_are_texts(tmp_path: Path) -> None:
    description = tiny_families.tiny_sd3() | {"tokenizer": {"words": ["WORD", "007", "write"], "max_length": 8}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(description).replace("WORD", "no").replace("'007'", "007"))
    model = build_diffusion_model(ModelConfig(config_path=str(tmp_path / "tiny.yaml"), max_sequence_length=7))
    vocabulary = model.pipeline.tokenizer.get_vocab()
    assert {"no</w>", "007</w>", "write</w>"} <= vocabulary.keys()
    assert diffusion_model_on_meta(ModelConfig(config_path=str(tmp_path / "tiny.yaml"), max_sequence_length=7), "no")


def test_mixed_precision_can_be_no(tmp_path: Path) -> None:
    config = tiny_dit_config(tmp_path)
    path = write_config(config, tmp_path / "config.yaml")
    assert load_config(TrainDitConfig, path, parse_overrides(["--train.mixed_precision", "no"])).train.lr > 0
    with pytest.raises(ConfigError, match=r"'no' or 'bf16'.*given: 'NO'"):
        load_config(TrainDitConfig, path, parse_overrides(["--train.mixed_precision", "NO"]))
    text = yaml.safe_dump(config | {"train": config["train"] | {"mixed_precision": "WORD"}})
    path.write_text(text.replace("WORD", "no"))
    assert read_yaml(path)["train"]["mixed_precision"] is False
    assert load_config(TrainDitConfig, path).train.mixed_precision == "no"
