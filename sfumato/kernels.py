"""Which matrix kernels the CPU computes with. Imports nothing heavy."""

from __future__ import annotations

import os


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
