"""Which modules of a model are its experts, and how fsdp cuts their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import Shard

from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeGuard

    class ExpertsModule(nn.Module):
        """The attributes by which transformers' ``use_experts_implementation`` describes the experts of a layer."""

        config: Any
        num_experts: int
        has_gate: bool
        """Whether there is a fused ``gate_up_proj``; else ``up_proj``."""
        has_bias: bool
        is_transposed: bool
        """Whether weights are ``[experts, in, out]``; else ``[experts, out, in]``."""
        down_proj: nn.Parameter
        act_fn: Callable[[Tensor], Tensor]
        post_expert_norm: Callable[[Tensor], Tensor]

        def _apply_gate(self, rows: Tensor) -> Tensor: ...


def is_experts(module: nn.Module) -> TypeGuard[ExpertsModule]:
    """Whether a module is the experts of a layer, by transformers' interface (``use_experts_implementation``)."""
    attributes = ("has_gate", "has_bias", "is_transposed", "config", "down_proj")
    if not all(hasattr(module, attribute) for attribute in attributes):
        return False
    return hasattr(module, "gate_up_proj" if module.has_gate else "up_proj")


def has_experts(module: nn.Module) -> bool:
    """Whether any layer has experts. All layers of a pipeline stage may be dense, even in a model with experts."""
    return any(map(is_experts, module.modules()))


def find_experts(module: nn.Module, remedy: str) -> dict[str, ExpertsModule]:
    """The experts modules, one for each layer that has experts, by name and in order.

    Raises:
        ConfigError: when there are none; its message ends with ``remedy``.
    """
    experts = {name: submodule for name, submodule in module.named_modules() if is_experts(submodule)}
    if not experts:
        raise ConfigError(
            f"{type(module).__name__} has no experts of transformers' interface (use_experts_implementation): {remedy}"
        )
    return experts


def expert_placement(parameter: nn.Parameter, ranks: int) -> Shard:
    """How fsdp cuts a parameter ``[experts, ...]`` further over ``ranks``.

    It is cut within each expert, since a rank may have fewer experts than there are ranks.

    Raises:
        ConfigError: when no dimension is divisible.
    """
    for dim in range(1, parameter.ndim):
        if parameter.shape[dim] % ranks == 0:
            return Shard(dim)
    raise ConfigError(
        f"experts' weights of shape {tuple(parameter.shape)} cannot be cut evenly over {ranks} ranks (fsdp ranks / "
        "train.expert_parallel_size): raise train.expert_parallel_size or train.data_parallel_replicate_size"
    )
