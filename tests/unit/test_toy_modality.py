"""A modality that is in no room of the library is trained by the shared core (docs/adding.md)."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sfumato.config.load import load_config, merge
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.json_lines import read_jsonl
from tests.resumed import assert_same_run, resume_after_interrupt
from tests.tiny import ROOT, run_task_here, run_task_process, weights_in, write_config
from tests.toy_modality import task
from tests.toy_modality.integers import IntegerRLConfig

FOLDER = ROOT / "tests" / "toy_modality"
SCRIPT = "../tests/toy_modality/task"


def toy_config(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    """12 iterations of 4 prompts x 8 sequences of 6 integers, two optimiser steps each."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(map(str, range(10))), encoding="utf-8")
    base = {
        "data": {"train_path": str(prompts), "eval_path": str(prompts)},
        "rollout": {"num_prompts": 4, "n": 8, "micro_batch_size": 16},
        "reward": {"rewards": [{"type": "tests.toy_modality.integers:Ascending"}]},
        "algorithm": {
            "advantage": "group",
            "objective": {"type": "clipped_ratio", "clip_range": 0.2},
            "kl_coef": 0.001,
        },
        "train": {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 12,
            "lr": 0.05,
            "micro_batch_size": 8,
            "global_batch_size": 16,
            "device": "cpu",
            "num_threads": 1,
            "trackers": [],
        },
        "eval": {"every_steps": 6, "num_prompts": 10},
    }
    return merge(base, overrides)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in this process."""
    return run_task_here(task, toy_config(tmp_path_factory.mktemp("toy")), with_report=True)


def values(folder: Path, name: str) -> list[float]:
    """A metric by step."""
    return [line[name] for line in read_jsonl(folder / "metrics.jsonl") if name in line]


def test_it_is_small_and_imports_nothing_of_another_modality() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")}
    assert sum(len(text.splitlines()) for text in sources.values()) < 260
    imported = [
        name
        for text in sources.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for name in [str(node.module), *(alias.name for alias in node.names)]
    ]
    assert len(imported) > 50 and not [name for name in imported if "diffusion" in name or "language" in name]
    code = "import json, sys\nimport tests.toy_modality.task\nprint(json.dumps(sorted(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    loaded = [name for name in json.loads(done.stdout) if name.startswith("sfumato") or name == "diffusers"]
    assert "sfumato.runtime.update" in loaded and not [name for name in loaded if "diffus" in name]


def test_the_page_names_what_is_there_and_shows_the_update_as_it_is() -> None:
    page, script = (path.read_text(encoding="utf-8") for path in (ROOT / "docs/adding.md", FOLDER / "task.py"))
    named = set(re.findall(r"`((?:sfumato|tests)/[a-z_/]+(?:\.py)?)`", page))
    assert len(named) > 8 and not [path for path in named if not (ROOT / path).exists()]
    (lines,) = (str(sum(len(path.read_text().splitlines()) for path in FOLDER.glob("*.py"))),)
    assert f"{lines} lines with configuration" in page
    shown = re.search(r"```python\n(.*?)```", page, re.S)[1].replace("config.algorithm", "algorithm").splitlines()
    code = [line.partition("  #")[0].strip() for line in shown]
    assert len(code) > 10 and not [line for line in code if line not in script]


def test_its_reward_rises(whole: Path) -> None:
    rewards = values(whole, "reward/total")
    assert len(rewards) == 12 and rewards[0] < 0.2 and rewards[-1] > rewards[0] + 0.25, rewards
    assert values(whole, "eval/reward/total")[-1] > 0.3 and values(whole, "eval/log_prob")[-1] < 0
    assert values(whole, "ratio/mean")[0] == pytest.approx(1, abs=0.1) and (whole / "report.html").is_file()
    samples = [json.loads(line) for line in (whole / "samples/step_000012/samples.jsonl").open()]
    assert len(samples[0]["text"].split()) == 6 and {sample["kind"] for sample in samples} == {"eval", "train"}


def test_a_run_that_was_ended_goes_on_to_the_same_bits(whole: Path, tmp_path: Path) -> None:
    assert_same_run(resume_after_interrupt(task, toy_config(tmp_path, train={"save_steps": 5}), 7), whole)


@pytest.mark.parametrize("in_turns", [False, True])
def test_a_sampler_of_its_own_draws_the_same(whole: Path, tmp_path: Path, in_turns: bool) -> None:
    runtime = {"offload_idle": in_turns}
    apart = run_task_here(task, toy_config(tmp_path, rollout={"hybrid_engine": False}, runtime=runtime))
    assert_same_run(apart, whole)


def test_the_memory_of_an_actor_that_samples_is_used_in_turns(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    build_actor = task.build_actor
    monkeypatch.setattr(task, "build_actor", lambda *args, **more: built.append(build_actor(*args, **more)) or built[0])
    offloaded = run_task_here(task, toy_config(tmp_path, runtime={"offload_idle": True}))
    assert built[0].memory is not None, "the setting is not ignored"
    assert (offloaded / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_the_next_samples_may_be_drawn_during_the_update(tmp_path: Path) -> None:
    late = {"hybrid_engine": False, "async_strategy": "one-step-off"}
    folder = run_task_here(task, toy_config(tmp_path, rollout=late))
    assert values(folder, "staleness/max") == [0] + [1] * 11
    assert values(folder, "reward/total")[-1] > values(folder, "reward/total")[0] + 0.2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp1", "fsdp2"])
def test_two_ranks_train_alike(whole: Path, tmp_path: Path, mode: str) -> None:
    """Ranks add up gradients in another order: after 24 optimiser steps metrics differ by 1e-5, weights by 5e-7."""
    config = write_config(toy_config(tmp_path, train={"data_parallel_mode": mode}), tmp_path / "toy.yaml")
    result = run_task_process(SCRIPT, config, num_processes=2)
    assert result.returncode == 0, result.output
    lines = [read_jsonl(folder / "metrics.jsonl") for folder in (whole, result.output_dir)]
    for alone, shared in zip(*lines, strict=True):
        assert shared == pytest.approx(alone, rel=1e-4, abs=1e-6), alone["step"]
    weights = [weights_in(folder / "hf_ckpt") for folder in (whole, result.output_dir)]
    for name, (*_, alone) in weights[0].items():
        shared = np.frombuffer(weights[1][name][2], np.float32)
        assert np.abs(shared - np.frombuffer(alone, np.float32)).max() < 1e-5, name


WITHOUT_PROMPTS = """
from pathlib import Path

