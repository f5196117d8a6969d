"""Attention of packed rows of 8,192 tokens by models of every kind: which kernels run, what is kept for the backward
pass, and whether the result is transformers'.

One layer of each family with its published heads and a narrow rest, in bf16; documents of unequal lengths, one of which
fills nearly the whole row.
"""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.gpu.cells import Bound, Cell, Setting, relative_error
from benchmarks.gpu.traces import KINDS
from sfumato.models.language import capped_attention
from sfumato.models.language.hf_config import set_attention
from sfumato.models.language.packed_attention import register_packed_attention

NARROW: dict[str, Any] = {"vocab_size": 256, "num_hidden_layers": 1, "intermediate_size": 256, "pad_token_id": 0}
# all experts of each token: in bf16 a router chooses another one for some tokens, whatever computes the attention
GPT_OSS: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 2, "head_dim": 64}
GEMMA: dict[str, Any] = {"head_dim": 256, "query_pre_attn_scalar": 256}
MLA: dict[str, Any] = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
MLA |= {"v_head_dim": 128, "first_k_dense_replace": 1, "n_routed_experts": 8}

LAYERS: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {
    "plain": ("qwen3", (32, 8), {"head_dim": 128}),
    "window": ("mistral", (32, 8), {"head_dim": 128, "sliding_window": 1024}),
    "width 256": ("gemma3_text", (16, 8), {**GEMMA, "layer_types": ["full_attention"]}),
    "width 256, window": (
        "gemma3_text",
        (16, 8),
        {**GEMMA, "layer_types": ["sliding_attention"], "sliding_window": 1024},
    ),
    "caps": ("gemma2", (16, 8), {**GEMMA, "layer_types": ["full_attention"], "attn_logit_softcapping": 50.0}),
    "sinks": ("gpt_oss", (64, 8), {**GPT_OSS, "layer_types": ["full_attention"]}),
    "sinks, window": ("gpt_oss", (64, 8), {**GPT_OSS, "layer_types": ["sliding_attention"], "sliding_window": 128}),
    "MLA": ("deepseek_v3", (32, 32), MLA),
}
"""transformers' name of the family, heads of queries and of keys, and what else its attention has."""

BOUNDS = (
    Bound(
        "growth",
        2.6,
        "score matrices are kept: a row of 32k tokens needs 16 times as much; set train.activation_checkpointing full, "
        "keep data.max_seq_len short, or take model.attention flash_attention_2 where the family has it",
    ),
    Bound("peak_gib", 4, "as growth", real=True),
    Bound("error", 0.03, "this kernel is not the family's attention: take model.attention sdpa or eager until mended"),
    Bound("of_plain", 4, "slower by a kernel for general masks: as growth", real=True),
)


def cells(setting: Setting) -> dict[str, Cell]:
    return {name: partial(measure, name=name) for name in LAYERS}


PLAIN_MS: dict[str, float] = {}
"""Milliseconds a head of the cell ``plain``, once it has been measured in this process."""


