"""Tiny runs of every task in float32: the losses of the device beside those of the CPU, and a run that was interrupted.

Noise, batches and dropout belong to samples, so a GPU computes the same run as a CPU but for rounding.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.cells import Bound, Cell, Setting
from benchmarks.gpu.syncs import TASKS
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.run import Run
from tests.tiny import run_task_here

COMPARED = {
    "train_text": ("loss", "grad_norm"),
    "train_dit": ("loss", "grad_norm"),
    "train_dit_dpo": ("loss", "grad_norm"),
    "rl_diffusion": ("reward/total", "grad_norm"),
    "rl_text": ("reward/total", "grad_norm"),
}
"""What of each step is compared."""

REMEDY = "the device computes something else than the CPU: the first step that differs by more says where to look"
BOUNDS = (
    Bound("loss", 1e-4, REMEDY),
    Bound("grad_norm", 2e-3, f"{REMEDY}; updates carry differences on from step to step"),
    Bound("reward/total", 1e-4, REMEDY),
)
"""Largest relative differences in float32."""

STEPS = {"rl_text": 1}
"""Steps that are compared, where not all: a token that is drawn otherwise by rounding changes all that comes after."""


def cells(setting: Setting) -> dict[str, Cell]:
    tasks = {task: partial(like_the_cpu, task=task) for task in COMPARED}
    return tasks | {"asynchronous saving, resuming": resumed}


def tiny_config(task: str, folder: Path, device: str, **train: Any) -> dict[str, Any]:
    config = TASKS[task].config(folder)
    config["train"] |= {"device": device, "compile": False, **train}
    return config


def run(task: str, config: dict[str, Any]) -> Path:
    """Runs a task, without its reports; returns the run folder."""
    with mock.patch.object(Run, "write_report", return_value=None):
        return run_task_here(task, config)


def like_the_cpu(setting: Setting, task: str) -> dict[str, Any]:
    """Largest relative differences over the steps."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    few = setting.size({}, {"max_steps": 2})
    lines_of_device, lines_of_cpu = (
        [line for line in read_jsonl(run(task, config) / "metrics.jsonl") if COMPARED[task][0] in line]
        for config in (
            tiny_config(task, setting.scratch / f"{task}_{number}", device, **few)
            for number, device in enumerate((setting.device, "cpu"))
        )
    )
    steps = STEPS.get(task, len(lines_of_cpu))
    values = {}
    for name in COMPARED[task]:
        pairs = [(a[name], b[name]) for a, b in zip(lines_of_device, lines_of_cpu, strict=True) if name in b][:steps]
        assert pairs, f"no step has {name}"
        values[name] = max(abs(a - b) / max(abs(b), 1e-8) for a, b in pairs)
        print(f"{task}: {name} of the device and of the CPU: {pairs}", flush=True)
    return values


def resumed(setting: Setting) -> dict[str, Any]:
    """A run that saves in the background and is resumed, beside one that is not interrupted."""
    saving = {"save_steps": 3, "save_async": True}
    whole = run("train_text", tiny_config("train_text", setting.scratch / "whole", setting.device))
    folder = setting.scratch / "resumed"
    run("train_text", tiny_config("train_text", folder, setting.device, **saving))
    for later in (folder / "run" / "checkpoints").glob("global_step_6*"):
        shutil.rmtree(later)
    again = tiny_config("train_text", folder, setting.device, load_checkpoint_path="auto", **saving)
    resumed_run = run("train_text", again)
    resumed_losses, whole_losses = (
        [line["loss"] for line in read_jsonl(run_folder / "metrics.jsonl") if "loss" in line]
        for run_folder in (resumed_run, whole)
    )
    assert len(resumed_losses) == len(whole_losses) == 6, (
        f"losses of {len(resumed_losses)} and {len(whole_losses)} steps"
    )
    worst = max(abs(a - b) / abs(b) for a, b in zip(resumed_losses, whole_losses, strict=True))
    print(f"losses, resumed and not interrupted: {resumed_losses}, {whole_losses}", flush=True)
    return {"loss": worst, "same_bits": resumed_losses == whole_losses}
