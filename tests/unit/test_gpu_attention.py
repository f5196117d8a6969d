"""Attention for GPUs, as far as a CPU can show it: what its kernels are given, and the blocks of capped scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from sfumato.models.language import capped_attention, packed_attention
from sfumato.models.language.packed_attention import register_packed_attention
from sfumato.rollout.engines.embedded import token_sampling
from sfumato.rollout.engines.embedded.token_sampling import running_sums

LENGTH, WINDOW = 21, 6


def inputs_of(width: int, positions: Tensor, value_width: int | None = None) -> tuple[list[Tensor], dict[str, Any]]:
    """Query of four heads, key and value of two, and what the attention is called with."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, width), (2, width), (2, value_width or width))
    tensors = [torch.randn(2, heads, LENGTH, size, generator=generator) for heads, size in shapes]
    return [tensor.requires_grad_() for tensor in tensors], {"position_ids": positions}


def attend(tensors: list[Tensor], mask: Any, **settings: Any) -> list[Tensor]:
    """Output, and gradients of its weighted sum."""
    attention = AttentionInterface()[register_packed_attention()]
    more = [setting for setting in settings.values() if isinstance(setting, Tensor) and setting.requires_grad]
    output = attention(nn.Module(), *tensors, mask, **settings)[0]
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), [*tensors, *more])]


def window() -> Any:
    """What a layer with a sliding window is given in the place of a mask."""
    sees: Callable[..., Tensor] = lambda row, head, query, key: (key <= query) & (key > query - WINDOW)  # noqa: E731
    make = AttentionMaskInterface()[register_packed_attention()]
    return make(q_length=LENGTH, mask_function=sees, local_size=WINDOW)


PACKED = torch.cat([torch.arange(13), torch.arange(8)])[None].repeat(2, 1)
WHOLE = torch.arange(LENGTH)[None]
"""Documents of 13 and 8 tokens, and rows of one document."""


@pytest.mark.parametrize("positions", [PACKED, WHOLE], ids=["packed", "whole"])
def test_windows_are_an_argument_of_the_flash_kernel(monkeypatch, positions):
    """Rows of one document, too, are given to it, in the layout and with the window that it takes."""
    tensors, settings = inputs_of(12, positions, value_width=6)
    expected = attend(tensors, window(), **settings)
    seen: list[tuple[Any, ...]] = []

    def flash(query, key, value, starts, _starts, longest, _longest, _drop, causal, _debug, *, scale, **options):
        assert query.shape[-1] == key.shape[-1] == value.shape[-1] == 16 and causal
        seen.append((None if starts is None else starts.tolist(), longest, options))
        places = torch.arange(LENGTH)
        mask = (places <= places[:, None]) & (places > places[:, None] - options["window_size_left"] - 1)
        if starts is not None:
            query, key, value = (tensor.unflatten(0, (2, LENGTH)) for tensor in (query, key, value))
            document = torch.bucketize(places, starts[1:3], right=True)
            mask &= document == document[:, None]
        rows = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        output = functional.scaled_dot_product_attention(*rows, mask, scale=scale, enable_gqa=True).transpose(1, 2)
        return (output.flatten(0, 1) if starts is not None else output,)

    monkeypatch.setattr(packed_attention, "_has_flash", lambda *_: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    for actual, right in zip(attend(tensors, window(), **settings), expected, strict=True):
        torch.testing.assert_close(actual, right)
    sizes = {"window_size_left": WINDOW - 1, "window_size_right": 0}
    starts, longest = (None, LENGTH) if positions is WHOLE else ([0, 13, 21, 34, 42], 13)
    assert seen == [(starts, longest, sizes)]


def test_widths_are_those_that_kernels_of_gpus_take(monkeypatch):
    """With a sink heads of 64 have 65 features: torch would keep whole matrices of scores."""
    tensors, settings = inputs_of(64, PACKED)
    settings["s_aux"] = torch.randn(4, requires_grad=True)
    expected = attend(tensors, window(), **settings)
    plain, widths = functional.scaled_dot_product_attention, []

    def watched(*tensors: Tensor, **options: Any) -> Tensor:
        widths.append({tensor.shape[-1] for tensor in tensors[:3]})
        return plain(*tensors, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(packed_attention, "WIDTHS", {"cpu": 8})
    for actual, right in zip(attend(tensors, window(), **settings), expected, strict=True):
        torch.testing.assert_close(actual, right)
    assert widths and all(sizes == {72} for sizes in widths)


@pytest.mark.parametrize("positions", [PACKED, WHOLE], ids=["packed", "whole"])
@pytest.mark.parametrize(("mask", "has_sinks"), [(lambda: None, False), (window, True)], ids=["causal", "window"])
def test_capped_scores_in_blocks_are_those_at_once(monkeypatch, positions, mask, has_sinks):
    tensors, settings = inputs_of(8, positions)
    settings |= {"softcap": 2.0, "s_aux": torch.randn(4, requires_grad=True) if has_sinks else None}
    expected = attend(tensors, mask(), **settings)
    largest: list[int] = []
    block = capped_attention._attend_block

    def watched(query: Tensor, key: Tensor, *others: Any) -> Tensor:
        largest.append(query.shape[2])
        return block(query, key, *others)

    monkeypatch.setattr(capped_attention, "QUERIES_AT_ONCE", 5)
    monkeypatch.setattr(capped_attention, "_attend_block", watched)
    for actual, right in zip(attend(tensors, mask(), **settings), expected, strict=True):
        torch.testing.assert_close(actual, right)
    assert max(largest) == 5


def test_capped_scores_of_a_long_document_are_not_kept():
    """Of 2,048 tokens and one head they would be 16 MiB, and several such matrices."""
    query, key, value = (torch.randn(1, 1, 2048, 8, requires_grad=True) for _ in range(3))
    saved_bytes: list[int] = []

    def causal(queries: range) -> Tensor:
        return torch.ones(len(queries), queries.stop, dtype=torch.bool).tril(queries.start)[None, None]

    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved_bytes.append(tensor.nbytes) or tensor, lambda x: x
    ):
        capped_attention.attend_capped(query, key, value, causal, None, 1.0, 2.0)
    assert sum(saved_bytes) == 3 * query.nbytes


def test_sums_in_one_order_draw_what_sums_in_any_draw(monkeypatch):
    probabilities = torch.rand(3, 5000, dtype=torch.float64)
    usual = running_sums(probabilities)
    assert torch.equal(usual, probabilities.cumsum(-1))
    monkeypatch.setattr(token_sampling, "_must_keep_order", lambda _: True)
    summed: list[torch.dtype] = []
    cumsum = Tensor.cumsum
    monkeypatch.setattr(Tensor, "cumsum", lambda self, dim: summed.append(self.dtype) or cumsum(self, dim))
    in_order = running_sums(probabilities)
    assert summed == [torch.int64], "CUDA refuses floating-point numbers under train.deterministic"
    torch.testing.assert_close(in_order, usual, rtol=1e-12, atol=1e-12)
    assert (in_order.diff() >= 0).all()
