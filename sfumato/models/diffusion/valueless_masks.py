"""Networks that need values, in counts of memory and operations, where tensors have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values: not on meta, and not a fake one."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


class SelectEverything(TorchFunctionMode):
    """Inside, ``x[mask]`` is all of ``x`` and ``x[~mask]`` nothing of it, and every condition holds."""

    def __init__(self) -> None:
        super().__init__()
        self._inverted: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.Tensor.__bool__:
            return True
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            if isinstance(index, Tensor) and index.dtype == torch.bool:
                return tensor[:0] if any(index is mask for mask in self._inverted) else tensor
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.__invert__:
            self._inverted.append(result)
        return result


class ShareRowsEvenly(TorchFunctionMode):
    """Inside, ``x[rows_of == i]`` is the i-th of equal parts of ``x``, as if each of several experts had as many rows.

    Args:
        num_parts: number of experts.
    """

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self._num_parts = num_parts
        self._masks: list[tuple[Tensor, int]] = []
        """Masks with the number of the part that they choose."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            tensor, index, *values = args
            args = (tensor, self._rows_of(index, len(tensor)), *values)
        result = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.__eq__, torch.Tensor.eq) and isinstance(args[1], int):
            self._masks.append((result, args[1]))
        return result

    def _rows_of(self, index: object, num_rows: int) -> object:
        """The rows that a mask of ``_masks`` chooses, as a slice; any other index as it is."""
        for mask, part in self._masks:
            if index is mask:
                return slice(part * num_rows // self._num_parts, (part + 1) * num_rows // self._num_parts)
        return index


def compute_positions_off_meta(denoiser: nn.Module, name: str) -> None:
    """Computes positions on the CPU where the denoiser is on meta, for operations to be counted: they switch autocast
    off, which torch cannot do on meta.

    Args:
        denoiser: its weights may be anywhere.
        name: of the part that computes positions from its first argument: a tensor, or several.
    """
    if not next(denoiser.parameters()).is_meta:
        return

    def to_cpu(module: nn.Module, args: tuple[Tensor, ...]) -> Tensor | None:
        return torch.zeros(args[0].shape) if args[0].is_meta else None

    def from_cpu(
        module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]
    ) -> Tensor | tuple[Tensor, ...]:
        device = next(denoiser.parameters()).device
        return output.to(device) if isinstance(output, Tensor) else tuple(part.to(device) for part in output)

    positions = denoiser.get_submodule(name)
    positions.register_forward_pre_hook(to_cpu)
    positions.register_forward_hook(from_cpu)


def masks_without_values(mask: Tensor) -> AbstractContextManager[object]:
    """``SelectEverything`` for a mask without values; nothing otherwise."""
    return nullcontext() if has_values(mask) else SelectEverything()
