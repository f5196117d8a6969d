"""Muon: hidden matrices move along the orthogonal factor of their momentum, everything else by AdamW.

As in "Muon is Scalable for LLM Training" (arXiv 2502.16982), where an update has the size of AdamW's, so that AdamW's
rate and decay can be used:

    M <- momentum M + (1 - momentum) G        W <- W - lr (decay W + 0.2 sqrt(max(rows, cols)) NS(G + momentum (M - G)))

NS are Newton-Schulz steps towards U V^T of a matrix U S V^T, in bf16 on a GPU and in float32 on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from sfumato.parallel.expert_modules import find_experts, has_experts
from sfumato.parallel.shards import gather_whole, local_shard, placed_like, plain_name, ranges_of, whole_shapes

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
SMALLEST_NORM = 1e-7


def hidden_matrices(module: nn.Module) -> set[str]:
    """Names of the parameters that Muon updates.

    These are, inside lists of layers (``nn.ModuleList``), the two-dimensional ``weight`` of every module but embeddings
    and the three-dimensional weights of experts. AdamW updates everything else: what lies outside all lists
    (embeddings, patch and time embeddings, heads, final projections), norms, biases, convolutions and LoRA adapters. A
    fused matrix counts as one matrix.

    Args:
        module: plain, or what ``parallelize`` made of it.
    """
    shapes = whole_shapes(module)
    experts = set(find_experts(module, "").values()) if has_experts(module) else set()
    lists = tuple(f"{name}." for name, submodule in module.named_modules() if isinstance(submodule, nn.ModuleList))
    names = set()
    for prefix, owner in module.named_modules():
        if not prefix.startswith(lists) or isinstance(owner, nn.Embedding) or ".lora_" in prefix or ".oft_R." in prefix:
            continue
        for key, _ in owner.named_parameters(recurse=False):
            name = plain_name(f"{prefix}.{key}")
            ndim = len(shapes[name])
            if (ndim == 2 and key == "weight") or (ndim == 3 and owner in experts):
                names.add(name)
    return names


def orthogonalise(matrices: Tensor) -> Tensor:
    """Moves singular values to about 1 (0.7 to 1.2) by Newton-Schulz steps.

    Args:
        matrices: ``[..., rows, cols]``; the steps run in its dtype.

    Returns:
        The same shape and dtype.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]  # the Gram matrix of the shorter side is the smaller one
    factor = matrices.mT if is_tall else matrices
    factor = factor / factor.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    add = torch.addmm if factor.ndim == 2 else torch.baddbmm
    for _ in range(NUM_STEPS):
        gram = factor @ factor.mT
        factor = add(factor, add(gram, gram, gram, beta=b, alpha=c), factor, beta=a)
    return factor.mT if is_tall else factor


