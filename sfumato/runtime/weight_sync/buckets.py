"""Whole tensors in buckets of bytes: planned once, gathered over the actor's ranks one bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Shards, all_parameters, local
from sfumato.runtime.weight_sync.checksum import Spec

ALIGNED = 16
"""Bytes: where tensors may begin in a bucket, so that they can be seen in any dtype."""


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
    """Bytes, with the gaps between tensors."""

    def tensors(self, memory: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the tensors in a bucket's bytes (uint8, of at least ``num_bytes``)."""
        for item in self.items:
            part = memory[item.start : item.start + item.num_bytes]
            yield item.name, part.view(item.spec.dtype).view(item.spec.shape)


def plan_buckets(specs: Mapping[str, Spec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Which tensors travel together, in their order.

    Args:
        specs: whole tensors.
        bucket_bytes: most bytes of a bucket; a tensor that is larger has a bucket of its own.
    """
    buckets: list[Bucket] = []
    items: list[Item] = []
    end = 0
    for name, spec in specs.items():
        start = -(-end // ALIGNED) * ALIGNED
        item = Item(name, spec, start)
        if items and start + item.num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(items), end))
            items, item = [], Item(name, spec, 0)
        items.append(item)
        end = item.start + item.num_bytes
    if items:
        buckets.append(Bucket(tuple(items), end))
    return tuple(buckets)


def largest(buckets: tuple[Bucket, ...]) -> int:
    """Bytes of the largest."""
    return max((bucket.num_bytes for bucket in buckets), default=0)


class Source:
    """The weights of a module that are to be sent."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self.parameters = all_parameters(module)
        self.shards = Shards(module, mesh, self.parameters)

    @torch.no_grad()
    def gather(self, bucket: Bucket, memory: torch.Tensor | None) -> None:
        """Gathers the whole tensors of a bucket. Every rank must call it, in the same order.

        Args:
            bucket: what to gather.
            memory: uint8, filled with the tensors, cast to the sampler's dtypes; None on ranks that only take part.
        """
        places = {} if memory is None else dict(bucket.tensors(memory))
        for item in bucket.items:
            whole = self.shards.whole(item.name, local(self.parameters[item.name].detach()))
            if memory is not None:
                places[item.name].copy_(whole)
