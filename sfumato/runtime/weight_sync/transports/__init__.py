"""Transports of weights from the actor's processes to the sampler's: one file each, with a class for either side.

What ``Sending.access`` and ``Sending.send`` return goes to the receivers through the driver: addresses, handles and
paths, no weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from sfumato.errors import ConfigError
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Shards
from sfumato.runtime.weight_sync.buckets import Bucket, Source
from sfumato.runtime.weight_sync.places import Place

NAMES = ("local", "broadcast", "ipc", "files")


@dataclass(frozen=True)
class Settings:
    """How weights travel."""

    transport: str = "auto"
    """One of NAMES, or auto."""
    bucket_bytes: int = 256 << 20
    """Most bytes that are gathered and sent at a time."""
    folder: Path | None = None
    """The folder for files: made, and emptied, by the sender."""
    timeout_s: float = 600.0
    """Longest wait of one side for the other."""


@dataclass(frozen=True)
class Ends:
    """The places of both sides' processes, by rank."""

    senders: Sequence[Place]
    receivers: Sequence[Place]
    takers: Sequence[int] | None = None
    """For each receiving rank the one that takes the weights for it; None: each takes its own."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Receiving ranks that take weights."""
        return tuple(sorted(set(range(len(self.receivers)) if self.takers is None else self.takers)))

    @property
    def taking(self) -> list[Place]:
        """Their places."""
        return [self.receivers[rank] for rank in self.ranks]

    @property
    def in_one_process(self) -> bool:
        """Whether each receiving rank runs in the process of the sending rank of the same number."""
        pairs = [(place.machine, place.process) for place in self.senders]
        return pairs == [(place.machine, place.process) for place in self.receivers]

    def neighbours(self, rank: int) -> list[int]:
        """Sending ranks that can share memory with a receiving rank: on its GPU, or without GPUs on its machine."""
        place = self.receivers[rank]
        return [
            index
            for index, other in enumerate(self.senders)
            if (other.machine, other.gpu) == (place.machine, place.gpu)
        ]


class Sending(Protocol):
    """The actor's side; one in each of its processes. Methods that a transport does not need do nothing."""

    streams: ClassVar[bool]
    """Whether receivers take part while it sends; otherwise they begin when it has ended."""

    def __init__(self, settings: Settings, mesh: Mesh, buckets: Sequence[Bucket], ends: Ends) -> None: ...

    def access(self) -> object:
        """What a receiver needs to connect; the first rank's counts."""

    def join(self) -> None:
        """Waits for the receivers, which join at the same time."""

    def send(self, version: int, source: Source) -> object:
        """Sends all buckets. Returns what the driver delivers to the receivers; the first rank's counts."""

    def release(self, version: int) -> None:
        """Called when all receivers have loaded a version."""

    def abort(self) -> None:
        """Ends a wait for receivers with an error; called in another thread."""

    def close(self) -> None:
        """Frees all resources; receivers that wait for it fail at once."""


class Receiving(Protocol):
    """The sampler's side; one in each of its processes. Methods that a transport does not need do nothing."""

    gives_shards: bool = False
    """Whether ``take`` yields this rank's shards, which stay valid until they are applied; otherwise it yields whole
    tensors, which are to be cut or copied at once."""
    hands_over: bool = False
    """Whether the sending side, in this process, calls what ``hand_over_to`` was given, in the place of ``take``."""

    def __init__(
        self, access: Any, settings: Settings, mesh: Mesh, buckets: Sequence[Bucket], shards: Shards | None
    ) -> None: ...

    def hand_over_to(self, load: Callable[[int, Iterator[tuple[str, torch.Tensor]]], None]) -> None:
        """Is told at the beginning what loads a version, from its number and its tensors as ``take`` yields them."""

    def join(self) -> None:
        """Waits for the sender, and for the other receivers."""

    def receive_tensors(self, version: int, delivery: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and tensors; each is valid until the next is asked for. It runs in any thread, and does not use
        the role's process group."""
        ...

    def give_up(self) -> None:
        """Called when this rank cannot go on with a version, so that nobody waits for it."""

    def close(self) -> None:
        """Frees all resources."""


class Bystander(Receiving):
    """Of a rank whose weights another one takes: nothing comes."""

    def __init__(self) -> None:
        pass

    def receive_tensors(self, version: int, delivery: object) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing."""
        del version, delivery
        yield from ()


def choose(name: str, ends: Ends) -> str:
    """Chooses the transport between two roles.

    Raises:
        ConfigError: when there is no transport of that name, or it cannot work between these processes.
    """
    if name == "auto":
        if ends.in_one_process:
            return "local"
        on_gpu = all(place.gpu for place in (*ends.senders, *ends.taking))
        near = all(ends.neighbours(rank) for rank in ends.ranks)
        return "ipc" if on_gpu and near else "broadcast"
    if name not in NAMES:
        raise ConfigError(f"runtime.weight_sync {name!r} is unknown: auto, {', '.join(NAMES)}")
    if name == "local" and not ends.in_one_process:
        raise ConfigError("weights can be handed over within a process only: set runtime.weight_sync to auto")
    if ends.in_one_process and name in ("broadcast", "ipc"):
        raise ConfigError(
            f"runtime.weight_sync {name} is between processes, and actor and sampler are in one: set it to auto"
        )
    return name


def sending_side(name: str) -> type[Sending]:
    """The actor's class of a transport; only its file is imported."""
    return importlib.import_module(f"{__name__}.{name}").Sending


def receiving_side(name: str) -> type[Receiving]:
    """The sampler's class of a transport; only its file is imported."""
    return importlib.import_module(f"{__name__}.{name}").Receiving
