"""Where the time of a rollout or an update goes: kinds of operations, and the denoiser's own passes, run alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

KINDS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear"),
    "attention": ("aten::_scaled_dot_product",),
    "convolutions": ("aten::mkldnn_convolution", "aten::convolution", "aten::_convolution"),
    "other operations": ("aten::",),
}
"""The first kind with a beginning of an operation's name is its kind; what none names is Python and autograd."""


def shares(work: Callable[[], object]) -> dict[str, float]:
    """Shares of the CPU time of ``work`` by kind; the profiler lengthens small operations and Python most."""
    with profile(activities=[ProfilerActivity.CPU]) as result, record_function("work"):
        work()
    events = result.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    taken = dict.fromkeys([*KINDS, "Python"], 0.0)
    for event in events:
        kind = next((name for name, starts in KINDS.items() if event.key.startswith(starts)), "Python")
        taken[kind] += event.self_cpu_time_total / total
    return taken


def passes_alone(denoiser: nn.Module, work: Callable[[], object]) -> Callable[[], None]:
    """The forward passes of the denoiser within ``work``, and the backward pass of each that had one, alone.

    Args:
        denoiser: what ``work`` calls, by keywords.
        work: runs once here.

    Returns:
        Runs the same passes with the same inputs, and ones for the gradient of each output.
    """
    calls: list[tuple[bool, dict[str, Any]]] = []

    def note(_: nn.Module, arguments: tuple[()], kwargs: dict[str, Any]) -> None:
        assert not arguments, "a denoiser is called by keywords"
        calls.append((torch.is_grad_enabled(), kwargs))

    handle = denoiser.register_forward_pre_hook(note, with_kwargs=True)
    try:
        work()
    finally:
        handle.remove()

    def run() -> None:
        for has_gradient, kwargs in calls:
            with torch.set_grad_enabled(has_gradient):
                output = denoiser(**kwargs)[0]
            if has_gradient:
                output.backward(torch.ones_like(output))

    return run
