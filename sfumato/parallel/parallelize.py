"""From a plain module to one that runs on a mesh."""

from __future__ import annotations

import torch
from torch import nn

from sfumato.config.parallel import ParallelConfig
from sfumato.parallel.data import shard_data_parallel
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.plan import ParallelPlan, find_blocks


def parallelize(
    module: nn.Module, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan, param_dtype: torch.dtype | None = None
) -> nn.Module:
    """Applies tensor, expert and sequence parallelism, recomputation, compilation and data parallelism, in that order.

    Args:
        module: an unmodified transformers or diffusers model, adapters included; changed in place.
        mesh: the ranks.
        config: what to apply.
        plan: the model's blocks and cuts.
        param_dtype: dtype in which fsdp gathers and uses weights (bf16 under mixed precision); None keeps theirs.

    Returns:
        The module to call from now on.

    Raises:
        ConfigError: when the model cannot be cut as configured.
    """
    layout = mesh.layout
    blocks = find_blocks(module, plan)
    parts = [module.get_submodule(name) for name in plan.parts] or [module]
    experts: dict[str, nn.Module] = {}
    if layout.tp > 1:
        from sfumato.parallel.tensor import apply_tensor_parallel

        for part in parts:
            apply_tensor_parallel(part, mesh, plan, config.sequence_parallel)
    if layout.ep > 1:
        from sfumato.parallel.expert import apply_expert_parallel, has_experts

        if layout.pp == 1 or has_experts(module):
            experts = apply_expert_parallel(module, mesh)
    if layout.cp > 1:
        from sfumato.parallel.sequence import apply_sequence_parallel

        for part in parts:
            apply_sequence_parallel(part, mesh, plan)
    if config.activation_checkpointing != "none" or config.enable_activation_offload or config.compile:
        from sfumato.parallel.memory import apply_memory_savings

        apply_memory_savings(module, config, blocks)
    return shard_data_parallel(module, mesh, config, blocks, param_dtype, experts)
