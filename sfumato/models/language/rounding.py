"""What rounding does to a model: the same forward pass with every layer's result off by as much as a precision is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def rounding_noise(module: nn.Module, dtype: torch.dtype, seed: int = 0) -> Iterator[None]:
    """Inside, inputs and results of layers are multiplied by 1 + u, with u uniform within half a unit in the last place
    of ``dtype``.

    Noise of the inputs stands for rounded weights, too, which moves a sum of products as much, and for the sum that the
    layers add to. Two computations that round differently, such as an engine's and training's, are about as far from
    each other as this moves the model. Noise in the place of a cast also works where the module computes in ``dtype``
    already. It is the same in every call, and on every rank of tensor parallelism, whose results are of one shape.

    Args:
        module: its layers are those of its modules that have weights of their own. Compiled ones run eagerly meanwhile:
            compiled code ignores hooks that came later.
        dtype: the precision.
        seed: of the noise.
    """
    half_ulp = torch.finfo(dtype).eps / 2
    generators: dict[torch.device, torch.Generator] = {}

    def add_noise(value: object) -> object:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value  # such as token ids
        generator = generators.setdefault(value.device, torch.Generator(value.device).manual_seed(seed))
        noise = torch.rand(value.shape, generator=generator, device=value.device) * 2 - 1
        return (value.float() * (1 + half_ulp * noise)).to(value.dtype)

    layers = [layer for layer in module.modules() if layer._parameters]
    hooks = [layer.register_forward_pre_hook(lambda _, inputs: tuple(map(add_noise, inputs))) for layer in layers]
    hooks += [layer.register_forward_hook(lambda _, _inputs, result: add_noise(result)) for layer in layers]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for hook in hooks:
            hook.remove()
