"""How often the host waits for the device in a step of each task, counted on a device that is pretended."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pretended_device import PretendedDevice, pretend_device
from tests.tiny import (
    run_task_here,
    tiny_dit_config,
    tiny_dit_dpo_config,
    tiny_rl_config,
    tiny_text_config,
    tiny_text_rl_config,
)

BOUND = 2
"""Of an optimiser step with several micro-batches; what is drawn, evaluated, shown and saved is counted apart."""

TEXT: dict[str, Any] = {"train": {"max_steps": 2}, "eval": {"every_steps": 9}}
RL: dict[str, Any] = {"train": {"max_steps": 2}, "eval": {"every_steps": 9}}
OFFLOADED = {"activation_checkpointing": "full", "enable_activation_offload": True}
UPDATES = {"rl": 2, "rl forward": 2}
"""Optimiser steps of an iteration."""
FORWARD = {"recipe": "diffusion_nft"}


def dit(folder: Path, make: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Images that are encoded before training: encoders of diffusers wait for the device themselves."""
    cached = {"data": {"cache_dir": str(folder / "cache")}, "train": {"max_steps": 2}}
    return make(folder, **cached, sample={"num_prompts": 2, "num_inference_steps": 2, "every_steps": 9})


def autoencoder(folder: Path) -> dict[str, Any]:
    config = tiny_dit_config(folder, train={"max_steps": 2})
    return {name: config[name] for name in ("model", "data", "train")}


def forward(folder: Path) -> dict[str, Any]:
    config = tiny_rl_config(folder, **RL)
    return {**config, "algorithm": FORWARD}


CONFIGS: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    "text": ("train_text", lambda folder: tiny_text_config(folder, **TEXT)),
    "text, chunked loss": (
        "train_text",
        lambda folder: tiny_text_config(folder, **{**TEXT, "train": {"max_steps": 2, "chunked_loss": True}}),
    ),
    "text, recomputed and offloaded": (
        "train_text",
        lambda folder: tiny_text_config(folder, **{**TEXT, "train": {"max_steps": 2, **OFFLOADED}}),
    ),
    "dpo": ("train_text_dpo", lambda folder: tiny_text_config(folder, data={"data_type": "preference"}, **TEXT)),
    "kto": ("train_text_kto", lambda folder: tiny_text_config(folder, data={"data_type": "unpaired"}, **TEXT)),
    "reward": (
        "train_text_reward",
        lambda folder: tiny_text_config(
            folder, data={"data_type": "preference"}, reward={"objective": "bradley_terry"}, **TEXT
        ),
    ),
    "dit": ("train_dit", lambda folder: dit(folder, tiny_dit_config)),
    "dit dpo": ("train_dit_dpo", lambda folder: dit(folder, tiny_dit_dpo_config)),
    "autoencoder": ("train_autoencoder", autoencoder),
    "rl": ("rl_diffusion", lambda folder: tiny_rl_config(folder, **RL)),
    "rl forward": ("rl_diffusion_forward", forward),
    "rl text": (
        "rl_text",
        lambda folder: tiny_text_rl_config(folder, train={"max_steps": 2}, eval={"every_steps": 9}),
    ),
}
QUICK = ("text", "rl text")


def of_second_step(name: str, folder: Path) -> tuple[PretendedDevice, list[Any]]:
    """Runs two steps, of which the second makes nothing for the first time."""
    task, config = CONFIGS[name]
    with pretend_device() as device:
        run_task_here(task, config(folder))
    return device, device.in_step(2)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_a_step_waits_for_the_device_at_most_twice(name: str, tmp_path: Path) -> None:
    _, waits = of_second_step(name, tmp_path)
    assert 0 < len(waits) <= BOUND * UPDATES.get(name, 1), "\n".join(map(str, waits))
