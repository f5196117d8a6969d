"""The quickstart as a whole, and what it promises. Takes about ten minutes on two cores."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sfumato.tracking.json_lines import read_jsonl
from tests.tiny import ROOT


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_reinforcement_learning_improves_the_model_that_pretraining_left_mediocre(tmp_path: Path) -> None:
    steps = [
        ("train_autoencoder", "autoencoder", []),
        ("train_dit", "pretrain", ["--model.model_path", f"{tmp_path}/autoencoder/hf_ckpt"]),
        ("rl_diffusion", "rl", ["--model.model_path", f"{tmp_path}/pretrain/hf_ckpt"]),
    ]
    for task, name, overrides in steps:
        if name == "pretrain":
            overrides = [*overrides, "--data.cache_dir", f"{tmp_path}/cache"]
        command = ["bash", "train.sh", f"tasks/{task}.py", f"configs/quickstart/{name}.yaml"]
        command += ["--train.output_dir", f"{tmp_path}/{name}", "--train.seed", "3", *overrides]
        subprocess.run(command, cwd=ROOT, check=True)

    lines = read_jsonl(tmp_path / "rl" / "metrics.jsonl")
    rewards = [line["eval/reward/ocr"] for line in lines if "eval/reward/ocr" in line]
    assert rewards[0] <= 0.6
    assert rewards[-1] >= rewards[0] + 0.2
    errors = [line["ratio/replay_error"] for line in lines if "ratio/replay_error" in line]
    assert errors == [0.0] * 60, "before every first update the log-ratio is exactly 0"
    report = (tmp_path / "rl" / "report.html").read_text()
    assert f"{rewards[0]:.3f}" in report and f"{rewards[-1]:.3f}" in report
