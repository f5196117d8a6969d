"""The one owner of gradient scale: sums over ranks, clipping, and the check before any weight changes.

Every loss is a sum divided by a count over all ranks and micro-batches, so gradients are *summed* over ranks.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from sfumato.errors import NonFiniteError
from sfumato.parallel.finite import not_finite
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import local, trainable_parameters

BUCKET_BYTES = 64 * 2**20
"""Gradients that one all-reduce sums."""


def reduce_and_clip(module: nn.Module, max_norm: float, mesh: Mesh, where: str) -> float:
    """Finishes the sum of gradients over ranks and scales them down to a total norm.

    FSDP has reduced its gradients in the backward pass; those of whole weights (ddp) are summed here. The norm is that
    of the whole model: every element counts once, however many ranks hold a copy of it.

    Args:
        module: what ``parallelize`` returned; its trainable parameters' gradients are changed in place.
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
    flat = isinstance(module, FullyShardedDataParallel)
    for parameter in parameters.values():
        if parameter.grad is None:  # a rank without samples in this step still takes part in the sum
            parameter.grad = torch.zeros_like(parameter)
    gradients = {name: local(parameter.grad) for name, parameter in parameters.items()}
    bad = not_finite(gradients) if mesh.size > 1 else []
    if flat:  # its reduction is a mean
        torch._foreach_mul_(list(gradients.values()), mesh.layout.dp_replicate * mesh.layout.fsdp)
    else:
        _sum_whole([gradients[name] for name, parameter in parameters.items() if not _is_reduced(parameter)], mesh)

    ranks = mesh.layout.fsdp * mesh.layout.dp_replicate * mesh.layout.tp
    copies = [ranks / num_shards(parameter, mesh, flat) for parameter in parameters.values()]
    norms = torch.zeros(0, device=mesh.device)
    if gradients:  # a pipeline stage may have nothing that is trained
        norms = torch.stack(torch._foreach_norm(list(gradients.values()))).float()
    norm = torch.linalg.vector_norm(norms / torch.tensor(copies, device=norms.device).sqrt())
    if mesh.size > 1:
        norm = torch.tensor(math.sqrt(mesh.sum(float(norm.double() ** 2), over="world")), device=norms.device)
    if not torch.isfinite(norm):
        if mesh.size == 1:
            bad = not_finite(gradients)
        ranks = [rank for rank, names in enumerate(mesh.gather(bad, over="world")) if names]
        names = ", ".join(bad[:3]) or "none on this rank"
        raise NonFiniteError(
            f"{where}: the gradient is not finite (ranks {ranks}; first parameters: {names}). Nothing was updated; "
            "lower train.lr or train.max_grad_norm, or set train.mixed_precision to no"
        )
    if gradients:
        torch._foreach_mul_(list(gradients.values()), torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return float(norm)


def num_shards(parameter: Tensor, mesh: Mesh, flat: bool = False) -> int:
    """Ranks of one pipeline stage that hold different shards of a parameter.

    Args:
        parameter: a parameter.
        mesh: the ranks.
        flat: whether it belongs to fsdp1, whose parameters are plain shards.
    """
    if isinstance(parameter, DTensor):
        sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        return math.prod(size for size, placement in sizes if not placement.is_replicate())
    return mesh.layout.fsdp if flat else 1


def check_finite(loss: Tensor, where: str) -> None:
    """Raises NonFiniteError when a loss of any shape is NaN or infinite. ``where`` names step, rank and samples."""
    if not torch.isfinite(loss.detach()).all():
        raise NonFiniteError(f"{where}: the loss is {float(loss.detach().sum())}. Nothing was updated")


def _is_reduced(parameter: Tensor) -> bool:
    """Whether FSDP has summed this parameter's gradient over the data already."""
    names = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()
    return bool({"fsdp", "efsdp"} & set(names))


def _sum_whole(gradients: list[Tensor], mesh: Mesh) -> None:
    """Sums gradients of whole weights over all ranks that saw other data, in buckets."""
    if mesh.size_of("gradient") == 1 or not gradients:
        return
    buckets: list[list[Tensor]] = [[]]
    room = BUCKET_BYTES
    for gradient in gradients:
        if buckets[-1] and (gradient.nbytes > room or gradient.dtype != buckets[-1][0].dtype):
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(gradient)
        room -= gradient.nbytes
    flats = [torch.cat([gradient.reshape(-1) for gradient in bucket]) for bucket in buckets]
    works = [dist.all_reduce(flat, group=mesh.group("gradient"), async_op=True) for flat in flats]
    for bucket, flat, work in zip(buckets, flats, works, strict=True):
        work.wait()
        for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))
