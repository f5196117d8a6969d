"""What each rank holds of the tensors of a checkpoint, and torch's distributed checkpoint files of them.

torch's planners are given the boxes of shards (``sfumato.parallel.shards``) instead of the DTensors that they
understand only in part. The files are torch's own, and any program that reads ``torch.distributed.checkpoint`` reads
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from sfumato.checkpoint.envelope import VALUES
from sfumato.checkpoint.outside import METADATA, read_metadata, read_values
from sfumato.errors import CheckpointError
from sfumato.parallel.shards import Box


class Part(NamedTuple):
    """One box of a tensor."""

    shape: torch.Size
    """Of the whole tensor."""
    tensor: torch.Tensor
    """A view of what this rank holds."""


Parts = dict[MetadataIndex, Part]
"""Boxes by the tensor's name and their offsets in it."""


class SavePlanner(DefaultSavePlanner):
    """Writes parts. Of those that several ranks hold one rank is chosen to write."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts = parts
        self.tensors: dict[MetadataIndex, torch.Tensor] = {}
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

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The tensor of an item."""
        return self.tensors[write_item.index]


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.parts[index].tensor


class Stored:
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
        self.values: dict[str, Any] = read_values(folder / VALUES)
        """Everything that is not a tensor."""
        self._metadata = read_metadata(folder / METADATA)
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(self._metadata, True)
        known = self._metadata.state_dict_metadata.items()
        self.tensors: dict[str, tuple[torch.Size, torch.dtype]] = {
            key: (each.size, each.properties.dtype) for key, each in known if isinstance(each, TensorStorageMetadata)
        }
        """Whole shapes and dtypes by name."""

    def optimizer_keys(self) -> list[str]:
        """What there is of the optimiser's state, tensors and numbers, as ``parameter/field``."""
        tensors = [key.removeprefix("optimizer/") for key in self.tensors if key.startswith("optimizer/")]
        return [*tensors, *self.values["optimizer"]]

    @torch.no_grad()
    def read(self, parts: Parts) -> None:
        """Fills parts; the checkpoint must have their tensors, with the same shapes and dtypes.

        Raises:
            CheckpointError: when the files do not hold what the metadata says.
        """
        boxes: dict[str, list[ChunkStorageMetadata]] = {}
        for index, part in parts.items():
            boxes.setdefault(index.fqn, []).append(ChunkStorageMetadata(offsets=index.offset, sizes=part.tensor.shape))
        items = [
            item
            for key, chunks in boxes.items()
            for item in create_read_items_for_chunk_list(key, self._metadata.state_dict_metadata[key], chunks)
        ]
        try:
            self._reader.read_data(LoadPlan(items), _LoadPlanner(parts)).wait()
        except Exception as error:  # torch trusts its files, and raises whatever it comes upon
            raise CheckpointError(
                f"{self.folder}: its files do not hold what its {METADATA} says ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]})"
            ) from error

    def read_whole(self, keys: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Whole tensors on the CPU.

        Args:
            keys: the name in the checkpoint by the name that each is to have.
        """
        found, parts = {}, {}
        for name, key in keys.items():
            shape, dtype = self.tensors[key]
            found[name] = torch.empty(shape, dtype=dtype)
            parts |= whole_part(key, found[name])
        self.read(parts)
        return found


def whole_part(key: str, tensor: torch.Tensor) -> Parts:
    """A tensor that this rank holds as a whole."""
    return {MetadataIndex(key, (0,) * tensor.ndim): Part(tensor.shape, tensor)}


def parts_of(key: str, shape: torch.Size, shard: torch.Tensor, boxes: list[Box]) -> Parts:
    """This rank's shard of a tensor.

    Args:
        key: the tensor's name.
        shape: of the whole.
        shard: a plain tensor.
        boxes: from ``boxes_of``.
    """
    return {MetadataIndex(key, each.offsets): Part(shape, shard[each.place].view(each.sizes)) for each in boxes}
