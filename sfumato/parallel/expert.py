"""Mixture-of-experts layers whose experts lie on several ranks: tokens travel to their experts and back.

Tokens are exchanged between ranks as in GShard (arXiv 2006.16668) and multiplied as in MegaBlocks (arXiv 2211.15841):
they are sorted by expert and multiplied in groups of any size. There is no capacity, so no token is ever dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from sfumato.errors import ConfigError
from sfumato.parallel.expert_modules import expert_placement, find_experts, is_experts
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import local_shard

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sfumato.parallel.expert_modules import ExpertsModule

EXCHANGED = "sfumato_exchanged"
GROUPED = "sfumato_grouped"
"""Names under which transformers finds our functions of an experts module."""


def apply_expert_parallel(module: nn.Module, mesh: Mesh) -> dict[str, ExpertsModule]:
    """Gives each rank of the axis ``ep`` its part of the experts of every layer, and sends tokens to them.

    A forward pass is a collective: every rank of ``ep`` must run it, and the backward pass, equally often. A rank
    without tokens takes part, and its experts get zeros as gradients.

    Args:
        module: a transformers model whose experts follow ``use_experts_implementation``, adapters included. The
            experts' parameters ``[experts, ...]``, on a device or on meta, become DTensors ``Shard(0)`` over ``ep``.
        mesh: the ranks, with an axis ``ep``.

    Returns:
        The experts modules by name; fsdp shards each over ``efsdp``, with ``expert_placement``.

    Raises:
        ConfigError: when there are no experts, when they cannot be shared evenly, or when they have adapters or
            parameters that do not belong to one expert.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    layout = mesh.layout
    experts = find_experts(module, "train.expert_parallel_size must be 1")
    for name, layer_experts in experts.items():
        _check_shareable(name, layer_experts, layout.ep)
        for parameter in layer_experts.parameters():
            expert_placement(parameter, layout.efsdp)
    ranks = mesh.device_mesh("ep")
    for layer_experts in experts.values():
        for name, parameter in list(layer_experts.named_parameters()):
            shard = parameter.detach().chunk(ranks.size())[ranks.get_local_rank()].clone()  # frees the others' memory
            cut = DTensor.from_local(shard, ranks, [Shard(0)], run_check=False)
            layer_experts.register_parameter(name, nn.Parameter(cut, parameter.requires_grad))
    # Not compiled: the host reads how many rows travel.
    ALL_EXPERTS_FUNCTIONS.register(EXCHANGED, torch.compiler.disable(exchanged_experts))
    cast("PreTrainedModel", module).set_experts_implementation(EXCHANGED)
    for name, layer_experts in experts.items():
        if layer_experts.config._experts_implementation != EXCHANGED:
            raise ConfigError(
                f"{name}: {type(layer_experts).__name__} cannot be switched to another experts implementation"
            )
    return experts


