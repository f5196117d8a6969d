"""Random numbers that belong to a sample, not to a rank, a micro-batch or a process.

A value is drawn from a generator keyed by (seed, purpose, keys...), so it is the same however the work is split
and wherever a run is resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sfumato.algorithms.device import to_device

if TYPE_CHECKING:
    from torch import Tensor


def keyed_generator(seed: int, purpose: str, *keys: int) -> torch.Generator:
    """A CPU generator whose state is a function of its arguments alone.

    Args:
        seed: the run's seed.
        purpose: name of the use of the numbers, so that two uses with equal keys stay independent.
        keys: integers such as the step and the sample id.
    """
    text = "/".join([str(int(seed)), purpose, *(str(int(key)) for key in keys)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def keyed_normal(
    shape: Sequence[int],
    seed: int,
    purpose: str,
    step: int,
    sample_ids: Sequence[int],
    device: torch.device | str = "cpu",
) -> Tensor:
    """Standard normal noise, one independent draw per sample.

    Args:
        shape: shape of one sample's noise.
        seed, purpose, step: the key that the samples share.
        sample_ids: one integer per sample (B of them).
        device: where the result goes; it is always drawn on the CPU, and the copy is not waited for.

    Returns:
        float32 ``[B, *shape]``.
    """
    rows = [
        torch.randn(tuple(shape), generator=keyed_generator(seed, purpose, step, sample_id)) for sample_id in sample_ids
    ]
    return to_device(torch.stack(rows), device)


def keyed_uniform(seed: int, purpose: str, step: int, sample_ids: Sequence[int]) -> Tensor:
    """One uniform number in [0, 1) per sample: float64 ``[B]``."""
    rows = [torch.rand((), generator=keyed_generator(seed, purpose, step, i), dtype=torch.float64) for i in sample_ids]
    return torch.stack(rows)


def keyed_permutation(length: int, seed: int, purpose: str, *keys: int) -> Tensor:
    """A random order of ``length`` items: int64 ``[length]``."""
    return torch.randperm(length, generator=keyed_generator(seed, purpose, *keys))
