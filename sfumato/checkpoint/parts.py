"""What each rank holds of the tensors of a checkpoint, and torch's distributed checkpoint files of them.

torch's planners are given the chunks of shards (``sfumato.parallel.shards``) instead of the DTensors that they
understand only in part. The files are torch's own, and any program that reads ``torch.distributed.checkpoint`` reads
them. What describes a checkpoint may be from elsewhere: nothing of it is run, and it is held to its files.
"""

from __future__ import annotations

import io
import math
import pickle
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from sfumato.config.file_checks import file_problem, read_json_object
from sfumato.errors import CheckpointError
from sfumato.parallel.shards import Chunk
from sfumato.tracking.atomic_folders import VALUES
from sfumato.tracking.identity import KEY as IDENTITY

METADATA = ".metadata"
"""torch's file that says which chunk of which tensor stands where."""

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


REFUSED = (pickle.EMPTY_SET, pickle.FROZENSET, pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX)
"""Codes of pickles that torch's metadata has no use for: what they make is hashed, or made of anything."""


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

    def load_setitem(self) -> None:
        _check_hashed(self.stack[-2])
        super().load_setitem()

    def load_setitems(self) -> None:
        _check_hashed(*self.stack[::2])  # those since the mark, by twos
        super().load_setitems()

    def load_dict(self) -> None:
        _check_hashed(*self.stack[::2])
        super().load_dict()

    def load_reduce(self) -> None:
        self._check_arguments()
        super().load_reduce()

    def load_newobj(self) -> None:
        self._check_arguments()
        super().load_newobj()

    def _check_arguments(self) -> None:
        arguments = self.stack[-1]
        if not isinstance(arguments, tuple) or not all(map(_is_flat, arguments)):
            raise pickle.UnpicklingError("it makes a value of nested ones, which is no part of a checkpoint")

    def refuse(self) -> None:
        raise pickle.UnpicklingError("it holds a set, or an object of an old kind, which is no part of a checkpoint")

    dispatch = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        **dict.fromkeys((code[0] for code in REFUSED), refuse),
    }


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, torch.dtype))


def _is_flat(value: Any) -> bool:
    """Whether that is a plain value, or a tuple of them. One that nests holds itself twice in each level, perhaps, and
    then takes 2^levels steps to hash, to compare or to print."""
    return _is_plain(value) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _check_hashed(*keys: Any) -> None:
    for key in keys:
        inside = vars(key).values() if isinstance(key, MetadataIndex) else (key,)
        if not all(map(_is_flat, inside)):
            raise pickle.UnpicklingError("a key of it is nested, which is no part of a checkpoint")


def read_state_values(path: Path) -> dict[str, Any]:
    """``state.json``. Raises CheckpointError when it is broken or lacks something."""
    if problem := file_problem(path, MOST_BYTES):
        raise CheckpointError(f"{path} {problem}")
    try:
        values = read_json_object(path)
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    for name, kind in KINDS.items():
        value = values.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and value < 0):
            raise CheckpointError(f"{path}: {name} is {str(value)[:50]!r}, which no run can have saved")
    for name in (IDENTITY, "critic_optimizer"):  # of runs that have one
        if not isinstance(values.get(name) or {}, dict):
            raise CheckpointError(f"{path}: {name} is {str(values[name])[:50]!r}, which no run can have saved")
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
        sizes = {file.name: file.stat().st_size for file in path.parent.iterdir() if file.is_file()}
        for index, info in metadata.storage_data.items():
            _check_place(index, info, sizes)
        for key, described in metadata.state_dict_metadata.items():
            if not isinstance(described, BytesStorageMetadata):
                _check_tensor(key, described, sum(sizes.values()))
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} does not describe the files beside it: {error}") from error
    return metadata


def _check_place(index: Any, info: Any, sizes: dict[str, int]) -> None:
    """Whether a chunk lies in one of the files."""
    if not isinstance(index, MetadataIndex) or not isinstance(info, _StorageInfo):
        raise TypeError(f"a place of {type(index).__name__} is {type(info).__name__}")
    if not isinstance(index.fqn, str) or not all(type(n) is int for n in (info.offset, info.length)):
        raise TypeError("a place has no name, or no number for an end")
    if not isinstance(info.relative_path, str) or info.relative_path not in sizes:
        raise ValueError(f"{index.fqn} is said to lie in {reprlib.repr(info.relative_path)}")
    if not 0 <= info.offset <= info.offset + info.length <= sizes[info.relative_path]:
        raise ValueError(f"{index.fqn} is said to lie beyond the end of {info.relative_path}")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{index.fqn} is packed as {reprlib.repr(info.transform_descriptors)}")


