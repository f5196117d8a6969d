"""One checkpoint on its way to disk.

All ranks together decide who writes what and, at the end, that it is complete; in between each writes on its own,
without a word to the others, so that a thread can do it while training goes on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from sfumato.checkpoint.parts import METADATA, VALUES, SavePlanner
from sfumato.checkpoint.state import TrainState, collect_state
from sfumato.config.writing import write_atomically
from sfumato.errors import CheckpointError
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.atomic_folders import begin_checkpoint, finish_checkpoint, list_files, prune_checkpoints


class Staging:
    """Copies of tensors in CPU memory, in buffers that are used again from save to save."""

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, Tensor] = {}

    def copy(self, tensors: dict[MetadataIndex, Tensor]) -> dict[MetadataIndex, Tensor]:
        """Copies tensors; the copies of the call before are overwritten."""
        copies = {}
        for index, tensor in tensors.items():
            buffer = self._buffers.get(index)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copies[index] = buffer.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        self._buffers = copies
        return copies


class Saving:
    """A checkpoint that is being written: ``write``, perhaps in a thread, and then ``finish``."""

    def __init__(self, root: Path, state: TrainState, mesh: Mesh, staging: Staging | None = None) -> None:
        """Begins it. Every rank must call it.

        Args:
            root: folder of all checkpoints.
            state: what is saved.
            mesh: the ranks.
            staging: takes a copy of what this rank writes, so that the state may change before ``write`` is over.

        Raises:
            CheckpointError: on every rank, when the folder cannot be made.
        """
        self.root = root
        self.step = state.step
        self.mesh = mesh
        self.building = root / f"global_step_{state.step}.tmp"
        parts, values = collect_state(state, mesh)
        self._values = json.dumps(values)
        self._writer = FileSystemWriter(self.building, sync_files=False)  # the envelope flushes
        self._writer.set_up_storage_writer(mesh.is_first)
        self._planner = SavePlanner(parts)
        self._metadata: Any = None
        self._plan = through_first(mesh, self._planner.create_local_plan(), self._share_out)
        chosen = {item.index: parts[item.index].tensor for item in self._plan.items}
        self._planner.tensors = staging.copy(chosen) if staging else chosen
        self._planner.parts = {}  # frees what the optimiser decompressed
        self._error: Exception | None = None
        self._written: tuple[list[Any], dict[str, Any]] = [], {}

    def _share_out(self, plans: list[Any]) -> list[Any]:
        """Rank 0: who writes what of the parts that several have."""
        begin_checkpoint(self.root, self.step)
        plans, self._metadata = self._planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(plans)

    def write(self) -> None:
        """Writes this rank's files; what goes wrong is raised by ``finish``."""
        try:
            self.mesh.take_device()
            plan = self._writer.prepare_local_plan(self._plan)
            results = self._writer.write_data(plan, self._planner).wait()
            files = list(self.building.glob(f"{plan.storage_data.prefix}*"))
            if self.mesh.is_first:
                files.append(self.building / VALUES)
                write_atomically(files[-1], self._values.encode())
            self._written = results, list_files(self.building, files)
        except Exception as error:  # a thread has nobody to raise it to
            self._error = error

    def fail(self, error: OSError) -> None:
        """Notes that what belongs to the checkpoint could not be written."""
        self._error = self._error or error

    def finish(self, keep: int) -> None:
        """Makes the checkpoint complete once all ranks have written, and removes older ones. Every rank must call it.

        Args:
            keep: how many checkpoints stay.

        Raises:
            CheckpointError: on every rank, when one could not write; nothing half-written stays behind.
        """
        cause = disk_error(self._error)
        problem = "" if self._error is None else f"rank {self.mesh.rank}: {cause or repr(self._error)}"
        try:
            through_first(self.mesh, (problem, *self._written), lambda written: self._complete(written, keep))
        except CheckpointError:
            if self._error is not None and cause is None:
                raise self._error  # noqa: B904 - not a matter of the disk
            raise

    def _complete(self, written: list[tuple[str, list[Any], dict[str, Any]]], keep: int) -> list[None]:
        """Rank 0: the index of all files, the manifest, the rename."""
        try:
            problems = [problem for problem, _, _ in written if problem]
            if problems:
                raise CheckpointError("; ".join(problems))
            self._writer.finish(self._metadata, [results for _, results, _ in written])
            listing = list_files(self.building, [self.building / METADATA])
            for _, _, files in written:
                listing |= files
            finish_checkpoint(self.building, listing)
        except (OSError, CheckpointError):
            shutil.rmtree(self.building, ignore_errors=True)
            raise
        prune_checkpoints(self.root, keep, self.step)
        return [None] * len(written)


def through_first(mesh: Mesh, mine: Any, decide: Callable[[list[Any]], list[Any]]) -> Any:
    """Rank 0 decides, from one value of each rank, what each gets; its failure is everyone's.

    Raises:
        CheckpointError: on every rank, when ``decide`` raised it or an OSError.
    """
    gathered: list[Any] = [mine]
    if mesh.size > 1:
        gathered = [None] * mesh.size if mesh.is_first else []
        dist.gather_object(mine, gathered or None, dst=0, group=mesh.group("world"))
    answers: list[Any] = [None] * mesh.size
    if mesh.is_first:
        try:
            answers = [(decision, "") for decision in decide(gathered)]
        except (OSError, CheckpointError) as error:
            answers = [(None, str(error))] * mesh.size
    answer = answers[:1]
    if mesh.size > 1:
        dist.scatter_object_list(answer, answers if mesh.is_first else None, src=0, group=mesh.group("world"))
    value, problem = answer[0]
    if problem:
        raise CheckpointError(problem)
    return value


def disk_error(error: BaseException | None) -> OSError | None:
    """The OSError behind an error, if there is one: torch makes a RuntimeError of a write that fails."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
