"""The parts of a checkpoint's tensors that each rank holds, and their files of ``torch.distributed.checkpoint``.

torch's planners are given the chunks of shards (``sfumato.parallel.shards``) instead of DTensors, whose placements they
only partly support. The files are torch's own, and any program that reads ``torch.distributed.checkpoint`` reads them.
A checkpoint may come from a stranger: no code in its metadata is run, and the metadata is checked against the files.
"""

from __future__ import annotations

import io
import math
import pickle
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
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
from sfumato.config.open_mappings import JsonObject
from sfumato.errors import CheckpointError
from sfumato.parallel.shards import Chunk
from sfumato.tracking.atomic_folders import VALUES
from sfumato.tracking.identity import KEY as IDENTITY

METADATA = ".metadata"
"""torch's file that says in which file, and where in it, each chunk of each tensor lies."""

MOST_BYTES = 2**30
"""Size of the largest ``.metadata`` and of the largest ``state.json`` that are read, in bytes."""

KINDS = {
    "step": int,
    "model": str,
    "schedule_steps": int,
    "policy_updates": dict,
    "optimizer": dict,
    "random": dict,
    "data": dict,
}
"""What ``state.json`` must hold, and of which types."""

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
"""The classes and functions that torch's metadata is made of, besides dtypes and paths, by module."""


LEAST_COMPARED, MOST_COMPARED = 10**5, 256
"""Pairs of chunks that are compared at most: so many, and so many for each chunk. Forged ones could ask for n^2."""

REFUSED = (pickle.EMPTY_SET, pickle.FROZENSET, pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX)
"""Opcodes of pickles that torch's metadata does not need. They build sets, whose members are hashed, or objects from
arbitrary arguments."""

_PythonUnpickler: Any = pickle._Unpickler
"""The standard library's own class, whose methods its type stubs leave out."""


class _Unpickler(_PythonUnpickler):
    """Reads torch's metadata, and refuses a pickle that asks for anything else, since it could run any program.

    It derives from the implementation in Python: the one in C allocates memory for as many objects as the pickle
    claims to have, which a few bytes can do.
    """

    def find_class(self, module: str, name: str) -> object:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_path = module.split(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath")
        if is_dtype or is_path or name in PICKLED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of a checkpoint")

    def load_build(self) -> None:
        # BUILD sets attributes: on a class they would change it for the whole process.
        if isinstance(self.stack[-2], type):
            raise pickle.UnpicklingError("it changes a class, which is no part of a checkpoint")
        super().load_build()

    def load_setitem(self) -> None:
        _check_hashed(self.stack[-2])
        super().load_setitem()

    def load_setitems(self) -> None:
        _check_hashed(*self.stack[::2])  # since the mark the stack holds key, value, key, value, ...
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
        **_PythonUnpickler.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        **dict.fromkeys((code[0] for code in REFUSED), refuse),
    }


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (str, int, torch.dtype))


def _is_flat(value: object) -> bool:
    """Whether that is a plain value or a tuple of plain values.

    A nested tuple could hold itself twice on each level, and would then take 2^levels steps to hash, compare or print.
    """
    return _is_plain(value) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _check_hashed(*keys: object) -> None:
    """Raises UnpicklingError for a key of a dictionary that could take for ever to hash."""
    for key in keys:
        values = vars(key).values() if isinstance(key, MetadataIndex) else (key,)
        if not all(map(_is_flat, values)):
            raise pickle.UnpicklingError("a key of it is nested, which is no part of a checkpoint")


