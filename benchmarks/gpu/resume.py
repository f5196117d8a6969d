"""Saving and resuming at size: a language model of 1.7 B with all weights, and one of 8 B with adapters.

All of the state of 8 B is 98 GB, which neither the memory of one GPU of 80 GB nor a small disk holds: how long its
checkpoint would take follows from the bytes a second of 1.7 B.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.cells import Bound, Cell, Setting
from benchmarks.gpu.memory import adapters_of_8b
from benchmarks.gpu.sft import sft_config
from benchmarks.gpu.watched import run_steps
from sfumato.checkpoint.checkpointer import Checkpointer

WHOLE_8B = 8.19e9 * 12
"""Bytes of float32 weights and AdamW's two averages."""

BOUNDS = (
    Bound(
        "loss_difference",
        1e-3,
        "what is resumed is not what was saved: compare the run folders, and train nothing long",
    ),
    Bound(
        "same_bits",
        1,
        "train.deterministic does not hold on this GPU: metrics.jsonl of both runs says from which step on",
        least=True,
        cells="8 B",
    ),
    Bound(
        "save_gb_per_s", 0.5, "the disk: set train.save_async true, or a faster train.output_dir", least=True, real=True
    ),
    Bound("whole_8b_save_s", 200, "as save_gb_per_s", real=True),
    Bound("resume_s", 120, "checksums or the disk: watch both while it starts", real=True),
)


def cells(setting: Setting) -> dict[str, Cell]:
    return {"1.7 B, all weights": partial(measure, kind="1.7b"), "8 B, adapters": partial(measure, kind="8b")}


@contextlib.contextmanager
def timed(name: str, seconds: list[float]) -> Iterator[None]:
    """Inside, calls of a method of ``Checkpointer`` leave how long they took."""
    method = getattr(Checkpointer, name)

    def call(*args: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*args, **named)
        finally:
            seconds.append(time.perf_counter() - started)

    with mock.patch.object(Checkpointer, name, call):
        yield


def measure(setting: Setting, kind: str) -> dict[str, Any]:
    """Four steps, of which the second is saved, and the last two once more from there."""
    folder = setting.scratch / kind
    config = sft_config(folder, setting, 1)
    settings = {"compile": False, "activation_checkpointing": "full", "chunked_loss": True, "save_steps": 2}
    if kind == "8b":
        config["model"] |= adapters_of_8b(folder, setting)
        settings["deterministic"] = True
    config["train"] |= settings
    save_s: list[float] = []
    resume_s: list[float] = []
    with timed("after_step", save_s):
        whole = run_steps("train_text", config, setting, 1, 3)
    size = sum(file.stat().st_size for file in newest_checkpoint(folder).rglob("*") if file.is_file())
    config["train"]["load_checkpoint_path"] = "auto"
    with timed("resume", resume_s):
        again = run_steps("train_text", config, setting, 3, 1)
    torch.use_deterministic_algorithms(False)  # what train.deterministic has set for this process
    losses = [line["loss"] for line in whole.metrics if line["step"] > 2]
    resumed = [line["loss"] for line in again.metrics if line["step"] > 2]
    assert len(losses) == len(resumed) == 2, f"losses of steps 3 and 4: {losses}, resumed {resumed}"
    rate = size / max(save_s)
    values = {
        "loss_difference": max(abs(a - b) / abs(b) for a, b in zip(resumed, losses, strict=True)),
        "same_bits": float(resumed == losses),
        "gigabytes": size / 1e9,
        "save_s": max(save_s),
        "save_gb_per_s": rate / 1e9,
        "resume_s": max(resume_s),
    }
    if kind == "8b":  # a small file says nothing of the disk
        values.pop("save_gb_per_s")
        return values
    return values | {"whole_8b_save_s": WHOLE_8B / rate}


def newest_checkpoint(folder: Path) -> Path:
    return max(
        (folder / "run" / "checkpoints").glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2])
    )
