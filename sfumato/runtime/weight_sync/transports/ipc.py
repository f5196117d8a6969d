"""Transport between processes that share memory: on one GPU by CUDA's IPC handles, without GPUs by a mapped file.

Every actor rank takes part in gathering the whole tensors, so each sampler rank reads them from an actor rank on its
GPU or machine. The memory of two buckets is mapped once, when the roles are connected, and used in turns.
"""

from __future__ import annotations

import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from sfumato.errors import ConfigError, WeightSyncError
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Shards
from sfumato.runtime.weight_sync import transports
from sfumato.runtime.weight_sync.buckets import NUM_SLOTS, Bucket, Source, largest_bytes
from sfumato.runtime.weight_sync.places import GIVEN_UP, open_store, reach_store, wait_for, wait_for_all
from sfumato.runtime.weight_sync.transports import Ends, Settings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

DEVICE = 6
"""Index of the argument of torch's rebuild_cuda_tensor that is the GPU's number, which differs between processes."""

Handle = str | tuple[Callable[..., torch.Tensor], tuple[object, ...]]
"""Path of a mapped file, or what torch.multiprocessing's ``reduce_tensor`` returns for a tensor on a GPU."""


@dataclass(frozen=True)
class Access:
    """How the sampler's ranks find store and memory."""

    address: tuple[str, int]
    ranks: tuple[int, ...]
    """Ranks of the sampler that take weights."""
    sources: tuple[int, ...]
    """For each of them the actor rank that it takes weights from."""
    handles: tuple[tuple[Handle, ...], ...]
    """For each of them handles of the slots: its own ones, since CUDA counts the users of each handle."""
    num_bytes: int
    """Bytes of a slot."""


def match(ends: Ends) -> tuple[int, ...]:
    """For each rank of the sampler that takes weights an actor rank that it can share memory with; several share the
    load.

    Raises:
        ConfigError: when there is none for some rank.
    """
    sources = []
    for rank, place in zip(ends.ranks, ends.taking, strict=True):
        neighbours = ends.neighbours(rank)
        if not neighbours:
            raise ConfigError(
                f"runtime.weight_sync ipc needs an actor process on the {'GPU' if place.gpu else 'machine'} of each "
                f"sampler process; the sampler's rank {rank} ({place}) has none: set it to broadcast or files"
            )
        sources.append(neighbours[rank % len(neighbours)])
    return tuple(sources)


class Sending(transports.Sending):
    """The actor's side. Ranks that sampler ranks read from ("takers") fill the memory; the others only gather."""

    streams = True

    def __init__(self, settings: Settings, mesh: Mesh, buckets: Sequence[Bucket], ends: Ends) -> None:
        self.settings = settings
        self.mesh = mesh
        self.buckets = buckets
        sources = match(ends)
        self.receivers = ends.ranks
        self.takers = [rank for rank, source in zip(self.receivers, sources, strict=True) if source == mesh.rank]
        places = [*ends.senders, *ends.taking]
        self.store: TCPStore | None
        self.store, address = open_store(places, settings.timeout_s) if mesh.is_first else (None, None)
        address = mesh.first(address, among="world")
        if self.store is None:
            self.store = reach_store(address, settings.timeout_s)
        self.stop = threading.Event()
        num_bytes = largest_bytes(buckets)
        self.paths: list[Path] = []
        self.slots = [self._allocate_slot(num_bytes) for _ in range(NUM_SLOTS if self.takers else 0)]
        rank_handles = {
            rank: tuple(map(str, self.paths)) or tuple(reduce_tensor(slot) for slot in self.slots)
            for rank in self.takers
        }
        handles = {rank: slots for part in _gather_handles(rank_handles, mesh) for rank, slots in part.items()}
        ordered = tuple(handles[rank] for rank in self.receivers)
        self._access = Access(address, self.receivers, sources, ordered, num_bytes)

    def _allocate_slot(self, num_bytes: int) -> torch.Tensor:
        """Memory of a bucket, uint8 ``[num_bytes]``: on the GPU, or a new mapped file."""
        if self.mesh.device.type == "cuda":
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.mesh.device)
        folder = Path("/dev/shm")
        folder = folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())
        self.paths.append(folder / f"sfumato_weights_{os.getpid()}_{uuid.uuid4().hex}")
        return torch.from_file(str(self.paths[-1]), shared=True, size=num_bytes, dtype=torch.uint8)

    def access(self) -> Access:
        """The handles of all ranks."""
        return self._access

    def join(self) -> None:
        """Waits until all ranks of the sampler have mapped the memory."""
        assert self.store is not None
        names = [f"the sampler's rank {rank}" for rank in self.receivers]
        try:
            wait_for_all(self.store, f"the actor's rank {self.mesh.rank}", names, self.settings.timeout_s, self.stop)
        finally:
            self._unlink_files()

    def send(self, version: int, source: Source) -> None:
        """Gathers one bucket after the other into memory that the takers read."""
        for number, bucket in enumerate(self.buckets):
            if self.takers and number >= NUM_SLOTS:
                self._wait(version, number - NUM_SLOTS)
            source.gather(bucket, self.slots[number % NUM_SLOTS] if self.takers else None)
            if self.takers:
                if self.mesh.device.type == "cuda":  # the store is faster than the copies on the GPU
                    torch.cuda.synchronize(self.mesh.device)
                assert self.store is not None
                self.store.set(_filled_key(version, number, self.mesh.rank), "1")
        # Each bucket was waited for when its slot was needed again, but for the last ones.
        for number in range(max(0, len(self.buckets) - NUM_SLOTS), len(self.buckets)) if self.takers else ():
            self._wait(version, number)

    def _wait(self, version: int, number: int) -> None:
        """Waits until all takers have read a bucket, and removes its keys from the store."""
        keys = [_taken_key(version, number, rank) for rank in self.takers]
        _wait(self.store, keys, version, "the sampler", self.settings.timeout_s, self.stop)
        assert self.store is not None
        for key in (*keys, _filled_key(version, number, self.mesh.rank)):
            self.store.delete_key(key)

    def abort(self) -> None:
        """Ends a wait for the sampler with an error."""
        self.stop.set()

    def close(self) -> None:
        """Frees the memory."""
        self._unlink_files()
        self.slots = []
        self.store = None

    def _unlink_files(self) -> None:
        """Removes the names of mapped files; their memory lives as long as a process has it mapped."""
        while self.paths:
            self.paths.pop().unlink(missing_ok=True)


