"""Turns a plain module into one that runs on a mesh; data parallelism comes last: whole models or shards (fsdp)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor, Shard

from sfumato.config.open_mappings import Keywords
from sfumato.config.parallel import ParallelConfig
from sfumato.errors import ConfigError
from sfumato.parallel.expert_modules import expert_placement, has_experts
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.plan import ParallelPlan, find_blocks
from sfumato.parallel.shards import local_shard, trainable_parameters, whole_shapes


def parallelize(
    module: nn.Module, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan, param_dtype: torch.dtype | None = None
) -> nn.Module:
    """Applies tensor, expert and sequence parallelism, recomputation, compilation and data parallelism, in that order.

    Args:
        module: an unmodified transformers or diffusers model, adapters included; changed in place.
        mesh: the ranks.
        config: sizes and modes of the parallelism.
        plan: the model's blocks and cuts.
        param_dtype: dtype in which float32 weights are used (bf16 under mixed precision): fsdp gathers them in it, and
            without fsdp layers convert their weights themselves. None keeps the weights' dtype.

    Returns:
        The module to call from now on.

    Raises:
        ConfigError: when the model cannot be cut as configured.
    """
    layout = mesh.layout
    blocks = find_blocks(module, plan)
    submodels = [module.get_submodule(name) for name in plan.parts] or [module]
    if param_dtype is not None:
        from sfumato.parallel.precision import keep_float32_routers

        keep_float32_routers(module, param_dtype)
    experts: Mapping[str, nn.Module] = {}
    # Each kind of parallelism is imported where it is switched on: most runs need none of them.
    if layout.tp > 1:
        from sfumato.parallel.tensor import apply_tensor_parallel

        for submodel in submodels:
            apply_tensor_parallel(submodel, mesh, plan, config.sequence_parallel)
    if layout.ep > 1 and (layout.pp == 1 or has_experts(module)):
        from sfumato.parallel.expert import apply_expert_parallel

        experts = apply_expert_parallel(module, mesh)
    elif layout.ep == 1 and param_dtype is not None and has_experts(module):
        from sfumato.parallel.expert import apply_grouped_experts

        apply_grouped_experts(module)
    for layer in module.modules() if param_dtype is not None else ():
        # peft's layers would cast inputs to the float32 of their weights, and autocast would cast them back.
        if hasattr(layer, "cast_input_dtype_enabled"):
            layer.cast_input_dtype_enabled = False  # pyright: ignore[reportArgumentType]
    if layout.cp > 1:
        from sfumato.parallel.sequence import apply_sequence_parallel

        for submodel in submodels:
            apply_sequence_parallel(submodel, mesh, plan)
    if param_dtype is not None and (not mesh.distributed or config.data_parallel_mode == "ddp"):
        from sfumato.parallel.precision import compute_in

        compute_in(module, param_dtype)
    kind = mesh.device.type
    if config.activation_checkpointing != "none" or config.enable_activation_offload or config.compiles(kind):
        from sfumato.parallel.memory import apply_memory_savings

        breaks = plan.graph_breaks or layout.ep > 1
        apply_memory_savings(module, config, blocks, device=kind, graph_breaks=breaks, mesh=mesh)
    return shard_data_parallel(module, mesh, config, blocks, param_dtype, experts)


def weights_device(mesh: Mesh, config: ParallelConfig) -> torch.device:
    """Where the weights of a module that ``parallelize`` returned wait: with ``enable_fsdp_offload`` in CPU memory."""
    return torch.device("cpu") if config.enable_fsdp_offload else mesh.device


def move_to_devices(module: nn.Module, mesh: Mesh, config: ParallelConfig) -> None:
    """Brings what ``parallelize`` returned to where passes need it, weights on meta excepted.

    fsdp has put weights that it offloads into CPU memory. It gathers weights alone on the device, so that buffers
    (frequencies of rotary embeddings, positions, biases of routers) must be there, where the batches are.
    """
    if not config.enable_fsdp_offload:
        module.to(mesh.device)
        return
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                submodule._buffers[name] = buffer.to(mesh.device)


MicroBatch = TypeVar("MicroBatch")


def shard_data_parallel(
    module: nn.Module,
    mesh: Mesh,
    config: ParallelConfig,
    blocks: Mapping[str, nn.Module],
    param_dtype: torch.dtype | None = None,
    experts: Mapping[str, nn.Module] | None = None,
) -> nn.Module:
    """Puts a module under the configured data parallelism.

    Gradients are summed, not averaged: the loss is divided by a global count already.

    Args:
        module: the model, after all other parallelism, recomputation and compilation.
        mesh: the ranks; without a process group nothing happens.
        config: mode, resharding, offload, prefetch.
        blocks: its repeated blocks, the units that are gathered at a time.
        param_dtype: dtype in which weights are gathered and used; gradients are reduced in float32.
        experts: modules with this rank's experts (expert parallelism), sharded over the remaining ranks.

    Returns:
        The module; with fsdp1 a wrapper around it.
    """
    if not mesh.distributed:
        return module
    broadcast_parameters(module, mesh)
    if config.data_parallel_mode == "ddp":
        return module
    replicate = ("dp_replicate",) if mesh.layout.dp_replicate > 1 else ()
    weights = mesh.device_mesh(*replicate, "fsdp")
    if config.data_parallel_mode == "fsdp1":
        return _wrap_fsdp1(module, mesh, weights, config, blocks, param_dtype)
    on_gpu = mesh.device.type == "cuda"
    settings: Keywords = {
        "reshard_after_forward": config.enable_reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype, torch.float32, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if config.enable_fsdp_offload else OffloadPolicy(),
    }
    place_experts = partial(expert_placement, ranks=mesh.layout.efsdp)
    # From the inside out: a unit is made of the parameters that no unit inside of it has taken.
    for layer_experts in (experts or {}).values():
        expert_mesh = mesh.device_mesh(*replicate, "efsdp")
        fully_shard(layer_experts, mesh=expert_mesh, shard_placement_fn=place_experts, **settings)
    place = partial(fsdp_placement, ranks=mesh.layout.fsdp)
    for unit in (*blocks.values(), module):
        fully_shard(unit, mesh=weights, shard_placement_fn=place, **settings)
    module.reduces_every_micro_batch = config.enable_reduce_every_micro_batch  # pyright: ignore[reportArgumentType]
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            # By default fsdp2 averages gradients over ranks; here a loss is divided by global counts already.
            submodule.set_gradient_divide_factor(1.0)
            submodule.set_force_sum_reduction_for_comms(True)
    if config.enable_forward_prefetch:
        for unit, following in pairwise(blocks.values()):
            cast("FSDPModule", unit).set_modules_to_forward_prefetch([following])  # pyright: ignore[reportArgumentType]
            cast("FSDPModule", following).set_modules_to_backward_prefetch([unit])  # pyright: ignore[reportArgumentType]
    return module


def fsdp_placement(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """The dimension along which fsdp2 cuts a weight further, for its ``shard_placement_fn``; None is fsdp2's default.

    Shards of fused matrices and of vocabularies that do not divide cannot be cut again along the same dimension: no
    DTensor placement could describe the result.

    Args:
        parameter: after ``apply_tensor_parallel``.
        ranks: over which fsdp2 cuts.

    Raises:
        ConfigError: when the other dimension does not divide either.
    """
    if not isinstance(parameter, DTensor) or parameter.ndim == 1:
        return None
    placement = parameter.placements[-1]
    size = parameter.device_mesh.size(-1)
    if placement.is_replicate() or cast("Shard", placement).dim != 0:
        return None
    if getattr(placement, "split_factor", 1) == 1 and not parameter.shape[0] % size:
        return None
    if parameter.shape[1] % ranks:
        raise ConfigError(
            f"a weight of shape {tuple(parameter.shape)} lies in uneven or several shards on {size} tensor-parallel "
            f"ranks, so that fsdp2 must cut its dimension 1, which its {ranks} ranks do not divide "
            f"({parameter.shape[1]} / {ranks} = {parameter.shape[1] / ranks:g}): change train.tensor_parallel_size or "
            "train.data_parallel_replicate_size"
        )
    return Shard(1)


def accumulate(module: nn.Module, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
    """Yields micro-batches; only the backward pass of the last reduces gradients over ranks.

    With ``enable_reduce_every_micro_batch`` all reduce them, and only the last sums them over copies (HSDP). Each
    batch's backward pass must be over when the next one is asked for.
    """
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        if isinstance(module, FSDPModule):
            reduces_every = cast("bool", module.reduces_every_micro_batch)
            module.set_requires_gradient_sync(is_last or reduces_every)
            module.set_requires_all_reduce(is_last)
        no_sync = isinstance(module, FullyShardedDataParallel) and not is_last
        with cast("FullyShardedDataParallel", module).no_sync() if no_sync else nullcontext():
            yield batch


def keep_gathered(module: nn.Module, keep: bool) -> None:
    """Sets whether weights that fsdp2 gathers for the module itself, not its blocks, stay until the backward pass.

    Among them is the output layer, which a loss reads after the forward pass. Without a backward pass they must not
    stay: nothing would free them before weights change, and stale ones would be used.
    """
    if isinstance(module, FSDPModule):
        module.set_reshard_after_forward(not keep, recurse=False)


def forget_pass(module: nn.Module) -> None:
    """Resets fsdp2 after an exception within a forward or backward pass.

    Otherwise it would take the next passes for parts of the failed one and reduce no gradients.

    Raises:
        ConfigError: when this version of torch cannot do that.
    """
    if isinstance(module, FSDPModule) and module._get_fsdp_state()._is_root:  # None before the first pass
        if not hasattr(module, "reset_iter_state"):
            raise ConfigError(f"fsdp2 of torch {torch.__version__} is of no use after a pass that failed: take 2.13")
        module.reset_iter_state()
        module.reshard()


def broadcast_parameters(module: nn.Module, mesh: Mesh) -> None:
    """Makes trainable parameters equal on all ranks that hold the same shard, to those of the first of these ranks."""
    for parameter in trainable_parameters(module).values():
        if parameter.is_meta:
            continue  # load_weights gives every rank the same
        is_expert = isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())
        for axis in ("efsdp", "dp_replicate") if is_expert else ("gradient",):
            if mesh.size_of(axis) > 1:
                dist.broadcast(local_shard(parameter.data), group=mesh.group(axis), group_src=0)


def _wrap_fsdp1(
    module: nn.Module,
    mesh: Mesh,
    weights: DeviceMesh,
    config: ParallelConfig,
    blocks: Mapping[str, nn.Module],
    param_dtype: torch.dtype | None,
) -> nn.Module:
    reshard = config.enable_reshard_after_forward
    if mesh.layout.dp_replicate > 1:
        strategy = ShardingStrategy.HYBRID_SHARD if reshard else ShardingStrategy._HYBRID_SHARD_ZERO2
    else:
        strategy = ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP
    on_gpu = mesh.device.type == "cuda"  # elsewhere there is nothing to move
    shapes = whole_shapes(module)
    units = set(blocks.values())
    wrapped = FullyShardedDataParallel(
        module,
        device_mesh=weights,
        sharding_strategy=strategy,
        auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=lambda submodule: submodule in units),
        mixed_precision=MixedPrecision(param_dtype, torch.float32, cast_forward_inputs=False) if param_dtype else None,
        cpu_offload=CPUOffload(offload_params=True) if config.enable_fsdp_offload and on_gpu else None,
        forward_prefetch=config.enable_forward_prefetch,
        device_id=mesh.device,
        use_orig_params=True,
    )
    # Its parameters are flat shards, from which whole shapes cannot be seen.
    wrapped.whole_shapes = shapes  # pyright: ignore[reportArgumentType]
    return wrapped
