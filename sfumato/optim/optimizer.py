"""AdamW and its schedule."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from sfumato.config.sections import TrainConfig
from sfumato.parallel.shards import trainable_parameters


def build_optimizer(module: nn.Module, config: TrainConfig, total_steps: int) -> tuple[torch.optim.AdamW, LambdaLR]:
    """AdamW over what requires gradients, and the schedule of its rate.

    Matrices have weight decay, vectors (norms, biases) have none.

    Args:
        module: what is trained.
        config: rates, betas, decay, schedule.
        total_steps: steps over which the schedule is laid.
    """
    parameters = list(trainable_parameters(module).values())
    groups = [
        {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [each for each in groups if each["params"]]
    fused = parameters[0].is_cuda
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
    return optimizer, LambdaLR(optimizer, lambda step: lr_at(step, total_steps, config) / config.lr)


def lr_at(step: int, total_steps: int, config: TrainConfig) -> float:
    """Learning rate of a step (0 is the first): linear warm-up, a plateau, then the decay to ``lr_min``."""
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    if config.lr_decay_style == "constant":
        return config.lr
    begin = max(config.lr_warmup_steps, round(total_steps * (1 - config.lr_decay_ratio)))
    progress = min(max((step - begin) / max(total_steps - begin, 1), 0.0), 1.0)
    factor = 1 - progress if config.lr_decay_style == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr_min + (config.lr - config.lr_min) * factor
