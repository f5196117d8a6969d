"""Heartbeats: each rank of a run writes to the store where they have met, so that the others see whether it lives.

Process groups report nothing while a network is down, and at most an address when a process has ended.

Rank 0, which keeps the store, reads all heartbeats and writes a notice of the ranks that are silent, which is all that
the others read. So a second of heartbeats costs O(ranks) messages and bytes; were each rank to read all the others', it
would be O(ranks^2).
"""

# torch.distributed offers its stores without naming them in __all__.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
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
MOST_NAMED = 16
"""Silent ranks that a notice names, so that it stays small when half of a cluster is gone; others are counted."""
NOTICE = "sfumato/notice"
"""Key of the notice in the store."""

_watching: Peers | None = None


@dataclass
class Notice:
    """What rank 0 tells the others about all ranks."""

    count: int = 0
    """Which heartbeat of rank 0 it belongs to."""
    host: str = ""
    """Of rank 0."""
    has_left: bool = False
    """Whether rank 0 ends normally."""
    silent: list[tuple[int, str, float]] = field(default_factory=list)
    """Ranks that rank 0 has not heard of for ``LOST_S``: rank, host (empty: it was never heard) and seconds."""
    num_others: int = 0
    """Further ranks that are silent."""


class Heartbeats:
    """The heartbeats of one rank, and what it knows of the others. It has no threads: somebody calls
    ``write_heartbeat`` once a second.

    All times are of this process's clock, so that no clocks are compared.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.hosts = {rank: socket.gethostname()}
        now = time.monotonic()
        self.answered = now
        """When the store last answered."""
        self.notice = Notice()
        """The last notice of rank 0."""
        self._noticed = now
        """When it was written, or read."""
        self._count = 0
        # On rank 0, by rank: the last heartbeat as it stands in the store, and when a new one was last read.
        self._signs: dict[int, bytes] = {}
        self._heard = dict.fromkeys(range(1, size), now) if rank == 0 else {}

    def write_heartbeat(self, store: dist.Store, is_last: bool = False) -> None:
        """Writes a heartbeat, and reads what is to be known of the others.

        Args:
            store: where the ranks meet.
            is_last: whether this rank ends normally.
        """
        self._count += 1
        store.set(_heartbeat_key(self.rank), f"{LEFT if is_last else self._count} {self.hosts[self.rank]}")
        if self.rank == 0:
            self._read_heartbeats(store)
            self.notice = self._write_notice(is_last)
            self._noticed = time.monotonic()
            store.set(NOTICE, json.dumps(asdict(self.notice)))
        elif self.notice.count or store.check([NOTICE]):
            self._read_notice(Notice(**json.loads(store.get(NOTICE))))
        self.answered = time.monotonic()

    @property
    def has_heard(self) -> bool:
        """Whether this rank knows something of the others: rank 0 of all of them, another one of rank 0."""
        return len(self._signs) == self.size - 1 if self.rank == 0 else self.notice.count > 0

    def silences(self) -> dict[int, float]:
        """Seconds since a sign of life by rank, of those that have not been heard of for ``LOST_S``."""
        now = time.monotonic()
        if self.rank == 0:
            heard_at = list(self._heard.items())  # the thread that reads heartbeats may remove some meanwhile
            return {rank: now - heard for rank, heard in heard_at if now - heard > LOST_S}
        named = {rank: seconds + now - self._noticed for rank, _, seconds in self.notice.silent if rank != self.rank}
        # Without the store, or while rank 0 writes nothing, no other rank can be heard.
        unheard_s = now - min(self.answered, self._noticed)
        return named if self.notice.has_left or unheard_s <= LOST_S else {0: unheard_s, **named}

    def name(self, rank: int) -> str:
        """Rank and host."""
        return f"rank {rank} on {self.hosts[rank]}" if rank in self.hosts else f"rank {rank}"

    def _read_heartbeats(self, store: dist.Store) -> None:
        """On rank 0: reads the heartbeats of all ranks that have not left."""
        heard_ranks = [rank for rank in self._heard if rank in self._signs or store.check([_heartbeat_key(rank)])]
        heartbeats = store.multi_get([_heartbeat_key(rank) for rank in heard_ranks]) if heard_ranks else []
        for rank, heartbeat in zip(heard_ranks, heartbeats, strict=True):
            if heartbeat == self._signs.get(rank):
                continue
            self._signs[rank] = heartbeat
            word, _, self.hosts[rank] = heartbeat.decode().partition(" ")
            if word == LEFT:
                del self._heard[rank]
            else:
                self._heard[rank] = time.monotonic()

    def _write_notice(self, is_last: bool) -> Notice:
        silences = self.silences()
        named = sorted(silences)[:MOST_NAMED]
        silent = [(rank, self.hosts.get(rank, ""), round(silences[rank], 2)) for rank in named]
        return Notice(self._count, self.hosts[0], is_last, silent, len(silences) - len(named))

    def _read_notice(self, notice: Notice) -> None:
        if notice.count != self.notice.count or notice.has_left:
            self._noticed = time.monotonic()
        self.notice = notice
        self.hosts[0] = notice.host
        self.hosts |= {rank: host for rank, host, _ in notice.silent if host and rank != self.rank}


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
        self.heartbeats = Heartbeats(rank, size)
        self._connect = connect
        self._say = say
        self._silent: dict[int, float] = {}
        """Since when the ranks are silent that were reported as such."""
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._exchange_heartbeats, self._report_silence)
        ]
        for thread in self._threads:
            thread.start()

    def lost(self) -> str:
        """The ranks that were lost, as text; empty when unknown. Takes a little longer than ``LOST_S``."""
        heartbeats = self.heartbeats
        # A rank's last heartbeat, rank 0's reading of it, its notice and the reading of that may each be a beat apart.
        deadline = time.monotonic() + LOST_S + (4 if heartbeats.rank else 2) * BEAT_S
        while time.monotonic() < deadline and (heartbeats.rank == 0 or not heartbeats.notice.silent):
            time.sleep(BEAT_S / 2)
        # Rank 0 may end before the others have waited as long: they keep what it noticed, also of ranks of one machine.
        time.sleep(BEAT_S if heartbeats.notice.silent else 0)
        silences = heartbeats.silences()
        is_store_gone = time.monotonic() - heartbeats.answered > LOST_S
        if is_store_gone and heartbeats.rank == 0:
            return ""
        if is_store_gone and set(silences) == {0}:
            return f"{heartbeats.name(0)}, which kept the store of the run, and maybe others"
        lost_ranks = [
            f"{heartbeats.name(rank)} (not heard of for {seconds:.0f} s)"
            for rank, seconds in sorted(silences.items())[:MOST_NAMED]
        ]
        if num_others := heartbeats.notice.num_others:
            lost_ranks.append(f"{num_others} other ranks")
        return ", ".join(lost_ranks)

    def leave(self) -> None:
        """Tells the others that this rank ends normally, so that they do not take it for lost."""
        self._stop.set()
        self._threads[0].join(2 * BEAT_S)

    def _exchange_heartbeats(self) -> None:
        while not self._stop.is_set():
            try:
                store = self._connect()
                while True:
                    is_last = self._stop.is_set()
                    self.heartbeats.write_heartbeat(store, is_last)
                    if is_last:
                        return
                    self._stop.wait(BEAT_S)
            except (dist.DistError, RuntimeError):  # the network is down, or rank 0 has ended
                self._stop.wait(BEAT_S)

    def _report_silence(self) -> None:
        heartbeats = self.heartbeats
        while self._say is not None and not self._stop.wait(BEAT_S):
            now = time.monotonic()
            since = dict(sorted(heartbeats.silences().items())[:MOST_NAMED])
            for rank, seconds in since.items():
                if seconds > SILENT_S and rank not in self._silent:
                    self._silent[rank] = now - seconds
                    self._say(
                        f"{heartbeats.name(rank)} is silent since {seconds:.0f} s: is its machine or the network down?"
                    )
            if len(since) == MOST_NAMED or 0 in since:
                continue  # a rank that is not among these may be silent all the same
            for rank, began in list(self._silent.items()):
                if since.get(rank, 0.0) < SILENT_S / 2:
                    del self._silent[rank]
                    self._say(f"{heartbeats.name(rank)} is heard again, after {now - began:.0f} s")


def _heartbeat_key(rank: int) -> str:
    """Key of a rank's heartbeat in the store."""
    return f"sfumato/alive/{rank}"


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
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])

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
