"""What rounding does to a model: the same forward pass with every layer's result off by as much as a precision is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def rounding_noise(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, results of layers are multiplied by 1 + u, with u uniform within half a unit in the last place of
    ``dtype``.

    Two computations that round differently, such as an engine's and training's, are about as far from each other as
    this moves the model. Noise in the place of a cast also works where the module computes in ``dtype`` already. It is
    the same in every call, and on every rank of tensor parallelism, whose results are of one shape.

    Args:
        module: its layers are those of its modules that have weights of their own. Compiled ones run eagerly meanwhile:
            compiled code ignores hooks that came later.
        dtype: the precision.
    """
    half_ulp = torch.finfo(dtype).eps / 2
    generators: dict[torch.device, torch.Generator] = {}

    def add_noise(_layer: nn.Module, _inputs: Any, result: Any) -> torch.Tensor | None:
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return None  # such as the choices of a router, whose inputs have noise
        generator = generators.setdefault(result.device, torch.Generator(result.device).manual_seed(0))
        noise = torch.rand(result.shape, generator=generator, device=result.device) * 2 - 1
        return (result.float() * (1 + half_ulp * noise)).to(result.dtype)

    layers = [layer for layer in module.modules() if layer._parameters]
    hooks = [layer.register_forward_hook(add_noise) for layer in layers]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for hook in hooks:
            hook.remove()