def apply_grouped_experts(module: nn.Module) -> None:
    """Computes experts in groups and in the dtype of autocast, where each rank has all of them.

    transformers' own implementation takes the dtype of the weights, which under autocast is float32, and its backward
    pass adds in an order that changes from run to run on GPUs. Models stay unchanged whose experts do not follow
    ``use_experts_implementation``, have adapters on their weights, or have submodules with parameters.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    experts = {name: submodule for name, submodule in module.named_modules() if is_experts(submodule)}
    has_more = any(
        len([*layer_experts.named_parameters()]) != len(layer_experts._parameters) for layer_experts in experts.values()
    )
    has_adapters = any(name.split(".")[-1] == "base_layer" for name in experts)
    if not experts or has_more or has_adapters or not hasattr(module, "set_experts_implementation"):
        return
    ALL_EXPERTS_FUNCTIONS.register(GROUPED, grouped_experts)
    cast("PreTrainedModel", module).set_experts_implementation(GROUPED)


def exchanged_experts(
    experts: ExpertsModule, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts' part of a layer, where each rank of ``ep`` has its own tokens and its own experts.

    Args:
        experts: the experts module; its parameters are DTensors ``Shard(0)`` over ``ep``.
        hidden_states: this rank's tokens, ``[tokens, hidden]``; there may be none.
        top_k_index: chosen experts of each, counted over all ranks, ``[tokens, k]``, int64.
        top_k_weights: their weights, ``[tokens, k]``.

    Returns:
        ``[tokens, hidden]``, dtype of ``hidden_states``. Sums run in a fixed order, so runs repeat bit by bit.
    """
    ranks = cast("DTensor", experts.down_proj).device_mesh
    group = ranks.get_group()
    num_ranks = ranks.size()
    num_experts = local_shard(experts.down_proj).shape[0] * num_ranks
    device = hidden_states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else experts.down_proj.dtype
    k = top_k_index.shape[-1]

    order, inverse, counts = _sort(top_k_index.reshape(-1), num_experts)
    # Ids count over all ranks, so rows sorted by expert are sorted by rank, too. ``counts`` are the rows for each
    # expert on each rank, ``arriving`` the rows that each rank sends to each of this rank's experts.
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    counts, arriving = counts.view(num_ranks, -1), arriving.view(num_ranks, -1)
    sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()  # the host waits for the device once

    rows = _Rows.apply(hidden_states.to(dtype), order, inverse, k)
    rows = _Exchange.apply(rows, sent, received, group)
    # Rows arrive sorted by rank, and by expert within each rank's: they are sorted by expert over all ranks.
    expert_ids = torch.arange(counts.shape[1], device=counts.device).repeat(num_ranks)
    # Given the size of its result, ``repeat_interleave`` does not make the host wait for it.
    expert_ids = expert_ids.repeat_interleave(arriving.reshape(-1), output_size=sum(received))
    by_expert, by_rank, counts = _sort(expert_ids, counts.shape[1])
    rows = _Rows.apply(rows, by_expert, by_rank, 1)
    rows = _compute(experts, rows, counts, dtype)
    rows = _Rows.apply(rows, by_rank, by_expert, 1)
    rows = _Exchange.apply(rows, received, sent, group)
    rows = _Rows.apply(rows, inverse, order, 1)  # back from the order of experts to that of tokens
    rows = rows.view(*top_k_weights.shape, rows.shape[-1]) * top_k_weights.unsqueeze(-1)
    return rows.sum(dim=1).to(hidden_states.dtype)