from sfumato.tracking.task import run_task
from tests.toy_modality import task
from tests.toy_modality.integers import IntegerRLConfig

identify = task.identify_prompts


def identify_and_remove(config, *prompts):
    identity = identify(config, *prompts)
    Path(config.data.train_path).unlink()
    return identity


task.identify_prompts = identify_and_remove
if __name__ == "__main__":
    run_task(task.main, IntegerRLConfig)
"""


@pytest.mark.slow
def test_it_runs_on_ray_where_roles_are_given_the_prompts(whole: Path, tmp_path: Path) -> None:
    """The file of the prompts is gone before the processes of the roles are started."""
    (tmp_path / "without_prompts.py").write_text(WITHOUT_PROMPTS, encoding="utf-8")
    script = os.path.relpath(tmp_path / "without_prompts", ROOT / "tasks")
    pools = {role: {"cpus": 0.5} for role in ("actor", "sampler", "scorer")}
    where = {"runtime": {"backend": "ray", "object_store_gb": 0.2, "pools": pools}, "rollout": {"hybrid_engine": False}}
    config = write_config(toy_config(tmp_path, **where), tmp_path / "toy.yaml")
    result = run_task_process(script, config, timeout_s=300)
    assert result.returncode == 0, result.output
    assert_same_run(result.output_dir, whole)


def test_a_sampler_has_the_weights_before_training_until_it_is_sent_others(tmp_path: Path) -> None:
    config = load_config(IntegerRLConfig, overrides=toy_config(tmp_path))
    sampler = task.build_sampler(config, Mesh(Layout(), torch.device("cpu")), None, prompts=[])
    assert sampler.version == 0
