"""The one owner of gradient scale: sums over ranks, clipping, and the check before any weight changes.

Every loss is a sum divided by a count over all ranks and micro-batches, so gradients are *summed* over ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from sfumato.errors import NonFiniteError
from sfumato.parallel.mesh import Mesh


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def reduce_and_clip(module: nn.Module, max_norm: float, mesh: Mesh, where: str) -> float:
    """Sums gradients over ranks and scales them down to a total norm.

    Args:
        module: its trainable parameters' gradients are changed in place.
        max_norm: largest total norm.
        mesh: the ranks.
        where: what was being computed (step, samples), for the error.

    Returns:
        The norm before clipping.

    Raises:
        NonFiniteError: when the norm is NaN or infinite; nothing has been updated then. It names the ranks and the
            parameters.
    """
    parameters = trainable_parameters(module)
    for each in parameters.values():
        if each.grad is None:  # a rank without samples in this step still takes part in the sum
            each.grad = torch.zeros_like(each)
    local_bad = (
        [name for name, each in parameters.items() if not torch.isfinite(each.grad).all()] if mesh.size > 1 else []
    )
    if mesh.size > 1:
        flat = torch.cat([each.grad.reshape(-1) for each in parameters.values()])
        dist.all_reduce(flat)
        offset = 0
        for each in parameters.values():
            each.grad.copy_(flat[offset : offset + each.numel()].view_as(each))
            offset += each.numel()
    norm = nn.utils.get_total_norm([each.grad for each in parameters.values()])
    if not torch.isfinite(norm):
        if mesh.size == 1:
            local_bad = [name for name, each in parameters.items() if not torch.isfinite(each.grad).all()]
        ranks = [rank for rank, names in enumerate(mesh.gather(local_bad)) if names]
        names = ", ".join(local_bad[:3]) or "none on this rank"
        raise NonFiniteError(
            f"{where}: the gradient is not finite (ranks {ranks}; first parameters: {names}). Nothing was updated; "
            "lower train.lr or train.max_grad_norm, or set train.mixed_precision to no"
        )
    nn.utils.clip_grads_with_norm_(parameters.values(), max_norm, norm)
    return float(norm)


def check_finite(loss: torch.Tensor, where: str) -> None:
    """Raises NonFiniteError when a loss is NaN or infinite. ``where`` names step, rank and samples."""
    if not torch.isfinite(loss.detach()).all():
        raise NonFiniteError(f"{where}: the loss is {float(loss.detach().sum())}. Nothing was updated")


def broadcast_parameters(module: nn.Module, mesh: Mesh) -> None:
    """Gives every rank the trainable parameters of rank 0."""
    if mesh.size > 1:
        for parameter in trainable_parameters(module).values():
            dist.broadcast(parameter.data, src=0)
