"""The most bytes that tensors hold at one time while something is computed, without memory if they are fake or on meta.

What allocators and kernels take besides (rounding, workspaces, copies in another layout) is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch._ops import OpOverload


class PeakBytes(TorchDispatchMode):
    """Inside, counts the storages that are made, each until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        """Bytes of storages that were made inside and live."""
        self.peak = 0
        """Most of them at one time."""
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        inputs = {storage._cdata for storage in _list_storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _list_storages(result):
            key = storage._cdata
            if key in self._seen or key in inputs:
                continue
            self._seen.add(key)
            self.live += storage.nbytes()
            weakref.finalize(storage, self._free, key, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _free(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.live -= num_bytes


def _list_storages(values: object) -> list[UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes of the tensors that ``run`` makes, those that it is given not counted."""
    with PeakBytes() as counted:
        run()
    return counted.peak
