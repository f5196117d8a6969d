"""Transport from the actor's first rank to all ranks of the sampler, by broadcasts in a process group: NCCL or gloo.

The group is made from a store directly: the two roles have different default groups, which stay as they are.

With NCCL a bucket is sent while the sampler draws, whose ranks run collectives of their own on the same GPUs. Kernels
of two groups that wait for each other's resources could wait for ever, and a kernel that waits for a dead process
reports nothing to the host. So a broadcast is launched only when all ranks have come to it, it uses few thread blocks
and a stream of its own, and the host polls whether it has ended, for as long as a sync may take.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from sfumato.errors import WeightSyncError
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.rendezvous import bound_to_loopback, is_loopback
from sfumato.parallel.shards import Shards
from sfumato.runtime.weight_sync import transports
from sfumato.runtime.weight_sync.buckets import Bucket, Source, largest
from sfumato.runtime.weight_sync.places import meet, open_store, reach_store
from sfumato.runtime.weight_sync.transports import Ends, Settings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MAX_CTAS = 4
"""Most thread blocks of NCCL's kernels of a broadcast: a GPU has room for more than a hundred."""

POLL_S = 0.002
"""Seconds between two checks whether a broadcast has ended."""


@dataclass(frozen=True)
class Access:
    """How the sampler's ranks join the group."""

    address: tuple[str, int]
    num_receivers: int
    backend: str


