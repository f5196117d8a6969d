"""bf16 in one process and under ddp that equals fsdp2, which gathers float32 weights in bf16 and computes with those.

Autocast converts the weights of linear layers and convolutions by itself. Weights with other uses (embeddings, norms,
experts, tables of modulations) would stay float32, and with them all activations between the layers: results would
depend on whether there are several GPUs, and one GPU would move twice the bytes. Trained weights, gradients and
optimiser state stay float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

if TYPE_CHECKING:
    from typing import TypeGuard

BY_AUTOCAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Layers whose weights autocast converts when they are used."""


TABLES = {"LongcatFlashTopkRouter": "classifier", "Qwen2AudioEncoder": "embed_positions"}
"""By class name, modules that read the weight of a submodule without calling it, and the submodule's name."""

NUM_TOKENS = 4
"""Tokens by which routers are tried."""


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Makes layers use their float32 weights in another dtype, where autocast does not convert them.

    Only the ``forward`` of each such layer is replaced, on the instance, and outside of autocast it is as it was.
    Gradients reach the float32 weights.

    Args:
        module: before recomputation, compilation and data parallelism; changed in place.
        dtype: the dtype of autocast.
    """
    for layer in module.modules():
        weights = [weight for weight in layer._parameters.values() if weight is not None and weight.is_floating_point()]
        table = TABLES.get(type(layer).__name__)
        if table is None and (not weights or isinstance(layer, BY_AUTOCAST)):
            continue
        replaced = vars(layer).get("forward")
        if isinstance(replaced, MethodType) and replaced.__func__ is forward_router:
            continue  # it converts its weights itself
        # The compiler tells functions apart by their identity. This method is one function for all layers, so that
        # blocks of one kind share their graphs; an object for each layer would have each block compiled anew.
        vars(layer).update(
            converted_dtype=dtype,
            converted_table=table,
            unconverted_forward=type(layer).forward if replaced is None else _Replaced(replaced),
            forward=MethodType(forward_converted, layer),
        )


def keep_float32_routers(module: nn.Module, dtype: torch.dtype) -> None:
    """Lets routers of experts compute in float32 under autocast where transformers' model of this dtype does.

    DeepSeek-V3's, GLM-4.5's and many others convert tokens and weights to float32 before they multiply, since rounded
    scores choose other experts. Autocast would convert both back. In other routers nothing changes.

    Args:
        module: before tensor parallelism, recomputation and compilation; weights may be on meta. Changed in place: only
            the ``forward`` of such a router, on the instance.
        dtype: the dtype of autocast.
    """
    answers: dict[type[nn.Module], bool] = {}
    for layer in module.modules():
        matrix = _router_matrix(layer)
        if matrix is None:
            continue
        kind = type(layer)
        if kind not in answers:
            answers[kind] = _multiplies_in_float32(layer, matrix.shape, dtype)
        if answers[kind]:
            vars(layer).update(converted_dtype=dtype, forward=MethodType(forward_router, layer))


def _router_matrix(layer: nn.Module) -> torch.Tensor | None:
    """The matrix ``[experts, width]`` of a layer that may be a router; None of other layers."""
    table = TABLES.get(type(layer).__name__)
    if isinstance(layer, (*BY_AUTOCAST, nn.Embedding)) or any(name != table for name, _ in layer.named_children()):
        return None
    owner = layer if table is None else getattr(layer, table)
    weight = owner._parameters.get("weight")
    return weight if weight is not None and weight.ndim == 2 else None


def _multiplies_in_float32(layer: nn.Module, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether a layer with a matrix of this shape, run on tokens in ``dtype`` with weights in it, gives float32."""
    num_experts, width = shape
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(buffer.shape, generator=generator) for name, buffer in layer.named_buffers()}
    for name, weight in layer.named_parameters():
        tensors[name] = torch.randn(weight.shape, generator=generator).to(dtype)
    tokens = torch.randn(NUM_TOKENS, width, generator=generator).to(dtype)
    # some routers are given the bias that chooses experts by the layer around them
    for arguments in ((tokens,), (tokens, torch.zeros(num_experts))):
        try:
            with torch.no_grad():
                output = torch.func.functional_call(layer, tensors, arguments)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
            continue  # no router, or one that needs more than tokens
        scores = output[0] if isinstance(output, tuple) else output
        return isinstance(scores, torch.Tensor) and scores.dtype == torch.float32
    return False


def forward_router(layer: nn.Module, *args: object, **kwargs: object) -> object:
    """The forward of a router of ``keep_float32_routers``: without autocast, but tokens and weights in its dtype."""
    forward = type(layer).forward
    tokens, *others = args
    assert isinstance(tokens, torch.Tensor)
    device = tokens.device.type
    if not torch.is_autocast_enabled(device):
        return forward(layer, *args, **kwargs)
    dtype = cast("torch.dtype", layer.converted_dtype)
    table = TABLES.get(type(layer).__name__)
    owner = layer if table is None else cast("nn.Module", getattr(layer, table))
    with torch.autocast(device, enabled=False):
        return with_weights_in(owner, dtype, forward, layer, tokens.to(dtype), *others, **kwargs)


@dataclass
class _Replaced:
    """An instance's own ``forward`` with the signature of a class's."""

    forward: Callable[..., object]

    def __call__(self, _layer: nn.Module, *args: object, **kwargs: object) -> object:
        return self.forward(*args, **kwargs)


def is_converting(forward: object) -> bool:
    """Whether this attribute ``forward`` of a layer is what ``compute_in`` put there."""
    return isinstance(forward, MethodType) and forward.__func__ is forward_converted


def forward_converted(layer: nn.Module, *args: object, **kwargs: object) -> object:
    """The forward of a layer of ``compute_in``, which converts float32 weights for the time of the call."""
    forward = cast("Callable[..., object]", layer.unconverted_forward)
    if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
        return forward(layer, *args, **kwargs)
    dtype = cast("torch.dtype", layer.converted_dtype)
    if layer.converted_table is not None:
        table = cast("nn.Module", getattr(layer, cast("str", layer.converted_table)))
        return with_weights_in(table, dtype, forward, layer, *args, **kwargs)
    return call_converted(layer, dtype, forward, layer, *args, **kwargs)


def call_converted(
    layer: nn.Module, dtype: torch.dtype, forward: Callable[..., Any], *args: object, **kwargs: object
) -> object:
    """Calls a function while a layer's own float32 weights appear in another dtype."""
    if type(layer) is nn.Embedding:  # converts the rows that are looked up, which are fewer than the table's
        embedded = forward(*args, **kwargs)
        return embedded.to(dtype) if embedded.dtype == torch.float32 else embedded
    return with_weights_in(layer, dtype, forward, *args, **kwargs)


def with_weights_in(
    layer: nn.Module, dtype: torch.dtype, forward: Callable[..., object], *args: object, **kwargs: object
) -> object:
    """As ``call_converted``, without the exception for embeddings."""
    weights = {name: weight for name, weight in layer._parameters.items() if _is_single(weight)}
    # In the dictionary of parameters, since torch 2.11 compiles no other way of putting a tensor in a parameter's place
    # and taking it away again.
    for name, weight in weights.items():
        layer._parameters[name] = cast("nn.Parameter", weight.to(dtype))
    try:
        return forward(*args, **kwargs)
    finally:
        for name, weight in weights.items():
            layer._parameters[name] = weight


def _is_single(weight: nn.Parameter | None) -> TypeGuard[nn.Parameter]:
    """Whether this is a float32 weight."""
    return weight is not None and weight.dtype == torch.float32