def read_state_values(path: Path) -> dict[str, object]:
    """Reads ``state.json``. Raises CheckpointError when it is broken or lacks something."""
    if problem := file_problem(path, MOST_BYTES):
        raise CheckpointError(f"{path} {problem}")
    try:
        values = read_json_object(path)
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    for name, kind in KINDS.items():
        value = values.get(name)
        # ``true`` in JSON is an int to Python.
        if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and cast(int, value) < 0):
            raise CheckpointError(f"{path}: {name} is {str(value)[:50]!r}, which no run can have saved")
    for name in (IDENTITY, "critic_optimizer"):  # of runs that have one
        if not isinstance(values.get(name) or {}, dict):
            raise CheckpointError(f"{path}: {name} is {str(values[name])[:50]!r}, which no run can have saved")
    return values


def read_metadata(path: Path) -> Metadata:
    """Reads torch's description of the tensors of a checkpoint, and checks it against the files beside it.

    Raises:
        CheckpointError: when torch did not write it, or it describes more than the files hold.
    """
    if problem := file_problem(path, MOST_BYTES):
        raise CheckpointError(f"{path} {problem}")
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # a forged pickle can raise anything
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


def _check_place(index: object, info: object, sizes: dict[str, int]) -> None:
    """Raises TypeError or ValueError when a chunk does not lie within one of the files, whose ``sizes`` are given."""
    if not isinstance(index, MetadataIndex) or not isinstance(info, _StorageInfo):
        raise TypeError(f"a place of {type(index).__name__} is {type(info).__name__}")
    if not isinstance(index.fqn, str) or not all(type(n) is int for n in (info.offset, info.length)):
        raise TypeError("a place has no name, or no number for an end")
    if not isinstance(info.relative_path, str) or info.relative_path not in sizes:
        raise ValueError(f"{index.fqn} is said to lie in {reprlib.repr(info.relative_path)}")
    if not 0 <= info.offset <= info.offset + info.length <= sizes[info.relative_path]:
        raise ValueError(f"{index.fqn} is said to lie beyond the end of {info.relative_path}")
    # No checkpoint of sfumato has any, and the sizes above say nothing about what compressed chunks grow to.
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{index.fqn} is packed as {reprlib.repr(info.transform_descriptors)}")


def _check_tensor(key: object, described: object, num_bytes: int) -> None:
    """Raises TypeError or ValueError when the chunks of a tensor do not make up the whole, or the files are too small.

    ``num_bytes`` is the size of all files together.
    """
    if not isinstance(key, str) or not isinstance(described, TensorStorageMetadata):
        raise TypeError(f"{reprlib.repr(key)} is {type(described).__name__}")
    size = tuple(described.size)
    dtype = described.properties.dtype
    if not isinstance(dtype, torch.dtype) or any(type(length) is not int or length < 0 for length in size):
        raise TypeError(f"{key} has dtype {reprlib.repr(dtype)} and shape {reprlib.repr(size)}")
    # Checked before anybody allocates it: a few bytes of metadata can claim any shape.
    if math.prod(size) * dtype.itemsize > num_bytes:
        raise ValueError(f"{key} of shape {size} is larger than all files together")
    if any(not _is_flat(tuple(part)) for chunk in described.chunks for part in (chunk.offsets, chunk.sizes)):
        raise TypeError(f"a chunk of {key} is nested")
    if problem := chunks_problem(size, [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in described.chunks]):
        raise ValueError(f"{key} of shape {size}: {problem}")


