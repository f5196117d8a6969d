"""Every block of docs/rewards_tutorial.md, in order, in one folder: files are written, code and commands are run.

Tasks run in this process and on the tiny model, a few iterations long; the reward server is a real one.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from sfumato.config.load import load_config, merge, parse_overrides
from sfumato.config.yaml_text import read_yaml
from sfumato.rewards.scoring.workers import close_workers
from sfumato.rewards.server.app import RewardServerConfig
from tests.reward_servers import start_server
from tests.tiny import ROOT, run_task_here, weights_in, write_tiny_pipeline

PAGE = ROOT / "docs" / "rewards_tutorial.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
SHORT = {
    "rollout": {"num_prompts": 2, "n": 4, "micro_batch_size": 4, "num_inference_steps": 4},
    "algorithm": {"window": {"range": [0, 3]}},
    "train": {"micro_batch_size": 4, "global_batch_size": 8, "max_steps": 2, "device": "cpu", "num_threads": 1},
    "eval": {"every_steps": 2, "num_prompts": 2, "num_inference_steps": 2},
}


def test_every_block_does_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    pipeline = tmp_path / "runs" / "quickstart" / "pretrain" / "hf_ckpt"
    write_tiny_pipeline(pipeline)
    servers: list = []
    done = []
    try:
        for kind, text in BLOCKS:
            done.append(run_block(kind, text, servers))
    finally:
        for server in servers:
            server.end()
        close_workers()
        for name in ("my_rewards", "my_functions"):
            sys.modules.pop(name, None)
    assert weights_in(tmp_path / "runs/warmth/hf_ckpt") == weights_in(tmp_path / "runs/served/hf_ckpt")
    assert sorted(set(done)) == ["code", "file", "server", "task"] and done.count("task") == 3


def run_block(kind: str, text: str, servers: list) -> str:
    """Does what a reader would do with a block. Returns what that was."""
    titled = re.match(r"# (\S+\.(?:py|yaml))\n", text)
    if titled:
        Path(titled.group(1)).write_text(text, encoding="utf-8")
        return "file"
    if kind == "python":
        exec(compile(text, str(PAGE), "exec"), {"__name__": "tutorial"})
        return "code"
    assert kind == "bash", f"a block of kind {kind} that is no file"
    program, *arguments = shlex.split(text)
    if program == "bash":
        assert arguments[:2] == ["train.sh", "tasks/rl_diffusion.py"]
        overrides = parse_overrides(arguments[3:])
        if servers:
            overrides["reward"]["rewards"][0]["base_urls"] = [servers[0].url]
        run_task_here("rl_diffusion", merge(merge(read_yaml(arguments[2]), overrides), SHORT), with_report=True)
        return "task"
    assert [program, *arguments[:2]] == ["python", "-m", "sfumato.rewards.server"]
    config = load_config(RewardServerConfig, arguments[2], parse_overrides(arguments[3:]))
    assert config.port == 8642
    rewards = read_yaml(arguments[2])["rewards"]
    servers.append(start_server(Path.cwd(), rewards, modules=Path.cwd()))  # at a port that is free here
    return "server"


def test_files_of_the_page_agree_with_its_commands() -> None:
    files = {text.split("\n", 1)[0].removeprefix("# "): text for _, text in BLOCKS if text.startswith("# ")}
    command = next(text for kind, text in BLOCKS if kind == "bash" and "runs/mixture" in text)

    overrides = parse_overrides(shlex.split(command)[4:])
    assert yaml.safe_load(files["mixture.yaml"])["reward"] == overrides["reward"]
