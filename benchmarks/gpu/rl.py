"""Flow-GRPO at the size of Stable Diffusion 3.5 medium: images a second of whole iterations.

The published transformer and autoencoder with random weights, 512 x 512 pixels, 10 steps, guidance 4.5, adapters of
rank 32, bf16; prompts are embedded in advance. ``9 steps`` is Flow-GRPO with its KL penalty, ``2 steps``
Flow-GRPO-Fast with two trained steps. An iteration draws images, decodes and scores them, and learns from them.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

from benchmarks.diffusion_families import FAMILIES
from benchmarks.gpu.cells import Bound, Cell, NotHereError, Setting
from benchmarks.gpu.sft import PEAK_TFLOPS, write_yaml
from benchmarks.gpu.watched import Steps, largest_that_fits, run_steps

SD35_MEDIUM: dict[str, Any] = {
    **FAMILIES["sd3"].real,
    "vae": {
        "channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "norm_groups": 32,
        "latent_channels": 16,
        "scaling_factor": 1.5305,
        "shift_factor": 0.0609,
    },
}
"""Its autoencoder, too, has the published sizes. Encoders have the published widths, but one layer: prompts are
embedded once, before anything is measured."""
TINY: dict[str, Any] = {
    "pipeline": "StableDiffusion3Pipeline",
    "transformer": {
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "caption_projection_dim": 32,
        "sample_size": 8,
        "pos_embed_max_size": 8,
        "dual_attention_layers": [0],
        "qk_norm": "rms_norm",
    },
    "vae": {"channels": [8, 16], "latent_channels": 4, "norm_groups": 4},
    "text_encoder": {"width": 16, "num_layers": 1, "num_heads": 2},
    "t5": {"num_layers": 1, "num_heads": 2},
    "scheduler": {"shift": 1.0},
}

REWARDS: dict[str, dict[str, Any]] = {
    "jpeg": {"type": "jpeg_compressibility"},
    "ocr thread": {"type": "ocr", "engine": "rapidocr"},
    "ocr processes": {"type": "ocr", "engine": "rapidocr", "process": True},
}
WORKERS = {"jpeg": 1, "ocr thread": 1, "ocr processes": 8}
"""Of ``reward.num_workers``."""

FASTER = (
    "see generate_s, update_s and wait_for_rewards_s: train.compile, more rows, rewards in processes, in this order"
)
BOUNDS = (
    Bound("images_per_s", 4.5, FASTER, least=True, cells="^compile/2 steps", real=True),
    Bound("images_per_s", 3.3, FASTER, least=True, cells="^eager/2 steps", real=True),
    Bound("images_per_s", 2.0, FASTER, least=True, cells="^compile/9 steps", real=True),
    Bound("images_per_s", 1.4, FASTER, least=True, cells="^eager/9 steps", real=True),
    Bound("wait_for_rewards_s", 1.0, "raise reward.num_workers, or process: true", cells="jpeg|processes", real=True),
)


def cells(setting: Setting) -> dict[str, Cell]:
    """The grid: what is cheapest first, and OCR, which is about the rest of the machine, last."""
    steps, modes = ("2 steps", "9 steps"), ("compile", "eager")
    grid = [(mode, step, "jpeg") for step, mode in itertools.product(steps, modes)]
    grid += [(mode, step, reward) for mode in modes for step in steps for reward in REWARDS if reward != "jpeg"]
    tiny_choices = [("eager", "2 steps", "jpeg"), ("eager", "9 steps", "ocr processes")]
    return {
        "/".join(choice): lambda cell_setting, choice=choice: measure(cell_setting, *choice)
        for choice in grid
        if not setting.tiny or choice in tiny_choices
    }


def measure(setting: Setting, mode: str, trained: str, reward: str) -> dict[str, Any]:
    """Rates of one cell."""
    if reward.startswith("ocr"):
        try:
            import rapidocr  # noqa: F401
        except ImportError as error:
            raise NotHereError(f"OCR needs rapidocr: {error}") from error

    def measured(replayed: int) -> Steps:
        folder = setting.scratch / f"{mode}_{trained}_{reward}_{replayed}".replace(" ", "_")
        config = rl_config(folder, setting, trained, reward, replayed)
        config["train"]["compile"] = mode == "compile"
        return run_steps("rl_diffusion", config, setting, setting.size(2 if mode == "compile" else 1, 1), 1)

    sizes = setting.size((8, 4), (2,)) if trained == "2 steps" else (1,)
    steps = largest_that_fits(sizes, measured)
    rates = steps.rates("images")
    phases = {f"{phase}_s": steps.mean(f"time/{phase}_s") for phase in ("generate", "wait_for_rewards", "update")}
    rates |= {name: value for name, value in phases.items() if value}
    rates |= {"mfu": rates["tflops_per_s"] / PEAK_TFLOPS, "reward": steps.metrics[-1]["reward/total"]}
    errors = [line["ratio/replay_error"] for line in steps.metrics if "ratio/replay_error" in line]
    return rates | {"replay_error": max(errors)}


def rl_config(folder: Path, setting: Setting, trained: str, reward: str, replayed: int) -> dict[str, Any]:
    """The configuration of ``tasks/rl_diffusion.py``, with its files in ``folder``.

    A replay, of ``replayed`` samples, has as many rows as a rollout, so that both run the same kernels.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = [f"{first}{second}" for first in "ABCDEFGH" for second in "KLMNOPQR"]
    for name, part in (("train", words[4:]), ("eval", words[:4])):
        (folder / f"{name}.txt").write_text("".join(f'a sign that reads "{word}"\n' for word in part))
    side, num_steps = setting.size((512, 10), (16, 6))
    fast = trained == "2 steps"
    algorithm: dict[str, Any] = {"recipe": "flow_grpo"}
    if fast:
        algorithm = {"recipe": "flow_grpo_fast", "window": {"type": "random", "size": 2, "range": [0, 5]}}
    groups, per_group, drawn = (4, 8, 2 * replayed) if fast else (2, 9, 9 * replayed)
    if setting.tiny:
        groups, per_group, drawn = 2, 2, 4
    return {
        "model": {
            "config_path": write_yaml(folder / "model.yaml", copy.deepcopy(setting.size(SD35_MEDIUM, TINY))),
            "lora": {"rank": 32, "alpha": 64},
            "dtype": "bf16",
            "max_sequence_length": setting.size(128, 7),
            "keep_encoders": False,
        },
        "data": {"train_path": str(folder / "train.txt"), "eval_path": str(folder / "eval.txt")},
        "rollout": {
            "num_prompts": groups,
            "n": per_group,
            "micro_batch_size": drawn,
            "height": side,
            "width": side,
            "num_inference_steps": num_steps,
            "guidance_scale": 4.5,
        },
        "reward": {"rewards": [REWARDS[reward]], "num_workers": WORKERS[reward] if not setting.tiny else 1},
        "algorithm": {**algorithm, "drop_no_spread": False},
        "train": {
            "output_dir": str(folder / "run"),
            "micro_batch_size": replayed,
            "lr": 3.0e-4,
            "weight_decay": 1.0e-4,
            "mixed_precision": "bf16",
        },
        "eval": {"num_prompts": 2, "num_inference_steps": 2},
    }