def chunks_problem(size: tuple[int, ...], chunks: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """Why chunks, offsets and sizes, do not make up a tensor of a size; empty if they do, each element once."""
    for offsets, lengths in chunks:
        if any(
            not 0 <= offset <= offset + length <= whole
            for offset, length, whole in zip(offsets, lengths, size, strict=True)
        ):
            return f"the chunk at {offsets} of shape {lengths} lies outside of its shape {size}"
    if (covered := sum(math.prod(lengths) for _, lengths in chunks)) != math.prod(size):
        return f"its chunks hold {covered} elements of {math.prod(size)}"
    if not size:
        return ""
    # Sorted along the dimension with the most cuts, few chunks reach beyond the beginning of the next.
    axis = max(range(len(size)), key=lambda dim: len({offsets[dim] for offsets, _ in chunks}))
    boxes = [
        tuple((first, first + length) for first, length in zip(offsets, lengths, strict=True))
        for offsets, lengths in chunks
        if 0 not in lengths
    ]
    reaching: list[tuple[tuple[int, int], ...]] = []
    num_compared = 0
    for box in sorted(boxes, key=lambda box: box[axis]):
        num_compared += len(reaching)
        if num_compared > LEAST_COMPARED + MOST_COMPARED * len(chunks):
            return f"its {len(chunks)} chunks lie as no processes cut a tensor"
        beginning = box[axis][0]
        reaching = [other for other in reaching if other[axis][1] > beginning]
        for other in reaching:
            for (first, end), (other_first, other_end) in zip(box, other, strict=True):
                if first >= other_end or other_first >= end:
                    break
            else:
                places = [tuple(first for first, _ in place) for place in (other, box)]
                return f"its chunks at {places[0]} and {places[1]} overlap"
        reaching.append(box)
    return ""


class TensorPart(NamedTuple):
    """One chunk of a tensor."""

    shape: torch.Size
    """The shape of the whole tensor."""
    tensor: Tensor
    """A view of this rank's values of the chunk."""


TensorParts = dict[MetadataIndex, TensorPart]
"""Chunks by the tensor's name and their offsets in it."""


class SavePlanner(DefaultSavePlanner):
    """Plans the writing of parts. torch chooses one rank for a part that several ranks hold."""

    def __init__(self, parts: TensorParts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts = parts
        self.tensors: dict[MetadataIndex, Tensor] = {}
        """The tensors that this rank writes, set once the ranks have planned; perhaps copies of the parts' tensors."""

    def create_local_plan(self) -> SavePlan:
        """Lists all parts of this rank. The global plan removes those that other ranks write."""
        items = []
        for index, (shape, tensor) in self.parts.items():
            chunk = ChunkStorageMetadata(offsets=cast(torch.Size, index.offset), sizes=tensor.shape)
            data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=tensor.dtype), size=shape)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Chooses one rank for each part that several ranks hold. Called on rank 0 alone.

        torch's own method also looks for chunks that overlap, along the longest dimension of a tensor: where that is
        not the one that is cut, it compares each chunk with all others, which takes O(ranks^2).

        Raises:
            ValueError: when the chunks of a tensor do not make it up.
        """
        plans, metadata = create_default_global_save_plan(dedup_save_plans(all_plans))
        for key, described in metadata.state_dict_metadata.items():
            chunks = cast("TensorStorageMetadata", described).chunks
            parts = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
            if problem := chunks_problem(tuple(cast("TensorStorageMetadata", described).size), parts):
                raise ValueError(f"the plan of a checkpoint is wrong: {key}: {problem}")
        self.global_plan = plans
        self.metadata = metadata
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The tensor that torch is to write for an item of the plan."""
        return self.tensors[write_item.index]


class _LoadPlanner(DefaultLoadPlanner):
    """Has torch read into the tensors of parts."""

    def __init__(self, parts: TensorParts) -> None:
        super().__init__()
        self.parts = parts

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.parts[index].tensor


