"""AdamW and its schedule."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from sfumato.config.sections import TrainConfig
from sfumato.parallel.pieces import whole_shapes
from sfumato.parallel.shards import trainable_parameters


def build_optimizer(module: nn.Module, config: TrainConfig, total_steps: int) -> tuple[torch.optim.AdamW, LambdaLR]:
    """AdamW over what requires gradients, and the schedule of its rate.

    Matrices have weight decay, vectors (norms, biases) have none.

    Args:
        module: what is trained.
        config: rates, betas, decay, schedule.
        total_steps: steps over which the schedule is laid.
    """
    parameters, shapes = trainable_parameters(module), whole_shapes(module)
    grouped: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for name, each in sorted(parameters.items(), key=lambda item: len(shapes[item[0]]) < 2):
        mesh = each.device_mesh if isinstance(each, DTensor) else None  # tensors of two meshes cannot share an update
        grouped.setdefault((len(shapes[name]) >= 2, mesh), []).append(each)
    groups = [
        {"params": group, "weight_decay": config.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), group in grouped.items()
    ]
    fused = next(iter(parameters.values())).is_cuda
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
