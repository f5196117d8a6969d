"""Whole tensors in buckets of bytes: planned once, gathered over the actor's ranks one bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Shards, all_parameters, local_shard
from sfumato.runtime.weight_sync.checksum import Spec

ALIGNED = 16
"""Tensors begin in a bucket at multiples of so many bytes, so that the bytes can be viewed in any dtype."""


@dataclass(frozen=True)
class Item:
    """A tensor in a bucket."""

    name: str
    spec: Spec
    start: int
    """First byte in the bucket."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.spec.shape) * self.spec.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together."""

    items: tuple[Item, ...]
    num_bytes: int
    """Bytes from the first tensor to the end of the last, with the gaps between tensors."""

    def tensors(self, memory: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and views of the tensors in ``memory``, uint8 ``[at least num_bytes]``."""
        for item in self.items:
            part = memory[item.start : item.start + item.num_bytes]
            yield item.name, part.view(item.spec.dtype).view(item.spec.shape)


def plan_buckets(specs: Mapping[str, Spec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Divides tensors into buckets, in their order.

    Args:
        specs: shapes and dtypes of the whole tensors.
        bucket_bytes: most bytes of a bucket; a larger tensor gets a bucket of its own.
    """
    buckets: list[Bucket] = []
    items: list[Item] = []
    end = 0
    for name, spec in specs.items():
        start = -(-end // ALIGNED) * ALIGNED
        item = Item(name, spec, start)
        if items and start + item.num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(items), end))
            items = []
            item = Item(name, spec, 0)
        items.append(item)
        end = item.start + item.num_bytes
    if items:
        buckets.append(Bucket(tuple(items), end))
    return tuple(buckets)


def largest_bytes(buckets: Sequence[Bucket]) -> int:
    """Bytes of the largest bucket; 0 without buckets."""
    return max((bucket.num_bytes for bucket in buckets), default=0)


NUM_SLOTS = 2
"""Buckets in memory: one travels while another is gathered, or loaded."""


def empty_slots(buckets: Sequence[Bucket], device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Memory for ``NUM_SLOTS`` buckets, of which bucket n takes number n mod ``NUM_SLOTS``: uint8 each."""
    count = min(NUM_SLOTS, max(1, len(buckets)))
    return [torch.empty(largest_bytes(buckets), dtype=torch.uint8, device=device) for _ in range(count)]


class Source:
    """The module whose weights are sent."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self.parameters = all_parameters(module)
        self.shards = Shards(module, mesh, self.parameters)

    @torch.no_grad()
    def gather(self, bucket: Bucket, memory: torch.Tensor | None) -> None:
        """Gathers the whole tensors of a bucket. Every rank must call it, in the same order.

        Args:
            bucket: what to gather.
            memory: uint8, which is filled with the tensors, cast to the sampler's dtypes; None on ranks that only take
                part in the collectives.
        """
        places = {} if memory is None else dict(bucket.tensors(memory))
        for item in bucket.items:
            whole = self.shards.whole(item.name, local_shard(self.parameters[item.name].detach()))
            if memory is not None:
                places[item.name].copy_(whole)
