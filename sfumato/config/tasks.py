"""Which configuration belongs to which task."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sfumato.config.diffusion_rl import ForwardRLConfig, TrajectoryRLConfig
    from sfumato.config.direct_rl import DirectRLConfig
    from sfumato.config.dit import TrainAutoencoderConfig, TrainDitConfig
    from sfumato.config.omni import TrainImageTokenizerConfig, TrainOmniConfig
    from sfumato.config.text import TrainTextConfig
    from sfumato.config.text_rl import TextRLConfig

    TaskConfig = (
        TrainTextConfig
        | TrainDitConfig
        | TrainAutoencoderConfig
        | TrainImageTokenizerConfig
        | TrainOmniConfig
        | TextRLConfig
        | TrajectoryRLConfig
        | ForwardRLConfig
        | DirectRLConfig
    )
    """The configuration of any task; those of preference and reward training derive from these."""

TASKS = {
    "train_text": ("sfumato.config.text", "TrainTextConfig"),
    "train_text_dpo": ("sfumato.config.text", "TrainTextDpoConfig"),
    "train_text_kto": ("sfumato.config.text", "TrainTextKtoConfig"),
    "train_text_reward": ("sfumato.config.text_reward", "TrainTextRewardConfig"),
    "train_dit": ("sfumato.config.dit", "TrainDitConfig"),
    "train_dit_dpo": ("sfumato.config.dit", "TrainDitDpoConfig"),
    "train_autoencoder": ("sfumato.config.dit", "TrainAutoencoderConfig"),
    "train_image_tokenizer": ("sfumato.config.omni", "TrainImageTokenizerConfig"),
    "train_omni": ("sfumato.config.omni", "TrainOmniConfig"),
    "rl_text": ("sfumato.config.text_rl", "TextRLConfig"),
    "rl_diffusion": ("sfumato.config.diffusion_rl", "TrajectoryRLConfig"),
    "rl_diffusion_forward": ("sfumato.config.diffusion_rl", "ForwardRLConfig"),
    "rl_diffusion_direct": ("sfumato.config.direct_rl", "DirectRLConfig"),
}
"""Modules and names of the tasks' configurations, in the order in which they are tried."""


def schema_of(task: str) -> type[TaskConfig]:
    """The configuration's class of a task."""
    module, name = TASKS[task]
    return getattr(importlib.import_module(module), name)
