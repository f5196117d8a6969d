"""Memory of an engine with weights of its own (vLLM, SGLang) on each of its GPUs, before it is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from sfumato.models.estimate.kv_memory import cached_bytes_per_token
from sfumato.models.estimate.memory_plan import Planned

BESIDE = 4 * 2**30
"""Bytes that CUDA's context, activations of a batch and recorded graphs take beside weights, keys and values: what vLLM
finds out at its start for models of 4 to 30 billion parameters is of this size."""

SHARE = 0.92
"""Share of a GPU's memory that vLLM takes, where nobody says."""


@dataclass(frozen=True)
class EngineMemory:
    """On each GPU of an engine."""

    weight_bytes: int
    token_bytes: int | None
    """Keys and values of a token; None for a model that keeps another state."""
    free_bytes: int
    """Bytes for keys and values; below 0 when there is no room for the weights."""

    def requests_of(self, length: int) -> float:
        """How many requests of so many tokens fit at a time."""
        assert self.token_bytes is not None
        return max(self.free_bytes, 0) / (self.token_bytes * length)


def engine_memory(
    planned: Planned, dtype: torch.dtype, tensor_parallel_size: int, device_bytes: int, share: float | None
) -> EngineMemory:
    """Predicts it from the model without memory.

    Args:
        planned: the policy, whose adapters count as weights.
        dtype: that the engine computes in.
        tensor_parallel_size: GPUs that share weights, and heads of keys and values as far as there are several.
        device_bytes: memory of a GPU.
        share: of it that the engine takes; None: as it chooses.
    """
    module = planned.build()
    config = getattr(module, "config", None)
    text_config: Any = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else None
    weights = sum(parameter.numel() for parameter in module.parameters()) * dtype.itemsize // tensor_parallel_size
    rank = getattr(text_config, "kv_lora_rank", None)
    if rank:  # engines keep the latents of latent attention, each GPU all of them; transformers what is made of them
        token_bytes = (rank + text_config.qk_rope_head_dim) * text_config.num_hidden_layers * dtype.itemsize
    else:
        # counted in float32: under autocast some keys stay in it, which engines compute in their own precision
        counted = cached_bytes_per_token(replace(planned, dtype=None, build=lambda: planned.build().float()))
        heads = getattr(text_config, "num_key_value_heads", None) or tensor_parallel_size
        parts = torch.float32.itemsize // dtype.itemsize * min(tensor_parallel_size, heads)
        token_bytes = None if counted is None else counted // parts
    free_bytes = int(device_bytes * (share or SHARE)) - weights - BESIDE
    return EngineMemory(weights, token_bytes, free_bytes)
