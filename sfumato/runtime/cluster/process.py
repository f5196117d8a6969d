"""One process of a role, as the driver sees it: it starts it, sends it calls, kills it and reads its last words."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sfumato.config.runtime import PoolConfig
from sfumato.runtime.cluster.packing import Packed
from sfumato.runtime.cluster.placement import Slot
from sfumato.runtime.cluster.worker import Identity, RoleWorker, on_state

ConcurrencyGroup = Literal["calls", "concurrent", "health"]
"""Threads of a process; each runs its calls in order, those of ``calls`` several at a time where there are several."""

WORDS = 50
"""Lines of a dead process's standard error that are shown."""
REMOTE_S = 10.0
"""Seconds for a look at another machine."""


@dataclass(frozen=True)
class Shipped:
    """A function on its way to processes, which get its pickle once."""

    name: str
    digest: str
    pickled: bytes


class Functions:
    """Pickles of functions, each made once."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, Shipped] = weakref.WeakKeyDictionary()

    def ship(self, function: Callable[..., Any], *, of_worker: bool = False) -> Shipped:
        """The function as it is sent: of the role's state, or of the worker itself."""
        if function not in self._known:
            from ray import cloudpickle

            pickled = cloudpickle.dumps(function if of_worker else on_state(function))
            name = getattr(function, "__name__", None) or getattr(getattr(function, "func", None), "__name__", "call")
            self._known[function] = Shipped(name, hashlib.sha256(pickled).hexdigest(), pickled)
        return self._known[function]


class RoleProcess:
    """A process in its place."""

    def __init__(
        self,
        role: str,
        rank: int,
        pool: PoolConfig,
        slot: Slot,
        output_dir: Path,
        *,
        threads: int = 1,
        speaks: bool = True,
    ) -> None:
        """Starts it, without waiting.

        Args:
            role: name of the role.
            rank: within the role.
            pool: what the process reserves.
            slot: its place.
            output_dir: the run folder.
            threads: calls that it works on at a time.
            speaks: whether what its functions say is heard.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.role, self.rank, self.slot = role, rank, slot
        self.identity: Identity | None = None
        self.is_lost = False
        self.unanswered: dict[Any, tuple[Any, Any]] = {}
        """Futures and parts of calls by the reference to their reply; the driver's loop keeps them."""
        self._sent: set[tuple[ConcurrencyGroup, str]] = set()
        worker = ray.remote(concurrency_groups={"calls": threads, "concurrent": 1, "health": 1})(RoleWorker)
        actor = worker.options(
            num_cpus=pool.cpus,
            num_gpus=pool.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(slot.group, slot.index),
            max_restarts=0,
            max_task_retries=0,
            **({} if pool.gpus else {"runtime_env": _without_gpus()}),
        )
        paths = [os.path.abspath(each) for each in sys.path]
        self._actor = actor.remote(role, rank, max(int(pool.cpus), 1), str(output_dir), speaks, paths)

    def send(
        self,
        group: ConcurrencyGroup,
        call: int,
        function: Shipped,
        args: Packed,
        values: list[Any],
        *,
        num_values: int,
        ships: bool,
        stop: bool,
    ) -> tuple[list[Any], int]:
        """Sends a call. Returns the references to its reply and kept values, and the bytes of the function."""
        is_new = (group, function.digest) not in self._sent
        self._sent.add((group, function.digest))
        options = {"concurrency_group": group, "num_returns": 1 + num_values}
        pickled = function.pickled if is_new else None
        references = self._actor.run.options(**options).remote(
            call, function.digest, pickled, args, num_values, ships, stop, *values
        )
        return references if num_values else [references], len(function.pickled) if is_new else 0

    def ask(self, method: Literal["ping", "stacks"]) -> Any:
        """The reference to an answer of the health thread."""
        return getattr(self._actor, method).options(concurrency_group="health").remote()

    def end(self) -> None:
        """Has Ray end the process, which works whatever the process does, unless it is stopped."""
        import ray

        self.is_lost = True
        ray.kill(self._actor)

    def kill(self, grace_s: float = 0.0) -> None:
        """Ends the process, a stopped one too. With a grace Ray may do it, which then is not surprised by its death."""
        self.end()
        if self.identity is not None:
            on_node(self.identity.node_id, _kill, self.identity.pid, self.identity.born, grace_s, wait=False)

    def where(self) -> str:
        """Process id and host."""
        return "its process" if self.identity is None else f"process {self.identity.pid} on {self.identity.host}"

    def last_words(self) -> str:
        """The end of its standard error; empty when there is none or it cannot be read."""
        if self.identity is None:
            return ""
        return on_node(self.identity.node_id, _tail, self.identity.stderr) or ""


def on_node(node_id: str, function: Callable[..., Any], *args: Any, wait: bool = True) -> Any:
    """Runs a small function on a machine of the cluster; None when that machine does not answer."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if node_id == ray.get_runtime_context().get_node_id():
        return function(*args)
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    answer = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(*args)
    if not wait:
        return None
    try:
        return ray.get(answer, timeout=REMOTE_S)
    except ray.exceptions.RayError:  # the machine is gone, which the caller is about to say
        return None


def _without_gpus() -> dict[str, Any]:
    """The environment of a process without GPUs, where the cluster has some: Ray will stop hiding them."""
    import ray

    return {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}} if ray.cluster_resources().get("GPU") else {}


def _kill(pid: int, born: int, grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) == born:
            if time.monotonic() >= deadline:
                os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.02)


def _tail(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(os.path.getsize(path) - 16384, 0))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        return f"(its log cannot be read: {error})"
    marks = (":job_id:", ":actor_name:", ":task_name:", "Extension modules:")  # by which Ray tells lines apart; long
    lines = [each for each in text.splitlines() if not (each.startswith(marks) or "] logging.cc:" in each)]
    return "\n".join(lines[-WORDS:])
