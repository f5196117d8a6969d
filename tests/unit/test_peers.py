"""Ranks that fall silent are named, those that end by themselves are not."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from sfumato.parallel import peers as peers_module
from sfumato.parallel.peers import MOST_NAMED, Heartbeats, Peers
from sfumato.tracking import exit as ending


class Line:
    """A connection to the store that can be cut."""

    def __init__(self, port: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self.is_up = threading.Event()
        self.is_up.set()

    def __getattr__(self, name: str) -> Any:
        self.is_up.wait(30)
        return getattr(self._store, name)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Peers], list[Line], list[str]]]:
    """Three ranks, of which the first says what it notices."""
    for name, seconds in (("BEAT_S", 0.05), ("SILENT_S", 0.6), ("LOST_S", 0.4)):
        monkeypatch.setattr(peers_module, name, seconds)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lines, said = [Line(server.port) for _ in range(3)], []
    made = [
        Peers(lambda line=line: line, rank, 3, said.append if rank == 0 else None) for rank, line in enumerate(lines)
    ]
    wait_until(lambda: all(peers.heartbeats.has_heard for peers in made))
    yield made, lines, said
    for line, rank_peers in zip(lines, made, strict=True):
        line.is_up.set()
        rank_peers.leave()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_that_is_cut_off_is_named_and_heard_again(ranks: tuple[list[Peers], list[Line], list[str]]) -> None:
    (first, second, third), lines, said = ranks
    lines[2].is_up.clear()
    host = socket.gethostname()
    wait_until(lambda: bool(said))
    assert said[0].startswith(f"rank 2 on {host} is silent since ")
    for rank_peers in (first, second):
        assert rank_peers.lost().startswith(f"rank 2 on {host} (not heard of for ")
    assert third.lost() == f"rank 0 on {host}, which kept the store of the run, and maybe others"
    lines[2].is_up.set()
    wait_until(lambda: len(said) > 1)
    assert said[1].startswith(f"rank 2 on {host} is heard again, after ")
    assert first.lost() == "" and len(said) == 2


def test_a_lost_rank_is_named_though_the_one_with_the_store_ends_meanwhile(
    ranks: tuple[list[Peers], list[Line], list[str]],
) -> None:
    (first, second, _), lines, _ = ranks
    lines[2].is_up.clear()
    wait_until(lambda: bool(second.heartbeats.notice.silent))
    first.leave()
    lines[1].is_up.clear()
    time.sleep(0.5)  # until the store has not answered for as long as makes a rank a lost one
    assert re.match(r"rank 2 on \S+ \(not heard of for", second.lost().split(", ")[-1])


def test_a_rank_that_ends_by_itself_is_not_taken_for_lost(ranks: tuple[list[Peers], list[Line], list[str]]) -> None:
    (first, second, third), _, said = ranks
    third.leave()
    time.sleep(0.8)
    assert first.lost() == second.lost() == "" and not said


class Counted:
    """A rank's connection to the store, which counts requests and the bytes that pass."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.requests = self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            result = getattr(self._store, name)(*arguments)
            self.requests += 1
            self.bytes += len(repr(arguments)) + len(repr(result))
            return result

        return call


def test_a_second_of_heartbeats_grows_with_the_ranks_and_not_with_their_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while most ranks are silent: so many are not all named to each of the others."""

    def cost(size: int, alive: int) -> tuple[int, int]:
        store = dist.HashStore()
        lines = [Counted(store) for _ in range(size)]
        ranks = [Heartbeats(rank, size) for rank in range(size)]
        for _ in range(2):  # the first time each rank is looked for
            for rank, line in zip(ranks, lines, strict=True):
                rank.write_heartbeat(line)
        monkeypatch.setattr(peers_module, "LOST_S", 0.0)
        before = [(line.requests, line.bytes) for line in lines]
        for rank, line in zip(ranks[:alive], lines, strict=False):
            rank.write_heartbeat(line)
        for rank in ranks[1:alive]:
            named = {silent for silent, _, _ in rank.notice.silent}
            assert named <= set(range(1, size)) and len(named) + rank.notice.num_others >= size - alive
            assert len(named) <= MOST_NAMED
        monkeypatch.undo()
        spent = [
            (line.requests - requests, line.bytes - num_bytes)
            for line, (requests, num_bytes) in zip(lines, before, strict=True)
        ]
        return sum(requests for requests, _ in spent), sum(num_bytes for _, num_bytes in spent)

    (few_requests, few_bytes), (requests, num_bytes) = cost(32, 16), cost(128, 64)
    assert requests <= 4 * few_requests and num_bytes < 5 * few_bytes


def test_the_message_of_a_lost_peer_is_one_line_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.77.0.2]:1234")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(ending, "lost_peers", lambda: "rank 1 on bravo (not heard of for 5 s)")
    result = ending.ending_of(error)
    assert result.text == (
        "stopped: rank 0 has lost rank 1 on bravo (not heard of for 5 s); "
        "to go on, add --train.load_checkpoint_path auto"
    )
    assert (result.code, result.kind, result.stacks) == (8, "lost", "")
