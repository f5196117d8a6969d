"""Copies to a device that the host does not wait for, and what of them it need not ask the device for.

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
def _host() -> WeakIdKeyDictionary:
    """Tensors in host memory, by those that were made of them. A configuration is read without loading torch."""
    return torch.utils.weak.WeakIdKeyDictionary()


def to_device(tensor: Tensor, device: torch.device | str, remember: bool = False) -> Tensor:
    """A tensor on another device, without waiting for that.

    Args:
        tensor: of any shape and dtype. From host memory it goes to a GPU through pinned memory.
        device: where to. What goes to host memory is waited for.
        remember: ``on_host`` of the result gives this tensor, which must not be changed.

    Returns:
        The tensor there, or itself where it is there already.
    """
    device = torch.device(device)
    source = tensor
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    copied = tensor.to(device, non_blocking=tensor.device.type == "cpu")
    if remember and copied is not source and source.device.type == "cpu":
        _host()[copied] = source
    return copied


def on_host(tensor: Tensor) -> Tensor:
    """The same values in host memory: what ``to_device`` remembers, else read from the device, which is waited for."""
    remembered = _host().get(tensor)
    return tensor.cpu() if remembered is None else remembered
