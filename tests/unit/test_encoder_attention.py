"""Attention of encoders' segments against torch's attention of each by itself."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from sfumato.config.load import load_config
from sfumato.config.text import TrainTextConfig
from sfumato.errors import ConfigError
from sfumato.models.language import encoder_attention
from sfumato.models.language.encoder_attention import SEGMENTS, reads_segments
from sfumato.models.language.hf_config import set_attention
from sfumato.models.language.load import build_language_model
from tests.tiny_vision import tiny_vision_config

LENGTHS = (3, 3, 1, 0, 5, 5, 5, 2)


def inputs(*, requires_grad: bool = True) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Queries, keys and values ``[1, 2, T, 4]``, and where segments begin."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, sum(LENGTHS), 4, generator=generator) for _ in range(3)]
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    return [tensor.requires_grad_(requires_grad) for tensor in tensors], bounds


@pytest.mark.parametrize("causal", [False, True])
def test_segments_are_those_of_torch_one_by_one(causal: bool) -> None:
    tensors, bounds = inputs()
    actual, _ = encoder_attention._encoder_attention(
        nn.Module(), *tensors, None, scaling=0.3, cu_seq_lens_q=bounds, max_length_q=5, is_causal=causal
    )
    parts = [
        functional.scaled_dot_product_attention(
            *(tensor[:, :, start:end] for tensor in tensors), is_causal=causal, scale=0.3
        )
        for start, end in pairwise(bounds.tolist())
    ]
    expected = torch.cat(parts, 2).transpose(1, 2)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.autograd.grad((result * weights).sum(), tensors) for result in (actual, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("setting", [{"dropout": 0.1}, {"softcap": 30.0}, {"sliding_window": 4}])
def test_what_would_change_scores_is_refused(setting: dict[str, float]) -> None:
    tensors, bounds = inputs()
    with pytest.raises(ConfigError, match=f"uses {next(iter(setting))}, unknown .* set model.attention to sdpa"):
        encoder_attention._encoder_attention(
            nn.Module(), *tensors, None, cu_seq_lens_q=bounds, max_length_q=5, **setting
        )


def test_a_gpu_computes_all_segments_in_one_call() -> None:
    """By the shapes that torch knows of its kernel, which runs on GPUs alone."""
    calls = []
    kernel = torch.ops.aten._flash_attention_forward

    def noted(*args: object, **kwargs: object) -> object:
        calls.append(args[3:])
        return kernel(*args, **kwargs)

    with mock.patch.object(encoder_attention, "choose_kernel", return_value="cuda_flash"):
        query, key, value = (torch.empty(1, 2, 24, 20, device="meta", dtype=torch.bfloat16) for _ in range(3))
        bounds = torch.empty(9, dtype=torch.int64, device="meta")
        with mock.patch.object(torch.ops.aten, "_flash_attention_forward", noted):
            result, _ = encoder_attention._encoder_attention(
                nn.Module(), query, key, value, None, cu_seq_lens_q=bounds, max_length_q=5
            )
    assert result.shape == (1, 24, 2, 20) and result.dtype == torch.bfloat16
    ((starts, _, longest, *_, causal, _),) = calls
    assert starts.dtype == torch.int32 and longest == 5 and causal is False


def test_encoders_take_it_beside_packed_rows_and_leave_it_again(tmp_path: Path) -> None:
    config = load_config(TrainTextConfig, overrides=tiny_vision_config(tmp_path))
    module = build_language_model(config.model, config.train, data_type=config.data.data_type).plain
    assert reads_segments(type(module)) and not reads_segments(None)
    assert module.config.vision_config._attn_implementation == SEGMENTS
    for attention in ("eager", "sdpa"):  # what transformers itself computes, with which packed rows are compared
        set_attention(module, attention)
        assert module.config.vision_config._attn_implementation == "sdpa"
    set_attention(module, config.model.attention if config.model.attention != "packed" else "sfumato_packed")
    assert module.config.vision_config._attn_implementation == SEGMENTS


@pytest.mark.slow
def test_a_compiled_encoder_block_takes_any_number_of_segments(tmp_path: Path) -> None:
    config = load_config(TrainTextConfig, overrides=tiny_vision_config(tmp_path))
    module = build_language_model(config.model, config.train, data_type=config.data.data_type).plain
    block = module.model.visual.blocks[0]
    width = module.config.vision_config.hidden_size
    head = width // module.config.vision_config.num_heads
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter)
    counts = []
    for segments in (2, 3, 5, 9, 4, 7):
        hidden = torch.randn(4 * segments, width)
        positions = (torch.ones(4 * segments, head), torch.zeros(4 * segments, head))
        bounds = torch.arange(0, 4 * segments + 1, 4, dtype=torch.int32)
        result = compiled(hidden, cu_seqlens=bounds, position_embeddings=positions, max_seqlen=4)
        expected = block(hidden, cu_seqlens=bounds, position_embeddings=positions, max_seqlen=4)
        torch.testing.assert_close(result, expected)
        counts.append(counter.frame_count)
    assert counts[1:] == [counts[1]] * 5, "the second size compiles once more for any; no later one does"
    torch._dynamo.reset()
