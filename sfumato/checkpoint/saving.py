"""The writing of one checkpoint.

All ranks together plan which rank writes which tensors and, at the end, make the checkpoint complete. In between each
rank writes without communicating, so that a thread can do it while training goes on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint.metadata import MetadataIndex

from sfumato.checkpoint.parts import METADATA, VALUES, SavePlanner
from sfumato.checkpoint.state import TrainState, collect_state
from sfumato.config.writing import write_atomically
from sfumato.errors import CheckpointError
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.atomic_folders import begin_checkpoint, finish_checkpoint, list_files, prune_checkpoints

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

    from sfumato.tracking.atomic_folders import Listing

    Value = TypeVar("Value")
    Decision = TypeVar("Decision")


class Staging:
    """Copies tensors to CPU memory, into buffers that are reused from save to save."""

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, Tensor] = {}

    def copy(self, tensors: dict[MetadataIndex, Tensor]) -> dict[MetadataIndex, Tensor]:
        """Copies tensors. The copies that the previous call returned are overwritten."""
        copies = {}
        for index, tensor in tensors.items():
            buffer = self._buffers.get(index)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            # Asynchronous from a GPU, since the buffers are pinned: one wait below for all of them.
            copies[index] = buffer.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        self._buffers = copies
        return copies


class Saving:
    """A checkpoint that is being written: call ``write``, perhaps in a thread, and then ``finish``."""

    def __init__(self, root: Path, state: TrainState, mesh: Mesh, staging: Staging | None = None) -> None:
        """Makes the folder and plans which rank writes what. Every rank must call it.

        Args:
            root: folder of all checkpoints.
            state: what is saved.
            mesh: the ranks.
            staging: copies what this rank writes, so that the state may change before ``write`` is over; None writes
                from the state itself.

        Raises:
            CheckpointError: on every rank, when the folder cannot be made.
        """
        self.root = root
        self.step = state.step
        self.mesh = mesh
        self.building = root / f"global_step_{state.step}.tmp"
        parts, values = collect_state(state, mesh)
        # Now and not in ``write``, since loader and counters go on while a thread writes.
        self._values = json.dumps(values)
        self._writer = FileSystemWriter(self.building, sync_files=False)  # ``list_files`` flushes
        self._writer.set_up_storage_writer(mesh.is_first)
        self._planner = SavePlanner(parts)
        self._metadata: Metadata | None = None
        self._plan: SavePlan = through_first(mesh, self._planner.create_local_plan(), self._plan_writes)
        chosen = {item.index: parts[item.index].tensor for item in self._plan.items}
        self._planner.tensors = staging.copy(chosen) if staging else chosen
        self._planner.parts = {}  # frees the copies that decompressing the optimiser's state made
        self._error: Exception | None = None
        self._outcome: tuple[list[WriteResult], Listing] = [], {}

    def _plan_writes(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: makes the folder, and chooses one rank for each part that several ranks hold."""
        begin_checkpoint(self.root, self.step)
        plans, self._metadata = self._planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(plans)

    def write(self) -> None:
        """Writes this rank's files. ``finish`` raises what goes wrong."""
        try:
            # The current GPU belongs to a thread, and a new thread begins with the first one.
            self.mesh.take_device()
            plan = self._writer.prepare_local_plan(self._plan)
            results = self._writer.write_data(plan, self._planner).wait()
            files = list(self.building.glob(f"{plan.storage_data.prefix}*"))
            if self.mesh.is_first:
                files.append(self.building / VALUES)
                write_atomically(files[-1], self._values.encode())
            self._outcome = results, list_files(self.building, files)
        except Exception as error:  # in a thread nobody would catch it
            self._error = error

    def fail(self, error: OSError) -> None:
        """Makes ``finish`` fail with this error, unless ``write`` has failed already."""
        self._error = self._error or error

    def finish(self, keep: int) -> None:
        """Waits until all ranks have written, makes the checkpoint complete and removes older ones.

        Every rank must call it.

        Args:
            keep: how many checkpoints stay.

        Raises:
            CheckpointError: on every rank, when some rank could not write; the incomplete folder is removed.
        """
        cause = disk_error(self._error)
        problem = "" if self._error is None else f"rank {self.mesh.rank}: {cause or repr(self._error)}"
        try:
            through_first(self.mesh, (problem, *self._outcome), lambda outcomes: self._complete_folder(outcomes, keep))
        except CheckpointError:
            if self._error is not None and cause is None:
                raise self._error  # noqa: B904 - not a matter of the disk
            raise

    def _complete_folder(self, outcomes: list[tuple[str, list[WriteResult], Listing]], keep: int) -> list[None]:
        """On rank 0: writes torch's metadata and the manifest, renames the folder and removes older checkpoints.

        Args:
            outcomes: of each rank, what went wrong (empty if nothing), torch's results, and the files with digests.
            keep: how many checkpoints stay.
        """
        try:
            problems = [problem for problem, _, _ in outcomes if problem]
            if problems:
                raise CheckpointError("; ".join(problems))
            self._writer.finish(cast("Metadata", self._metadata), [results for _, results, _ in outcomes])
            listing = list_files(self.building, [self.building / METADATA])
            for _, _, files in outcomes:
                listing |= files
            finish_checkpoint(self.building, listing)
        except (OSError, CheckpointError):
            shutil.rmtree(self.building, ignore_errors=True)
            raise
        # After the rename: until then the older checkpoints are all there is to go back to.
        prune_checkpoints(self.root, keep, self.step)
        return [None] * len(outcomes)


def through_first(mesh: Mesh, mine: Value, decide: Callable[[list[Value]], list[Decision]]) -> Decision:
    """Has rank 0 decide for all ranks. Every rank must call it.

    Args:
        mesh: the ranks.
        mine: this rank's value.
        decide: called on rank 0 with the values of all ranks, in their order; returns what each rank gets.

    Returns:
        What ``decide`` returned for this rank.

    Raises:
        CheckpointError: on every rank, when ``decide`` raised it or an OSError.
    """
    gathered: list[Any] = [mine]
    if mesh.size > 1:
        # Not to all ranks: the plans of every rank on every rank would grow with the square of their number.
        gathered = [None] * mesh.size if mesh.is_first else []
        dist.gather_object(mine, gathered or None, dst=0, group=mesh.group("world"))
    answers: list[Any] = [None] * mesh.size
    if mesh.is_first:
        try:
            answers = [(decision, "") for decision in decide(gathered)]
        except (OSError, CheckpointError) as error:
            # Told as an answer: all other ranks wait in the scatter below.
            answers = [(None, str(error))] * mesh.size
    answer = answers[:1]
    if mesh.size > 1:
        dist.scatter_object_list(answer, answers if mesh.is_first else None, src=0, group=mesh.group("world"))
    value, problem = answer[0]
    if problem:
        raise CheckpointError(problem)
    return value


def disk_error(error: BaseException | None) -> OSError | None:
    """The OSError that caused an error, if there is one: torch turns a failed write into a RuntimeError."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
