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

ARRAYS = ("_reconstruct", "scalar", "_frombuffer")


def to_bytes(value: Any) -> bytes:
    """A value in a form that ``from_bytes`` reads."""
    return pickle.dumps(value, protocol=5)


def from_bytes(data: bytes | memoryview) -> Any:
    """The value of ``to_bytes``.

    Raises:
        ConfigError: it holds something of another kind, which may do anything when it is made.
    """
    return _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """A name of a loaded module that stands for a record, or for an array; nothing else."""
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        if (module, name) in NAMES:
            return NAMES[module, name]
        named = sys.modules.get(module)
        for part in name.split("."):
            named = getattr(named, part, None)
        if _is_record(named) or (module.startswith("numpy") and name in ARRAYS):
            return named
        raise ConfigError(
            f"ranks were to exchange {module}.{name}, which is no plain value: numbers, texts, lists, mappings, arrays "
            "and dataclasses are; or a stranger has reached the network of the run"
        )


def _is_record(named: Any) -> bool:
    if isinstance(named, torch.dtype):
        return True
    if named in (collections.OrderedDict, collections.Counter, collections.deque, torch.Size, np.ndarray, np.dtype):
        return True
    if named in (torch._utils._rebuild_tensor_v2, torch._utils._rebuild_parameter, torch.device, PosixPath):
        return True
    is_class = isinstance(named, type)
    return is_class and (
        dataclasses.is_dataclass(named) or issubclass(named, enum.Enum) or issubclass(named, tuple | np.generic)
    )


def _load_storage(data: bytes) -> Any:
    """The memory of a tensor."""
    return torch.load(io.BytesIO(data), weights_only=True)
