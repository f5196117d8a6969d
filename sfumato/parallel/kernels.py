"""Attention of one block with its log-sum-exp, forward and backward, by torch's CPU or CUDA kernels or plain matmuls.

The kernels are called by their aten names, since torch's public function does not return the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.config.open_mappings import Keywords
from sfumato.errors import ConfigError

CHANGES_SCORES = ("softcap", "s_aux", "position_bias")
"""Arguments of transformers' attention functions that change the scores unless they are None."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, kernel: str | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of [B, H, S, D] over [B, Hk, Sk, D] and [B, Hk, Sk, Dv] within one process; Hk divides H.

    Args:
        scale: of the scores.
        causal: token i sees tokens 0 to i; S = Sk then.
        kernel: see ``choose_kernel``; None takes the best.

    Returns:
        [B, H, S, Dv] in the dtype of the query, and the log-sum-exp of the scores, [B, H, S], float32 or wider.
    """
    kernel = kernel or choose_kernel(query, value)
    aten = torch.ops.aten
    inputs = _for_kernel(query, key, value, kernel)
    match kernel:
        case "cpu_flash":
            result: Sequence[Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(
                *inputs, 0.0, causal, scale=scale
            )
        case "cuda_flash":
            result = aten._scaled_dot_product_flash_attention(*inputs, 0.0, causal, scale=scale)
        case "cuda_efficient":
            result = aten._scaled_dot_product_efficient_attention(*inputs, None, True, 0.0, causal, scale=scale)
        case "math":
            with torch.autocast(query.device.type, enabled=False):
                wide = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in inputs]
                scores = _attention_scores(wide[0], wide[1], scale, causal)
                result = (scores.softmax(-1) @ wide[2]).to(query.dtype), scores.logsumexp(-1)
    return result[0][..., : value.shape[-1]], result[1][..., : query.shape[2]]  # some kernels pad the log-sum-exp


def attend_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor],
    scale: float,
    causal: bool,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value (``inputs``) from one tile of an attention.

    ``grad``, the gradient of the output, and ``result``, output and log-sum-exp as of ``attend``, are those of the
    whole attention, joined over all tiles: with the joined log-sum-exp each tile gives its share of the gradients.
    """
    kernel = kernel or choose_kernel(inputs[0], inputs[2])
    aten = torch.ops.aten
    padded = _for_kernel(*inputs, kernel)
    lse = result[1]
    grad, out = (functional.pad(tensor, (0, padded[2].shape[-1] - tensor.shape[-1])) for tensor in (grad, result[0]))
    match kernel:
        case "cpu_flash":
            operation = aten._scaled_dot_product_flash_attention_for_cpu_backward
            gradients = operation(grad, *padded, out, lse, 0.0, causal, scale=scale)
        case "cuda_flash":
            sizes = (None, None, padded[0].shape[2], padded[1].shape[2])
            # The kernel's signature asks for the random state of dropout, which is not used here.
            state = torch.zeros(2, dtype=torch.uint64, device=grad.device)
            trailing = (*sizes, 0.0, causal, state, state[0])
            operation = aten._scaled_dot_product_flash_attention_backward
            gradients = operation(grad, *padded, out, lse.contiguous(), *trailing, scale=scale)
        case "cuda_efficient":
            lse = functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)  # the kernel takes 32 rows at a time
            state = torch.zeros((), dtype=torch.int64, device=grad.device)
            trailing = (state, state, 0.0, [True, True, True, False], causal)
            operation = aten._scaled_dot_product_efficient_attention_backward
            gradients = operation(grad, *padded, None, out, lse, *trailing, scale=scale)
        case "math":
            with torch.autocast(grad.device.type, enabled=False):
                grad, out, query, key, value = (tensor.to(lse.dtype) for tensor in (grad, out, *padded))
                weights = torch.exp(_attention_scores(query, key, scale, causal) - lse[..., None])
                slope = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True)) * scale
                gradients = slope @ key, slope.mT @ query, weights.mT @ grad
    # Cuts off padded features and sums over repeated heads. Some kernels return more than these three gradients.
    return cast(
        "tuple[Tensor, Tensor, Tensor]",
        tuple(
            gradient[..., : like.shape[-1]].unflatten(1, (like.shape[1], -1)).sum(2, dtype=lse.dtype)
            for gradient, like in zip(gradients, inputs, strict=False)
        ),
    )


def attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None,
    longest: int,
    scale: float,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Attention within the segments of a row, in one call of torch's CUDA flash kernel: half precision, widths to 256.

    Args:
        query: ``[T, H, D]``; without ``starts`` ``[B, T, H, D]``.
        key, value: ``[T, Hk, D]`` and ``[T, Hk, Dv]``, with B as the query; Hk divides H.
        starts: int32 ``[segments + 1]``: where segments begin, and T; None where each of B rows is a segment.
        longest: tokens of the longest.
        scale: of the scores.
        causal: a token sees its segment up to itself.
        window: of so many tokens, itself included, it sees the last; None is all.

    Returns:
        ``[T, H, Dv]``, with B as the query.
    """
    width = max(query.shape[-1], value.shape[-1])
    inputs = [pad_width(tensor, width + -width % 8) for tensor in (query, key, value)]
    edges = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    out = torch.ops.aten._flash_attention_forward(
        *inputs, starts, starts, longest, longest, 0.0, causal, False, scale=scale, **edges
    )
    return out[0][..., : value.shape[-1]]


def pad_width(tensor: Tensor, width: int) -> Tensor:
    """Fills the last dimension with zeros up to a width. A tensor of that width is returned as it is: padding it by
    nothing would copy."""
    return tensor if tensor.shape[-1] == width else functional.pad(tensor, (0, width - tensor.shape[-1]))


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Query, key and value in the dtype of autocast, as torch's own attention takes them, where autocast is on."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


def choose_kernel(query: Tensor, value: Tensor) -> str:
    """The best kernel for device, dtype and width: cpu_flash, cuda_flash, cuda_efficient or math.

    math keeps whole score matrices and computes in float32; it runs everywhere, and tests compare the others with it.
    """
    if query.device.type == "cpu":
        return "cpu_flash"
    if query.device.type == "cuda" and torch.version.hip is None:
        half = query.dtype in (torch.bfloat16, torch.float16)
        if half and max(query.shape[-1], value.shape[-1]) <= 256 and torch.cuda.get_device_capability() >= (8, 0):
            return "cuda_flash"
        if query.dtype != torch.float64:
            return "cuda_efficient"
    return "math"


def _for_kernel(query: Tensor, key: Tensor, value: Tensor, kernel: str) -> tuple[Tensor, Tensor, Tensor]:
    """Pads features to one width with zeros, which change no score, and repeats key heads where the kernel needs it."""
    width = max(query.shape[-1], value.shape[-1])
    width += -width % 8 if kernel.startswith("cuda") else 0
    query, key, value = (functional.pad(tensor, (0, width - tensor.shape[-1])) for tensor in (query, key, value))
    repeat = 1 if kernel == "cuda_flash" else query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = (tensor.repeat_interleave(repeat, dim=1) for tensor in (key, value))
    return query, key, value


def _attention_scores(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    scores = query @ key.mT * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -torch.inf) if causal else scores


_in_packed_attention = ContextVar("in_packed_attention", default=False)


def in_packed_attention() -> bool:
    """Whether a function of ``packed_causal`` is running, which is never compiled."""
    return _in_packed_attention.get()


def packed_causal(
    attend: Callable[..., Tensor], known_by: str, remedy: str, knows: Sequence[str] | None = None
) -> Callable[..., tuple[Tensor, None]]:
    """An attention function for transformers' registry, of causal attention of packed documents only.

    Args:
        attend: computes ``[B, S, H, Dv]`` from the attention module, query ``[B, H, S, D]``, key ``[B, Hk, S, D]``,
            value ``[B, Hk, S, Dv]``, position ids ``[B, S]`` and the scale of the scores.
        known_by: the name of ``attend`` in the message about an unsupported argument.
        remedy: what a user should do then, for the message.
        knows: names of settings that ``attend`` supports and gets by name, together with ``pattern``: what the model's
            mask function returned, where that is no tensor (a window), else None. None: it gets the six arguments.

    Returns:
        The function, which raises ConfigError for arguments that change the scores and are not supported.
    """

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        position_ids: Tensor | None = None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        name = type(module).__name__
        extra: Keywords = {}
        if knows is not None:
            extra = {"pattern": None if isinstance(attention_mask, Tensor) else attention_mask}
            extra |= {setting: settings.pop(setting, None) for setting in knows}
            if extra["pattern"] is not None:  # it stands for mask and window, which are then supported
                attention_mask = None
                settings = {**settings, "sliding_window": None}
        unsupported = [argument for argument in CHANGES_SCORES if settings.get(argument) is not None]
        unsupported += ["dropout"] * (dropout > 0) + ["attention_mask"] * (attention_mask is not None)
        unsupported += ["is_causal=False"] * (
            settings.get("is_causal") is False or not getattr(module, "is_causal", True)
        )
        unsupported += ["a cache of keys and values"] * (key.shape[2] != query.shape[2])
        window = settings.get("sliding_window")
        # A window of at least the row's length changes nothing.
        is_wide = knows is not None and window is not None and window >= query.shape[2]
        unsupported += ["sliding_window"] * (window is not None and not is_wide)
        if unsupported:
            raise ConfigError(f"{name} uses {', '.join(unsupported)}, unknown to {known_by}: {remedy}")
        if position_ids is None or position_ids.ndim != 2:
            raise ConfigError(f"{name} does not hand position_ids [B, S] to its attention: {remedy}")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        before = _in_packed_attention.set(True)
        try:
            return attend(module, query, key, value, position_ids, scale, **extra), None
        finally:
            _in_packed_attention.reset(before)

    disabled = cast("Any", torch.compiler.disable(attention))
    disabled.knows = tuple(knows or ())  # ``RowAttention.of`` reads it
    return disabled