def _check_tensor(key: Any, described: Any, num_bytes: int) -> None:
    """Whether the chunks of a tensor make up the whole, and there are bytes for it."""
    if not isinstance(key, str) or not isinstance(described, TensorStorageMetadata):
        raise TypeError(f"{reprlib.repr(key)} is {type(described).__name__}")
    size = tuple(described.size)
    dtype = described.properties.dtype
    if not isinstance(dtype, torch.dtype) or any(type(length) is not int or length < 0 for length in size):
        raise TypeError(f"{key} has dtype {reprlib.repr(dtype)} and shape {reprlib.repr(size)}")
    if math.prod(size) * dtype.itemsize > num_bytes:
        raise ValueError(f"{key} of shape {size} is larger than all files together")
    if any(not _is_flat(tuple(part)) for chunk in described.chunks for part in (chunk.offsets, chunk.sizes)):
        raise TypeError(f"a chunk of {key} is nested")
    chunks = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in described.chunks}
    for offsets, lengths in chunks:
        inside = zip(offsets, lengths, size, strict=True)
        if any(not 0 <= offset <= offset + length <= whole for offset, length, whole in inside):
            raise ValueError(f"a chunk of {key} lies outside of its shape {size}")
    if len(chunks) != len(described.chunks) or sum(math.prod(lengths) for _, lengths in chunks) != math.prod(size):
        raise ValueError(f"the chunks of {key} do not make up its shape {size}")


class TensorPart(NamedTuple):
    """One chunk of a tensor."""

    shape: torch.Size
    """The shape of the whole tensor."""
    tensor: Tensor
    """A view of what this rank holds."""


TensorParts = dict[MetadataIndex, TensorPart]
"""Chunks by the tensor's name and their offsets in it."""


class SavePlanner(DefaultSavePlanner):
    """Writes parts. Of those that several ranks hold one rank is chosen to write."""

    def __init__(self, parts: TensorParts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts = parts
        self.tensors: dict[MetadataIndex, Tensor] = {}
        """What is written, by the time it is written."""

    def create_local_plan(self) -> SavePlan:
        """What this rank could write."""
        items = []
        for index, (shape, tensor) in self.parts.items():
            chunk = ChunkStorageMetadata(offsets=index.offset, sizes=tensor.shape)
            data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=tensor.dtype), size=shape)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The tensor of an item."""
        return self.tensors[write_item.index]


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, parts: TensorParts) -> None:
        super().__init__()
        self.parts = parts

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.parts[index].tensor


class StoredCheckpoint:
    """What a checkpoint holds. Nothing in it is run."""

    def __init__(self, folder: Path) -> None:
        """Opens a checkpoint.

        Raises:
            CheckpointError: when the folder is no distributed checkpoint, or not one that torch wrote.
        """
        if not (folder / METADATA).is_file():
            raise CheckpointError(
                f"{folder} has no {METADATA}: it is not a torch distributed checkpoint (the first versions of sfumato "
                "wrote whole tensors); to go on from its weights, set model.model_path to the run's hf_ckpt"
            )
        self.folder = folder
        self.values: dict[str, Any] = read_state_values(folder / VALUES)
        """Everything that is not a tensor."""
        self._metadata = read_metadata(folder / METADATA)
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(self._metadata, True)
        known = self._metadata.state_dict_metadata.items()
        self.tensors: dict[str, tuple[torch.Size, torch.dtype]] = {
            key: (described.size, described.properties.dtype)
            for key, described in known
            if isinstance(described, TensorStorageMetadata)
        }
        """Whole shapes and dtypes by name."""

    def optimizer_keys(self, section: str = "optimizer") -> list[str]:
        """What there is of an optimiser's state, tensors and numbers, as ``parameter/field``."""
        tensors = [key.removeprefix(f"{section}/") for key in self.tensors if key.startswith(f"{section}/")]
        numbers = self.values.get(section, {})
        if not isinstance(numbers, dict):
            raise CheckpointError(f"{self.folder / VALUES}: {section} holds no mapping")
        return [*tensors, *numbers]

    @torch.no_grad()
    def read(self, parts: TensorParts) -> None:
        """Fills parts; the checkpoint must have their tensors, with the same shapes and dtypes.

        Raises:
            CheckpointError: when the files do not hold what the metadata says.
        """
        wanted: dict[str, list[ChunkStorageMetadata]] = {}
        for index, part in parts.items():
            wanted.setdefault(index.fqn, []).append(ChunkStorageMetadata(offsets=index.offset, sizes=part.tensor.shape))
        items = [
            item
            for key, chunks in wanted.items()
            for item in create_read_items_for_chunk_list(key, self._metadata.state_dict_metadata[key], chunks)
        ]
        try:
            self._reader.read_data(LoadPlan(items), _LoadPlanner(parts)).wait()
        except Exception as error:  # torch trusts its files, and raises whatever it comes upon
            raise CheckpointError(
                f"{self.folder}: its files do not hold what its {METADATA} says ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]})"
            ) from error

    def read_whole(self, keys: Mapping[str, str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU.

        Args:
            keys: the name in the checkpoint by the name that each is to have.
        """
        found = {}
        parts = {}
        for name, key in keys.items():
            shape, dtype = self.tensors[key]
            found[name] = torch.empty(shape, dtype=dtype)
            parts |= whole_part(key, found[name])
        self.read(parts)
        return found


def whole_part(key: str, tensor: Tensor) -> TensorParts:
    """A tensor that this rank holds as a whole."""
    return {MetadataIndex(key, (0,) * tensor.ndim): TensorPart(tensor.shape, tensor)}


def parts_of_shard(key: str, shape: torch.Size, shard: Tensor, chunks: list[Chunk]) -> TensorParts:
    """This rank's shard of a tensor.

    Args:
        key: the tensor's name.
        shape: of the whole.
        shard: a plain tensor.
        chunks: from ``chunks_of``.
    """
    return {
        MetadataIndex(key, chunk.offsets): TensorPart(shape, shard[chunk.place].view(chunk.sizes)) for chunk in chunks
    }
