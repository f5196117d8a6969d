"""The configurations of docs/text_rl/examples.md as they are, by their commands: what each is to show, it shows.

The agent needs openai, the environment verifiers and uv: each is left out where its package is missing. Each takes one
to some minutes on two cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sfumato.tracking.json_lines import read_jsonl
from tests.tiny import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
EVAL = "eval/reward/total"


def start(task: str, name: str, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A run of ``configs/text_rl/NAME.yaml`` in the folder."""
    words = ["bash", "train.sh", f"tasks/{task}.py", f"configs/text_rl/{name}.yaml", "--train.output_dir", str(folder)]
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where uv may be
    environment = os.environ | {"PYTHON": sys.executable, "PATH": programs, "PYTHONPATH": "docs/examples"}
    return subprocess.run([*words, *overrides], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def curve(folder: Path, metric: str = EVAL) -> list[float]:
    return [line[metric] for line in read_jsonl(folder / "metrics.jsonl") if metric in line]


@pytest.fixture(scope="module")
def unsure_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of calculator_sft.yaml."""
    folder = tmp_path_factory.mktemp("sft")
    done = start("train_text", "calculator_sft", folder)
    assert done.returncode == 0, done.stderr
    return str(folder / "hf_ckpt")


def test_a_model_learns_to_call_the_calculator(unsure_model: str, tmp_path: Path) -> None:
    done = start("rl_text", "calculator", tmp_path, "--model.model_path", unsure_model)
    assert done.returncode == 0, done.stderr
    assert curve(tmp_path)[0] < 0.6 and curve(tmp_path)[-1] > 0.9
    again = start("rl_text", "calculator", tmp_path, "--model.model_path", unsure_model)
    assert again.returncode != 0 and str(tmp_path) in again.stderr, "a second run in the same folder"


def test_an_agent_for_the_openai_client_is_trained_as_it_is(unsure_model: str, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    done = start("rl_text", "agent", tmp_path, "--model.model_path", unsure_model)
    assert done.returncode == 0, done.stderr
    assert curve(tmp_path)[0] < 0.6 and curve(tmp_path)[-1] > 0.9


def test_an_environment_of_verifiers_is_trained_as_it_is(unsure_model: str, tmp_path: Path) -> None:
    pytest.importorskip("verifiers.v1")
    done = start("rl_text", "verifiers", tmp_path, "--model.model_path", unsure_model)
    assert done.returncode == 0, done.stderr
    assert curve(tmp_path)[-1] > curve(tmp_path)[0] + 0.2
