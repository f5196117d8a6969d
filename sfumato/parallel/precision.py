"""bf16 in one process and under ddp as under fsdp2, which gathers float32 weights in bf16 and computes with those.

Autocast converts the weights of linear layers and convolutions by itself. Weights that are used otherwise (embeddings,
norms, experts, tables of modulations) would stay float32 there, and with them everything between the layers: the result
would depend on whether there are several GPUs, and one GPU would move twice the bytes. Trained weights, gradients and
optimiser state stay float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

BY_AUTOCAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Layers whose weights autocast converts when they are used."""


TABLES = {"Qwen2AudioEncoder": "embed_positions"}
"""Modules that read the weight of a part, of this name, without calling it."""


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Has layers use their float32 weights as if these were of another dtype, where autocast does not do it.

    Only the ``forward`` of each such layer is replaced, on the instance, and outside of autocast it is as it was.
    Gradients reach the float32 weights.

    Args:
        module: before recomputation, compilation and data parallelism; changed in place.
        dtype: that of autocast.
    """
    for layer in module.modules():
        names = [
            name for name, weight in layer._parameters.items() if weight is not None and weight.is_floating_point()
        ]
        if names and not isinstance(layer, BY_AUTOCAST):
            layer.forward = Converted(layer, dtype)
        if type(layer).__name__ in TABLES:
            layer.forward = Converted(layer, dtype, getattr(layer, TABLES[type(layer).__name__]))


class Converted:
    """What stands in for the forward of one layer."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype, table: nn.Module | None = None) -> None:
        """``table`` is a part whose weight the layer reads, in place of its own."""
        self.layer = layer
        self.dtype = dtype
        self.table = table
        self.replaced: Callable[..., Any] | None = vars(layer).get("forward")
        """What stood in for it before, if anything did."""
        self._of_class = type(layer).forward  # for the compiler, which cannot look it up in every class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
            return (self.replaced or partial(self._of_class, self.layer))(*args, **kwargs)
        forward = (self._of_class, self.layer) if self.replaced is None else (self.replaced,)
        if self.table is not None:
            return with_weights_in(self.table, self.dtype, *forward, *args, **kwargs)
        return converted(self.layer, self.dtype, *forward, *args, **kwargs)

    def of_block(self, _block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The same, called as the function of a class is."""
        return self(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Converted:
        layer = copy.deepcopy(self.layer, memo)
        duplicate = Converted(layer, self.dtype, copy.deepcopy(self.table, memo))
        duplicate.replaced = copy.deepcopy(self.replaced, memo)
        return duplicate


def converted(layer: nn.Module, dtype: torch.dtype, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function within which a layer's own float32 weights are of another dtype."""
    if type(layer) is nn.Embedding:  # the rows that are looked up, not the table
        embedded = forward(*args, **kwargs)
        return embedded.to(dtype) if embedded.dtype == torch.float32 else embedded
    return with_weights_in(layer, dtype, forward, *args, **kwargs)


def with_weights_in(
    layer: nn.Module, dtype: torch.dtype, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The same, whatever the layer is."""
    # An attribute of the instance stands before a parameter of the same name, which stays where it is.
    converted_weights = {name: weight.to(dtype) for name, weight in layer._parameters.items() if _is_single(weight)}
    vars(layer).update(converted_weights)
    try:
        return forward(*args, **kwargs)
    finally:
        for name in converted_weights:
            del vars(layer)[name]


def _is_single(weight: nn.Parameter | None) -> bool:
    return weight is not None and weight.dtype == torch.float32
