"""Values on their way between processes: a pickle, and its large parts beside it.

Numpy arrays leave without a copy and arrive as read-only views of shared memory. Tensors arrive as copies of their
own, since torch does not know read-only memory and a write into it would end the process.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Packed = tuple[bytes, list[np.ndarray]]
"""The pickle and its buffers as uint8 arrays."""


def pack(value: Any, reference: Callable[[Any], int | None] | None = None) -> Packed:
    """Pickles a value: functions and classes of a script by value, tensors from whatever device they are on, without
    gradients.

    Args:
        value: anything that can be pickled.
        reference: numbers what is not to be pickled but to be put in by ``unpack``; None for all else.
    """
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    plain, referring = _picklers()
    pickler = (plain if reference is None else referring)(file, protocol=5, buffer_callback=buffers.append)
    if reference is not None:
        pickler.reference = reference
    pickler.dump(value)
    return file.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]


def unpack(packed: Packed, referred: Sequence[Packed] = ()) -> Any:
    """The value; ``referred`` holds, packed, what ``reference`` numbered."""
    data, buffers = packed
    unpickler = _Unpickler(io.BytesIO(data), buffers=buffers)
    unpickler.referred = referred
    return unpickler.load()


@functools.cache
def _picklers() -> tuple[Any, Any]:
    """Classes that pickle without and with references: asking about every item takes time.

    Made once: a class is only freed when Python looks for cycles, and one for each value would keep it until then.
    """
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        def reducer_override(self, item: Any) -> Any:
            torch = sys.modules.get("torch")
            if torch is not None and type(item) is torch.Tensor and item.layout == torch.strided:
                return _tensor_of, _parts_of(item)
            return super().reducer_override(item)

    class ReferringPickler(Pickler):
        def persistent_id(self, item: Any) -> int | None:
            return self.reference(item)

    return Pickler, ReferringPickler


class _Unpickler(pickle.Unpickler):
    referred: Sequence[Packed] = ()

    def persistent_load(self, number: int) -> Any:
        return unpack(self.referred[number])


def size_of(packed: Packed) -> int:
    """Bytes."""
    return len(packed[0]) + sum(buffer.nbytes for buffer in packed[1])


def _parts_of(tensor: Any) -> tuple[np.ndarray, str, tuple[int, ...]]:
    import torch

    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8), dtype, tuple(tensor.shape)


def _tensor_of(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    if data.size:
        tensor.view(-1).view(torch.uint8).numpy()[:] = data
    return tensor
