"""The only place that scales gradients: sums over ranks, clipping, and the check before any weight changes.

Every loss is a sum divided by a count over all ranks and micro-batches, so gradients are *summed* over ranks.
"""

# torch has no public names for its _foreach functions.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Mapping
from math import isfinite
from typing import NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from sfumato.algorithms.device import to_device
from sfumato.algorithms.reading import Numbers, read
from sfumato.errors import NonFiniteError
from sfumato.parallel.finite import not_finite
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import local_shard, trainable_parameters

BUCKET_BYTES = 64 * 2**20
"""Gradients that one all-reduce sums."""


def reduce_and_clip(
    module: nn.Module, max_norm: float, mesh: Mesh, where: str, losses: Numbers | None = None, *more: Numbers
) -> float:
    """Finishes the sum of gradients over ranks and scales them down to a total norm.

    FSDP has reduced its gradients in the backward pass; those of unsharded weights (ddp) are summed here. The norm is
    that of the whole model: every element counts once, also if several ranks hold copies. The host waits for the device
    once.

    Args:
        module: what ``parallelize`` returned; its trainable parameters' gradients are changed in place.
        max_norm: largest total norm.
        mesh: the ranks.
        where: the step and samples, for the error.
        losses: of this rank's micro-batches, which are read here, too; the error gives their names.
        more: other numbers to read in the same copy.

    Returns:
        The norm before clipping.

    Raises:
        NonFiniteError: when a loss of any rank or the norm is NaN or infinite; nothing has been updated then. It names
            the loss, or the ranks and the parameters.
    """
    parameters = trainable_parameters(module)
    flat = isinstance(module, FullyShardedDataParallel)
    for parameter in parameters.values():
        if parameter.grad is None:  # a rank without samples in this step still takes part in the sum
            parameter.grad = torch.zeros_like(parameter)
    gradients = {name: local_shard(cast("Tensor", parameter.grad)) for name, parameter in parameters.items()}
    # Before ranks are summed: afterwards NaN has spread, and no longer tells which rank it comes from.
    largest = _largest_values(gradients) if mesh.size > 1 else None
    if flat:  # fsdp1 has averaged gradients over ranks; they are to be sums
        torch._foreach_mul_(list(gradients.values()), mesh.layout.dp_replicate * mesh.layout.fsdp)
    else:
        _all_reduce_unsharded(
            [gradients[name] for name, parameter in parameters.items() if not _is_reduced(parameter)], mesh
        )

    norm = Numbers(_total_norm(list(gradients.values()), _count_copies(parameters, mesh, flat)))
    losses = Numbers() if losses is None else losses
    read(norm, losses, *more, *([] if largest is None else [largest]))
    total = norm[0]
    bad_loss = next(
        (f"{name or where}: the loss is {value}" for name, value in losses.named() if not isfinite(value)), ""
    )
    if mesh.size > 1:
        # An infinite square on one rank makes the sum infinite on all, so that all of them raise below.
        square = math.inf if bad_loss else total**2
        total = float(torch.tensor(math.sqrt(mesh.sum(square, over="world"))))
    if bad_loss or not isfinite(total):
        bad_gradients = (
            not_finite(gradients)
            if largest is None
            else [name for name, value in largest.named() if not isfinite(value)]
        )
        _raise_not_finite(bad_loss, bad_gradients, mesh, where)
    scale = float(torch.clamp(max_norm / (torch.tensor(total) + 1e-6), max=1.0))
    if gradients and scale != 1.0:
        torch._foreach_mul_(list(gradients.values()), scale)
    return total


def _raise_not_finite(bad_loss: str, bad_gradients: list[str], mesh: Mesh, where: str) -> NoReturn:
    """Raises the error of ``reduce_and_clip``: the same on every rank but for the parameters. All ranks call it."""
    reports = mesh.gather((bad_loss, bool(bad_gradients)), over="world")
    for loss, _ in reports:
        if loss:
            raise NonFiniteError(f"{loss}. Nothing was updated")
    ranks = [rank for rank, (_, is_bad) in enumerate(reports) if is_bad]
    names = ", ".join(bad_gradients[:3]) or "none on this rank"
    raise NonFiniteError(
        f"{where}: the gradient is not finite (ranks {ranks}; first parameters: {names}). Nothing was updated; "
        "lower train.lr or train.max_grad_norm, or set train.mixed_precision to no"
    )


def _largest_values(gradients: Mapping[str, Tensor]) -> Numbers:
    """The largest absolute value of each gradient by name; it is finite exactly where the whole gradient is."""
    non_empty = {name: gradient for name, gradient in gradients.items() if gradient.numel()}
    norms = Numbers()
    for name, value in zip(
        non_empty, torch._foreach_norm(list(non_empty.values()), math.inf) if non_empty else (), strict=True
    ):
        norms.add(value, name)
    return norms


def _count_copies(parameters: Mapping[str, Tensor], mesh: Mesh, flat: bool) -> list[float]:
    """The number of ranks that hold a copy of each element, for each parameter."""
    ranks = mesh.layout.fsdp * mesh.layout.dp_replicate * mesh.layout.tp
    return [ranks / num_shards(parameter, mesh, flat) for parameter in parameters.values()]


def _total_norm(gradients: list[Tensor], copies: list[float]) -> Tensor:
    """The norm of this rank's gradients, float32, in which the square of an element with n copies counts 1 / n.

    Its square, summed over ranks, is then that of the whole model's gradient.
    """
    if not gradients:  # a pipeline stage may have nothing that is trained
        return torch.zeros(())
    norms = torch.stack(torch._foreach_norm(gradients)).float()
    if any(count != 1 for count in copies):
        norms = norms / to_device(torch.tensor(copies), norms.device).sqrt()
    return torch.linalg.vector_norm(norms)


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


def _is_reduced(parameter: Tensor) -> bool:
    """Whether FSDP has summed this parameter's gradient over the data already."""
    names = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()
    return bool({"fsdp", "efsdp"} & set(names))


def _all_reduce_unsharded(gradients: list[Tensor], mesh: Mesh) -> None:
    """Sums gradients of unsharded weights over all ranks with other data, in place, in buckets of one dtype."""
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
    flat_buckets = [torch.cat([gradient.reshape(-1) for gradient in bucket]) for bucket in buckets]
    works = [dist.all_reduce(flat, group=mesh.group("gradient"), async_op=True) for flat in flat_buckets]
    for bucket, flat, work in zip(buckets, flat_buckets, works, strict=True):
        cast("dist.Work", work).wait()  # None only on ranks outside of the group
        for gradient, reduced in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(reduced.view_as(gradient))


class _SequenceSumContext(FunctionCtx):
    """What ``SequenceSum`` keeps for its backward pass."""

    group: dist.ProcessGroup | None


class SequenceSum(torch.autograd.Function):
    """The sum of values over ranks, with gradients.

    Without ``sum_gradients`` all ranks compute the same loss from the sum, so the gradient of a rank's values is the
    gradient of the sum. With it ranks compute different parts of a loss, whose gradients are added up over ranks.
    """

    @staticmethod
    def forward(
        ctx: _SequenceSumContext, values: Tensor, group: dist.ProcessGroup, sum_gradients: bool = False
    ) -> Tensor:
        ctx.group = group if sum_gradients else None
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: _SequenceSumContext, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.group is not None:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None