class StoredCheckpoint:
    """A checkpoint on disk, opened for reading. No code in it is run."""

    def __init__(self, folder: Path) -> None:
        """Opens a checkpoint.

        Raises:
            CheckpointError: when the folder is no distributed checkpoint, not one that torch wrote, or is gone.
        """
        _check_still_there(folder)
        if not (folder / METADATA).is_file():
            raise CheckpointError(
                f"{folder} has no {METADATA}: it is not a torch distributed checkpoint (the first versions of sfumato "
                "wrote whole tensors); to go on from its weights, set model.model_path to the run's hf_ckpt"
            )
        self.folder = folder
        self.values: JsonObject = read_state_values(folder / VALUES)
        """Everything that is not a tensor, from ``state.json``."""
        self._metadata = read_metadata(folder / METADATA)
        self._reader = FileSystemReader(folder)
        # Given the metadata, the reader never unpickles the file itself.
        self._reader.set_up_storage_reader(self._metadata, True)
        stored_tensors = self._metadata.state_dict_metadata.items()
        self.tensors: dict[str, tuple[torch.Size, torch.dtype]] = {
            key: (described.size, described.properties.dtype)
            for key, described in stored_tensors
            if isinstance(described, TensorStorageMetadata)
        }
        """Whole shapes and dtypes by name."""

    def optimizer_keys(self, section: str = "optimizer") -> list[str]:
        """Names of the tensors and numbers of an optimiser's state, as ``parameter/field``.

        Raises:
            CheckpointError: when the section holds something else than numbers by name.
        """
        tensors = [key.removeprefix(f"{section}/") for key in self.tensors if key.startswith(f"{section}/")]
        numbers = self.values.get(section, {})
        if not isinstance(numbers, dict):
            raise CheckpointError(f"{self.folder / VALUES}: {section} holds no mapping")
        return [*tensors, *numbers]

    @torch.no_grad()
    def read(self, parts: TensorParts) -> None:
        """Reads into the tensors of parts; the checkpoint must have them, with the same shapes and dtypes.

        Raises:
            CheckpointError: when the files do not hold what the metadata says, or are gone.
        """
        chunks_by_key: dict[str, list[ChunkStorageMetadata]] = {}
        for index, part in parts.items():
            chunks_by_key.setdefault(index.fqn, []).append(
                ChunkStorageMetadata(offsets=cast(torch.Size, index.offset), sizes=part.tensor.shape)
            )
        items = [
            item
            for key, chunks in chunks_by_key.items()
            for item in create_read_items_for_chunk_list(
                key, cast(TensorStorageMetadata, self._metadata.state_dict_metadata[key]), chunks
            )
        ]
        try:
            self._reader.read_data(LoadPlan(items), _LoadPlanner(parts)).wait()
        except Exception as error:  # torch trusts its files, and damaged ones make it raise anything
            _check_still_there(self.folder)
            raise CheckpointError(
                f"{self.folder}: its files do not hold what its {METADATA} says ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]})"
            ) from error

    def read_whole(self, keys: Mapping[str, str]) -> dict[str, Tensor]:
        """Reads whole tensors into memory of the CPU.

        Args:
            keys: the name of each tensor in the checkpoint, by the name that it gets in the result.

        Raises:
            CheckpointError: as ``read``.
        """
        tensors = {}
        parts = {}
        for name, key in keys.items():
            shape, dtype = self.tensors[key]
            tensors[name] = torch.empty(shape, dtype=dtype)
            parts |= whole_part(key, tensors[name])
        self.read(parts)
        return tensors


def _check_still_there(folder: Path) -> None:
    """Raises CheckpointError where a checkpoint that was chosen is gone by the time that it is read."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} was removed meanwhile; a run at work keeps the newest train.max_checkpoints alone. Start again, "
            "or copy a checkpoint to another place first"
        )


def whole_part(key: str, tensor: Tensor) -> TensorParts:
    """The one part of a tensor that this rank holds whole."""
    return {MetadataIndex(key, (0,) * tensor.ndim): TensorPart(tensor.shape, tensor)}


def parts_of_shard(key: str, shape: torch.Size, shard: Tensor, chunks: list[Chunk]) -> TensorParts:
    """The parts that this rank's shard of a tensor consists of, as views of the shard.

    Args:
        key: the tensor's name.
        shape: of the whole tensor.
        shard: this rank's shard, a plain tensor.
        chunks: of the shard, from ``chunks_of``.
    """
    return {
        MetadataIndex(key, chunk.offsets): TensorPart(shape, shard[chunk.place].view(chunk.sizes)) for chunk in chunks
    }
