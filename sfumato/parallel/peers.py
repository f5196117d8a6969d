"""Heartbeats: each rank of a run writes to the store where they have met, so that the others see whether it lives.

Process groups report nothing while a network is down, and at most an address when a process has ended.
"""

# torch.distributed offers its stores without naming them in __all__.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

BEAT_S = 1.0
"""Seconds between two heartbeats."""
SILENT_S = 10.0
"""Seconds without a heartbeat after which a rank is reported as silent."""
LOST_S = 3.0
"""Seconds without a heartbeat after which, once a connection has failed, a rank is named as the one that was lost."""
CONNECT_S = 30.0
"""Longest wait for an answer of the store; then a new connection is made."""
LEFT = "left"
"""The last heartbeat of a rank that ends normally."""

_watching: Peers | None = None


class Peers:
    """Heartbeats of all ranks, in two threads: one talks to the store, the other reports silence, also the store's."""

    def __init__(
        self, connect: Callable[[], dist.Store], rank: int, size: int, say: Callable[[str], None] | None
    ) -> None:
        """Starts both threads.

        Args:
            connect: makes a connection to the store, which lives in rank 0.
            rank: of this process.
            size: number of ranks.
            say: gets messages about ranks that are silent or heard again; None where another rank reports them.
        """
        self._connect = connect
        self.rank = rank
        self.size = size
        self._say = say
        self._hosts = {rank: socket.gethostname()}
        self._signs: dict[int, bytes] = {}
        """The last heartbeat of each rank, as it stands in the store."""
        self._heard = dict.fromkeys(range(size), time.monotonic())
        """When the last new heartbeat of each rank was read; this process's clock, so that no clocks are compared."""
        self._answered = time.monotonic()
        """When the store last answered."""
        self._silent: dict[int, float] = {}
        """Since when the ranks are silent that were reported as such."""
        self._has_left: set[int] = set()
        self._stop = threading.Event()
        self._count = 0
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._talk, self._report_silence)]
        for thread in self._threads:
            thread.start()

    def lost(self) -> str:
        """The ranks that were lost, as text; empty when unknown. Takes a little longer than ``LOST_S``."""
        time.sleep(LOST_S + 2 * BEAT_S)
        now = time.monotonic()
        if now - self._answered > LOST_S:
            return "" if self.rank == 0 else f"{self.name(0)}, which kept the store of the run, and maybe others"
        lost_ranks = [rank for rank in self._others() if now - self._heard[rank] > LOST_S]
        return ", ".join(f"{self.name(rank)} (not heard of for {now - self._heard[rank]:.0f} s)" for rank in lost_ranks)

    def leave(self) -> None:
        """Tells the others that this rank ends normally, so that they do not take it for lost."""
        self._stop.set()
        self._threads[0].join(2 * BEAT_S)

    def name(self, rank: int) -> str:
        """Rank and host."""
        return f"rank {rank} on {self._hosts[rank]}" if rank in self._hosts else f"rank {rank}"

    def _others(self) -> list[int]:
        """The other ranks that have not left."""
        return [rank for rank in range(self.size) if rank != self.rank and rank not in self._has_left]

    def _talk(self) -> None:
        while not self._stop.is_set():
            try:
                self._send_heartbeats(self._connect())
            except (
                dist.DistError,
                RuntimeError,
            ):  # the network is down, or rank 0 has ended
                self._stop.wait(BEAT_S)

    def _send_heartbeats(self, store: dist.Store) -> None:
        keys = [f"sfumato/alive/{rank}" for rank in range(self.size)]
        while True:
            is_last = self._stop.is_set()
            self._count += 1
            store.set(keys[self.rank], f"{LEFT if is_last else self._count} {self._hosts[self.rank]}")
            heard_ranks = [rank for rank in self._others() if rank in self._signs or store.check([keys[rank]])]
            heartbeats = store.multi_get([keys[rank] for rank in heard_ranks]) if heard_ranks else []
            for rank, heartbeat in zip(heard_ranks, heartbeats, strict=True):
                if heartbeat != self._signs.get(rank):
                    self._signs[rank] = heartbeat
                    self._heard[rank] = time.monotonic()
                    word, _, self._hosts[rank] = heartbeat.decode().partition(" ")
                    if word == LEFT:
                        self._has_left.add(rank)
            self._answered = time.monotonic()
            if is_last:
                return
            self._stop.wait(BEAT_S)

    def _report_silence(self) -> None:
        while self._say is not None and not self._stop.wait(BEAT_S):
            now = time.monotonic()
            store_s = now - self._answered
            since = {rank: now - self._heard[rank] for rank in self._others()}
            if self.rank and store_s > SILENT_S:  # without the store no rank can be heard: only rank 0 is reported
                since = {0: store_s}
            for rank, seconds in since.items():
                if seconds > SILENT_S and rank not in self._silent:
                    self._silent[rank] = now - seconds
                    self._say(f"{self.name(rank)} is silent since {seconds:.0f} s: is its machine or the network down?")
            for rank, began in list(self._silent.items()):
                if since.get(rank, 0.0) < SILENT_S / 2:
                    del self._silent[rank]
                    self._say(f"{self.name(rank)} is heard again, after {now - began:.0f} s")


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error means that ranks could not reach each other.

    Gloo raises a plain RuntimeError that names its source file. The exact class is asked for, since sfumato's own
    errors may quote one of gloo about other processes, such as those that weights are sent to.
    """
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo/transport" in str(error))


def watch_peers(rank: int, size: int, say: Callable[[str], None]) -> None:
    """Starts heartbeats among the ranks of a run on several nodes, for as long as the process lives.

    On a single node nothing is started: the launcher there sees how each rank ends.

    Args:
        rank: of this process.
        size: number of ranks.
        say: as of ``Peers``; used by the first rank of each node.
    """
    global _watching
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) == size or _watching is not None:
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def connect() -> dist.Store:
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=CONNECT_S))

    _watching = Peers(connect, rank, size, say if os.environ.get("LOCAL_RANK", "0") == "0" else None)


def lost_peers() -> str:
    """As ``Peers.lost``; empty where there are no heartbeats."""
    return "" if _watching is None else _watching.lost()


def leave_peers() -> None:
    """As ``Peers.leave``."""
    if _watching is not None:
        _watching.leave()
