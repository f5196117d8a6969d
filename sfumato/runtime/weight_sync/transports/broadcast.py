"""From the actor's first rank to all ranks of the sampler, in a process group of their own: NCCL or gloo.

The group is made from a store directly: the two roles have different default groups, which this leaves alone.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from sfumato.errors import WeightSyncError
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Shards
from sfumato.runtime.weight_sync import transports
from sfumato.runtime.weight_sync.buckets import Bucket, Source, largest
from sfumato.runtime.weight_sync.places import check_reachable, meet, open_store, reach_store
from sfumato.runtime.weight_sync.transports import Ends, Settings


@dataclass(frozen=True)
class Access:
    """How the sampler's ranks find the group."""

    address: tuple[str, int]
    num_receivers: int
    backend: str


class _Group:
    """One process's membership."""

    def __init__(self, store: dist.Store, rank: int, access: Access, mesh: Mesh, buckets: Sequence[Bucket]) -> None:
        self.device = mesh.device if access.backend == "nccl" else torch.device("cpu")
        self.memory = torch.empty(largest(tuple(buckets)), dtype=torch.uint8, device=self.device)
        self.store, self.rank, self.access = store, rank, access
        self.group: dist.ProcessGroupGloo | dist.ProcessGroupNCCL | None = None
        self.stop = threading.Event()

    @property
    def name(self) -> str:
        return f"the sampler's rank {self.rank - 1}" if self.rank else "the actor"

    def join(self, timeout_s: float) -> None:
        size = self.access.num_receivers + 1
        names = ["the actor", *(f"the sampler's rank {rank}" for rank in range(size - 1))]
        meet(self.store, self.name, names, timeout_s, self.stop)
        store, timeout = dist.PrefixStore("weights", self.store), timedelta(seconds=timeout_s)
        try:
            if self.access.backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                with torch.cuda.device(self.device):
                    self.group = dist.ProcessGroupNCCL(store, self.rank, size, options)
            else:
                self.group = dist.ProcessGroupGloo(store, self.rank, size, timeout)
        except RuntimeError as error:
            raise WeightSyncError(
                f"{self.name} could not join the group that sends weights: {_reason(error)}"
            ) from error

    def broadcast(self, num_bytes: int, version: int) -> None:
        if self.group is None:
            raise WeightSyncError(f"{self.name} is not connected (any more): WeightSync.reconnect() first")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            self.group.broadcast([self.memory[:num_bytes]], options).wait()
        except RuntimeError as error:
            other = "the actor" if self.rank else "a rank of the sampler"
            raise WeightSyncError(
                f"version {version}: {self.name} lost {other} while weights were sent ({_reason(error)}); "
                "WeightSync.reconnect() when both live"
            ) from error

    def abort(self) -> None:
        self.stop.set()
        if self.group is not None and self.access.backend == "nccl":  # its kernels would wait for a rank that has gone
            self.group.abort()

    def close(self) -> None:
        if self.group is not None:
            self.group.shutdown()
        self.group = self.store = None
        self.memory = torch.empty(0, dtype=torch.uint8)


class Sending(transports.Sending):
    """The actor's side. Only its first rank sends; the others take part in gathering."""

    streams = True

    def __init__(self, settings: Settings, mesh: Mesh, buckets: Sequence[Bucket], ends: Ends) -> None:
        self.settings, self.buckets = settings, buckets
        self.group: _Group | None = None
        if not mesh.is_first:
            return
        store, address = open_store(settings.timeout_s)
        check_reachable(address[0], [ends.senders[0], *ends.receivers])
        gpus = [place.gpu for place in (ends.senders[0], *ends.receivers)]
        backend = "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"  # NCCL wants a GPU for each rank
        self.group = _Group(store, 0, Access(address, len(ends.receivers), backend), mesh, buckets)

    def access(self) -> Access | None:
        """Where the store is."""
        return self.group.access if self.group else None

    def join(self) -> None:
        """Waits for all ranks of the sampler."""
        if self.group:
            self.group.join(self.settings.timeout_s)

    def send(self, version: int, source: Source) -> None:
        """Gathers and broadcasts one bucket after the other."""
        for bucket in self.buckets:
            source.gather(bucket, self.group.memory if self.group else None)
            if self.group:
                self.group.broadcast(bucket.num_bytes, version)

    def abort(self) -> None:
        """Breaks off waiting for the sampler. A broadcast by gloo ends by itself when one of its ranks has gone."""
        if self.group:
            self.group.abort()

    def close(self) -> None:
        """Leaves the group."""
        if self.group:
            self.group.close()


class Receiving(transports.Receiving):
    """The sampler's side."""

    def __init__(
        self, access: Access, settings: Settings, mesh: Mesh, buckets: Sequence[Bucket], shards: Shards | None
    ) -> None:
        del shards
        self.settings, self.buckets = settings, buckets
        store = reach_store(access.address, settings.timeout_s)
        self.group = _Group(store, mesh.rank + 1, access, mesh, buckets)

    def join(self) -> None:
        """Waits for the actor and the other ranks."""
        self.group.join(self.settings.timeout_s)

    def take(self, version: int, delivery: None) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, in the memory of the current bucket."""
        del delivery
        for bucket in self.buckets:
            self.group.broadcast(bucket.num_bytes, version)
            yield from bucket.tensors(self.group.memory)

    def give_up(self) -> None:
        """Leaves the group, which ends the broadcasts of all others."""
        self.group.close()

    def close(self) -> None:
        """Leaves the group."""
        self.group.close()


def _reason(error: RuntimeError) -> str:
    """The first sentence of what gloo or NCCL say, without the places in their source files; all of it is the cause."""
    return re.sub(r"\[[^\]]*\.(cc|h|cpp|hpp):\d+\] *", "", str(error).splitlines()[0]).partition(". ")[0]
