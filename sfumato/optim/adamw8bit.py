"""AdamW with its state in 8 bits, block by block (arXiv 2110.02861); torchao compresses and computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_8bit import OptimState8bit

from sfumato.parallel.shards import local

BLOCK = 256
"""Elements that share a scale."""

SMALLEST = 4096
"""Pieces of fewer elements, or of a number that BLOCK does not divide, keep float32 state, as torchao does it."""


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose two averages take 8 bits and a share of a scale for each element.

    torchao's own optimiser of the name is not used: its rates are tensors, which schedules here do not set, and its
    negative numbers do not survive being decompressed and compressed. State is that of this rank's shards, so a shard
    that begins and ends with a block (rows of a multiple of 256 elements) has the same bits however many ranks there
    are.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        """Takes groups of parameters, plain or DTensors, and AdamW's settings."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on this rank's shards; on a GPU it is compiled, once for each shape."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_of(parameter, group)
        return loss

    def _step_of(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        shard = local(parameter.detach())
        state.setdefault("step", torch.tensor(0.0))
        for key, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
            state[key] = compressed(state.get(key), shard, is_signed)
        state["step"] += 1
        averages = state["exp_avg"], state["exp_avg_sq"]
        settings = torch.tensor(group["lr"]), *group["betas"], group["weight_decay"], group["eps"]
        update = _compiled if shard.is_cuda else single_param_adam
        # no third average (amsgrad); decoupled decay; no stochastic rounding
        update(shard, local(parameter.grad), state["step"], *averages, None, *settings, True, False)


def compressed(known: Tensor | None, shard: Tensor, is_signed: bool) -> Tensor:
    """State of a shard as the optimiser keeps it.

    What was decompressed (a checkpoint) becomes the bits that it was made from: the table of values has 1 and -1, so
    that the largest element of a block is its scale exactly.

    Args:
        known: state so far, compressed or float32, of the shard or a DTensor of which this is it; None is zero.
        shard: this rank's shard of the parameter.
        is_signed: whether values can be negative.
    """
    if isinstance(known, OptimState8bit):
        return known
    values = torch.zeros_like(shard) if known is None else local(known)
    if shard.numel() < SMALLEST or shard.numel() % BLOCK:
        return values
    state = OptimState8bit.zeros(shard.shape, is_signed, BLOCK, shard.device, dtype=shard.dtype)
    if is_signed:
        state.qmap[0] = -1.0
    return state.copy_(values)


def _compiled(*arguments: Any) -> None:
    with torch._dynamo.utils.disable_cache_limit():  # one program for each shape, of which models may have many
        torch.compile(single_param_adam, fullgraph=True, dynamic=False)(*arguments)