class Muon(torch.optim.AdamW):
    """Muon for groups with ``orthogonal``, AdamW for the others.

    Matrices may be cut over ranks (DTensor). Each is gathered; one rank orthogonalises it, while the other ranks do the
    same with other matrices of the group, and broadcasts the result. Experts ``[experts, rows, cols]`` are separate
    matrices: they are gathered only along mesh axes that cut within an expert. Matrices that every rank holds whole
    (ddp) are computed by every rank. The state is one tensor for each matrix, ``momentum_buffer``, of its shape and
    placement.
    """

    def __init__(
        self, groups: list[dict[str, object]], *, compute_dtype: torch.dtype | None = None, **adamw: Any
    ) -> None:
        """Takes groups of parameters and AdamW's settings.

        Args:
            groups: as for AdamW, each with ``orthogonal``; its parameters are two- or three-dimensional and lie on one
                mesh.
            compute_dtype: of the Newton-Schulz steps; None is bf16 on a GPU and float32 on a CPU.
            adamw: ``lr``, ``betas``, ``eps``, ``fused`` of AdamW; ``lr`` is Muon's too.
        """
        self.compute_dtype = compute_dtype
        super().__init__(groups, **adamw)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step and returns what ``closure`` returns, None without one.

        Gradients must have been summed over ranks and clipped. Every rank must call it.
        """
        loss = super().step(closure)
        for group in self.param_groups:
            if group["orthogonal"]:
                self._step_orthogonal(group)
        return loss

    def __setstate__(self, state: dict[str, object]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's looks for a step in every state

    def _init_group(self, group: dict[str, object], *lists: list[Tensor]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Hides the groups of matrices from AdamW, whose ``step`` collects the parameters that it updates here."""
        return False if group["orthogonal"] else super()._init_group(group, *lists)

    def _step_orthogonal(self, group: dict[str, Any]) -> None:
        # Only matrices that are gathered over the same ranks can share the work on them.
        by_axes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_axes.setdefault(_shared_axes(parameter), []).append(parameter)
        for axes, parameters in by_axes.items():
            sharers = Sharers(parameters[0], axes)
            for start in range(0, len(parameters), sharers.size):
                self._step_together(parameters[start : start + sharers.size], sharers, group)

    def _step_together(self, parameters: list[nn.Parameter], sharers: Sharers, group: dict[str, Any]) -> None:
        """Updates at most as many matrices as ranks share the work: each rank orthogonalises one of them."""
        shapes: list[torch.Size] = []
        mine: Tensor | None = None
        for owner, parameter in enumerate(parameters):
            gathered = sharers.gather(self._nesterov_direction(parameter), parameter)
            shapes.append(gathered.shape)
            if owner == sharers.rank:
                mine = orthogonalise(gathered.to(self._matrix_dtype(gathered)))
        for owner, (parameter, shape) in enumerate(zip(parameters, shapes, strict=True)):
            shard = local_shard(parameter)
            is_mine = owner == sharers.rank
            # The last matrices of a group may be fewer than the ranks; ranks beyond them only receive.
            update = mine if is_mine else torch.empty(shape, dtype=self._matrix_dtype(shard), device=shard.device)
            update = _shard(sharers.send(cast(Tensor, update), owner), parameter)
            shard.mul_(1 - group["lr"] * group["weight_decay"])
            # An orthogonal matrix has elements of RMS sqrt(1 / max(rows, cols)); AdamW's updates are of RMS 0.2 to 0.4.
            shard.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(shape[-2:])))

    def _nesterov_direction(self, parameter: nn.Parameter) -> Tensor:
        """This rank's shard of the momentum one step ahead (Nesterov)."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient = local_shard(cast(Tensor, parameter.grad))
        momentum = local_shard(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)

    def _matrix_dtype(self, like: Tensor) -> torch.dtype:
        return self.compute_dtype or (torch.bfloat16 if like.is_cuda else torch.float32)


class Sharers:
    """The ranks that gather matrices together and share the work on them."""

    def __init__(self, parameter: nn.Parameter, axes: tuple[int, ...]) -> None:
        """Takes the ranks along ``axes`` of the parameter's mesh; without axes this rank alone."""
        self.axes = axes
        # A parameter with axes is a DTensor. Without axes there may be no mesh, and no loop below looks at it.
        self._mesh = cast(DeviceMesh, cast(DTensor, parameter).device_mesh if axes else None)
        self._sizes = [self._mesh.size(axis) for axis in axes]
        self.size = math.prod(self._sizes)
        self.rank = 0
        for size, axis in zip(self._sizes, axes, strict=True):
            self.rank = self.rank * size + self._mesh.get_local_rank(axis)

    def gather(self, shard: Tensor, like: nn.Parameter) -> Tensor:
        """Gathers a tensor along these axes.

        Args:
            shard: this rank's shard.
            like: a parameter of the tensor's shape and placements.

        Returns:
            The tensor, whole along these axes; along other axes of the mesh it stays cut.
        """
        if not self.axes:
            return shard
        assert isinstance(like, DTensor)  # else it would have no axes
        placed = placed_like(shard, like)
        if len(self.axes) == like.device_mesh.ndim:
            return gather_whole(placed)
        placements = [Replicate() if axis in self.axes else placement for axis, placement in enumerate(like.placements)]
        return placed.redistribute(placements=placements).to_local()

    def send(self, tensor: Tensor, owner: int) -> Tensor:
        """Broadcasts the tensor of rank ``owner`` (0 to ``size`` - 1) to all of these ranks, axis by axis.

        On the other ranks ``tensor`` has the same shape and dtype, and its values are overwritten.
        """
        place = []
        for size in reversed(self._sizes):
            owner, rank = divmod(owner, size)
            place.insert(0, rank)
        tensor = tensor.contiguous()
        for index, axis in enumerate(self.axes):
            # Of the groups along this axis only those take part whose place on all later axes is the owner's: one of
            # their ranks has the tensor already. The later axes pass it on to the rest.
            later = zip(self.axes[index + 1 :], place[index + 1 :], strict=True)
            if all(self._mesh.get_local_rank(other) == rank for other, rank in later):
                dist.broadcast(tensor, group=self._mesh.get_group(axis), group_src=place[index])
        return tensor


def _shared_axes(parameter: nn.Parameter) -> tuple[int, ...]:
    """Axes of a parameter's mesh along which its matrices are cut or replicated.

    Along the remaining axes whole experts are cut (dimension 0 of three), which need not be gathered.
    """
    if not isinstance(parameter, DTensor):
        return ()
    return tuple(
        axis
        for axis, placement in enumerate(parameter.placements)
        if not (parameter.ndim == 3 and placement.is_shard(0))
    )


def _shard(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """This rank's shard of a tensor that is whole in every dimension, or already cut as ``parameter`` is in some."""
    for dim, (size, ranges) in enumerate(zip(local_shard(parameter).shape, ranges_of(parameter), strict=True)):
        if tensor.shape[dim] != size:
            tensor = torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    return tensor
