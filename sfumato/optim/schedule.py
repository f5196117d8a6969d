"""The learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sfumato.config.sections import TrainConfig


def lr_at(step: int, total_steps: int, config: TrainConfig) -> float:
    """Learning rate of a step (0 is the first): linear warm-up, a plateau, then the decay to ``lr_min``.

    Args:
        step: counted from 0; from ``total_steps`` on a decayed rate stays at ``lr_min``.
        total_steps: steps of the run, whose last ``lr_decay_ratio`` decays. Warm-up is never cut short.
        config: peak, minimum, warm-up and shape.
    """
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    if config.lr_decay_style == "constant":
        return config.lr
    begin = max(config.lr_warmup_steps, round(total_steps * (1 - config.lr_decay_ratio)))
    progress = min(max((step - begin) / max(total_steps - begin, 1), 0.0), 1.0)
    return config.lr_min + (config.lr - config.lr_min) * decay_factor(config.lr_decay_style, progress)


def decay_factor(style: str, progress: float) -> float:
    """What is left of the way from ``lr_min`` to ``lr``, from 1 to 0, at a progress from 0 to 1."""
    if style == "linear":
        return 1 - progress
    if style == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    assert style == "wsd", style
    return 1 - math.sqrt(progress)


def say_unfinished_warmup(config: dict[str, Any], total_steps: int, say: Callable[[str], None]) -> None:
    """Says when a run ends before its warm-up does.

    Args:
        config: the whole configuration as plain values; empty of a run without one.
        total_steps: steps of the run.
        say: takes a line for the person who watches.
    """
    warmup = config.get("train", {}).get("lr_warmup_steps", 0)
    if warmup > total_steps:
        say(
            f"train.lr_warmup_steps {warmup} is more than the {total_steps} steps of the run: the learning rate ends "
            f"at {total_steps / warmup:.1%} of train.lr"
        )