class _Group:
    """One process's membership of the group: rank 0 is the actor's first rank, the others are the sampler's ranks."""

    def __init__(self, store: Store, rank: int, access: Access, mesh: Mesh, buckets: Sequence[Bucket]) -> None:
        self.device = mesh.device if access.backend == "nccl" else torch.device("cpu")
        self.memory = torch.empty(largest(tuple(buckets)), dtype=torch.uint8, device=self.device)
        self.store: Store | None = store
        self.rank = rank
        self.access = access
        self.group: dist.ProcessGroupGloo | dist.ProcessGroupNCCL | None = None
        self.stop = threading.Event()
        self.timeout_s = 0.0  # set by ``join``
        self.num_sent = 0  # broadcasts so far
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @property
    def name(self) -> str:
        return f"the sampler's rank {self.rank - 1}" if self.rank else "the actor"

    @property
    def names(self) -> list[str]:
        """Names of all members, by rank."""
        return ["the actor", *(f"the sampler's rank {rank}" for rank in range(self.access.num_receivers))]

    def join(self, timeout_s: float) -> None:
        """Waits for all members, and makes the process group."""
        assert self.store is not None
        size = self.access.num_receivers + 1
        self.timeout_s = timeout_s
        meet(self.store, self.name, self.names, timeout_s, self.stop)
        store = dist.PrefixStore("weights", self.store)  # pyright: ignore[reportPrivateImportUsage]
        timeout = timedelta(seconds=timeout_s)
        try:
            if self.access.backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                options.config.max_ctas = MAX_CTAS
                with torch.cuda.device(self.device):
                    self.group = dist.ProcessGroupNCCL(store, self.rank, size, options)
            else:
                with bound_to_loopback() if is_loopback(self.access.address[0]) else nullcontext():
                    self.group = dist.ProcessGroupGloo(store, self.rank, size, timeout)
        except RuntimeError as error:
            raise WeightSyncError(
                f"{self.name} could not join the group that sends weights: {_reason(error)}"
            ) from error

    def broadcast(self, num_bytes: int, version: int) -> None:
        """Sends, or on ranks above 0 receives, the first bytes of ``memory``.

        Raises:
            WeightSyncError: when a rank is lost.
        """
        if self.group is None:
            raise WeightSyncError(f"{self.name} is not connected (any more): WeightSync.reconnect() first")
        try:
            if self.stream is None:
                self._begin(num_bytes).wait()
            else:
                self._broadcast_beside(num_bytes)
        except RuntimeError as error:
            other = "the actor" if self.rank else "a rank of the sampler"
            raise WeightSyncError(
                f"version {version}: {self.name} lost {other} while weights were sent ({_reason(error)}); "
                "WeightSync.reconnect() when both live"
            ) from error

    def _begin(self, num_bytes: int) -> dist.Work:
        """Starts the broadcast; on GPUs in the current stream."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        # torch's stubs lack the methods of the backends.
        return cast("Any", self.group).broadcast([self.memory[:num_bytes]], options)

    def _broadcast_beside(self, num_bytes: int) -> None:
        """Broadcasts beside other work of the GPU.

        Raises:
            WeightSyncError: when another rank does not come.
            RuntimeError: when the broadcast does not end in time.
        """
        assert self.store is not None
        assert self.stream is not None
        self.num_sent += 1
        names = [f"{name}, bucket {self.num_sent}" for name in self.names]
        meet(self.store, names[self.rank], names, self.timeout_s, self.stop)
        if self.rank == 0:  # everybody is at this meeting, so nobody reads the keys of the one before
            for name in self.names:
                self.store.delete_key(f"here/{name}, bucket {self.num_sent - 1}")
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # what filled this memory, or read it
        with torch.cuda.stream(self.stream):
            self._begin(num_bytes).wait()
            ended = self.stream.record_event()
        deadline = time.monotonic() + self.timeout_s
        while not ended.query():
            if self.stop.is_set() or time.monotonic() > deadline:
                raise RuntimeError(f"the broadcast did not end in {self.timeout_s:g} s")
            time.sleep(POLL_S)

    def abort(self) -> None:
        """Ends waits and, with NCCL, running broadcasts."""
        self.stop.set()
        if self.group is not None and self.access.backend == "nccl":  # its kernels would wait for a lost rank
            self.group.abort()

    def close(self) -> None:
        """Leaves the group and frees the memory."""
        if self.group is not None:
            self.group.shutdown()
        self.group = self.store = None
        self.memory = torch.empty(0, dtype=torch.uint8)


class Sending(transports.Sending):
    """The actor's side. Only its first rank sends; the others take part in gathering."""

    streams = True

    def __init__(self, settings: Settings, mesh: Mesh, buckets: Sequence[Bucket], ends: Ends) -> None:
        self.settings = settings
        self.buckets = buckets
        self.group: _Group | None = None
        if not mesh.is_first:
            return
        store, address = open_store([ends.senders[0], *ends.receivers], settings.timeout_s)
        gpus = [place.gpu for place in (ends.senders[0], *ends.receivers)]
        backend = "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"  # NCCL wants a GPU for each rank
        self.group = _Group(store, 0, Access(address, len(ends.receivers), backend), mesh, buckets)

    def access(self) -> Access | None:
        """Address of the store, and size and backend of the group; None on other ranks than the first."""
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
        """Ends a wait for the sampler with an error. A broadcast by gloo fails by itself when a rank is lost."""
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
        self.settings = settings
        self.buckets = buckets
        store = reach_store(access.address, settings.timeout_s)
        self.group = _Group(store, mesh.rank + 1, access, mesh, buckets)

    def join(self) -> None:
        """Waits for the actor and the other ranks."""
        self.group.join(self.settings.timeout_s)

    def take(self, version: int, delivery: None) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, as views of the memory of the current bucket."""
        del delivery
        for bucket in self.buckets:
            self.group.broadcast(bucket.num_bytes, version)
            yield from bucket.tensors(self.group.memory)

    def give_up(self) -> None:
        """Leaves the group, which makes the broadcasts of all other ranks fail."""
        self.group.close()

    def close(self) -> None:
        """Leaves the group."""
        self.group.close()


def _reason(error: RuntimeError) -> str:
    """The first sentence of an error of gloo or NCCL, without positions in their source files. The whole text is in the
    cause."""
    return re.sub(r"\[[^\]]*\.(cc|h|cpp|hpp):\d+\] *", "", str(error).splitlines()[0]).partition(". ")[0]
