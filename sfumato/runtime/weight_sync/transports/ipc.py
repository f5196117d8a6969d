"""Between processes that share memory: on one GPU by CUDA's handles, without GPUs by a mapped file.

Every actor rank gathers the whole tensors anyway, so each sampler rank takes them from an actor rank beside it. Two
buckets are mapped once, when the roles are connected, and used in turns.
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
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from sfumato.errors import ConfigError, WeightSyncError
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Shards
from sfumato.runtime.weight_sync import transports
from sfumato.runtime.weight_sync.buckets import Bucket, Source, largest
from sfumato.runtime.weight_sync.places import GIVEN_UP, meet, open_store, reach_store, wait_for
from sfumato.runtime.weight_sync.transports import Ends, Settings

NUM_SLOTS = 2
"""Buckets in memory: one is filled while the other is read."""

DEVICE = 6
"""Which argument of torch's rebuild_cuda_tensor is the GPU's number, which differs between processes."""

Handle = str | tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""A path, or what torch.multiprocessing makes of a tensor on a GPU."""


@dataclass(frozen=True)
class Access:
    """How the sampler's ranks find the memory."""

    address: tuple[str, int]
    sources: tuple[int, ...]
    """For each rank of the sampler the actor rank that it takes weights from."""
    handles: tuple[tuple[Handle, ...], ...]
    """For each rank of the sampler its slots: CUDA counts who has each handle."""
    num_bytes: int
    """Bytes of a slot."""


def match(ends: Ends) -> tuple[int, ...]:
    """For each rank of the sampler an actor rank beside it.

    Raises:
        ConfigError: when one has none.
    """
    sources = []
    for rank, place in enumerate(ends.receivers):
        neighbours = ends.neighbours(rank)
        if not neighbours:
            raise ConfigError(
                f"runtime.weight_sync ipc needs an actor process on the {'GPU' if place.gpu else 'machine'} of each "
                f"sampler process; the sampler's rank {rank} ({place}) has none: set it to broadcast or files"
            )
        sources.append(neighbours[rank % len(neighbours)])
    return tuple(sources)


class Sending(transports.Sending):
    """The actor's side; each rank that has takers sends."""

    streams = True

    def __init__(self, settings: Settings, mesh: Mesh, buckets: Sequence[Bucket], ends: Ends) -> None:
        self.settings, self.mesh, self.buckets = settings, mesh, buckets
        sources = match(ends)
        self.takers = [rank for rank, source in enumerate(sources) if source == mesh.rank]
        self.num_receivers = len(sources)
        places = [*ends.senders, *ends.receivers]
        self.store, address = open_store(places, settings.timeout_s) if mesh.is_first else (None, None)
        address = mesh.first(address, among="world")
        if self.store is None:
            self.store = reach_store(address, settings.timeout_s)
        self.stop = threading.Event()
        num_bytes = largest(tuple(buckets))
        self.paths: list[Path] = []
        self.slots = [self._slot(num_bytes) for _ in range(NUM_SLOTS if self.takers else 0)]
        rank_handles = {
            rank: tuple(map(str, self.paths)) or tuple(reduce_tensor(slot) for slot in self.slots)
            for rank in self.takers
        }
        handles = {rank: slots for part in _gather_handles(rank_handles, mesh) for rank, slots in part.items()}
        ordered = tuple(handles[rank] for rank in range(len(sources)))
        self._access = Access(address, sources, ordered, num_bytes)

    def _slot(self, num_bytes: int) -> torch.Tensor:
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
        names = [f"the sampler's rank {rank}" for rank in range(self.num_receivers)]
        try:
            meet(self.store, f"the actor's rank {self.mesh.rank}", names, self.settings.timeout_s, self.stop)
        finally:
            self._unlink()

    def send(self, version: int, source: Source) -> None:
        """Gathers one bucket after the other into memory that the takers read."""
        for number, bucket in enumerate(self.buckets):
            if self.takers and number >= NUM_SLOTS:
                self._wait(version, number - NUM_SLOTS)
            source.gather(bucket, self.slots[number % NUM_SLOTS] if self.takers else None)
            if self.takers:
                if self.mesh.device.type == "cuda":
                    torch.cuda.synchronize(self.mesh.device)
                self.store.set(_filled(version, number, self.mesh.rank), "1")
        for number in range(max(0, len(self.buckets) - NUM_SLOTS), len(self.buckets)) if self.takers else ():
            self._wait(version, number)

    def _wait(self, version: int, number: int) -> None:
        """Until all takers have read a bucket."""
        keys = [_taken(version, number, rank) for rank in self.takers]
        _wait(self.store, keys, version, "the sampler", self.settings.timeout_s, self.stop)
        for key in (*keys, _filled(version, number, self.mesh.rank)):
            self.store.delete_key(key)

    def abort(self) -> None:
        """Breaks off waiting for the sampler."""
        self.stop.set()

    def close(self) -> None:
        """Frees the memory."""
        self._unlink()
        self.slots, self.store = [], None

    def _unlink(self) -> None:
        """Takes the names of mapped files away: the memory lives as long as somebody has it mapped."""
        while self.paths:
            self.paths.pop().unlink(missing_ok=True)


