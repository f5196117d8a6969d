"""YAML that unpacks without end, nests without end, or breaks what makes values of it."""

import os
import time
from pathlib import Path

import pytest

from sfumato.config.load import parse_overrides
from sfumato.config.yaml_text import read_yaml
from sfumato.errors import ConfigError

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12)
)
MERGED = "a0: &a0 {x: 1}\n" + "".join(
    f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 9)}]}}\n" for level in range(1, 12)
)
REFUSED = {
    "an alias bomb": (BOMB, r":5: stands for more than 20,000 values, with all that aliases repeat"),
    "a bomb of merged keys": (MERGED, r":5: stands for more than 20,000 values"),
    "a value within itself": ("a: &a [1, *a]\n", r":1: \*a stands within what it repeats"),
    "a mapping merged into itself": ("a: &a\n  b: 1\n  <<: *a\n", r":3: \*a stands within what it repeats"),
    "brackets": ("a: " + "[" * 100_000, r":1: nested deeper than 50 levels"),
    "braces": ("a: " + "{b: " * 10_000, r":1: nested deeper than 50 levels"),
    "indents": ("".join(f"{' ' * level}a:\n" for level in range(1000)), r":50: nested deeper than 50 levels"),
    "many values": ("a: [" + "1," * 30_000 + "]", r":1: stands for more than 20,000 values"),
    "a megabyte": ("a: " + "x" * 2**20, r" has 1,048,579 bytes, more than the 1,048,576 that are read"),
    "a date that is none": ("a: 2021-99-99\n", "is not valid YAML: .*month must be in"),
    "a number that is none": ("a: !!int x\n", "is not valid YAML: .*invalid literal"),
    "an empty number": ("a: !!float ''\n", "is not valid YAML: .*index out of range"),
    "a truth that is none": ("a: !!bool x\n", "is not valid YAML"),
    "an object": (
        "a: !!python/object/apply:os.system [touch mark]\n",
        ":1 is not valid YAML|is not valid YAML: could not",
    ),
    "a zero byte": ("a: \0\n", "is not valid YAML: unacceptable character"),
    "a digit too many": ("a: " + "9" * 5000 + "\n", "is not valid YAML: .*Exceeds the limit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_within_a_second_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    text, message = REFUSED[name]
    path = tmp_path / "run.yaml"
    path.write_text(text)
    began = time.process_time()
    with pytest.raises(ConfigError, match=message) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    if name != "many values":  # 20,000 of which are read first
        assert time.process_time() - began < 1
    assert not (tmp_path / "mark").exists()


def test_many_keys_take_no_longer_than_they_must(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("".join(f"k{number}: 1\n" for number in range(9_000)))
    began = time.process_time()
    assert len(read_yaml(path)) == 9_000
    assert time.process_time() - began < 10


def test_aliases_and_merged_keys_that_people_write_still_work(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("a: &a {x: 1, y: [1e-4, 2]}\nb: {<<: *a, x: 3}\nc: *a\n")
    assert read_yaml(path) == {
        "a": {"x": 1, "y": [1e-4, 2]},
        "b": {"x": 3, "y": [1e-4, 2]},
        "c": {"x": 1, "y": [1e-4, 2]},
    }


def test_overrides_are_read_with_the_same_care() -> None:
    for value, message in (
        ("[" * 5000, "nested deeper"),
        ("!!int x", "is not valid YAML"),
        ("[1", "is not valid YAML"),
    ):
        with pytest.raises(ConfigError, match=f"the value of --a.b.*{message}"):
            parse_overrides(["--a.b", value])


def test_a_pipe_or_a_folder_is_no_configuration(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"run\.yaml is a named pipe, not a file"):
        read_yaml(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        read_yaml(tmp_path)


def test_a_file_in_another_encoding_says_how_to_save_it(tmp_path):
    path = tmp_path / "run.yaml"
    for content in ("train:\n  lr: 1\n".encode("utf-16"), "# größe\ntrain:\n  lr: 1\n".encode("latin-1")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"run.yaml is not UTF-8 text: .*; save it as UTF-8"):
            read_yaml(path)
