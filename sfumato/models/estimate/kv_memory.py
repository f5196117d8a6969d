"""Memory of RL's embedded engine in each rank, beside that of the update: keys and values, and a copy of the model."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sfumato.models.estimate.activation_memory import count_cached, fake_autocast, make_fake
from sfumato.models.estimate.memory_plan import Planned
from sfumato.models.language.row_cache import COLUMNS, cache_argument
from sfumato.parallel.layout import Layout
from sfumato.parallel.plan import find_blocks

if TYPE_CHECKING:
    from transformers import DynamicCache

KEYS_AND_VALUES = "keys and values while tokens are drawn"
COPY = "copy of the model that draws"
"""Names of the two parts of this memory, in a plan."""


@dataclass(frozen=True)
class DrawingLoad:
    """The largest load of a rank's engine at a time."""

    num_sequences: int
    """Sequences that are sampled together."""
    length: int
    """Tokens of each sequence, with its prompt."""
    cache_bytes: int | None = None
    """Limit of keys and values; None stands for half of the memory that is free on the device."""


def drawing_bytes(planned: Planned, drawn: DrawingLoad, layout: Layout, data_parallel_mode: str) -> dict[str, int]:
    """Bytes of a rank's engine by their purpose; without keys and values if the model keeps another state.

    Args:
        planned: the policy.
        drawn: the load of the engine.
        layout: the mesh.
        data_parallel_mode: ``train.data_parallel_mode``.
    """
    module = planned.build()
    is_sharded = layout.fsdp > 1 and data_parallel_mode != "ddp"
    bytes_by_part = {}
    if is_sharded or layout.tp > 1 or layout.ep > 1:
        # The engine needs whole weights: it has a copy of the model where the update's weights are cut, with float32
        # weights in the dtype of forward passes.
        weights = {id(weight): weight for weight in module.parameters()}.values()
        sizes = [
            weight.numel()
            * (planned.dtype if planned.dtype and weight.dtype == torch.float32 else weight.dtype).itemsize
            for weight in weights
        ]
        bytes_by_part[COPY] = sum(sizes) + sum(buffer.nbytes for buffer in module.buffers())
    per_token = cached_bytes_per_token(planned)
    if per_token is not None:
        # The cache keeps a multiple of COLUMNS tokens of each sequence.
        wanted = drawn.num_sequences * -(-drawn.length // COLUMNS) * COLUMNS * per_token
        bytes_by_part[KEYS_AND_VALUES] = min(wanted, wanted if drawn.cache_bytes is None else drawn.cache_bytes)
    return bytes_by_part


def cached_bytes_per_token(planned: Planned) -> int | None:
    """Bytes of the keys and values of a token, counted on tensors without memory.

    None for models that put no keys and values, or something else, into a cache of transformers.
    """
    module = planned.build().eval()
    blocks = find_blocks(module, planned.plan)
    argument = cache_argument(inspect.signature(module.forward).parameters)
    if argument is None:
        return None

    def run(cache: DynamicCache) -> object:
        ids = torch.zeros(1, COLUMNS, dtype=torch.int64)
        positions = torch.arange(COLUMNS)[None]
        with fake_autocast(planned.dtype):
            return module(input_ids=ids, position_ids=positions, use_cache=True, **{argument: cache})

    with FakeTensorMode(allow_non_fake_inputs=True):
        make_fake(module)
        try:
            return count_cached(module, blocks, run) // COLUMNS or None
        except (AttributeError, KeyError, TypeError, ValueError, NotImplementedError):  # the model needs another cache
            return None
