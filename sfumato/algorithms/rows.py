"""Containers of tensors with one row per sample, whose ``rows``, ``cat`` and ``to`` follow from their fields.

Each field says by its default how it is split; one without ``by_row`` or ``by_group`` is shared by all samples:

    @dataclass(frozen=True)
    class Trajectories(TensorRows):
        sigmas: Tensor                            # [T + 1]
        latents: Tensor = by_row()                # [B, W, ...]
        means: Tensor | None = by_row(None)       # [B, W, ...]

Used by conditionings (``models/diffusion``) and by the results of rollouts (``rollout``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from sfumato.algorithms.device import on_host, to_device

if TYPE_CHECKING:
    from torch import Tensor


def by_row(default: object = dataclasses.MISSING) -> Any:
    """A field with one row per sample: a tensor ``[B, ...]``, a mapping of such, a list, ``TensorRows`` or None."""
    return dataclasses.field(default=default, metadata={"axis": "row"})


def by_group() -> Any:
    """A field with one row per group of samples. ``rows`` leaves it as it is, ``cat`` joins those of all containers."""
    return dataclasses.field(metadata={"axis": "group"})


class TensorRows:
    """Base of dataclasses with fields by row."""

    if TYPE_CHECKING:  # subclasses are dataclasses
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def row_fields(self) -> list[str]:
        """Names of the fields with one row per sample."""
        return [name for name, axis in self._field_axes() if axis == "row"]

    def rows(self, index: Tensor | Sequence[int] | slice) -> Self:
        """The rows at ``index``, a slice, int64 ``[B']`` or bool ``[B]``; a number may repeat."""
        if not isinstance(index, torch.Tensor | slice):
            index = torch.tensor(index, dtype=torch.long)
        if isinstance(index, torch.Tensor) and index.dtype == torch.bool:
            index = on_host(index).nonzero()[:, 0]
        on_devices: dict[torch.device, torch.Tensor | slice] = {}  # the index is copied to each device once

        def index_on(device: torch.device) -> torch.Tensor | slice:
            if device not in on_devices:
                on_devices[device] = to_device(index, device) if isinstance(index, torch.Tensor) else index
            return on_devices[device]

        def take_rows(value: object) -> object:
            if isinstance(value, list):
                return [value[row] for row in torch.arange(len(value))[index_on(torch.device("cpu"))].tolist()]
            return _map_value(value, lambda tensor: tensor[index_on(tensor.device)], lambda inner: inner.rows(index))

        return self._replace(self.row_fields(), take_rows)

    def change(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Every tensor ``[B, ...]`` with one row per sample changed."""
        return self._replace(
            self.row_fields(), lambda value: _map_value(value, change, lambda inner: inner.change(change))
        )

    def to(self, device: torch.device | str) -> Self:
        """The same with all tensors on another device; fields that all samples share stay readable by ``on_host``."""

        def move(value: object, remember: bool) -> object:
            return _map_value(value, lambda tensor: to_device(tensor, device, remember), lambda inner: inner.to(device))

        axes = self._field_axes()  # only shared fields, such as a schedule, are remembered on the host: they are small
        return dataclasses.replace(self, **{name: move(getattr(self, name), axis == "shared") for name, axis in axes})

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Joins the rows of several containers, in order; fields that all samples share come from the first.

        Raises:
            ValueError: when a field has rows in some of the parts only, or a shared list or number differs.
        """
        first = parts[0]
        joined = {}
        for name, axis in first._field_axes():
            values = [getattr(part, name) for part in parts]
            present = [value for value in values if value is not None]
            if axis == "group" or name in first.row_fields():
                if axis != "group" and 0 < len(present) < len(values):
                    raise ValueError(f"{cls.__name__}.{name} is there in {len(present)} of {len(values)} parts only")
                joined[name] = _join_values(present) if present else None
            elif isinstance(values[0], list | int | str) and any(value != values[0] for value in values):
                raise ValueError(f"{cls.__name__}.{name} must be the same in all parts, not {values}")
        return dataclasses.replace(first, **joined)

    def _field_axes(self) -> list[tuple[str, str]]:
        """Names of all fields, and whether each is by row, by group or shared."""
        return [(field.name, field.metadata.get("axis", "shared")) for field in dataclasses.fields(self)]

    def _replace(self, names: Sequence[str], change: Callable[[object], object]) -> Self:
        return dataclasses.replace(self, **{name: change(getattr(self, name)) for name in names})


def _map_value(value: object, tensors: Callable[[Tensor], Tensor], inner: Callable[[TensorRows], TensorRows]) -> object:
    """Applies ``tensors`` to the tensors in a field's value and ``inner`` to its containers; other values stay."""
    if isinstance(value, torch.Tensor):
        return tensors(value)
    if isinstance(value, dict):
        return {name: _map_value(entry, tensors, inner) for name, entry in value.items()}
    return inner(value) if isinstance(value, TensorRows) else value


def _join_values(values: list[Any]) -> Any:
    """Joins the values that one field has in several containers."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(values)
    if isinstance(first, TensorRows):
        return type(first).cat(values)
    if isinstance(first, dict):
        return {name: _join_values([value[name] for value in values]) for name in first}
    return [row for value in values for row in value] if isinstance(first, list) else first
