"""torch.compile: whether it works here, and what it has cost."""

from __future__ import annotations

import functools
import sys
import warnings

import torch
from torch import Tensor
from torch.nn import functional

NOTICES = ("TensorFloat32 tensor cores for float32", r"\s*Online softmax is disabled")
"""Beginnings of the compiler's warnings that ask nothing of a user: the log says what precision there is."""

NEEDS = {
    "cpu": "a C++ compiler (g++; the environment variable CXX names another)",
    "cuda": "Triton and a C compiler (gcc; the environment variable CC names another) with the headers of Python",
}
"""What torch.compile needs on a type of device."""


@functools.cache
def compiler_problem(device: str, backend: str = "inductor") -> str | None:
    """Compiles and runs one small block, forward and backward.

    Args:
        device: type of device on which blocks will run.
        backend: of ``torch.compile``.

    Returns:
        None where that works; else one line with the compiler's own words and the remedy.
    """
    from torch._dynamo.utils import counters

    for notice in NOTICES:
        warnings.filterwarnings("ignore", notice, UserWarning)
    stats = dict(counters["stats"])
    try:
        inputs = [torch.full(shape, 0.5, device=device, requires_grad=True) for shape in ((8, 16), (32, 16), (16, 32))]
        torch.compile(_feed_forward, backend=backend)(*inputs).sum().backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers, their libraries and torch raise what they like
        return (
            f"torch.compile does not work here ({type(error).__name__}: {first_paragraph(error)}): blocks run "
            f"uncompiled. It needs {NEEDS.get(device, 'a compiler')}; train.compile false runs without trying"
        )
    finally:
        # the trial counts for no graph of the run
        counters["stats"].clear()
        counters["stats"].update(stats)
    return None


def first_paragraph(error: Exception) -> str:
    """What a compiler's error says before stacks and advice, in one line."""
    return " ".join(str(error).strip().partition("\n\n")[0].split())


def _feed_forward(hidden: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return hidden + functional.linear(functional.silu(functional.linear(hidden, up)), down)


def compiler_figures() -> dict[str, float]:
    """Graphs that torch.compile has made in this process so far, and the seconds that it took; empty without any."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # loading it takes seconds
    if dynamo is None or not dynamo.counters["stats"]["unique_graphs"]:
        return {}
    seconds = dynamo.calculate_time_spent().get("total_wall_time", 0.0)
    return {"compile/graphs": dynamo.counters["stats"]["unique_graphs"], "compile/seconds": seconds}
