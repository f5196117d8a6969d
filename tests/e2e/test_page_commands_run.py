"""Commands of the pages as they stand there, run in a copy of the repository whose configurations are made tiny and
where the reader's own files (``my/...``) are made in code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image

from sfumato.config.load import merge, parse_overrides
from sfumato.config.yaml_text import read_yaml
from sfumato.tracking.json_lines import read_jsonl
from tests.page_commands import ROOT, Command
from tests.tiny import (
    tiny_dit_config,
    tiny_pipeline_description,
    tiny_rl_config,
    write_config,
    write_tiny_pipeline,
)
from tests.unit.test_config_files import made_tiny
from tests.unit.test_page_commands import COMMANDS, SLOW, rules_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RUN = [command for command in COMMANDS if rules_of(command)[0].where == SLOW]
ONE_PROCESS = {"NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
MOST_RANKS = 4
"""Where a page starts more, so many are started here."""
SHORTER = {
    "benchmarks/pipeline_model.py": ["--iterations", "2", "--workers", "8"],
    "benchmarks.weight_sync": ["--layers", "1", "--width", "128", "--repeats", "1"],
}
"""Flags that make a benchmark short; they come last, and so replace those before."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository with configurations and runs of its own, and the files that a reader is to bring."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for name in ("train.sh", "tasks", "sfumato", "benchmarks", "docs", "tests"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "configs", folder / "configs")
    write_tiny_pipeline(folder / "my/stable-diffusion-3.5")
    (folder / "my/images").mkdir()
    pictures = []
    for index in range(4):
        pixels = np.random.default_rng(index).integers(0, 256, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"my/images/{index}.png")
        (folder / f"my/images/{index}.txt").write_text(f"picture {index}")
        pictures.append({"bytes": (folder / f"my/images/{index}.png").read_bytes()})
    chat = {"messages": [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]}
    for name in ("chats", "held_out_chats"):
        (folder / f"my/{name}.jsonl").write_text(f"{json.dumps(chat)}\n" * 8)
    pairs = {"caption": list("abcd"), "jpg_0": pictures, "jpg_1": pictures[::-1], "label_0": [1, 0, 1, 0]}
    for name in ("pairs", "held_out_pairs"):
        Dataset.from_dict(pairs).to_parquet(folder / "my" / name / "rows.parquet")
    return folder


def tiny_config(command: Command, task: str, path: Path, ranks: int) -> dict[str, Any]:
    """The shipped configuration, or a reader's own, at the size of a toy."""
    if not path.is_file():
        content = (tiny_rl_config if task.startswith("rl_diffusion") else tiny_dit_config)(path.parent)
        if "pixel_mixer:PixelMixerFamily" in command.words:
            description = write_config(
                {"pipeline": "PixelMixerPipeline", "transformer": {"width": 16}}, path.with_name("mixer.yaml")
            )
            content = merge(content, {"rollout": {"height": 8, "width": 8}})
            content["model"] = {"config_path": str(description), "family": "pixel_mixer:PixelMixerFamily"}
        if command.page == "docs/rl_diffusion.md":
            content["algorithm"] |= {"objective": {"type": "reinforce:Reinforce"}}
        if "--train.ulysses_parallel_size" in command.words:  # of which each rank takes some heads
            heads = {"transformer": {"num_attention_heads": 4, "attention_head_dim": 8}}
            described = write_config(merge(tiny_pipeline_description(), heads), path.with_name("four_heads.yaml"))
            content["model"] = {"config_path": str(described), "max_sequence_length": 7}
        if "--train.cfg_parallel_size" in command.words:
            content["rollout"]["guidance_scale"] = 3.0
    else:
        shipped, (_, content) = read_yaml(path), made_tiny(path, path.parent)
        content["train"]["output_dir"] = shipped["train"]["output_dir"]
        if "--data.train_path" in command.words:
            made = ("data_type", "glyphs", "synthetic")
            content["data"] = {key: value for key, value in content["data"].items() if key not in made}
            content["data"] |= {key: value for key, value in shipped["data"].items() if key in made}
    name, size = "--train.micro_batch_size", 2
    if name in command.words:
        size = int(command.words[command.words.index(name) + 1])
    content["train"] |= {"max_steps": 1, "device": "cpu", "num_threads": 1}
    content["train"]["micro_batch_size"] = size
    if task != "rl_diffusion_direct":  # whose iteration is one optimiser step
        content["train"]["global_batch_size"] = size * ranks
    if task.startswith("rl_diffusion"):
        content["rollout"] |= {"num_prompts": ranks, "n": 2, "micro_batch_size": 2}
    if task == "rl_text":
        content["rollout"] |= {"num_prompts": ranks}
    return content


def run(words: list[str], copy: Path, **environment: str) -> str:
    """What a command writes; it must end with 0."""
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | ONE_PROCESS | environment | {"PATH": programs}
    done = subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "command", [command for command in RUN if "tasks/" in command.text and "--help" not in command.words], ids=str
)
def test_a_task_runs_as_the_page_says(command: Command, copy: Path) -> None:
    words = list(command.words)
    script = next(number for number, word in enumerate(words) if word.startswith("tasks/"))
    nodes, ranks = (int(command.environment.get(name, 1)) for name in ("NNODES", "NPROC_PER_NODE"))
    ranks = min(ranks, MOST_RANKS)
    task, path = Path(words[script]).stem, copy / words[script + 1]
    if words[script + 1] == "configs/quickstart/text_sft.yaml":
        shorten_what_makes_the_model(copy)
    content = tiny_config(command, task, path, ranks)
    write_config(content, path)
    environment = {name: value for name, value in command.environment.items() if name == "PYTHONPATH"}
    environment["NPROC_PER_NODE"] = str(ranks)
    if nodes > 1:
        pytest.skip("the launch on several nodes: tests/unit/test_launch.py")
    if "auto" in words:
        run(words[: words.index("--train.load_checkpoint_path")], copy, **environment)
    run(words, copy, **environment)
    folder = copy / merge(content, parse_overrides(words[script + 2 :]))["train"]["output_dir"]
    assert (folder / "hf_ckpt").is_dir() and read_jsonl(folder / "metrics.jsonl")[-1]["step"] >= 1


def shorten_what_makes_the_model(copy: Path) -> None:
    """The configuration that ``model.made_by`` names."""
    path = copy / "configs/quickstart/text_pretrain.yaml"
    content = merge(read_yaml(path), {"train": {"max_steps": 2}, "eval": {"num_rows": 4}})
    write_config(content, path)


@pytest.mark.parametrize(
    "command", [command for command in RUN if "tasks/" not in command.text or "--help" in command.words], ids=str
)
def test_another_command_runs_as_the_page_says(command: Command, copy: Path) -> None:
    words = list(command.words)
    if "runs/my_run" in words:
        write_config(tiny_rl_config(copy, train={"output_dir": "runs/my_run"}), copy / "my_run.yaml")
        run(["bash", "train.sh", "tasks/rl_diffusion.py", "my_run.yaml"], copy)
    more = next((flags for name, flags in SHORTER.items() if name in words), [])
    assert run([*words, *more], copy).strip()
