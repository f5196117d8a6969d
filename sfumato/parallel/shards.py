"""Weights that lie in pieces on many ranks: this rank's piece, and the whole."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece; it shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered from all ranks that hold a piece: every one of them must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
