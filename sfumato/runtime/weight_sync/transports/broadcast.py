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
from concurrent.futures import Future, ThreadPoolExecutor
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
from sfumato.runtime.weight_sync.buckets import NUM_SLOTS, Bucket, Source, empty_slots
from sfumato.runtime.weight_sync.places import open_store, reach_store, wait_for_all
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
    ranks: tuple[int, ...]
    """Ranks of the sampler that take weights."""
    backend: str


class _Group:
    """One process's membership of the group: rank 0 is the actor's first rank, the others are the sampler's ranks."""

    def __init__(self, store: Store, rank: int, access: Access, mesh: Mesh, buckets: Sequence[Bucket]) -> None:
        self.device = mesh.device if access.backend == "nccl" else torch.device("cpu")
        self.slots = empty_slots(buckets, self.device)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        """Sends or receives a bucket while another is gathered, or loaded."""
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
        return self.names[self.rank]

    @property
    def names(self) -> list[str]:
        """Names of all members, by rank."""
        return ["the actor", *(f"the sampler's rank {rank}" for rank in self.access.ranks)]

    def join(self, timeout_s: float) -> None:
        """Waits for all members, and makes the process group."""
        assert self.store is not None
        size = len(self.names)
        self.timeout_s = timeout_s
        wait_for_all(self.store, self.name, self.names, timeout_s, self.stop)
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
                f"{self.name} could not join the group that sends weights: {_first_sentence(error)}"
            ) from error

    def begin(self, number: int, bucket: Bucket, version: int) -> Future[torch.Tensor]:
        """Sends, or on ranks above 0 receives, a bucket in the slot of its number. The result is that memory.

        What uses the slot on the device must have been launched before.
        """
        self._check_open()
        slot = self.slots[number % NUM_SLOTS]
        is_free = torch.cuda.current_stream(self.device).record_event() if self.stream is not None else None
        return self.thread.submit(self.broadcast, slot, bucket.num_bytes, version, is_free)

    def broadcast(
        self, memory: torch.Tensor, num_bytes: int, version: int, is_free: torch.Event | torch.cuda.Event | None = None
    ) -> torch.Tensor:
        """Sends, or on ranks above 0 receives, the first bytes of a memory, and returns it.

        Args:
            memory: uint8, at least ``num_bytes``.
            num_bytes: of the bucket.
            version: of the weights.
            is_free: the event on the device after which the memory may be read, or filled.

        Raises:
            WeightSyncError: when a rank is lost.
        """
        self._check_open()
        try:
            if self.stream is None:
                self._launch(memory[:num_bytes]).wait()
            else:
                self._broadcast_beside(memory[:num_bytes], is_free)
            return memory
        except RuntimeError as error:
            other = "the actor" if self.rank else "a rank of the sampler"
            raise WeightSyncError(
                f"version {version}: {self.name} lost {other} while weights were sent ({_first_sentence(error)}); "
                "WeightSync.reconnect() when both live"
            ) from error

    def _check_open(self) -> None:
        if self.group is None:
            raise WeightSyncError(f"{self.name} is not connected (any more): WeightSync.reconnect() first")

    def _launch(self, memory: torch.Tensor) -> dist.Work:
        """Starts the broadcast; on GPUs in the current stream."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        # torch's stubs lack the methods of the backends.
        return cast("Any", self.group).broadcast([memory], options)

    def _broadcast_beside(self, memory: torch.Tensor, is_free: torch.Event | torch.cuda.Event | None) -> None:
        """Broadcasts beside other work of the GPU.

        Raises:
            WeightSyncError: when another rank does not come.
            RuntimeError: when the broadcast does not end in time.
        """
        assert self.store is not None
        assert self.stream is not None
        self.num_sent += 1
        names = [f"{name}, bucket {self.num_sent}" for name in self.names]
        wait_for_all(self.store, names[self.rank], names, self.timeout_s, self.stop)
        if self.rank == 0:  # everybody is at this meeting, so nobody reads the keys of the one before
            for name in self.names:
                self.store.delete_key(f"here/{name}, bucket {self.num_sent - 1}")
        if is_free is not None:
            self.stream.wait_event(is_free)
        with torch.cuda.stream(self.stream):
            self._launch(memory).wait()
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
        self.slots = []
        self.thread.shutdown(wait=False, cancel_futures=True)


class Sending(transports.Sending):
    """The actor's side. Only its first rank sends; the others take part in gathering."""

    streams = True

    def __init__(self, settings: Settings, mesh: Mesh, buckets: Sequence[Bucket], ends: Ends) -> None:
        self.settings = settings
        self.buckets = buckets
        self.group: _Group | None = None
        if not mesh.is_first:
            return
        store, address = open_store([ends.senders[0], *ends.taking], settings.timeout_s)
        gpus = [place.gpu for place in (ends.senders[0], *ends.taking)]
        backend = "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"  # NCCL wants a GPU for each rank
        self.group = _Group(store, 0, Access(address, ends.ranks, backend), mesh, buckets)

    def access(self) -> Access | None:
        """Address of the store, and size and backend of the group; None on other ranks than the first."""
        return self.group.access if self.group else None

    def join(self) -> None:
        """Waits for all ranks of the sampler."""
        if self.group:
            self.group.join(self.settings.timeout_s)

    def send(self, version: int, source: Source) -> None:
        """Broadcasts one bucket while the next is gathered."""
        sending: Future[torch.Tensor] | None = None
        for number, bucket in enumerate(self.buckets):
            # Its slot is free: the broadcast of the bucket two before has ended, see below.
            source.gather(bucket, self.group.slots[number % NUM_SLOTS] if self.group else None)
            if sending is not None:
                sending.result()
            sending = self.group.begin(number, bucket, version) if self.group else None
        if sending is not None:
            sending.result()

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
        self.group = _Group(store, access.ranks.index(mesh.rank) + 1, access, mesh, buckets)

    def join(self) -> None:
        """Waits for the actor and the other ranks."""
        self.group.join(self.settings.timeout_s)

    def receive_tensors(self, version: int, delivery: None) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, as views of the memory of a bucket, while the next one comes."""
        del delivery
        coming = [self.group.begin(0, self.buckets[0], version)] if self.buckets else []
        for number, bucket in enumerate(self.buckets):
            memory = coming.pop().result()
            if number + 1 < len(self.buckets):
                coming.append(self.group.begin(number + 1, self.buckets[number + 1], version))
            yield from bucket.tensors(memory)

    def give_up(self) -> None:
        """Leaves the group, which makes the broadcasts of all other ranks fail."""
        self.group.close()

    def close(self) -> None:
        """Leaves the group."""
        self.group.close()


def _first_sentence(error: RuntimeError) -> str:
    """The first sentence of an error of gloo or NCCL, without positions in their source files. The whole text is in the
    cause."""
    return re.sub(r"\[[^\]]*\.(cc|h|cpp|hpp):\d+\] *", "", str(error).splitlines()[0]).partition(". ")[0]
