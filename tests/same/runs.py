"""The runs that are recorded: each task in its main modes, every recipe, on ranks, on Ray, and resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sfumato.config.load import merge
from sfumato.config.recipes import FORWARD_RECIPES, TRAJECTORY_RECIPES
from sfumato.config.text_recipes import TEXT_RECIPES
from sfumato.config.yaml_text import read_yaml
from tests.faults.test_kill_at_random import tiny_autoencoder_config
from tests.role_runs import COLOCATED, ONE_STEP_OFF, SEPARATE
from tests.tiny import (
    ROOT,
    rl_task,
    run_task_here,
    tiny_dit_config,
    tiny_dit_dpo_config,
    tiny_language_description,
    tiny_rl_config,
    tiny_text_config,
    tiny_text_rl_config,
    write_config,
    write_tiny_pipeline,
)
from tests.tiny_families import tiny_flux, tiny_qwen_image, tiny_stable_diffusion, tiny_wan, tiny_z_image
from tests.tiny_omni import tiny_flow_config, tiny_omni_config
from tests.tiny_unified import tiny_unified_config
from tests.tiny_vision import tiny_sound_config, tiny_vision_config
from tests.tiny_vision_rl import tiny_vision_rl_config

Config = dict[str, Any]

LORA: Config = {"model": {"lora": {"rank": 4, "alpha": 8}}}
EMA: Config = {"train": {"ema_decay": 0.9}}
_preference = partial(tiny_text_config, data={"data_type": "preference"})
_unpaired = partial(tiny_text_config, data={"data_type": "unpaired"})
_text_rl = partial(tiny_text_rl_config, data={"synthetic": {"num_rows": 20_000}})
FAMILIES: dict[str, Callable[[], Config]] = {
    "flux": tiny_flux,
    "stable_diffusion": tiny_stable_diffusion,
    "wan": tiny_wan,
    "qwen_image": tiny_qwen_image,
    "z_image": tiny_z_image,
}


@dataclass(frozen=True)
class RecordedRun:
    """A run of a task that takes seconds."""

    task: str
    config: Callable[[Path], Config]
    """Makes what the run needs in a folder, and returns its configuration."""
    overrides: Config = field(default_factory=dict)
    """What is laid over the configuration."""
    num_ranks: int = 1
    on_ray: bool = False
    resumed_after: int | None = None
    """Steps after which the run is ended, to be resumed; None runs it through."""


def _family(kind: str, folder: Path) -> Config:
    """Pretraining on images of one diffusion family."""
    config = tiny_dit_config(folder)
    pipeline = write_tiny_pipeline(folder / kind, described=FAMILIES[kind]())
    return merge(config, {"model": {"model_path": str(pipeline)}, "flow": {"timestep_sampling": "logit_normal"}})


def _image_tokenizer(folder: Path) -> Config:
    """A tokenizer of images, of the same glyphs as the autoencoder."""
    config = tiny_autoencoder_config(folder)
    described = read_yaml(ROOT / "configs" / "omni" / "tiny_vq.yaml") | {"sample_size": [16, 16]}
    return {**config, "model": {"config_path": str(write_config(described, folder / "vq.yaml"))}}


def _with_teacher(folder: Path) -> Config:
    """On-policy distillation, whose teacher is a run of the same kind of model."""
    teacher = tiny_text_config(folder / "teacher", train={"max_steps": 2}, eval={"every_steps": 0})
    run_task_here("train_text", teacher)
    return merge(_text_rl(folder), {"algorithm": {"teacher": str(folder / "teacher" / "run" / "hf_ckpt")}})


def _runs() -> dict[str, RecordedRun]:
    text, dpo, rl_text = ("train_text", tiny_text_config), ("train_text_dpo", _preference), "rl_text"
    runs = {
        "train_text": RecordedRun(*text),
        "train_text, lora": RecordedRun(*text, LORA),
        "train_text, average and chunked loss": RecordedRun(*text, merge(EMA, {"train": {"chunked_loss": True}})),
        "train_text, two ranks": RecordedRun(*text, num_ranks=2),
        "train_text, resumed": RecordedRun(*text, EMA, resumed_after=3),
        "train_text, vision": RecordedRun("train_text", tiny_vision_config),
        "train_text, sound": RecordedRun("train_text", tiny_sound_config),
        "train_text_dpo": RecordedRun(*dpo),
        "train_text_dpo, lora": RecordedRun(*dpo, LORA),
        "train_text_dpo, resumed": RecordedRun(*dpo, resumed_after=3),
        "train_text_kto": RecordedRun("train_text_kto", _unpaired),
        "train_text_reward": RecordedRun("train_text_reward", _preference, {"reward": {"objective": "bradley_terry"}}),
        "train_autoencoder": RecordedRun("train_autoencoder", tiny_autoencoder_config),
        "train_dit": RecordedRun("train_dit", tiny_dit_config, EMA),
        "train_dit, lora": RecordedRun("train_dit", tiny_dit_config, LORA),
        "train_dit, two ranks": RecordedRun("train_dit", tiny_dit_config, num_ranks=2),
        "train_dit, resumed": RecordedRun("train_dit", tiny_dit_config, EMA, resumed_after=3),
        "train_dit_dpo": RecordedRun("train_dit_dpo", tiny_dit_dpo_config),
        "train_dit_dpo, lora": RecordedRun("train_dit_dpo", tiny_dit_dpo_config, LORA),
        "train_omni": RecordedRun("train_omni", tiny_omni_config),
        "train_omni, flow head": RecordedRun("train_omni", tiny_flow_config),
        "train_omni, janus": RecordedRun("train_omni", partial(_unified, "janus")),
        "train_image_tokenizer": RecordedRun("train_image_tokenizer", _image_tokenizer),
        "rl_diffusion, lora": RecordedRun("rl_diffusion", tiny_rl_config, LORA),
        "rl_diffusion, two ranks": RecordedRun("rl_diffusion", tiny_rl_config, num_ranks=2),
        "rl_diffusion, resumed": RecordedRun("rl_diffusion", tiny_rl_config, EMA, resumed_after=3),
        "rl_diffusion, ray": RecordedRun("rl_diffusion", tiny_rl_config, COLOCATED, on_ray=True),
        "rl_diffusion, ray, own pools": RecordedRun("rl_diffusion", tiny_rl_config, SEPARATE, on_ray=True),
        "rl_diffusion, ray, one step off": RecordedRun("rl_diffusion", tiny_rl_config, ONE_STEP_OFF, on_ray=True),
        "rl_text, lora": RecordedRun(rl_text, _text_rl, LORA),
        "rl_text, two ranks": RecordedRun(rl_text, _text_rl, num_ranks=2),
        "rl_text, resumed": RecordedRun(rl_text, _text_rl, resumed_after=2),
        "rl_text, ray": RecordedRun(rl_text, _text_rl, COLOCATED, on_ray=True),
        "rl_text, vision": RecordedRun(rl_text, tiny_vision_rl_config),
    }
    for kind in ("llama", "qwen3_moe", "deepseek_v3"):
        runs[f"train_text, {kind}"] = RecordedRun("train_text", partial(_language, kind))
    for kind in FAMILIES:
        runs[f"train_dit, {kind}"] = RecordedRun("train_dit", partial(_family, kind))
    for recipe in (*TRAJECTORY_RECIPES, *FORWARD_RECIPES):
        task = rl_task(recipe)
        runs[f"{task}, {recipe}"] = RecordedRun(task, partial(_diffusion_recipe, recipe))
    for recipe in TEXT_RECIPES:
        config = _with_teacher if recipe == "distillation" else _text_rl
        runs[f"rl_text, {recipe}"] = RecordedRun(rl_text, config, {"algorithm": {"recipe": recipe}})
    return runs


def _diffusion_recipe(recipe: str, folder: Path) -> Config:
    """RL by a recipe as it is published, with as many denoising steps as its window needs."""
    config = merge(tiny_rl_config(folder), {"rollout": {"num_inference_steps": 16}, "train": {"max_steps": 2}})
    return {**config, "algorithm": {"recipe": recipe}}


def _language(kind: str, folder: Path) -> Config:
    return merge(tiny_text_config(folder), {"model": {"config_path": str(_describe(kind, folder))}})


def _describe(kind: str, folder: Path) -> Path:
    return write_config(tiny_language_description(kind), folder / f"{kind}.yaml")


def _unified(kind: str, folder: Path) -> Config:
    return tiny_unified_config(folder, kind)


RUNS = _runs()
