"""Losses by source: sums over micro-batches, wherever their tokens lie."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sfumato.parallel.layout import Layout
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.step_sums import SourceLosses


def rows() -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Two micro-batches of two sources, the last token of each outside the loss mask."""
    results = []
    for shift in (0.0, 10.0):
        losses = torch.tensor([[1.0, 2.0, 4.0, 0.0]]) + shift
        labels = torch.tensor([[5, 6, 7, IGNORED]])
        sources = torch.tensor([[0, 1, 1, 0]])
        results.append((losses, sources, labels != IGNORED))
    return results


def test_means_of_two_sources_are_over_their_tokens_in_all_micro_batches():
    sums = SourceLosses(["a", "b"])
    for losses, sources, loss_mask in rows():
        sums.add(losses, sources, loss_mask)
    result = sums.means(Mesh(Layout(), torch.device("cpu")))
    assert result == {"tokens/a": 2, "loss/a": (1 + 11) / 2, "tokens/b": 4, "loss/b": (2 + 4 + 12 + 14) / 4}


def test_a_loss_of_nan_outside_the_mask_does_not_count():
    sums = SourceLosses(["a", "b"])
    losses, sources, loss_mask = rows()[0]
    losses[0, -1] = torch.nan
    sums.add(losses, sources, loss_mask)
    assert sums.means(Mesh(Layout(), torch.device("cpu")))["loss/a"] == 1.0


def test_sums_stay_where_the_losses_are_and_nothing_is_read():
    """Fake tensors refuse operations on two devices, as CUDA does, and what would have to know values."""
    with FakeTensorMode():
        sums = SourceLosses(["a", "b"])
        for _ in range(2):
            sources = torch.zeros(1, 4, dtype=torch.int64, device="meta")
            sums.add(torch.zeros(1, 4, device="meta"), sources, sources != IGNORED)
        total = sums.total()
    assert total.device.type == "meta" and total.shape == (2, 2) and total.dtype == torch.float64
