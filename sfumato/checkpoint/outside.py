"""What describes a checkpoint that may be from elsewhere: nothing of it is run, and it is held to its files."""

from __future__ import annotations

import io
import json
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from sfumato.config.files import file_problem
from sfumato.errors import CheckpointError

METADATA = ".metadata"
"""torch's file that says which box of which tensor stands where."""

MOST_BYTES = 2**30
"""Size of the largest file of either kind that is read."""

KINDS = {
    "step": int,
    "model": str,
    "schedule_steps": int,
    "policy_updates": dict,
    "optimizer": dict,
    "random": dict,
    "data": dict,
}
"""What ``state.json`` must hold."""

PICKLED = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}
"""What torch's metadata is made of, besides dtypes and paths, by module."""


class _Unpickler(pickle._Unpickler):
    """Reads torch's metadata, and refuses a pickle that asks for anything else: it could run any program.

    The one in Python: that in C makes room for as many objects as a pickle of a few bytes says that it has.
    """

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_path = module.split(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath")
        if is_dtype or is_path or name in PICKLED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of a checkpoint")

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type):
            raise pickle.UnpicklingError("it changes a class, which is no part of a checkpoint")
        super().load_build()

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


def read_values(path: Path) -> dict[str, Any]:
    """``state.json``. Raises CheckpointError when it is broken or lacks something."""
    if problem := file_problem(path, MOST_BYTES):
        raise CheckpointError(f"{path} {problem}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no mapping")
    for name, kind in KINDS.items():
        value = values.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and value < 0):
            raise CheckpointError(f"{path}: {name} is {str(value)[:50]!r}, which no run can have saved")
    return values


def read_metadata(path: Path) -> Metadata:
    """torch's description of the tensors of a checkpoint, which is compared with the files beside it.

    Raises:
        CheckpointError: when torch did not write it, or it tells of more than there is in the files.
    """
    if problem := file_problem(path, MOST_BYTES):
        raise CheckpointError(f"{path} {problem}")
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # a pickle that is made up raises whatever it comes upon
        raise CheckpointError(f"{path} was not written by torch: {error or type(error).__name__}") from error
    try:
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        sizes = {each.name: each.stat().st_size for each in path.parent.iterdir() if each.is_file()}
        for index, info in metadata.storage_data.items():
            _check_place(index, info, sizes)
        for key, each in metadata.state_dict_metadata.items():
            if not isinstance(each, BytesStorageMetadata):
                _check_tensor(key, each, sum(sizes.values()))
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} does not describe the files beside it: {error}") from error
    return metadata


def _check_place(index: Any, info: Any, sizes: dict[str, int]) -> None:
    """Whether a box lies in one of the files."""
    if not isinstance(index, MetadataIndex) or not isinstance(info, _StorageInfo):
        raise TypeError(f"a place of {type(index).__name__} is {type(info).__name__}")
    if info.relative_path not in sizes:
        raise ValueError(f"{index.fqn} is said to lie in {info.relative_path!r}")
    if not 0 <= info.offset <= info.offset + info.length <= sizes[info.relative_path]:
        raise ValueError(f"{index.fqn} is said to lie beyond the end of {info.relative_path}")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{index.fqn} is packed as {info.transform_descriptors}")


def _check_tensor(key: Any, each: Any, num_bytes: int) -> None:
    """Whether the boxes of a tensor make up the whole, and there are bytes for it."""
    if not isinstance(key, str) or not isinstance(each, TensorStorageMetadata):
        raise TypeError(f"{key!r} is {type(each).__name__}")
    size, dtype = tuple(each.size), each.properties.dtype
    if not isinstance(dtype, torch.dtype) or any(type(length) is not int or length < 0 for length in size):
        raise TypeError(f"{key} has dtype {dtype} and shape {size}")
    if math.prod(size) * dtype.itemsize > num_bytes:
        raise ValueError(f"{key} of shape {size} is larger than all files together")
    boxes = {(tuple(box.offsets), tuple(box.sizes)) for box in each.chunks}
    for offsets, lengths in boxes:
        inside = zip(offsets, lengths, size, strict=True)
        if any(not 0 <= offset <= offset + length <= whole for offset, length, whole in inside):
            raise ValueError(f"a box of {key} lies outside of its shape {size}")
    if len(boxes) != len(each.chunks) or sum(math.prod(lengths) for _, lengths in boxes) != math.prod(size):
        raise ValueError(f"the boxes of {key} do not make up its shape {size}")