def _gather_handles(rank_handles: dict[int, Any], mesh: Mesh) -> list[dict[int, Any]]:
    """Handles of all ranks: names of files, or what torch makes of a GPU's memory, which holds functions."""
    if mesh.device.type != "cuda" or mesh.size == 1:
        return mesh.gather(rank_handles, over="world")
    handles_by_rank: list[dict[int, Any]] = [{}] * mesh.size
    dist.all_gather_object(handles_by_rank, rank_handles, group=mesh.group("world"))
    return handles_by_rank


class Receiving(transports.Receiving):
    """The sampler's side."""

    def __init__(
        self, access: Access, settings: Settings, mesh: Mesh, buckets: Sequence[Bucket], shards: Shards | None
    ) -> None:
        del shards
        self.settings, self.mesh, self.buckets, self.access = settings, mesh, buckets, access
        self.source = access.sources[mesh.rank]
        self.store = reach_store(access.address, settings.timeout_s)
        self.slots: list[torch.Tensor] = []
        self.stop = threading.Event()

    def join(self) -> None:
        """Maps the memory, and says so."""
        self.slots = [self._map(handle) for handle in self.access.handles[self.mesh.rank]]
        name = f"the sampler's rank {self.mesh.rank}"
        meet(self.store, name, [f"the actor's rank {self.source}"], self.settings.timeout_s, self.stop)

    def _map(self, handle: Handle) -> torch.Tensor:
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

    def take(self, version: int, delivery: None) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, in the memory that the actor has filled."""
        del delivery
        for number, bucket in enumerate(self.buckets):
            key = _filled(version, number, self.source)
            _wait(self.store, [key], version, "the actor", self.settings.timeout_s, self.stop)
            yield from bucket.tensors(self.slots[number % NUM_SLOTS])
            if self.mesh.device.type == "cuda":
                torch.cuda.current_stream(self.mesh.device).synchronize()
            self.store.set(_taken(version, number, self.mesh.rank), "1")

    def give_up(self) -> None:
        """Tells the actor not to wait."""
        with suppress(dist.DistNetworkError):  # it has gone, and waits for nobody
            if self.store is not None:
                self.store.set(GIVEN_UP, "1")

    def close(self) -> None:
        """Lets go of the memory."""
        self.slots, self.store = [], None


def _filled(version: int, number: int, rank: int) -> str:
    return f"{version}/{number}/filled by {rank}"


def _taken(version: int, number: int, rank: int) -> str:
    return f"{version}/{number}/taken by {rank}"


def _wait(
    store: dist.Store | None, keys: list[str], version: int, other: str, timeout_s: float, stop: threading.Event
) -> None:
    if store is None:
        raise WeightSyncError("the roles are not connected (any more): WeightSync.reconnect() first")
    try:
        lacking, error = wait_for(store, keys, timeout_s, stop), None
    except dist.DistNetworkError as lost:
        lacking, error = keys, lost
    if lacking:
        why = "has gone" if error else f"gave up, or did nothing for {timeout_s:g} s"
        raise WeightSyncError(
            f"version {version}: {other} did not go on with the weights: it {why}; "
            "WeightSync.reconnect() when both live"
        ) from error
