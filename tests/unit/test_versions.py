"""Packages outside of the versions that were tested."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sfumato.config.versions import describe_broken_package, describe_untested_versions
from sfumato.tracking.exit import ending_of

ROOT = Path(__file__).parents[2]
LISTED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
REQUIREMENTS = {requirement.name: requirement for requirement in map(Requirement, LISTED)}


@pytest.fixture(autouse=True)
def installed_as_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if sfumato had been installed since ``pyproject.toml`` was changed."""
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [*LISTED, "a-tool>=1; extra == 'dev'"])


@pytest.mark.parametrize("package", ["torch", "transformers", "diffusers", "peft"])
def test_a_version_that_nobody_has_tried_is_not_installed_and_is_said_where_it_is(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of these packages is used than what their pages promise."""
    requirement = REQUIREMENTS[package]
    assert any(bound.operator == "<" for bound in requirement.specifier), f"{package} has no upper bound"
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.1" if name == package else version(name))
    (sentence,) = describe_untested_versions()
    assert sentence.startswith(f"{package} 99.1 is not among the versions")
    assert sentence.endswith(f"pip install '{requirement}'")


def test_what_is_not_installed_has_no_range(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert describe_untested_versions() == []


def test_the_versions_of_the_tests_are_in_the_ranges() -> None:
    """An upper bound that was forgotten when ``constraints.txt`` moved would make the README's commands fail."""
    pins = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    version_of = {name.lower(): version for name, version in pins}
    for name, requirement in REQUIREMENTS.items():
        assert requirement.specifier.contains(version_of[name.lower()]), requirement
    assert describe_untested_versions() == []


def import_late(package: str) -> None:
    """As transformers and diffusers do, whose errors name a class or a module of their own."""
    try:
        try:
            importlib.import_module(package)
        except Exception as error:
            raise ModuleNotFoundError("Could not import module 'Qwen3ForCausalLM'.") from error
    except ModuleNotFoundError as error:
        raise RuntimeError("Failed to import diffusers.pipelines because of the following error") from error


def test_an_installed_package_that_does_not_fit_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision of another torch: transformers imports it as soon as it is installed."""
    (tmp_path / "seen.py").write_text("import torch\ntorch.ops.load_library('/nowhere/of_another_torch.so')\n")
    described = tmp_path / "a_seen_package-0.2.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: a-seen-package\nVersion: 0.2\n")
    (described / "top_level.txt").write_text("seen\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError) as raised:
        import_late("seen")
    ending = ending_of(raised.value)
    assert ending.text.startswith("error: a-seen-package 0.2 is installed, but cannot be imported (OSError: ")
    assert ending.text.endswith("or pip uninstall a-seen-package") and ending.code == 2


def test_other_errors_of_imports_are_no_broken_package() -> None:
    with pytest.raises(RuntimeError) as missing:
        import_late("nothing_of_this_name")
    assert describe_broken_package(missing.value) == ""
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module("nothing_of_this_name")
    assert describe_broken_package(raised.value) == ""
    assert "Traceback" in ending_of(raised.value).text
