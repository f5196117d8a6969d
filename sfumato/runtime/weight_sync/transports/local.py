"""Within a process: the sender's shards where both sides are cut alike, otherwise wholes that are cut again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Shards, chunks_of, local
from sfumato.runtime.weight_sync import transports
from sfumato.runtime.weight_sync.buckets import Bucket, Source, largest
from sfumato.runtime.weight_sync.transports import Ends, Settings


class Sending(transports.Sending):
    """The actor's side; the sampler's is given this very object."""

    streams = False

    def __init__(self, settings: Settings, mesh: Mesh, buckets: Sequence[Bucket], ends: Ends) -> None:
        del settings, ends
        self.mesh, self.buckets = mesh, buckets
        self.receiver: Shards | None = None
        """How the receiver in this process is cut; it says so when it opens. None takes whole tensors."""
        self.kept: dict[str, torch.Tensor] = {}
        """Memory of the version before, by name. Of a CPU only: there new memory costs several times what filling it
        does, while that of a GPU is kept by its allocator, which others want in the meantime."""

    def access(self) -> Sending:
        """This."""
        return self

    @torch.no_grad()
    def send(self, version: int, source: Source) -> dict[str, torch.Tensor]:
        """Copies of what the receiver in this process needs, by name, in memory that the next version is put into."""
        del version
        items = [item for bucket in self.buckets for item in bucket.items]
        receiver_shards = self.receiver
        differs = receiver_shards is None or any(
            chunks_of(source.shards, item.name) != chunks_of(receiver_shards, item.name) for item in items
        )
        if not self.mesh.any(differs):
            return {
                item.name: self._copy(item.name, local(source.parameters[item.name].detach()), item.spec.dtype)
                for item in items
            }
        memory = torch.empty(largest(self.buckets), dtype=torch.uint8, device=self.mesh.device)
        copies = {}
        for bucket in self.buckets:
            source.gather(bucket, memory)
            for name, whole in bucket.tensors(memory):
                copies[name] = self._copy(name, whole if receiver_shards is None else receiver_shards.shard(name, whole), whole.dtype)
        return copies

    def close(self) -> None:
        """Frees the memory."""
        self.kept = {}

    def _copy(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if name in self.kept:
            return self.kept[name].copy_(tensor)
        copied = tensor.to(dtype, copy=True)
        if self.mesh.device.type == "cpu":
            self.kept[name] = copied
        return copied


class Receiving(transports.Receiving):
    """The sampler's side."""

    gives_shards = True

    def __init__(
        self, access: Sending, settings: Settings, mesh: Mesh, buckets: Sequence[Bucket], shards: Shards | None
    ) -> None:
        del settings, mesh, buckets
        access.receiver = shards

    def take(self, version: int, delivery: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's shards."""
        del version
        yield from delivery.items()
