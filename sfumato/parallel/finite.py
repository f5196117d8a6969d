"""Finds NaN and infinite values before they are learned from, written or sent.

Checking a weight costs one read of its memory; the host waits for a device once for all weights of a dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import local_shard

NAMED = 3
"""Tensors that a message names; the others are counted."""


def finite_rows(*tensors: Tensor) -> Tensor:
    """Whether each of B rows is finite in all tensors ``[B, ...]``: bool ``[B]``."""
    rows = [tensor.isfinite().flatten(1).all(dim=1) for tensor in tensors]
    return torch.stack(rows).all(dim=0)


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors whose shard on this rank holds NaN or an infinite value.

    Args:
        tensors: plain tensors or DTensors of any dtypes and devices; those on meta, and numbers that are no floats,
            are passed over.
    """
    shards = {name: local_shard(tensor.detach()) for name, tensor in tensors.items()}
    groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, shard in shards.items():
        is_float = shard.is_floating_point() and shard.dtype.itemsize > 1  # values of one byte are quantised
        if is_float and not shard.is_meta and shard.numel():
            groups.setdefault((shard.device, shard.dtype), []).append(name)
    # A sum reads memory fastest. A finite sum proves that all values are finite; another may just have overflowed, so
    # these tensors are looked at again by their extremes.
    sums = {group: torch.stack([shards[name].sum() for name in names]) for group, names in groups.items()}
    return [
        name
        for group, values in sums.items()
        for name, is_finite in zip(groups[group], values.isfinite().tolist(), strict=True)
        if not is_finite and not torch.stack(torch.aminmax(shards[name])).isfinite().all()  # NaN is both
    ]


def gather_names(names: Iterable[str], mesh: Mesh) -> list[str]:
    """The names that any rank has, each once, in rank order. Every rank must call it."""
    return list(dict.fromkeys(name for rank_names in mesh.gather(list(names), over="world") for name in rank_names))


def list_first(names: Sequence[str], named: int = NAMED, separator: str = ", ") -> str:
    """The first few names, and how many more."""
    return separator.join(names[:named]) + (f" and {len(names) - named} more" if len(names) > named else "")
