"""The processes of a run as an object that is passed, never a global."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sfumato.config.sections import TrainConfig
from sfumato.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """Data-parallel ranks; with one process every method is the identity."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.rank == 0

    def sum(self, value: float) -> float:
        """Sum of a number over ranks."""
        if self.size == 1:
            return value
        tensor = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return float(tensor)

    def sum_dict(self, values: dict[str, float]) -> dict[str, float]:
        """Sums of named numbers over ranks; a name may be missing on some."""
        total: dict[str, float] = {}
        for part in self.gather(values):
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def any(self, value: bool) -> bool:
        """Whether the value is true on some rank."""
        return self.sum(float(value)) > 0

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def share(self, count: int) -> range:
        """This rank's part of ``count`` items, contiguous and as even as possible."""
        base, extra = divmod(count, self.size)
        start = self.rank * base + min(self.rank, extra)
        return range(start, start + base + (self.rank < extra))

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.size > 1:
            dist.barrier()

    @contextmanager
    def first_rank_first(self) -> Iterator[None]:
        """Rank 0 runs the block before the others: it makes what they then only read."""
        if not self.is_first:
            self.barrier()
        yield
        if self.is_first:
            self.barrier()


def build_mesh(config: TrainConfig) -> Mesh:
    """Joins the process group that torchrun describes, or stands alone.

    Raises ConfigError when a GPU is asked for and there is none.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "train.device is cuda, but torch finds no GPU: install a CUDA build of torch, or set it to auto"
        )
    use_gpu = torch.cuda.is_available() and config.device != "cpu"
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpu else "gloo")
    return Mesh(rank, size, device)


def close_mesh() -> None:
    """Leaves the process group, if this process is in one, together with the others.

    A rank that left while another still writes would break that one's connections.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
