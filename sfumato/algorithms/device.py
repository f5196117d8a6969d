"""Copies to a device that the host does not wait for, and their host values, so that they need not be read back.

A plain ``tensor.to(device)`` lets the host wait until a GPU has done all its work so far; the GPU is then idle while
the host prepares the next piece.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.weak import WeakIdKeyDictionary


@functools.cache
def _host_copies() -> WeakIdKeyDictionary:
    """Host tensors by the device tensors that are copies of them, for as long as these live."""
    return torch.utils.weak.WeakIdKeyDictionary()  # pyright: ignore[reportAttributeAccessIssue]  # torch loads it


def to_device(tensor: Tensor, device: torch.device | str, remember: bool = False) -> Tensor:
    """A tensor on another device, without waiting for that.

    Args:
        tensor: of any shape and dtype. From host memory it goes to a GPU through pinned memory.
        device: the target. A copy to host memory is waited for.
        remember: ``on_host`` of the result gives this tensor, which must not be changed.

    Returns:
        The tensor on that device; the same object where it is there already.
    """
    device = torch.device(device)
    source = tensor
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    # Copies from a GPU are blocking: a caller may read host memory at once, before the copy would have arrived.
    copied = tensor.to(device, non_blocking=tensor.device.type == "cpu")
    if remember and copied is not source and source.device.type == "cpu":
        _host_copies()[copied] = source
    return copied


def on_host(tensor: Tensor) -> Tensor:
    """The same values in host memory: those that ``to_device`` remembers, else a blocking copy from the device."""
    remembered = _host_copies().get(tensor)
    return tensor.cpu() if remembered is None else remembered
