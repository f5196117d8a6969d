"""What the embedded engine of RL takes in each rank beside the update: keys and values, and a copy of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sfumato.models.estimate.activation_memory import autocast, count_cached, make_fake
from sfumato.models.estimate.memory_plan import Planned
from sfumato.models.language.row_cache import COLUMNS
from sfumato.parallel.layout import Layout
from sfumato.parallel.plan import find_blocks

KEYS_AND_VALUES, COPY = "keys and values while tokens are drawn", "copy of the model that draws"
"""Parts of the memory."""


@dataclass(frozen=True)
class DrawingLoad:
    """The most that a rank's engine is asked for at a time."""

    num_sequences: int
    length: int
    """Tokens of each, prompt included."""
    cache_bytes: int | None = None
    """Most that keys and values may take; None: half of what is free on the device."""


def drawing_bytes(planned: Planned, drawn: DrawingLoad, layout: Layout, data_parallel_mode: str) -> dict[str, int]:
    """Bytes of a rank by what they hold; without keys and values where the model keeps another state.

    Args:
        planned: the policy.
        drawn: what is drawn at a time.
        layout: the mesh.
        data_parallel_mode: of the section train.
    """
    module = planned.build()
    cuts = layout.fsdp > 1 and data_parallel_mode != "ddp"
    bytes_by_part = {}
    if cuts or layout.tp > 1 or layout.ep > 1:
        tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        bytes_by_part[COPY] = sum(tensor.nbytes for tensor in tensors.values())
    per_token = cached_bytes_per_token(planned)
    if per_token is not None:
        wanted = drawn.num_sequences * -(-drawn.length // COLUMNS) * COLUMNS * per_token
        bytes_by_part[KEYS_AND_VALUES] = min(wanted, wanted if drawn.cache_bytes is None else drawn.cache_bytes)
    return bytes_by_part


def cached_bytes_per_token(planned: Planned) -> int | None:
    """Bytes of the keys and values of a token, found out on tensors without memory; None for models that hand a cache
    something else, or nothing."""
    module = planned.build().eval()
    blocks = find_blocks(module, planned.plan)

    def run(cache: Any) -> Any:
        ids, positions = torch.zeros(1, COLUMNS, dtype=torch.int64), torch.arange(COLUMNS)[None]
        with autocast(planned.dtype):
            return module(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)

    with FakeTensorMode(allow_non_fake_inputs=True):
        make_fake(module)
        try:
            return count_cached(module, blocks, run) // COLUMNS or None
        except (AttributeError, KeyError, TypeError, ValueError, NotImplementedError):  # it wants a cache of its own
            return None
