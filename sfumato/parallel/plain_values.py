"""Values that ranks exchange, as bytes: numbers, texts, arrays, and records whose classes are loaded already.

Process groups have no authentication, so on an untrusted network a value may come from an attacker. The format is
pickle, restricted when it is read: it can neither import a module nor call an arbitrary function. Of all that a pickle
can name only dataclasses, enumerations, tuples and the constructors of arrays are resolved.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import pickle
import sys
from pathlib import PosixPath
from typing import Any, cast

import numpy as np
import torch

from sfumato.errors import ConfigError

NAMES = {
    ("builtins", name): getattr(__import__("builtins"), name)
    for name in ("set", "frozenset", "complex", "bytearray", "slice", "range")
}
"""Names that are resolved besides those of records: builtin containers."""


def to_bytes(value: object) -> bytes:
    """A value in a form that ``from_bytes`` reads."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()


def from_bytes(data: bytes | memoryview) -> Any:
    """The value of ``to_bytes``.

    Raises:
        ConfigError: when it names another class or function, whose call could have any effect.
    """
    return _Unpickler(io.BytesIO(data)).load()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Writes arrays as bytes with dtype and shape, since numpy's and torch's own constructors trust their input."""
        if isinstance(value, np.generic):
            return make_scalar, (value.tobytes(), value.dtype.str)
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return make_array, (value.tobytes(), value.dtype.str, value.shape)
        if type(value) in (torch.Tensor, torch.nn.Parameter) and cast("torch.Tensor", value).layout == torch.strided:
            content = (
                cast("torch.Tensor", value).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
            is_parameter = isinstance(value, torch.nn.Parameter)
            return make_tensor, (content, value.dtype, tuple(value.shape), str(value.device), is_parameter)
        return NotImplemented


def make_scalar(content: bytes, dtype: str) -> np.generic:
    """A numpy scalar."""
    return cast("np.generic", make_array(content, dtype, ())[()])


def make_array(content: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array from its bytes. Raises ValueError when they do not fit dtype and shape, or the dtype holds objects."""
    kind = np.dtype(dtype)
    if kind.hasobject or not isinstance(content, bytes):
        raise ValueError("no array of numbers")
    if not content and 0 in shape:
        return np.empty(shape, kind)
    return np.frombuffer(content, kind).reshape(shape).copy()


def make_tensor(
    content: bytes, dtype: torch.dtype, shape: tuple[int, ...], device: str, is_parameter: bool
) -> torch.Tensor:
    """A tensor from its bytes. Raises ValueError when they do not fit dtype and shape."""
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
    def find_class(self, module: str, name: str) -> object:
        """Resolves the name of a record's class, or of an array's constructor, in a loaded module; no other name."""
        if (module, name) in NAMES:
            return NAMES[module, name]
        named = sys.modules.get(module)  # not an import, which would run code
        for attribute in name.split("."):
            named = getattr(named, attribute, None)
        if _is_record(named):
            return named
        raise ConfigError(
            f"ranks were to exchange {module}.{name}, which is no plain value: numbers, texts, lists, mappings, arrays "
            "and dataclasses are; or a stranger has reached the network of the run"
        )


def _is_record(named: object) -> bool:
    """Whether an unpickler may use this object of a module: constructing it only makes a plain value."""
    if isinstance(named, torch.dtype):
        return True
    if named in (collections.OrderedDict, collections.Counter, collections.deque, torch.Size, torch.device):
        return True
    if named in (make_scalar, make_array, make_tensor, PosixPath):
        return True
    is_class = isinstance(named, type)
    return is_class and (dataclasses.is_dataclass(named) or issubclass(named, enum.Enum) or issubclass(named, tuple))
