"""Containers whose ``rows``, ``cat`` and ``to`` follow from what their fields declare."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from sfumato.algorithms.rows import TensorRows, by_row
from sfumato.models.diffusion.conditioning import Conditioning


@dataclass(frozen=True)
class Inner(TensorRows):
    values: torch.Tensor = by_row()
    shared: torch.Tensor


@dataclass(frozen=True)
class Outer(TensorRows):
    schedule: torch.Tensor
    inner: Inner = by_row()
    named: dict[str, torch.Tensor] = by_row()
    labels: list[str] = by_row()
    extra: torch.Tensor | None = by_row(None)
    note: str = "same"


def outer(start=0, with_extra=False):
    rows = torch.arange(start, start + 3)
    inner = Inner(values=rows * 10, shared=torch.tensor([7, 8]))
    extra = rows.float() if with_extra else None
    return Outer(torch.tensor([1.0, 0.0]), inner, {"a": rows[:, None] * 100}, [f"row {row}" for row in rows], extra)


@pytest.mark.parametrize(
    "index", [[2, 0, 0], torch.tensor([2, 0, 0]), torch.tensor([True, False, True]), slice(1, None), []]
)
def test_rows_are_taken_of_declared_fields_alone(index):
    result = outer(with_extra=True).rows(index)
    places = torch.arange(3)[torch.tensor(index, dtype=torch.long) if isinstance(index, list) else index]
    assert result.inner.values.tolist() == (places * 10).tolist()
    assert result.named["a"].tolist() == (places[:, None] * 100).tolist()
    assert result.labels == [f"row {row}" for row in places.tolist()] and result.extra.tolist() == places.tolist()
    assert result.schedule.tolist() == [1.0, 0.0] and result.inner.shared.tolist() == [7, 8] and result.note == "same"


@pytest.mark.parametrize("with_extra", [False, True])
def test_cat_drops_no_field(with_extra):
    result = Outer.cat([outer(0, with_extra), outer(3, with_extra)])
    assert result.inner.values.tolist() == [0, 10, 20, 30, 40, 50] and len(result.labels) == 6
    assert result.named["a"].shape == (6, 1) and result.schedule.shape == (2,) and result.inner.shared.shape == (2,)
    assert (result.extra is None) if not with_extra else result.extra.tolist() == [0, 1, 2, 3, 4, 5]


def test_all_tensors_move_whether_shared_or_not():
    result = outer(with_extra=True).to("meta")
    tensors = (result.schedule, result.inner.values, result.inner.shared, result.named["a"], result.extra)
    assert all(tensor.is_meta for tensor in tensors) and result.labels == outer().labels


def test_a_negative_has_rows_where_it_belongs_to_samples():
    tensors = {"prompt": torch.arange(6.0).view(3, 2)}
    shared = Conditioning(tensors, {"prompt": torch.zeros(1, 2)})
    conditioning = Conditioning(tensors, {"prompt": -tensors["prompt"]}, own_negative=True)
    assert shared.rows([1]).negative["prompt"].shape == (1, 2) and conditioning.rows([2, 1]).negative[
        "prompt"
    ].shape == (2, 2)
    assert Conditioning.cat([shared, shared]).negative["prompt"].shape == (1, 2)
    assert torch.equal(
        Conditioning.cat([conditioning, conditioning]).negative["prompt"], torch.cat([-tensors["prompt"]] * 2)
    )
    doubled = conditioning.repeat_interleave(2)
    assert torch.equal(doubled.negative["prompt"], (-tensors["prompt"]).repeat_interleave(2, dim=0))
    assert dataclasses.is_dataclass(doubled) and len(doubled) == 6
