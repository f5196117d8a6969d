"""Which matrix kernels the CPU computes with, and how GPU memory grows. Imports nothing heavy."""

from __future__ import annotations

import os

ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""What torch's allocator of GPU memory looks at."""


def choose_allocator(shares_memory: bool = False) -> dict[str, str]:
    """Has GPU memory grow in place (``expandable_segments``), so that rows of unequal lengths leave no gaps in it;
    another choice that is set stays.

    torch looks at the environment when it touches a GPU for the first time; processes started later inherit it.

    Args:
        shares_memory: GPU memory is handed to other processes (``RuntimeConfig.shares_gpu_memory``), which then needs
            the system call pidfd_getfd, that many containers refuse: leave the allocator as it is.

    Returns:
        The environment variables for processes that do not inherit them.
    """
    if not shares_memory and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault(ALLOCATOR, "expandable_segments:True")
    return {name: os.environ[name] for name in (ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF") if name in os.environ}


def choose_kernels() -> dict[str, str]:
    """Has MKL compute a row of a matrix product alike, however many rows there are; another choice that is set stays.

    MKL looks at the environment when it computes for the first time, so call this before anything is computed;
    processes that are started later inherit it. It works on CPUs of Intel with AVX2 or AVX-512 and costs no speed; on
    those of AMD MKL pays no heed, and rows are alike from four on.

    Returns:
        The environment variables for processes that do not inherit them.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    return {"MKL_CBWR": os.environ["MKL_CBWR"]}
