"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import sfumato
from sfumato.cli import main
from tests.tiny import ROOT, tiny_dit_config, write_config


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sfumato.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_check_prints_json_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_config(tiny_dit_config(tmp_path), tmp_path / "run.yaml")
    capfd.readouterr()
    code = main(["check", str(path), "--json", "--train.micro_batch_size", "1"])
    content = json.loads(capfd.readouterr().out)
    assert code == content["exit_code"] == 0 and content["task"] == "train_dit"
    assert not (tmp_path / "run").exists(), "nothing is made"


def test_mistakes_are_printed_without_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tiny_dit_config(tmp_path), tmp_path / "run.yaml")
    for arguments, message in (
        (["check", str(path), "--train.lrr", "1"], "did you mean 'lr'"),
        (["check", str(path), "--train.lr"], "--train.lr has no value"),
        (["check", str(tmp_path / "none.yaml")], "configuration file not found"),
        (["report", str(tmp_path)], "is no run folder"),
        (["export", str(tmp_path), str(tmp_path / "out")], str(tmp_path)),
    ):
        assert main(arguments) in (2, 3), arguments
        shown = capsys.readouterr().err
        assert shown.startswith("error: ") and message in shown and "Traceback" not in shown


def test_a_shipped_configuration_is_understood_from_any_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("check", "preprocess"):
        assert main([command, "configs/quickstart/text_sft.yaml", "--train.lrr", "1"]) == 2
        assert "did you mean 'lr'" in capsys.readouterr().err
        assert main([command, "configs/quickstart/none.yaml"]) == 2
        assert capsys.readouterr().err.startswith("error: configuration file not found: configs/quickstart/none.yaml")


def test_options_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["doctor", "--train.lr", "1"], ["check", "x.yaml", "--ranks", "0"], ["chekc"], []):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert "unexpected arguments: --train.lr 1" in capsys.readouterr().err


def test_an_option_that_is_nearly_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, meant in (
        (["check", "x.yaml", "--skip-date"], "unknown option --skip-date; did you mean --skip-data?"),
        (["doctor", "--flder=/tmp"], "unknown option --flder; did you mean --folder?"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert meant in capsys.readouterr().err


def test_report_is_written_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("train: {}\n")
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").stat().st_size > 0 and "report.html" in capsys.readouterr().out


def test_the_command_line_starts_at_once() -> None:
    code = "import sys, sfumato.cli; sfumato.cli.build_parser(); print([m for m in sys.modules if m in HEAVY])"
    heavy = ("torch", "pydantic", "yaml", "rich", "numpy", "transformers", "packaging")
    done = subprocess.run(
        [sys.executable, "-c", f"HEAVY = {heavy}\n{code}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
    assert run("--version").stdout == f"sfumato {sfumato.__version__}\n"
    assert all(name in run("--help").stdout for name in ("check", "doctor", "export", "report"))
