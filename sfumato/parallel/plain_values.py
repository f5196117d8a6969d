"""Values that ranks exchange, as bytes: numbers, texts, arrays, and records of classes that are loaded.

Process groups know no secret, so that on a network with strangers a value may be somebody else's. What is read here is
a pickle in its form, but it can neither import a module nor call a function: of all that a pickle can name it gets
dataclasses, enumerations and the constructors of arrays.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import pickle
import sys
from pathlib import PosixPath
from typing import Any

import numpy as np
import torch

from sfumato.errors import ConfigError

NAMES = {
    ("builtins", name): getattr(__import__("builtins"), name)
    for name in ("set", "frozenset", "complex", "bytearray", "slice", "range")
}
"""What may be named besides records: containers of the language, and what arrays are made of again with."""


def to_bytes(value: Any) -> bytes:
    """A value in a form that ``from_bytes`` reads."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()


def from_bytes(data: bytes | memoryview) -> Any:
    """The value of ``to_bytes``.

    Raises:
        ConfigError: it holds something of another kind, which may do anything when it is made.
    """
    return _Unpickler(io.BytesIO(data)).load()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Arrays as bytes with a shape: what numpy and torch make of them again from trusts what it is told."""
        if isinstance(value, np.generic):
            return make_scalar, (value.tobytes(), value.dtype.str)
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return make_array, (value.tobytes(), value.dtype.str, value.shape)
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided:
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            is_parameter = isinstance(value, torch.nn.Parameter)
            return make_tensor, (content, value.dtype, tuple(value.shape), str(value.device), is_parameter)
        return NotImplemented


def make_scalar(content: bytes, dtype: str) -> Any:
    """A number of numpy."""
    return make_array(content, dtype, ())[()]


def make_array(content: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array. Raises ValueError when the bytes are not those of such a one."""
    kind = np.dtype(dtype)
    if kind.hasobject or not isinstance(content, bytes):
        raise ValueError("no array of numbers")
    if not content and 0 in shape:
        return np.empty(shape, kind)
    return np.frombuffer(content, kind).reshape(shape).copy()


def make_tensor(
    content: bytes, dtype: torch.dtype, shape: tuple[int, ...], device: str, is_parameter: bool
) -> torch.Tensor:
    """A tensor. Raises ValueError when the bytes are not those of such a one."""
    if not isinstance(dtype, torch.dtype) or not isinstance(content, bytes):
        raise ValueError("no tensor")
    if content:
        tensor = torch.frombuffer(bytearray(content), dtype=dtype).reshape(tuple(map(int, shape)))
    elif 0 in shape:
        tensor = torch.empty(tuple(map(int, shape)), dtype=dtype)
    else:
        raise ValueError("no tensor")
    tensor = tensor.to(device)
    return torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()) if is_parameter else tensor


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """A name of a loaded module that stands for a record, or for an array; nothing else."""
        if (module, name) in NAMES:
            return NAMES[module, name]
        named = sys.modules.get(module)
        for attribute in name.split("."):
            named = getattr(named, attribute, None)
        if _is_record(named):
            return named
        raise ConfigError(
            f"ranks were to exchange {module}.{name}, which is no plain value: numbers, texts, lists, mappings, arrays "
            "and dataclasses are; or a stranger has reached the network of the run"
        )


def _is_record(named: Any) -> bool:
    if isinstance(named, torch.dtype):
        return True
    if named in (collections.OrderedDict, collections.Counter, collections.deque, torch.Size, torch.device):
        return True
    if named in (make_scalar, make_array, make_tensor, PosixPath):
        return True
    is_class = isinstance(named, type)
    return is_class and (dataclasses.is_dataclass(named) or issubclass(named, enum.Enum) or issubclass(named, tuple))
