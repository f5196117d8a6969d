"""Whether rows of matrix products are independent of their number on this machine, by measurement."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional


def counts_that_differ() -> list[int]:
    """Of the numbers of rows below 32: those with which a row of a product of width 256 is another one."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(count, 256, generator=generator) for count in (32, 256))
    whole = functional.linear(rows, weight)
    return [count for count in range(1, 32) if not torch.equal(functional.linear(rows[:count], weight), whole[:count])]


def kernels_heed_the_setting() -> bool:
    """Whether MKL keeps rows apart when it is told to: on CPUs of Intel with AVX2. On those of AMD it does from four
    rows on, told or not (seen on an EPYC with AVX-512)."""
    cpu = Path("/proc/cpuinfo")
    is_intel = cpu.exists() and "GenuineIntel" in cpu.read_text(encoding="utf-8")
    return is_intel and torch.backends.mkl.is_available() and torch.cpu._is_avx2_supported()


ROUNDING = 1e-6 if counts_that_differ() else 0.0
"""What a log-ratio before an update may be: 0 on every CPU on which MKL keeps rows apart (see test_kernels.py)."""
