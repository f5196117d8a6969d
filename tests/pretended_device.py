"""A device that is not there, to count on a CPU what a GPU would be waited for.

Inside ``pretend_device`` tensors live in CPU memory as always, but it is known of each whether it would be on the
device: what is moved or made there is, and what is computed from it. The device is called ``cpu:0``, host memory
``cpu``.

Counted is what makes the host wait until a CUDA device has done all its work: numbers that are read (``item``,
``float``, ``bool``, ``tolist``, ``cpu``), copies to the device that are not ``non_blocking``, also of lists and of
indices, and shapes that depend on values (``nonzero``, a mask as an index). An operation on tensors of both sides,
which CUDA refuses, raises RuntimeError.

    with pretend_device() as device:
        ...
    device.waits    # where, in the order in which they happened
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")

READS = {"tolist", "numpy", "cpu", "__array__", "__repr__", "__format__", "__reduce_ex__", "__deepcopy__"}
SYNCHRONISES = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim", "_unique2"}
SYNCHRONISES |= {"unique_consecutive", "bincount", "histc"}
BESIDE = ("generate", "evaluate", "answer_prompts", "draw_grid", "save_samples", "after_step", "export_model")
"""Functions of a step that are counted apart."""

INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


@dataclass(frozen=True)
class Wait:
    """One synchronisation."""

    what: str
    """The operation."""
    where: tuple[str, ...]
    """File, line and function of the frames of this repository, the innermost first."""
    step: int
    """Lines of metrics that had been logged."""

    def is_in(self, function: str) -> bool:
        """Whether a function of that name was running."""
        return any(frame.endswith(f" {function}") for frame in self.where)

    def __str__(self) -> str:
        return f"{self.what} at {' < '.join(self.where[:3])}"


@dataclass
class PretendedDevice:
    """What happened."""

    waits: list[Wait] = field(default_factory=list)
    step: int = -1
    is_computing: bool = False
    """Whether an operation on tensors of the device is going on: what it makes on the way is there, too."""
    storages: dict[int, StorageWeakRef] = field(default_factory=dict)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor would be on the device."""
        key = _storage(tensor)
        reference = self.storages.get(key)
        if reference is not None and reference.expired():
            del self.storages[key]
            return False
        return reference is not None

    def take(self, tensor: Tensor) -> Tensor:
        """Notes that a tensor is on the device."""
        key = _storage(tensor)
        if key and not self.holds(tensor):
            self.storages[key] = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def leave(self, tensor: Tensor) -> Tensor:
        """Notes that a tensor is in host memory."""
        self.storages.pop(_storage(tensor), None)
        return tensor

    def wait(self, what: str) -> None:
        """Notes a synchronisation here."""
        frame, where = sys._getframe(1), []
        while frame is not None:
            path, name = frame.f_code.co_filename, frame.f_code.co_name
            for room in ("/sfumato/", "/tasks/"):
                if room in path and "site-packages" not in path:
                    where.append(f"{path.rpartition(room)[2]}:{frame.f_lineno} {name}")
            frame = frame.f_back
        self.waits.append(Wait(what, tuple(where), self.step))

    def in_step(self, step: int) -> list[Wait]:
        """Those between two lines of metrics: the step that has the number of the second, but for evaluation, samples
        and what is saved."""
        return [wait for wait in self.waits if wait.step == step - 1 and not any(map(wait.is_in, BESIDE))]


