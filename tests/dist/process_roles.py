"""Roles of real processes without Ray: each has a main thread, a second thread, and its role's own gloo group."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.dist.ranks import RankPool

THREADS = ("main", "concurrent")


def serve(address: str, sizes: dict[str, int]) -> None:
    """Runs what the driver asks for until it hangs up. On each rank of a pool, which leaves the common group first."""
    rank, store = dist.get_rank(), distributed_c10d._get_default_store()
    store.set(f"in/{rank}", "1")
    store.wait(
        [f"in/{index}" for index in range(dist.get_world_size())]
    )  # one that left would break the others' way in
    dist.destroy_process_group()
    for role, size in sizes.items():  # noqa: B007 (used below)
        if rank < size:
            break
        rank -= size
    if size > 1:
        dist.init_process_group("gloo", store=dist.PrefixStore(role, store), rank=rank, world_size=size)
    connections = [Client(address) for _ in THREADS]
    for thread, connection in zip(THREADS, connections, strict=True):
        connection.send((role, rank, thread))
    state: dict[str, Any] = {}
    second = threading.Thread(target=_answer, args=(connections[1], state))
    second.start()
    _answer(connections[0], state)
    second.join()


def _answer(connection: Connection, state: dict[str, Any]) -> None:
    torch.set_grad_enabled(False)
    while True:
        try:
            function, args, replaces = connection.recv()
        except EOFError:
            return
        try:
            value = function(*args) if replaces else function(state["state"], *args)
            if replaces:
                state["state"], value = value, None
            connection.send((True, value))
        except Exception as error:
            traceback.print_exc()
            connection.send((False, error))


class ProcessRole:
    """Calls to the processes of a role; those of a thread are answered in their order."""

    def __init__(self, connections: dict[str, list[Connection]]) -> None:
        self._connections = connections
        self._threads = {thread: ThreadPoolExecutor(1) for thread in THREADS}

    def build(self, function: Callable[..., Any], *args: Any) -> None:
        """Makes (or makes anew) the state of every process."""
        self._values("main", function, args, True).result()

    def call(self, function: Callable[..., Any], *args: Any, kind: str = "other") -> Future[Any]:
        """``function(state, *args)`` in every process; the value of the first."""
        return self._first(self._values("main", function, args))

    def call_concurrently(self, function: Callable[..., Any], *args: Any, kind: str = "other") -> Future[Any]:
        """The same, in the second thread of each process."""
        return self._first(self._values("concurrent", function, args))

    def all(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Values, or errors, of all processes."""
        return [value for _, value in self._values("main", function, args).result()]

    def close(self) -> None:
        """Lets the processes go."""
        for thread in self._threads.values():
            thread.shutdown()
        for connections in self._connections.values():
            for connection in connections:
                connection.close()

    def _values(self, thread: str, function: Callable[..., Any], args: Any, replaces: bool = False) -> Future[Any]:
        def ask() -> list[tuple[bool, Any]]:
            for connection in self._connections[thread]:
                connection.send((function, args, replaces))
            return [connection.recv() for connection in self._connections[thread]]

        return self._threads[thread].submit(ask)

    @staticmethod
    def _first(values: Future[Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def pass_on(done: Future[Any]) -> None:
            if done.exception():
                future.set_exception(done.exception())
                return
            errors = [value for ok, value in done.result() if not ok]
            future.set_exception(errors[0]) if errors else future.set_result(done.result()[0][1])

        values.add_done_callback(pass_on)
        return future


class ProcessRoles:
    """``with ProcessRoles(ranks, actor=2, sampler=2) as roles: roles.actor.build(...)``."""

    def __init__(self, ranks: RankPool, folder: Any, **sizes: int) -> None:
        self._address = os.path.join(str(folder), f"roles_{id(self)}")
        self._listener = Listener(self._address, backlog=16)
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(ranks, sizes))
        self._thread.start()
        results: dict[str, dict[str, dict[int, Connection]]] = {}
        for _ in range(sum(sizes.values()) * len(THREADS)):
            connection = self._listener.accept()
            role, rank, thread = connection.recv()
            results.setdefault(role, {}).setdefault(thread, {})[rank] = connection
        self._roles = {
            role: ProcessRole({name: [thread[rank] for rank in sorted(thread)] for name, thread in threads.items()})
            for role, threads in results.items()
        }
        self.actor, self.sampler = self._roles["actor"], self._roles["sampler"]

    def _run(self, ranks: RankPool, sizes: dict[str, int]) -> None:
        try:
            ranks.run(sum(sizes.values()), serve, self._address, sizes)
        except BaseException as error:
            self._errors.append(error)

    def __enter__(self) -> ProcessRoles:
        return self

    def __exit__(self, *_: Any) -> None:
        for role in self._roles.values():
            role.close()
        self._listener.close()
        self._thread.join()
        if self._errors:
            raise self._errors[0]