def grouped_experts(
    experts: ExpertsModule, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts' part of a layer, where each rank has all experts; the host does not wait for the device.

    Args:
        experts: the experts module, with whole weights.
        hidden_states, top_k_index, top_k_weights: as for ``exchanged_experts``.

    Returns:
        ``[tokens, hidden]``, dtype of ``hidden_states``. Sums run in a fixed order, so runs repeat bit by bit.
    """
    device = hidden_states.device.type
    k = top_k_index.shape[-1]
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else experts.down_proj.dtype
    order, inverse, counts = _sort(top_k_index.reshape(-1), experts.down_proj.shape[0])
    rows = _Rows.apply(hidden_states.to(dtype), order, inverse, k)
    rows = _compute(experts, rows, counts, dtype)
    rows = _Rows.apply(rows, inverse, order, 1)  # back from the order of experts to that of tokens
    rows = rows.view(*top_k_weights.shape, rows.shape[-1]) * top_k_weights.unsqueeze(-1)
    return rows.sum(dim=1).to(hidden_states.dtype)


def grouped_matmul(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiplies each group of rows with its own matrix, in one kernel where torch has it, else one by one.

    Args:
        rows: ``[rows, in]``, sorted by group.
        weight: ``[groups, in, out]``, dtype of ``rows``; it always gets a gradient, zeros for groups without rows.
        counts: rows of each group, ``[groups]``, int64.

    Returns:
        ``[rows, out]``.
    """
    if _has_kernel(rows, weight):
        return functional.grouped_mm(rows, weight, offs=counts.cumsum(0).int())
    return multiply_in_turn(rows, weight, counts)


def multiply_in_turn(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """``grouped_matmul`` as a loop over groups, with the same shapes."""
    return torch.cat([part @ matrix for part, matrix in zip(rows.split(counts.tolist()), weight.unbind(), strict=True)])


def tokens_per_expert(sorted_ids: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs in sorted ids ``[n]``: ``[num_experts]``, int64."""
    # Not bincount, which makes the host wait for a GPU.
    ids = torch.arange(num_experts, device=sorted_ids.device)
    ends = torch.searchsorted(sorted_ids, ids, right=True)
    return ends.diff(prepend=ends.new_zeros(1))


def _check_shareable(name: str, experts: ExpertsModule, ranks: int) -> None:
    """Raises ConfigError when ``ranks`` ranks cannot share the experts of a layer."""
    if name.split(".")[-1] == "base_layer":
        raise ConfigError(
            f"{name}: adapters on experts' weights (model.lora.target_parameters) add whole matrices to them and do "
            "not go together with expert parallelism: leave model.lora.target_parameters empty, or set "
            "train.expert_parallel_size to 1"
        )
    num_experts = experts.down_proj.shape[0]
    for key, parameter in experts.named_parameters():
        if "." in key or parameter.ndim < 2 or parameter.shape[0] != num_experts:
            raise ConfigError(
                f"{name}.{key} of shape {tuple(parameter.shape)} does not belong to one of {num_experts} experts, so "
                "ranks cannot share it: set train.expert_parallel_size to 1"
            )
    if num_experts % ranks:
        raise ConfigError(
            f"train.expert_parallel_size {ranks} does not divide the {num_experts} experts of {name}: {num_experts} / "
            f"{ranks} = {num_experts / ranks:g}; take a divisor of {num_experts}"
        )


def _sort(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The stable order of ids ``[n]``, the inverse of that permutation, and how often each id occurs."""
    sorted_ids, order = ids.sort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return order, inverse, tokens_per_expert(sorted_ids, num_experts)


def _compute(experts: ExpertsModule, rows: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Runs the experts on their rows ``[rows, hidden]``, which are sorted by expert; ``counts`` are rows of each."""
    rows = _multiply_by_experts(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, counts, dtype)
    rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    rows = _multiply_by_experts(experts, "down_proj", rows, counts, dtype)
    return experts.post_expert_norm(rows) if getattr(experts, "has_post_expert_norm", False) else rows


def _multiply_by_experts(experts: ExpertsModule, name: str, rows: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplies the rows of each expert by its matrix in the parameter ``name``, and adds its bias if there is one."""
    weight = local_shard(getattr(experts, name)).to(dtype)
    rows = grouped_matmul(rows, weight if experts.is_transposed else weight.transpose(1, 2), counts)
    if experts.has_bias:
        ids = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=len(rows))
        rows = rows + local_shard(getattr(experts, f"{name}_bias")).to(dtype)[ids]
    return rows


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch has a grouped kernel for this device, dtype and alignment."""
    compiling = torch.compiler.is_compiling()
    if not len(rows) or not hasattr(functional, "grouped_mm") or (compiling and rows.dtype != torch.bfloat16):
        return False
    offset = 0 if compiling else weight.storage_offset()  # the compiler cannot read it
    if any(size * weight.itemsize % 16 for size in (*weight.shape[1:], offset)):
        return False
    if rows.device.type == "cpu":
        return rows.dtype in (torch.float32, torch.bfloat16)
    return (
        rows.device.type == "cuda"
        and rows.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    )


class _RowsContext(FunctionCtx):
    """What ``_Rows`` keeps for its backward pass."""

    saved_tensors: tuple[Tensor]
    shape: torch.Size
    repeats: int


class _Rows(torch.autograd.Function):
    """Takes rows ``index // repeats``, where ``index`` is a permutation and ``inverse`` its inverse.

    Each row is taken ``repeats`` times. Unlike with torch's indexing, gradients are added in a fixed order.
    """

    @staticmethod
    def forward(ctx: _RowsContext, rows: Tensor, index: Tensor, inverse: Tensor, repeats: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.shape = rows.shape
        ctx.repeats = repeats
        return rows[index // repeats if repeats > 1 else index]

    @staticmethod
    def backward(ctx: _RowsContext, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (inverse,) = ctx.saved_tensors
        gradient = gradient[inverse]
        if ctx.repeats > 1:
            gradient = gradient.view(ctx.shape[0], ctx.repeats, ctx.shape[1]).sum(dim=1)
        return gradient, None, None, None


class _ExchangeContext(FunctionCtx):
    """What ``_Exchange`` keeps for its backward pass."""

    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; its backward pass sends gradients the opposite way."""

    @staticmethod
    def forward(
        ctx: _ExchangeContext, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent = sent
        ctx.received = received
        ctx.group = group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: _ExchangeContext, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Exchange.apply(gradient, ctx.received, ctx.sent, ctx.group), None, None, None
