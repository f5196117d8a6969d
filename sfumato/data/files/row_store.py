"""Tensors of rows on disk, by keys of the data that they were computed from: appended, never changed, memory-mapped.

A row counts once its key is in the index, which is written after its tensors have reached the disk. A process that is
killed at any time therefore leaves whole rows, and perhaps bytes of an unfinished one, which the next writer cuts off.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from sfumato.config.file_checks import read_json_object
from sfumato.config.open_mappings import JsonObject
from sfumato.config.writing import open_to_append, write_atomically
from sfumato.data.files.stored import make_cache_folder
from sfumato.errors import DataError

SPECS, INDEX = "tensors.json", "index.bin"

KEY = np.dtype("V16")
DTYPES = {"bfloat16", "bool", "float16", "float32", "float64", "int16", "int32", "int64", "int8", "uint8"}
"""Names of torch's dtypes that rows may have; the file of specifications is not trusted to name others."""


LONGEST_NAME = 100
"""Most letters of a tensor's name, which is also the name of its file."""


class RowStore:
    """The rows of a folder that were there when it was opened; rows that are appended later are not seen."""

    def __init__(self, folder: Path, kind: str) -> None:
        """Maps the files of a folder, which need not exist.

        Args:
            folder: of the store.
            kind: what messages call the store, such as "latent cache".

        Raises:
            DataError: when a file is missing or shorter than its index says.
        """
        self.folder = folder
        self._kind = kind
        self.specs: dict[str, JsonObject] = {}
        self.keys: np.ndarray = np.zeros(0, KEY)
        """V16 ``[N]``."""
        self.tensors: dict[str, torch.Tensor] = {}
        """``[N, *shape]`` by name, mapped."""
        if (folder / INDEX).is_file():
            self.specs = self._read_specs()
            index = (folder / INDEX).read_bytes()
            self.keys = np.frombuffer(index[: len(index) // 16 * 16], KEY)  # a killed process may leave part of a key
            self.tensors = {name: self._map(name) for name in self.specs} if len(self.keys) else {}

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, with its key."""
        return 16 + sum(map(_num_bytes, self.specs.values()))

    @property
    def key_set(self) -> set[bytes]:
        """The keys of all rows."""
        return {*self.keys.tolist()}

    def positions(self, keys: list[bytes]) -> np.ndarray:
        """The positions of rows by their keys: int64 ``[n]``, -1 for a key that is missing."""
        places = {key: place for place, key in enumerate(self.keys.tolist())}  # not kept: it is larger than the index
        return np.array([places.get(key, -1) for key in keys], np.int64)

    def _read_specs(self) -> dict[str, JsonObject]:
        """Shape of a row and dtype by tensor. Raises DataError when the file is damaged, or made to do harm."""
        path = self.folder / SPECS
        try:
            specs = read_json_object(path)
            for name, spec in specs.items():
                if not name.isidentifier() or len(name) > LONGEST_NAME or spec["dtype"] not in DTYPES:
                    raise ValueError(f"{name:.50} of dtype {spec['dtype']!r:.50}")
                if not all(type(size) is int and 0 <= size < 2**31 for size in spec["shape"]):
                    raise ValueError(f"{name} of shape {spec['shape']!r:.50}")
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(f"damaged {self._kind}: {path}: {error!s:.200}; delete its folder") from error
        return specs

    def _map(self, name: str) -> torch.Tensor:
        """A tensor of all rows, mapped into memory. Raises DataError when its file is missing or too short."""
        path = self.folder / f"{name}.bin"
        spec = self.specs[name]
        expected = len(self.keys) * _num_bytes(spec)
        if not path.is_file() or path.stat().st_size < expected:
            raise DataError(f"damaged {self._kind}: {path} is missing or has not {expected} bytes; delete its folder")
        count = len(self.keys) * math.prod(spec["shape"])
        flat = torch.from_file(str(path), shared=False, size=count, dtype=getattr(torch, spec["dtype"]))
        return flat.reshape(len(self.keys), *spec["shape"])


class RowWriter:
    """Appends rows to a store. Only one process at a time may have a writer: hold a lock."""

    def __init__(self, store: RowStore) -> None:
        """Cuts off what a killed process left behind the last whole row.

        Args:
            store: must have been opened under the lock.
        """
        make_cache_folder(store.folder)
        self._store = store
        self._specs = dict(store.specs)
        self._count = len(store)
        for name, spec in [*self._specs.items(), ("index", {"shape": [16], "dtype": "uint8"})]:
            path = store.folder / f"{name}.bin"
            if path.is_file():
                _truncate(path, self._count * _num_bytes(spec))

    def append(self, keys: list[bytes], rows: Mapping[str, torch.Tensor]) -> None:
        """Adds rows. When it returns, they have reached the disk.

        Args:
            keys: 16 bytes for each of n rows.
            rows: ``[n, *shape]`` by name, always of the same shapes and dtypes.

        Raises:
            DataError: when there is no room; rows that were appended before stay.
        """
        if not keys:
            return
        folder = self._store.folder
        try:
            if not self._specs:
                self._specs = {name: _spec_of(tensor) for name, tensor in rows.items()}
                write_atomically(folder / SPECS, json.dumps(self._specs).encode())
            for name, tensor in rows.items():
                assert _spec_of(tensor) == self._specs[name], f"{name}: {_spec_of(tensor)} for {self._specs[name]}"
                content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                _append(folder / f"{name}.bin", content)
            _append(folder / INDEX, b"".join(keys))
        except OSError as error:
            raise DataError(
                f"data.cache_dir: {folder}: {error.strerror}: what was finished stays, and is gone on with in the next "
                "run: make room, or give another data.cache_dir"
            ) from error


def _spec_of(tensor: torch.Tensor) -> dict[str, object]:
    """Shape of a row and dtype of a tensor ``[n, *shape]``, as JSON can hold them."""
    return {"shape": list(tensor.shape[1:]), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _num_bytes(spec: JsonObject) -> int:
    """Bytes of one row of a tensor."""
    return math.prod(spec["shape"]) * torch.empty((), dtype=getattr(torch, spec["dtype"])).element_size()


def _truncate(path: Path, num_bytes: int) -> None:
    """Cuts a file off after ``num_bytes``. Raises DataError when it cannot be written, or is a link."""
    try:
        with open_to_append(path) as file:
            file.truncate(num_bytes)
    except OSError as error:
        reason = "is a link; remove it" if path.is_symlink() else error.strerror
        raise DataError(f"data.cache_dir: {path}: {reason}") from error


def _append(path: Path, content: bytes) -> None:
    """Appends to a file, and returns when the content has reached the disk."""
    with open_to_append(path) as file:
        view = memoryview(content)
        while len(view):
            view = view[file.write(view) :]  # unbuffered: a call may write a part only
        os.fsync(file.fileno())
