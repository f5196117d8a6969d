"""Whether all processes of a run execute the same source code, and whether it is edited under the run."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from sfumato.errors import ConfigError
from sfumato.tracking import source_code
from sfumato.tracking.source_code import (
    CODE,
    SourceWatch,
    check_same_code,
    code_digest,
    describe_difference,
    package_versions,
)
from tests.tiny import run_task_here, tiny_dit_config


class GatheringMesh:
    """A mesh whose other rank gives these versions."""

    size = 2

    def __init__(self, other: dict[str, str]) -> None:
        self.other = other

    def gather(self, value: tuple[str, dict[str, str]], over: str) -> list[tuple[str, dict[str, str]]]:
        assert over == "world"
        return [value, ("second-host", self.other)]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of nothing but two files in place of the library."""
    (tmp_path / "package" / "deep").mkdir(parents=True)
    for name in ("one.py", "deep/two.py"):
        (tmp_path / "package" / name).write_text("x = 1\n")
    monkeypatch.setattr(source_code, "PACKAGE", tmp_path / "package")
    source_code._package_files.cache_clear()
    code_digest.cache_clear()
    yield tmp_path / "package"
    source_code._package_files.cache_clear()
    code_digest.cache_clear()


def test_the_digest_is_of_names_and_contents_at_the_first_call(package: Path) -> None:
    first = code_digest()
    (package / "one.py").write_text("x = 2\n")
    assert code_digest() == first, "what runs is what was loaded"
    code_digest.cache_clear()
    second = code_digest()
    (package / "one.py").rename(package / "three.py")
    source_code._package_files.cache_clear()
    code_digest.cache_clear()
    assert len({first, second, code_digest()}) == 3


def test_machines_with_other_code_or_versions_are_named() -> None:
    same = package_versions()
    check_same_code(GatheringMesh(same))
    with pytest.raises(ConfigError, match=rf"second-host has {CODE} 0123 \({same[CODE]} here\)\. Install"):
        check_same_code(GatheringMesh({**same, CODE: "0123"}))
    with pytest.raises(ConfigError, match=r"second-host has torch 1.0 "):
        check_same_code(GatheringMesh({**same, "torch": "1.0"}))
    assert describe_difference(same, same) == ""
    older = {name: version for name, version in same.items() if name != CODE}
    assert describe_difference(older, same) == f"{CODE} unknown ({same[CODE]} here)", "a release without the digest"


def test_edited_files_are_named_once(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_code, "PAUSE_S", 0.0)
    user_file = tmp_path / "my_reward.py"
    user_file.write_text("y = 1\n")
    module = types.ModuleType("my_reward")
    module.__file__ = str(user_file)
    monkeypatch.setitem(sys.modules, "my_reward", module)
    watch = SourceWatch()
    assert watch.look() == ""
    (package / "deep" / "two.py").write_text("x = 10\n")
    user_file.write_text("y = 10\n")
    said = watch.look()
    assert str(package / "deep" / "two.py") in said and str(user_file) in said and "one.py" not in said
    assert watch.look() == "", "each edit is said once"
    (package / "one.py").unlink()
    assert "one.py" in watch.look()


def test_installed_packages_are_not_watched() -> None:
    files = SourceWatch()._files
    assert Path(source_code.__file__) in files
    assert not [path for path in files if "site-packages" in path.parts or path.name == "pathlib.py"]


def test_a_run_says_what_is_edited_and_a_resumed_one_that_it_is_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_code, "PAUSE_S", 0.0)
    looks = iter(["", "edited while this run goes on: x.py"])
    monkeypatch.setattr(SourceWatch, "look", lambda self: next(looks, ""))
    config = tiny_dit_config(tmp_path, train={"max_steps": 2, "save_steps": 1})
    folder = run_task_here("train_dit", config)
    assert "edited while this run goes on: x.py" in (folder / "log.txt").read_text()
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["source_code"] == code_digest()
    config["train"] |= {"max_steps": 3, "load_checkpoint_path": "auto"}
    run_task_here("train_dit", config)
    assert "other source code" not in (folder / "log.txt").read_text()
    environment = json.loads((folder / "environment.json").read_text()) | {"source_code": "0123"}
    (folder / "environment.json").write_text(json.dumps(environment))
    config["train"]["max_steps"] = 4
    run_task_here("train_dit", config)
    assert "step 4 and later run other source code of sfumato than the steps before" in (folder / "log.txt").read_text()