def _gather_handles(rank_handles: dict[int, Any], mesh: Mesh) -> list[dict[int, tuple[Handle, ...]]]:
    """Gathers the handles of all ranks. Handles of a GPU's memory contain functions, so they need a pickling gather."""
    if mesh.device.type != "cuda" or mesh.size == 1:
        return mesh.gather(rank_handles, over="world")
    handles_by_rank: list[dict[int, tuple[Handle, ...]]] = [{}] * mesh.size
    dist.all_gather_object(handles_by_rank, rank_handles, group=mesh.group("world"))
    return handles_by_rank


class Receiving(transports.Receiving):
    """The sampler's side."""

    def __init__(
        self, access: Access, settings: Settings, mesh: Mesh, buckets: Sequence[Bucket], shards: Shards | None
    ) -> None:
        del shards
        self.settings = settings
        self.mesh = mesh
        self.buckets = buckets
        self.access = access
        self.number = access.ranks.index(mesh.rank)
        """Of this rank among those that take weights."""
        self.source = access.sources[self.number]
        self.store: TCPStore | None = reach_store(access.address, settings.timeout_s)
        self.slots: list[torch.Tensor] = []
        self.stop = threading.Event()

    def join(self) -> None:
        """Maps the memory, and tells the actor's rank."""
        assert self.store is not None
        self.slots = [self._map(handle) for handle in self.access.handles[self.number]]
        name = f"the sampler's rank {self.mesh.rank}"
        wait_for_all(self.store, name, [f"the actor's rank {self.source}"], self.settings.timeout_s, self.stop)

    def _map(self, handle: Handle) -> torch.Tensor:
        """Maps a slot of the actor's rank. Raises WeightSyncError when it cannot be reached from here."""
        where = f"the sampler's rank {self.mesh.rank} cannot see the memory of the actor's rank {self.source}"
        remedy = "set runtime.weight_sync to broadcast or files"
        if isinstance(handle, str):
            if not Path(handle).is_file():  # from_file would make it
                raise WeightSyncError(f"{where}: there is no {handle} here; {remedy}")
            return torch.from_file(handle, shared=True, size=self.access.num_bytes, dtype=torch.uint8)
        rebuild, arguments = handle
        try:
            device_index = self.mesh.device.index
            return rebuild(*(device_index if index == DEVICE else argument for index, argument in enumerate(arguments)))
        except RuntimeError as error:
            raise WeightSyncError(f"{where}: {error}; {remedy}") from error

    def receive_tensors(self, version: int, delivery: None) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, as views of the memory that the actor fills."""
        del delivery
        for number, bucket in enumerate(self.buckets):
            key = _filled_key(version, number, self.source)
            _wait(self.store, [key], version, "the actor", self.settings.timeout_s, self.stop)
            yield from bucket.tensors(self.slots[number % NUM_SLOTS])
            if self.mesh.device.type == "cuda":
                # What loads the tensors may still copy from the slot, which the actor is about to fill again.
                torch.cuda.current_stream(self.mesh.device).synchronize()
            assert self.store is not None
            self.store.set(_taken_key(version, number, self.mesh.rank), "1")

    def give_up(self) -> None:
        """Tells the actor not to wait for this rank."""
        with suppress(dist.DistNetworkError):  # the actor is lost, and waits for nobody
            if self.store is not None:
                self.store.set(GIVEN_UP, "1")

    def close(self) -> None:
        """Unmaps the memory."""
        self.slots = []
        self.store = None


def _filled_key(version: int, number: int, rank: int) -> str:
    """Key of the store that an actor rank sets when a bucket is in memory."""
    return f"{version}/{number}/filled by {rank}"


def _taken_key(version: int, number: int, rank: int) -> str:
    """Key of the store that a sampler rank sets when it has read a bucket."""
    return f"{version}/{number}/taken by {rank}"


def _wait(
    store: Store | None, keys: list[str], version: int, other: str, timeout_s: float, stop: threading.Event
) -> None:
    """Waits for keys that the ``other`` role sets. Raises WeightSyncError when that gives up, is lost or too late."""
    if store is None:
        raise WeightSyncError("the roles are not connected (any more): WeightSync.reconnect() first")
    try:
        lacking = wait_for(store, keys, timeout_s, stop)
        error = None
    except dist.DistNetworkError as lost:
        lacking = keys
        error = lost
    if lacking:
        why = "has gone" if error else f"gave up, or did nothing for {timeout_s:g} s"
        raise WeightSyncError(
            f"version {version}: {other} did not go on with the weights: it {why}; "
            "WeightSync.reconnect() when both live"
        ) from error
