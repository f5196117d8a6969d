"""Whole iterations of RL of FLUX, Qwen-Image and Wan at the sizes of ``configs/rl``, on one GPU.

The configuration as it stands, with as many samples as one pass of its rollout draws, and JPEG's size as the reward.
Transformers and autoencoders have their published sizes and random weights. Text encoders have the published width, but
one layer: prompts are embedded once, before anything is measured. Wan 2.2 of 5 B trains all weights on eight GPUs;
here it has adapters, and a decoder of less than its published width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import yaml

from benchmarks.diffusion_families import FAMILIES
from benchmarks.gpu.cells import Bound, Cell, Setting
from benchmarks.gpu.results import ROOT
from benchmarks.gpu.sft import write_yaml
from benchmarks.gpu.watched import run_steps
from tests.tiny_families import tiny_flux, tiny_qwen_image, tiny_wan, tiny_wan_small

IMAGE_VAE = {"channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_groups": 32, "latent_channels": 16}
WAN_VAE = {"channels": 96, "multipliers": [1, 2, 4, 4], "layers_per_block": 2, "latent_channels": 16}
UMT5 = {"width": 4096, "num_layers": 1, "num_heads": 64}
WAN_HEAD = {"attention_head_dim": 128, "freq_dim": 256, "num_layers": 30}


@dataclass(frozen=True)
class Configuration:
    """A file of ``configs/rl``, and the pipeline that its ``model.model_path`` stands for."""

    name: str
    pipeline: dict[str, Any]
    tiny_pipeline: dict[str, Any]
    samples: int
    """Of one pass of its rollout."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the section ``model``."""


CONFIGURATIONS = {
    "FLUX.1 dev": Configuration(
        "flow_grpo_flux",
        {**FAMILIES["flux"].real, "vae": {**IMAGE_VAE, "scaling_factor": 0.3611, "shift_factor": 0.1159}},
        tiny_flux(),
        5,
    ),
    "Qwen-Image": Configuration(
        "flow_grpo_qwen_image",
        {
            **FAMILIES["qwen_image"].real,
            "vae": {"base_width": 96, "multipliers": [1, 2, 4, 4], "layers_per_block": 2, "latent_channels": 16},
        },
        tiny_qwen_image(),
        4,
    ),
    "Wan 2.1 1.3 B": Configuration(
        "flow_grpo_wan_ocr",
        {
            "pipeline": "WanPipeline",
            "transformer": {**WAN_HEAD, "num_attention_heads": 12, "ffn_dim": 8960},
            "vae": WAN_VAE,
            "text_encoder": UMT5,
            "scheduler": {"flow_shift": 3.0},
        },
        tiny_wan(),
        2,
    ),
    "Wan 2.2 5 B": Configuration(
        "dance_grpo_wan22",
        {
            "pipeline": "WanPipeline",
            "expand_timesteps": True,
            "transformer": {**WAN_HEAD, "num_attention_heads": 24, "ffn_dim": 14336},
            "vae": {**WAN_VAE, "channels": 160, "latent_channels": 48, "patch_size": 2, "residual": True},
            "text_encoder": UMT5,
            "scheduler": {"flow_shift": 5.0},
        },
        tiny_wan_small(),
        4,
        {"lora": {"rank": 64, "alpha": 128}},
    ),
}

SLOWER = (
    "stage traces says where the time goes: train.compile true, rollout.micro_batch_size, enable_activation_offload"
)
BOUNDS = (
    Bound(
        "gpu_peak_gib",
        76,
        "does not fit on 80 GB: rollout.micro_batch_size, model.offload_idle true, tensor_parallel_size 2",
        real=True,
    ),
    Bound("tflops_per_s", 250, SLOWER, least=True, real=True),
    Bound("samples_finite", 1, "the policy draws NaN in bf16: model.dtype fp32 for what overflows", least=True),
)


def cells(setting: Setting) -> dict[str, Cell]:
    return {name: partial(measure, name=name) for name in CONFIGURATIONS}


def measure(setting: Setting, name: str) -> dict[str, Any]:
    """One iteration after one that does not count."""
    config = family_config(setting, name)
    steps = run_steps("rl_diffusion", config, setting, 1, 1)
    values = steps.rates("images")
    phases = {f"{phase}_s": steps.mean(f"time/{phase}_s") for phase in ("generate", "update")}
    errors = [line["ratio/replay_error"] for line in steps.metrics if "ratio/replay_error" in line]
    broken = steps.metrics[-1].get("reward/failed", 0.0)
    return values | phases | {"replay_error": max(errors), "samples_finite": float(not broken)}


def family_config(setting: Setting, name: str) -> dict[str, Any]:
    """The file of ``configs/rl`` with random weights, prompts of its own and few samples; small images where tiny."""
    chosen = CONFIGURATIONS[name]
    folder = setting.scratch / chosen.name
    folder.mkdir(parents=True, exist_ok=True)
    config = yaml.safe_load((ROOT / "configs" / "rl" / f"{chosen.name}.yaml").read_text(encoding="utf-8"))
    pipeline = setting.size(chosen.pipeline, chosen.tiny_pipeline)
    model = {**config["model"], **chosen.changes, "config_path": write_yaml(folder / "model.yaml", pipeline)}
    model.pop("model_path")
    model["keep_encoders"] = False
    for part, count in (("train", 8), ("eval", 2)):
        lines = "".join(f'a sign that reads "{part.upper()}{number}"\n' for number in range(count))
        (folder / f"{part}.txt").write_text(lines, encoding="utf-8")
    train = {**config["train"], "output_dir": str(folder / "run"), "compile": False}
    for key in ("global_batch_size", "max_steps", "save_steps", "ema_decay", "ema_interval"):
        train.pop(key, None)
    samples = min(chosen.samples, config["rollout"]["micro_batch_size"])
    rollout = {**config["rollout"], "num_prompts": 1, "n": samples, "micro_batch_size": samples}
    if setting.tiny:
        model["max_sequence_length"] = 8
        rollout |= {"height": 32, "width": 32, "num_inference_steps": 6, "n": 2}
        rollout |= {"num_frames": 5} if "num_frames" in rollout else {}
    return {
        **config,
        "model": model,
        "data": {"train_path": str(folder / "train.txt"), "eval_path": str(folder / "eval.txt")},
        "rollout": rollout,
        "reward": {"rewards": [{"type": "jpeg_compressibility"}]},
        "algorithm": {**config["algorithm"], "drop_no_spread": False},
        "train": train,
        "eval": {"num_prompts": 1, "num_inference_steps": 2},
    }
