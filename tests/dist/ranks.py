"""Processes that stay alive over many tests: importing torch four times for each would take most of the time."""

from __future__ import annotations

import faulthandler
import gc
import os
import queue
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.forked import fork_server

NATIVE_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)

GRACE_S = 5.0
"""Seconds in which ranks must follow one that has raised; those that then still wait for it are killed."""


class RankError(AssertionError):
    """What a rank raised."""


class RankPool:
    """Up to ``size`` processes with one thread each; each call gets a new gloo group."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._workers: list[Any] = []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._num_runs = 0
        self._ended: list[Any] = []
        """Processes that had ended by themselves when the others were killed."""

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
        """``function(*args)`` on so many ranks, each within a process group. Returns their results in rank order.

        The function must be importable (module level), arguments and results picklable.

        A rank that dies of a signal in native code (gloo's threads have been seen to, once in some hundred thousand
        runs, with ``free(): invalid pointer``) leaves its stack in the log and a warning, and all is run once more.

        Raises:
            RankError: with the traceback of the first rank that raised. Ranks that then hang are killed.
        """
        try:
            return self._run(num_ranks, function, *args, timeout=timeout)
        except RankError as error:
            signals = [process.exitcode for process in self._ended if process.exitcode in NATIVE_CRASHES]
            if not signals:
                raise
            warnings.warn(f"a rank was ended by signal {-signals[0]}, run again: {error}", stacklevel=2)
            return self._run(num_ranks, function, *args, timeout=timeout)

    def _run(self, num_ranks: int, function: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        self._ended = []
        if not self._workers:
            self._start()
        self._num_runs += 1
        for rank, (_, inbox, _) in enumerate(self._workers[:num_ranks]):
            inbox.put((f"run {self._num_runs}", rank, num_ranks, function, args))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(errors) < num_ranks:
            for rank, (process, _, outbox) in enumerate(self._workers[:num_ranks]):
                if rank in results or rank in errors:
                    continue
                try:
                    ok, value = outbox.get(timeout=0.02)
                except queue.Empty:
                    if time.monotonic() > deadline or not process.is_alive():
                        state = "did not finish" if process.is_alive() else "died"
                        self.close()  # the others may wait for this one for ever
                        self._raise(errors)
                        raise RankError(f"rank {rank} {state}; finished: {sorted(results)}") from None
                    continue
                if ok:
                    results[rank] = value
                else:
                    errors[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if errors and any(process.exitcode is not None for process, _, _ in self._workers[:num_ranks]):
            self.close()
        for _, inbox, _ in self._workers[:num_ranks]:
            inbox.put(None)  # leave the group, now that nobody needs it any more
        self._raise(errors)
        return [results[rank] for rank in range(num_ranks)]

    @staticmethod
    def _raise(errors: dict[int, str]) -> None:
        for rank, error in sorted(errors.items()):
            raise RankError(f"rank {rank}:\n{error}")

    def close(self) -> None:
        """Ends the processes; the next run starts new ones."""
        self._ended = [process for process, _, _ in self._workers if process.exitcode is not None]
        for process, _, _ in self._workers:
            process.kill()
        for process, _, _ in self._workers:
            process.join()
        self._workers = []

    def _start(self) -> None:
        context = fork_server()
        for _ in range(self.size):
            inbox, outbox = context.Queue(), context.Queue()
            arguments = (inbox, outbox, self._store.port, dict(os.environ))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._workers.append((process, inbox, outbox))


def _share_one_loop() -> None:
    """All gloo groups of this process use one device: each has a thread that wakes a hundred times a second, and the
    mesh of a run has some twenty groups."""
    # by name: the process that this one is a copy of may have read the variable already
    is_lazy = os.environ.get("TORCH_GLOO_LAZY_INIT") == "1"
    device = dist.ProcessGroupGloo.create_default_device(lazy_init=is_lazy)

    class SharedGloo(dist.ProcessGroupGloo):
        # torch 2.15 passes more
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any = None, **_: Any) -> None:
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._threads = [device], 2
            if timeout is not None:
                options._timeout = timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedGloo


def _serve(inbox: Any, outbox: Any, port: int, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    faulthandler.enable()
    torch.set_num_threads(1)
    _share_one_loop()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        name, rank, num_ranks, function, args = inbox.get()
        gc.freeze()  # modules and caches, which the collection below need not look through
        torch.set_grad_enabled(True)  # which torch's schedules forget when an evaluation fails
        try:
            dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=num_ranks)
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        outbox.put(answer)
        inbox.get()
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_meshes()
        del function, args, answer
        gc.collect()  # models and meshes hold groups, and each group threads that wake a hundred times a second


def _forget_meshes() -> None:
    """Empties what DTensor remembers by mesh: one of the next run is equal to it, but has other groups."""
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
