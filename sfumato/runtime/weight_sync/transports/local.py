"""Transport within a process: it copies the sender's shards if both sides are divided alike; otherwise whole tensors
are gathered, and divided again or, for a receiver that takes them whole, handed over one bucket at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Shards, chunks_of, local_shard
from sfumato.runtime.weight_sync import transports
from sfumato.runtime.weight_sync.buckets import Bucket, Source, largest_bytes
from sfumato.runtime.weight_sync.transports import Ends, Settings


class Sending(transports.Sending):
    """The actor's side; the sampler's side in the same process is given this object itself."""

    streams = False

    def __init__(self, settings: Settings, mesh: Mesh, buckets: Sequence[Bucket], ends: Ends) -> None:
        del settings
        self.mesh = mesh
        self.buckets = buckets
        self.is_taken_here = mesh.rank in ends.ranks
        self.load_whole: Callable[[int, Iterator[tuple[str, torch.Tensor]]], None] | None = None
        """Has the receiver load a version; set when one opens that takes whole tensors."""
        self.receiver: Shards | None = None
        """How the receiver's tensors are divided, set when it opens; None: it takes whole tensors."""
        self.reused: dict[str, torch.Tensor] = {}
        """Memory of the previous version by name, which the next is copied into. On a CPU only: allocating there costs
        several times what filling the memory does. On a GPU the allocator caches memory, which others can use
        meanwhile."""

    def access(self) -> Sending:
        """The object itself."""
        return self

    @torch.no_grad()
    def send(self, version: int, source: Source) -> dict[str, torch.Tensor]:
        """Has a receiver of whole tensors load them. Otherwise copies those that the receiver in this process needs.

        Returns:
            The copies, by name; the next version overwrites them.
        """
        items = [item for bucket in self.buckets for item in bucket.items]
        receiver_shards = self.receiver
        differs = receiver_shards is None or any(
            chunks_of(source.shards, item.name) != chunks_of(receiver_shards, item.name) for item in items
        )
        if not self.mesh.any(differs):  # all ranks decide alike, since gathering is collective
            return {
                item.name: self._copy(item.name, local_shard(source.parameters[item.name].detach()), item.spec.dtype)
                for item in items
            }
        if self.load_whole is not None or not self.is_taken_here:
            self._hand_over(version, source)
            return {}
        memory = torch.empty(largest_bytes(self.buckets), dtype=torch.uint8, device=self.mesh.device)
        copies = {}
        for bucket in self.buckets:
            source.gather(bucket, memory)
            for name, whole in bucket.tensors(memory):
                copies[name] = self._copy(
                    name,
                    whole if receiver_shards is None else receiver_shards.shard(name, whole),
                    whole.dtype,
                )
        return copies

    def _hand_over(self, version: int, source: Source) -> None:
        """Has the receiver load whole tensors while they are gathered; in no process are they all held at once."""
        gathered = self._gather(source)
        try:
            if self.load_whole is not None:
                self.load_whole(version, gathered)
        finally:
            for _ in gathered:  # what was not loaded: the other ranks gather with this one
                pass

    def _gather(self, source: Source) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors, each valid until the next is asked for; none where nobody takes them."""
        memory = None
        if self.is_taken_here:
            memory = torch.empty(largest_bytes(self.buckets), dtype=torch.uint8, device=self.mesh.device)
        for bucket in self.buckets:
            source.gather(bucket, memory)
            if memory is not None:
                yield from bucket.tensors(memory)

    def close(self) -> None:
        """Frees the memory."""
        self.reused = {}

    def _copy(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a tensor, cast to ``dtype``, in the memory of the previous version where that was kept."""
        if name in self.reused:
            return self.reused[name].copy_(tensor)
        copied = tensor.to(dtype, copy=True)
        if self.mesh.device.type == "cpu":
            self.reused[name] = copied
        return copied


class Receiving(transports.Receiving):
    """The sampler's side."""

    gives_shards = True

    def __init__(
        self, access: Sending, settings: Settings, mesh: Mesh, buckets: Sequence[Bucket], shards: Shards | None
    ) -> None:
        del settings, mesh, buckets
        self.access = access
        self.hands_over = shards is None
        access.receiver = shards

    def hand_over_to(self, load: Callable[[int, Iterator[tuple[str, torch.Tensor]]], None]) -> None:
        """Has a receiver of whole tensors load them while they are gathered."""
        self.access.load_whole = load if self.hands_over else None

    def receive_tensors(self, version: int, delivery: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's shards."""
        del version
        yield from delivery.items()
