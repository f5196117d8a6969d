"""Peak memory of some steps beside what ``sfumato check`` predicts for the same configuration."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.cells import Bound, Cell, Setting
from benchmarks.gpu.distances import mesh_device
from benchmarks.gpu.rl import rl_config
from benchmarks.gpu.sft import QWEN3_1_7B, TINY, sft_config, write_yaml
from benchmarks.gpu.watched import run_steps
from sfumato.commands.check_model import check_model, needed_bytes
from sfumato.config.diffusion_rl import TrajectoryRLConfig
from sfumato.config.load import load_config
from sfumato.config.text import TrainTextConfig
from sfumato.parallel.layout import Layout

QWEN3_8B = QWEN3_1_7B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}

OVER = "sfumato check says that it fits where it does not: the largest part of predicted is the one to look at first"
UNDER = (
    "sfumato check refuses what fits: the part of predicted that torch's memory snapshot (train.profile_steps) lacks"
)
BOUNDS = (
    Bound("of_predicted", 1.03, OVER, real=True),
    Bound("of_predicted", 0.8, UNDER, least=True, real=True),
    Bound(
        "reserved_of_peak",
        1.15,
        "the allocator loses memory between sizes: PYTORCH_ALLOC_CONF, pad_to_multiple_of",
        real=True,
    ),
)

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "1.7 B, all weights": ("1.7b", {"compile": False}),
    "1.7 B, recomputed, chunked": (
        "1.7b",
        {"compile": False, "activation_checkpointing": "full", "chunked_loss": True},
    ),
    "8 B, adapters": ("8b", {"compile": False, "activation_checkpointing": "full", "chunked_loss": True}),
    "Stable Diffusion 3.5 medium, Flow-GRPO": ("rl", {"compile": False}),
}
"""Which model, and settings of ``train``."""


def cells(setting: Setting) -> dict[str, Cell]:
    return {name: partial(measure, name=name) for name in CONFIGURATIONS}


def measure(setting: Setting, name: str) -> dict[str, Any]:
    """The prediction, and on a GPU the peak of two steps after the first."""
    kind, train = CONFIGURATIONS[name]
    folder = setting.scratch / name.replace(" ", "_").replace(",", "")
    if kind == "rl":
        task, schema, config = "rl_diffusion", TrajectoryRLConfig, rl_config(folder, setting, "2 steps", "jpeg", 4)
        config["rollout"]["num_prompts"] = setting.size(2, 2)
    else:
        task, schema, config = "train_text", TrainTextConfig, sft_config(folder, setting, 2)
        if kind == "8b":
            config["model"] |= adapters_of_8b(folder, setting)
    config["train"] |= train
    settings = {"device": mesh_device(setting), "max_steps": 1, **config["train"]}
    parsed = load_config(schema, overrides=config | {"train": settings})
    findings = check_model(parsed, Layout(), on_gpu=True, limit=None)
    predicted = findings.largest
    values: dict[str, Any] = {
        "predicted_gib": predicted.total / 2**30,
        "needed_gib": needed_bytes(predicted, True) / 2**30,
        "predicted": {part: size / 2**30 for part, size in predicted.parts.items()},
    }
    steps = run_steps(task, config, setting, 1, setting.size(2, 1))
    if setting.on_gpu:
        reserved = max(line["memory/gpu_reserved_mib"] for line in steps.timings) / 1024
        values |= {"gpu_peak_gib": steps.peak_gib, "of_predicted": steps.peak_gib * 2**30 / predicted.total}
        values["reserved_of_peak"] = reserved / steps.peak_gib
    return values


def adapters_of_8b(folder: Path, setting: Setting) -> dict[str, Any]:
    """The section ``model`` of adapters on frozen bf16 weights of 8 B."""
    path = write_yaml(folder / "model.yaml", setting.size(QWEN3_8B, TINY))
    return {"config_path": path, "lora": {"rank": 32, "alpha": 64.0}, "dtype": "bf16"}