class _Functions(TorchFunctionMode):
    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = kwargs or {}, self.device
        name = getattr(func, "__name__", "")
        if name == "__get__" and getattr(func, "__self__", None) is torch.Tensor.device:
            result = func(*args, **kwargs)
            return DEVICE if result.type == "cpu" and device.holds(args[0]) else result
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if name in READS and tensor is not None and device.holds(tensor):
            device.wait(name)
            result = func(tensor.clone() if name in ("cpu", "numpy") else tensor, *args[1:], **kwargs)
            return device.leave(result) if isinstance(result, Tensor) else result
        before = device.is_computing
        device.is_computing = name != "backward" and any(map(device.holds, _tensors(args, kwargs)))
        try:
            result = func(*args, **kwargs)
        finally:
            device.is_computing = before
        if func is torch.Tensor.to or name in ("to", "type_as"):
            return self._moved(tensor, result, args, kwargs)
        asked = kwargs.get("device")
        if asked is not None and isinstance(result, Tensor) and torch.device(asked) == DEVICE:
            if name in ("tensor", "as_tensor", "asarray"):
                device.wait(name)
                result = result.clone() if name != "tensor" else result
            for leaf in tree_leaves(result):
                device.take(leaf)
        return result

    def _moved(self, tensor: Tensor, actual: Tensor, args: Any, kwargs: Any) -> Tensor:
        target = kwargs.get("device", next((arg for arg in args[1:] if isinstance(arg, torch.device | str)), None))
        like = next((arg for arg in args[1:] if isinstance(arg, Tensor)), None)
        if like is not None:
            target = DEVICE if self.device.holds(like) else HOST
        if target is None:
            return actual
        target, source = torch.device(target), DEVICE if self.device.holds(tensor) else HOST
        if target.type != "cpu" or tensor.device.type != "cpu":
            return actual
        if target == source:  # cpu:0 is another device than cpu for torch, which copies
            return tensor if actual.dtype == tensor.dtype and not kwargs.get("copy") else actual
        flags = [arg for arg in args[1:] if isinstance(arg, bool)]
        if not (kwargs.get("non_blocking") or flags[:1] == [True]) or target == HOST:
            self.device.wait(f"to {'host' if target == HOST else 'device'}")
        actual = actual.clone()
        if target == DEVICE:
            return self.device.take(actual)
        return self.device.leave(actual)


class _Operations(TorchDispatchMode):
    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = kwargs or {}, self.device
        tensors = _tensors(args, kwargs)
        mine = [tensor for tensor in tensors if device.holds(tensor)]
        if not mine:
            result = func(*args, **kwargs)
            if device.is_computing and not tensors:
                for tensor in _tensors(result):
                    device.take(tensor)
            return result
        name = func.name().removeprefix("aten::").partition(".")[0]
        others = [
            tensor for tensor in tensors if tensor.ndim > 0 and tensor.device.type == "cpu" and not device.holds(tensor)
        ]
        if name in SYNCHRONISES or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            device.wait(name)
        if name in INDEXES:
            index = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)]
            for tensor in index:
                if tensor.dtype in (torch.bool, torch.uint8) and device.holds(tensor):
                    device.wait(f"{name} by a mask")
                elif not device.holds(tensor) and tensor.ndim:
                    device.wait(f"{name} by indices of the host")
            others = [other for other in others if not any(other is one for one in index)]
        if name == "copy_":
            source, target = device.holds(args[1]), device.holds(args[0])
            if source != target:
                if not (len(args) > 2 and args[2]) or source:
                    device.wait("copy_")
                return func(*args, **kwargs)
        # autograd makes zeros in the place of gradients that there are not
        in_backward = torch._C._current_graph_task_id() != -1
        if others and not in_backward and name not in ("copy_", "_to_copy", "set_", "_foreach_copy_", "resize_"):
            raise RuntimeError(f"{name} on tensors of the device and of the host: {[other.shape for other in others]}")
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            device.take(tensor)
        return result


@contextmanager
def pretend_device() -> Iterator[PretendedDevice]:
    """Inside, the device of every mesh is one that counts; see this module. fsdp2 gathers weights there."""
    from torch.distributed.fsdp._fully_shard import _fully_shard as fsdp2

    from sfumato.parallel import mesh
    from sfumato.tracking.run import Run

    device, init, log = PretendedDevice(), mesh.Mesh.__init__, Run.log

    def init_on_device(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.device = DEVICE

    def log_and_count(self: Any, step: int, *args: Any, **kwargs: Any) -> None:
        log(self, step, *args, **kwargs)
        device.step = step

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(mesh.Mesh, "__init__", init_on_device))
        stack.enter_context(mock.patch.object(Run, "log", log_and_count))
        stack.enter_context(mock.patch.object(fsdp2, "_get_device_from_mesh", return_value=DEVICE))
        stack.enter_context(_Operations(device))
        stack.enter_context(_Functions(device))
        yield device


def _tensors(*nested: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    if tensor.layout != torch.strided or tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor):
        return 0
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # tensors without memory, such as those of functorch
        return 0
