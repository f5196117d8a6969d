"""A mesh of processes that are not there, to see on one machine what a model becomes on many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh


@contextmanager
def pretended_mesh(layout: Layout, rank: int = 0) -> Iterator[Mesh]:
    """Inside, this process is one rank of a mesh whose other ranks do not exist.

    Collectives return at once and leave in their results what was there, so that shapes are right and values are not:
    for modules on meta and fake tensors. Not within a process group.

    Args:
        layout: the mesh.
        rank: the rank to be.
    """
    if layout.size == 1:
        yield Mesh(layout, torch.device("cpu"), 0)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.size)
    try:
        yield Mesh(layout, torch.device("cpu"), rank)
    finally:
        dist.destroy_process_group()
