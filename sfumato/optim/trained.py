"""A trained module with its optimiser and learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


@dataclass
class Trained:
    """A trained module with its optimiser and learning-rate schedule."""

    module: nn.Module
    """As ``parallelize`` returned it."""
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
