"""AdamW with its state in 8 bits, block by block (arXiv 2110.02861); torchao compresses and computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_8bit import OptimState8bit

from sfumato.parallel.shards import local_shard

BLOCK = 256
"""Elements that share a scale."""

SMALLEST = 4096
"""Pieces of fewer elements, or of a number that BLOCK does not divide, keep float32 state, as torchao does it."""


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose two averages take 8 bits and a share of a scale for each element.

    torchao's own optimiser of this name is not used: its learning rates are tensors, which the schedules here do not
    set, and its negative values do not survive decompression followed by compression. The state is that of this rank's
    shards, so a shard that begins and ends at a block boundary (rows of a multiple of 256 elements) has the same bits
    for any number of ranks.
    """

    def __init__(
        self,
        groups: list[dict[str, object]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
    ) -> None:
        """Takes groups of parameters, plain or DTensors, and AdamW's settings."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Takes one step on this rank's shards and returns what ``closure`` returns, None without one.

        On a GPU the update is compiled, once for each shape.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, group)
        return loss

    def _step_parameter(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        shard = local_shard(parameter.detach())
        state.setdefault("step", torch.tensor(0.0))
        # After a checkpoint was loaded the averages are float32; they are compressed again before their first use.
        for key, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
            state[key] = compress_state(state.get(key), shard, is_signed)
        state["step"] += 1
        averages = state["exp_avg"], state["exp_avg_sq"]
        settings = torch.tensor(group["lr"]), *group["betas"], group["weight_decay"], group["eps"]
        update = _update_compiled if shard.is_cuda else single_param_adam
        # no third average (amsgrad); decoupled decay; no stochastic rounding
        update(shard, local_shard(cast(Tensor, parameter.grad)), state["step"], *averages, None, *settings, True, False)


def compress_state(previous: Tensor | None, shard: Tensor, is_signed: bool) -> Tensor:
    """The state of a shard as the optimiser keeps it: in 8 bits where the shard is large enough, else float32.

    State that a checkpoint holds decompressed gets back the bits that it had: the table of values contains 1 and -1,
    so that the largest element of a block is exactly its scale.

    Args:
        previous: state so far, compressed or float32: a plain tensor of the shard's shape, or a DTensor whose local
            shard it is; None starts at zero.
        shard: this rank's shard of the parameter.
        is_signed: whether values can be negative.
    """
    if isinstance(previous, OptimState8bit):
        return cast(Tensor, previous)
    values = torch.zeros_like(shard) if previous is None else local_shard(previous)
    if shard.numel() < SMALLEST or shard.numel() % BLOCK:
        return values
    state = OptimState8bit.zeros(shard.shape, is_signed, BLOCK, shard.device, dtype=shard.dtype)
    if is_signed:
        # torchao's table ends above -1, so that a block whose largest element is negative would change its scale.
        state.qmap[0] = -1.0
    return state.copy_(values)


def _update_compiled(*arguments: object) -> None:
    with torch._dynamo.utils.disable_cache_limit():  # one program for each shape, of which models may have many
        torch.compile(single_param_adam, fullgraph=True, dynamic=False)(*arguments)
