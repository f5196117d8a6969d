"""Pickling of values that travel between processes, with large buffers beside the pickle.

Numpy arrays leave without a copy and arrive as read-only views of shared memory. Tensors arrive as copies of their
own, since torch does not know read-only memory and a write into it would end the process.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Packed = tuple[bytes, list[np.ndarray]]
"""The pickle and its buffers as uint8 arrays."""


def pack(value: object, reference: Callable[[object], int | None] | None = None) -> Packed:
    """Pickles a value. Functions and classes of a script are pickled by value; tensors lose device and gradient.

    Args:
        value: anything that can be pickled.
        reference: returns a number for an item that is not pickled, but inserted by ``unpack``; None for all others.
    """
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    plain, referring = _pickler_classes()  # ``referring`` is slower, since it asks about every item
    pickler = (plain if reference is None else referring)(file, protocol=5, buffer_callback=buffers.append)
    if reference is not None:
        pickler.reference = reference
    pickler.dump(value)
    return file.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]


def unpack(packed: Packed, referred: Sequence[Packed] = ()) -> Any:
    """Unpickles a value; ``referred`` holds the packed items that ``reference`` has numbered."""
    data, buffers = packed
    unpickler = _Unpickler(io.BytesIO(data), buffers=buffers)
    unpickler.referred = referred
    return unpickler.load()


@functools.cache
def _pickler_classes() -> tuple[Any, Any]:
    """Pickler classes without and with references.

    They are made once: Python frees a class only when it looks for cycles, and a class made for each value would keep
    that alive until then.
    """
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        def reducer_override(self, item: Any) -> object:
            # Where nobody has imported torch there are no tensors, and importing it takes seconds.
            torch = sys.modules.get("torch")
            # Parameters and other subclasses are more than their values, and pickled as usual.
            if torch is not None and type(item) is torch.Tensor and item.layout == torch.strided:
                return _tensor_of, _parts_of(item)
            return super().reducer_override(item)

    class ReferringPickler(Pickler):
        def persistent_id(self, item: object) -> int | None:
            return self.reference(item)

    return Pickler, ReferringPickler


class _Unpickler(pickle.Unpickler):
    """Inserts referred items."""

    referred: Sequence[Packed] = ()

    def persistent_load(self, number: int) -> object:
        return unpack(self.referred[number])


def size_of(packed: Packed) -> int:
    """Bytes of the pickle and its buffers."""
    return len(packed[0]) + sum(buffer.nbytes for buffer in packed[1])


def _parts_of(tensor: torch.Tensor) -> tuple[np.ndarray, str, tuple[int, ...]]:
    """Bytes, dtype and shape of a tensor."""
    import torch

    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8), dtype, tuple(tensor.shape)


def _tensor_of(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of ``_parts_of``, with memory of its own."""
    import torch

    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    if data.size:
        tensor.view(-1).view(torch.uint8).numpy()[:] = data
    return tensor
