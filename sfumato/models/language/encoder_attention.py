"""Attention of encoders that read several images, videos or sounds as one row, each by itself or in windows.

transformers' encoders hand the bounds of these segments to flash attention alone; for any other attention they cut the
row in a loop in each layer, for which the host waits for the device, and which the compiler compiles anew for each
number of segments. Here one call of torch's flash kernel computes all segments on CUDA in half precision; elsewhere
segments of equal length that follow each other are computed as a batch.
"""

from __future__ import annotations

import inspect
import sys
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.errors import ConfigError
from sfumato.parallel.kernels import CHANGES_SCORES, attend_segments, choose_kernel

SEGMENTS = "sfumato_flash_segments"
"""Name in transformers' registries. Encoders ask whether a name contains "flash"."""


def reads_segments(cls: type | None) -> bool:
    """Whether the file of a model's class has an attention that takes bounds of segments, which encoders alone do."""
    module = sys.modules.get(cls.__module__) if cls is not None else None
    if module is None or not hasattr(module, "is_flash_attention_requested"):
        return False
    layers = (value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, nn.Module))
    return any("cu_seqlens" in inspect.signature(layer.forward).parameters for layer in layers)


def register_segment_attention() -> str:
    """Makes the attention known to transformers. Returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(SEGMENTS, torch.compiler.disable(_encoder_attention))
    AttentionMaskInterface.register(SEGMENTS, AttentionMaskInterface()["sdpa"])  # of layers without segments
    return SEGMENTS


def _encoder_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    """As transformers calls it: queries, keys and values ``[1, H, T, D]``; returns ``[1, T, H, D]``.

    Args:
        cu_seq_lens_q: integers ``[segments + 1]``: where segments begin, and T; None of a layer without segments.
        max_length_q: the length of the longest.

    Raises:
        ConfigError: for what would change scores within segments and is not computed here.
    """
    if cu_seq_lens_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **settings)
    causal = settings.get("is_causal")
    causal = bool(getattr(module, "is_causal", False) if causal is None else causal)
    unsupported = [name for name in (*CHANGES_SCORES, "sliding_window") if settings.get(name) is not None]
    unsupported += ["dropout"] * (dropout > 0) + ["attention_mask"] * (attention_mask is not None)
    if unsupported:
        raise ConfigError(
            f"{type(module).__name__} uses {', '.join(unsupported)}, unknown to the attention of encoders' segments: "
            "set model.attention to sdpa"
        )
    if choose_kernel(query, value) == "cuda_flash":
        assert max_length_q is not None
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return attend_segments(queries, keys, values, cu_seq_lens_q.int(), max_length_q, scale, causal)[None], None
    lengths = [end - start for start, end in pairwise(cu_seq_lens_q.tolist())]
    outputs = []
    start = 0
    for length, group in groupby(length for length in lengths if length):
        end = start + length * len(list(group))
        # [1, H, n L, D] to [n, H, L, D]
        queries, keys, values = (
            tensor[0, :, start:end].unflatten(1, (-1, length)).transpose(0, 1) for tensor in (query, key, value)
        )
        output = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=causal, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        start = end
    return torch.cat(outputs)[None], None