def measure(setting: Setting, name: str) -> dict[str, Any]:
    """Kernel, memory and error of one kind of attention."""
    family, heads, settings = LAYERS[name]
    module = make_layer(family, heads, settings, setting)
    longest = setting.size(8192, 256)
    values = {"error": error_beside_eager(module, setting)}
    at_once = setting.size(capped_attention.QUERIES_AT_ONCE, 32)  # scores of shorter documents are kept
    with mock.patch.object(capped_attention, "QUERIES_AT_ONCE", at_once):
        half, whole = (saved_bytes(module, make_positions(length, setting)) for length in (longest // 2, longest))
    positions = make_positions(longest, setting)
    if setting.on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(module, positions)
        values["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    kernels = kernels_of(module, positions, setting)
    milliseconds = setting.seconds(lambda: run(module, positions), setting.size(5, 1), setting.size(2, 0)) * 1e3
    if name == "plain":
        PLAIN_MS[name] = milliseconds / heads[0]
    elif PLAIN_MS:
        values["of_plain"] = milliseconds / heads[0] / PLAIN_MS["plain"]
    return values | {
        "growth": whole / half,
        "saved_gib": whole / 2**30,
        "ms": milliseconds,
        "kernel": next(iter(kernels)),
        "kernels": kernels,
    }


def make_layer(family: str, heads: tuple[int, int], settings: dict[str, Any], setting: Setting) -> nn.Module:
    """A decoder of one layer without an output layer, random weights in bf16."""
    from transformers import AutoConfig, AutoModel

    width = setting.size(1024, 64)
    if "sliding_window" in settings:
        settings = {**settings, "sliding_window": setting.size(settings["sliding_window"], 32)}
    counts = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    limits = {"max_position_embeddings": 16_384, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(family, **{**NARROW, "hidden_size": width, **counts, **limits, **settings})
    torch.manual_seed(0)
    with torch.device(setting.device):
        module = AutoModel.from_config(config, dtype=torch.bfloat16)
        for parameter in module.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.05)
    set_attention(module, register_packed_attention())
    return module


def make_positions(total: int, setting: Setting) -> Tensor:
    """Position ids ``[1, total]`` of three documents."""
    lengths = (total - total // 64 - 5, total // 64, 5)
    return torch.cat([torch.arange(length) for length in lengths])[None].to(setting.device)


def tokens_of(positions: Tensor) -> Tensor:
    tokens = torch.randint(1, 256, positions.shape, generator=torch.Generator().manual_seed(positions.shape[1]))
    return tokens.to(positions.device)


def run(module: nn.Module, positions: Tensor) -> Tensor:
    """Forward and backward pass; the hidden states ``[1, T, width]``."""
    hidden = module(input_ids=tokens_of(positions), position_ids=positions, use_cache=False).last_hidden_state
    hidden.float().square().mean().backward()
    module.zero_grad()
    return hidden.detach()


def saved_bytes(module: nn.Module, positions: Tensor) -> int:
    """Bytes that autograd keeps of one forward pass, each storage once, without weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is that of a later one

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = module(input_ids=tokens_of(positions), position_ids=positions, use_cache=False).last_hidden_state
    del hidden
    return sum(storage.nbytes() for storage in storages.values())


def error_beside_eager(module: nn.Module, setting: Setting) -> float:
    """Relative error of hidden states in packed rows, beside transformers' eager attention in float32 on the CPU, one
    document after the other."""
    positions = make_positions(setting.size(1536, 200), setting)
    with torch.no_grad():
        packed = module(input_ids=tokens_of(positions), position_ids=positions, use_cache=False).last_hidden_state
    reference = copy.deepcopy(module).cpu().float()
    set_attention(reference, "eager")
    starts = (positions[0].cpu() == 0).nonzero().flatten().tolist()
    ends = [*starts[1:], positions.shape[1]]
    tokens = tokens_of(positions).cpu()
    with torch.no_grad():
        alone = [
            reference(input_ids=tokens[:, start:end], use_cache=False).last_hidden_state
            for start, end in zip(starts, ends, strict=True)
        ]
    return relative_error(packed, torch.cat(alone, dim=1))


def kernels_of(module: nn.Module, positions: Tensor, setting: Setting) -> dict[str, float]:
    """The kernels (on a CPU operations) with most time, those of attention first, with their share of the time."""
    from torch.profiler import ProfilerActivity, profile

    run(module, positions)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_gpu else [])]
    with profile(activities=activities) as profiled:
        run(module, positions)
        setting.wait()
    key = "self_device_time_total" if setting.on_gpu else "self_cpu_time_total"
    times = {event.key[:90]: getattr(event, key) for event in profiled.key_averages()}
    whole = sum(times.values()) or 1.0

    def rank(name: str) -> tuple[bool, float]:
        return bool(re.search(KINDS["attention"], name, re.IGNORECASE)) and times[name] > 0, times[name]

    return {name: times[name] / whole for name in sorted(times, key=rank, reverse=True)[:6]}
