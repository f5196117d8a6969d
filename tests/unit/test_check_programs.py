"""``sfumato check`` looks for the engine's program and for what rewards need, and says what only the run finds out."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from sfumato.commands.check_config import FITS, WRONG, check_config
from sfumato.commands.check_programs import ProgramFindings, check_programs
from sfumato.config.load import load_config
from sfumato.config.text_rl import TextRLConfig
from sfumato.config.trust import code_of_configurations
from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.rewards.ocr import OcrReward
from sfumato.rollout.engines.sglang import SglangSettings
from sfumato.rollout.engines.vllm import VllmSettings
from tests.tiny import tiny_text_rl_config, write_config


def with_reward(folder: Path, **reward: Any) -> ProgramFindings:
    config = tiny_text_rl_config(folder)
    config["reward"] = {"rewards": [reward]}
    return check_programs(load_config(TextRLConfig, overrides=config))


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    """Python as it is where these packages are not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in missing else find(name, *more))


def test_a_program_that_is_not_there_stops_the_check_as_it_would_the_run(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    settings = VllmSettings(program=str(program))
    with pytest.raises(ConfigError, match=f"{program} is not there"):
        settings.check_installed()
    program.write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match=f"may not be executed: chmod .x {program}"):
        settings.check_installed()
    program.chmod(0o755)
    assert SglangSettings(program=str(program)).check_installed() == "whether it takes the model and its arguments"


def test_the_whole_check_ends_with_2_here_and_with_a_note_for_another_machine(tmp_path: Path) -> None:
    config = tiny_text_rl_config(tmp_path)
    config["reward"] = {
        "rewards": [{"type": "http", "base_urls": ["http://127.0.0.1:9"], "api_key_env": "NO_SUCH_KEY"}]
    }
    path = write_config(config, tmp_path / "run.yaml")
    result = check_config(path)
    assert result.exit_code == WRONG and "NO_SUCH_KEY, which is not set" in result.problems[0]
    elsewhere = check_config(path, device_gib=80, with_data=False)
    assert elsewhere.exit_code == FITS and "not on this machine" in "".join(elsewhere.notes)
    assert elsewhere.not_looked_at[0] == "the data" and not result.not_looked_at


def test_servers_are_not_asked_and_that_is_said(tmp_path: Path) -> None:
    result = with_reward(tmp_path, type="http", base_urls=["http://127.0.0.1:9"])
    assert result == ProgramFindings([], ["reward 'http': whether http://127.0.0.1:9 answer"])
    assert "127.0.0.1:8 answers" in VllmSettings(url="http://127.0.0.1:8").check_installed()
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        VllmSettings(url="http://127.0.0.1:8", api_key_env="NO_SUCH_KEY").check_installed()


def test_packages_are_named_with_the_line_that_installs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "vllm", "onnxruntime", "paddle", "math_verify")
    with pytest.raises(MissingDependencyError, match="vLLM cannot be imported here"):
        VllmSettings().check_installed()
    with pytest.raises(MissingDependencyError, match=r"onnxruntime.*pip install rapidocr onnxruntime"):
        OcrReward(engine="rapidocr").check_installed()
    with pytest.raises(MissingDependencyError, match=r"paddle.*pip install 'paddleocr>=3\.0' paddlepaddle"):
        OcrReward(engine="paddleocr").check_installed()
    (missing,) = with_reward(tmp_path, type="math").missing
    assert missing.startswith("reward 'math' needs math-verify") and "pip install" in missing
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="apt-get install tesseract-ocr"):
        OcrReward(engine="tesseract").check_installed()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    (missing,) = with_reward(tmp_path, type="text_reward_model", model_path=str(tmp_path / "none")).missing
    assert missing.startswith(f"reward 'text_reward_model': model_path {tmp_path / 'none'} is not a folder")


def test_a_strangers_function_is_not_imported(tmp_path: Path) -> None:
    reward = {"type": "function", "path": f"{tmp_path / 'mine.py'}:score"}
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\ndef score():\n    return 1\n")
    with code_of_configurations(trusted=False):
        result = with_reward(tmp_path, **reward)
    assert not (tmp_path / "imported").exists() and "--trust-code" in result.not_looked_at[0]
    assert "score" in with_reward(tmp_path, **reward).missing[0] and (tmp_path / "imported").exists()


def test_what_ray_and_a_reward_of_ones_own_load_is_left_to_the_run(tmp_path: Path) -> None:
    config = tiny_text_rl_config(tmp_path)
    config["reward"] = {"rewards": [{"type": "tests.text_rewards:Ascii"}]}
    assert check_programs(load_config(TextRLConfig, overrides=config)) == ProgramFindings()
    config["runtime"] = {"backend": "ray"}
    (line,) = check_programs(load_config(TextRLConfig, overrides=config)).not_looked_at
    assert line == "runtime.backend ray: the cluster, and what is installed on its nodes"
