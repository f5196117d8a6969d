"""What `make quickstart` runs: it can be given again, and with another seed, and the commands of its page beside it."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sfumato.config.diffusion_rl import TrajectoryRLConfig
from sfumato.config.dit import TrainAutoencoderConfig, TrainDitConfig
from sfumato.config.load import load_config, parse_overrides
from tests.tiny import ROOT

SCHEMAS = {
    "train_autoencoder": TrainAutoencoderConfig,
    "train_dit": TrainDitConfig,
    "rl_diffusion": TrajectoryRLConfig,
}


def steps(*arguments: str) -> list[tuple[str, str, Any]]:
    """Task, YAML file and resolved configuration of each command."""
    made = subprocess.run(
        ["make", "-n", "quickstart", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.replace("\\\n", " ")
    results = []
    for line in made.splitlines():
        if "train.sh" in line:
            task, path, *overrides = shlex.split(line[line.index("train.sh") :])[1:]
            name = Path(task).stem
            results.append((name, path, load_config(SCHEMAS[name], ROOT / path, parse_overrides(overrides))))
    assert [name for name, _, _ in results] == list(SCHEMAS)
    return results


def test_it_is_the_configurations_of_the_quickstart_gone_on_with() -> None:
    """So that a command of its page, given with one of the files, meets the same run."""
    for name, path, config in steps():
        plain = load_config(SCHEMAS[name], ROOT / path, {"train": {"load_checkpoint_path": "auto"}})
        assert config == plain


@pytest.mark.parametrize("seed", [42, 7])
def test_each_step_takes_what_the_one_before_made_in_folders_of_its_seed(seed: int) -> None:
    configs = [config for _, _, config in steps(f"SEED={seed}")]
    folders = [Path(config.train.output_dir) for config in configs]
    root = Path("runs/quickstart" if seed == 42 else f"runs/quickstart_seed{seed}")
    assert [folder.parent for folder in folders] == [root] * 3 and len(set(folders)) == 3
    for before, config in zip(folders[:-1], configs[1:], strict=True):
        assert config.model.model_path == str(before / "hf_ckpt")
    assert {config.train.seed for config in configs} == {seed}
    assert Path(configs[1].data.cache_dir).parent == root
    assert {config.train.load_checkpoint_path for config in configs} == {"auto"}


def test_variations_on_the_quickstarts_page_have_folders_of_their_own() -> None:
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"tasks/(\w+)\.py +(configs/quickstart/\w+\.yaml) +(--.*)", text)
    assert len(commands) >= 3
    folders = []
    for task, path, overrides in commands:
        changes = parse_overrides(shlex.split(overrides, comments=True))
        plain = load_config(SCHEMAS[task], ROOT / path)
        config = load_config(SCHEMAS[task], ROOT / path, changes)
        if config.train.output_dir == plain.train.output_dir:
            assert changes == {"train": {"load_checkpoint_path": "auto"}}, "it would meet the quickstart's run"
        folders.append(config.train.output_dir)
    assert len(set(folders)) == len(folders)
