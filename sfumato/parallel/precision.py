"""bf16 in one process and under ddp that equals fsdp2, which gathers float32 weights in bf16 and computes with those.

Autocast converts the weights of linear layers and convolutions by itself. Weights with other uses (embeddings, norms,
experts, tables of modulations) would stay float32, and with them all activations between the layers: results would
depend on whether there are several GPUs, and one GPU would move twice the bytes. Trained weights, gradients and
optimiser state stay float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from typing import TypeGuard

BY_AUTOCAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Layers whose weights autocast converts when they are used."""


TABLES = {"Qwen2AudioEncoder": "embed_positions"}
"""By class name, modules that read the weight of a submodule without calling it, and the submodule's name."""


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Makes layers use their float32 weights in another dtype, where autocast does not convert them.

    Only the ``forward`` of each such layer is replaced, on the instance, and outside of autocast it is as it was.
    Gradients reach the float32 weights.

    Args:
        module: before recomputation, compilation and data parallelism; changed in place.
        dtype: the dtype of autocast.
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
    """A callable in the place of one layer's ``forward``, which converts float32 weights for the time of the call."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype, table: nn.Module | None = None) -> None:
        """``table`` is a submodule whose weight is converted in place of the layer's own."""
        self.layer = layer
        self.dtype = dtype
        self.table = table
        self.replaced: Callable[..., Any] | None = vars(layer).get("forward")
        """The layer's own replacement of ``forward`` before this one, if there was any."""
        self._of_class = type(layer).forward  # stored, since the compiler cannot look it up in every class

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
            return (self.replaced or partial(self._of_class, self.layer))(*args, **kwargs)
        forward = (self._of_class, self.layer) if self.replaced is None else (self.replaced,)
        if self.table is not None:
            return with_weights_in(self.table, self.dtype, *forward, *args, **kwargs)
        return converted(self.layer, self.dtype, *forward, *args, **kwargs)

    def of_block(self, _block: nn.Module, *args: object, **kwargs: object) -> object:
        """The same with the signature of a class's ``forward``, for ``BlockForward``."""
        return self(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> Converted:
        layer = copy.deepcopy(self.layer, memo)
        duplicate = Converted(layer, self.dtype, copy.deepcopy(self.table, memo))
        duplicate.replaced = copy.deepcopy(self.replaced, memo)
        return duplicate


def converted(layer: nn.Module, dtype: torch.dtype, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function while a layer's own float32 weights appear in another dtype."""
    if type(layer) is nn.Embedding:  # converts the rows that are looked up, which are fewer than the table's
        embedded = forward(*args, **kwargs)
        return embedded.to(dtype) if embedded.dtype == torch.float32 else embedded
    return with_weights_in(layer, dtype, forward, *args, **kwargs)


def with_weights_in(
    layer: nn.Module, dtype: torch.dtype, forward: Callable[..., object], *args: object, **kwargs: object
) -> Any:
    """As ``converted``, without the exception for embeddings."""
    # Attributes in the instance's dictionary are found before parameters of the same name, which stay registered.
    converted_weights = {name: weight.to(dtype) for name, weight in layer._parameters.items() if _is_single(weight)}
    vars(layer).update(converted_weights)
    try:
        return forward(*args, **kwargs)
    finally:
        for name in converted_weights:
            del vars(layer)[name]


def _is_single(weight: nn.Parameter | None) -> TypeGuard[nn.Parameter]:
    """Whether this is a float32 weight."""
    return weight is not None and weight.dtype == torch.float32
